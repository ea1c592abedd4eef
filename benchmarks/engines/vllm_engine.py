"""vLLM's offline interface (``LLM.generate``). Runs in vLLM's environment.

Settings: ``model``, and ``options`` for ``LLM(...)``. What vLLM reads from the environment (threads, KV space,
preloaded libraries) is set by the parent.
"""

from __future__ import annotations

from typing import Any

from child import main


class VllmEngine:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings

    def start(self) -> dict[str, Any]:
        import vllm

        self._vllm = vllm
        self._llm = vllm.LLM(self._settings["model"], enable_prefix_caching=False, **self._settings["options"])
        config = self._llm.llm_engine.vllm_config
        return {
            "version": vllm.__version__, "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        }  # fmt: skip

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[int]:
        params = self._vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(requests, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        del self._llm


if __name__ == "__main__":  # vLLM starts its own processes by spawning: they import this file
    main(VllmEngine)

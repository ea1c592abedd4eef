"""OpenVINO GenAI's continuous-batching pipeline on a GGUF file. Runs in OpenVINO's environment.

Settings: ``gguf``, ``properties`` of the CPU plugin, and ``scheduler``: fields of ``SchedulerConfig``.
"""

from __future__ import annotations

from typing import Any

from child import main


class OpenVinoEngine:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings

    def start(self) -> dict[str, Any]:
        import openvino_genai

        self._genai = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        for name, value in self._settings["scheduler"].items():
            setattr(scheduler, name, value)
        properties = self._settings["properties"]
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            self._settings["gguf"], scheduler, "CPU", properties
        )
        return {
            "version": openvino_genai.__version__,
            "dtype": f"{properties.get('INFERENCE_PRECISION_HINT', 'auto')} (weights float16)",
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        }

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[int]:
        import numpy as np
        import openvino

        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
        tensors = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = self._pipeline.generate(tensors, [config] * len(prompts))
        return [len(result.m_generation_ids[0]) for result in results]

    def close(self) -> None:
        del self._pipeline


if __name__ == "__main__":
    main(OpenVinoEngine)

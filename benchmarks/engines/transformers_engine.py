"""``transformers``: ``generate`` on one static batch. All prompts are equally long, so nothing is padded.

Settings: ``model``, ``dtype``, ``num_threads``.
"""

from __future__ import annotations

from typing import Any

from child import main


class TransformersEngine:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings

    def start(self) -> dict[str, Any]:
        import torch
        import transformers

        torch.set_num_threads(self._settings["num_threads"])
        self._torch = torch
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            self._settings["model"], dtype=getattr(torch, self._settings["dtype"]), local_files_only=True
        ).eval()
        return {"version": transformers.__version__, "dtype": self._settings["dtype"]}

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[int]:
        ids = self._torch.tensor(prompts)
        with self._torch.inference_mode():
            output = self._model.generate(
                ids, attention_mask=self._torch.ones_like(ids), do_sample=False, eos_token_id=None, pad_token_id=0,
                min_new_tokens=max_tokens, max_new_tokens=max_tokens,
            )  # fmt: skip
        return [output.shape[1] - ids.shape[1]] * len(prompts)

    def close(self) -> None:
        del self._model


if __name__ == "__main__":
    main(TransformersEngine)

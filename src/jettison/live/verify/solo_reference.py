"""The reference that is ourselves: one instance, one request at a time, memory to spare.

Below float64 it shows that nothing but a request's own tokens decides what it gets: another implementation rounds
otherwise, and near-ties then hide what memory does. Where ``transformers`` is not installed it is the only one.
"""

from __future__ import annotations

from pathlib import Path

from jettison.config import EngineConfig
from jettison.device.reference import Verdict
from jettison.live.engine.assembly import assemble
from jettison.live.engine.local_cluster import LocalCluster
from jettison.types import Grammar, SamplingParams

MAX_TOKENS = 4096
"""Prompt and answer of the longest request it is asked about."""


class SoloReference:
    """Runs each prompt alone and undisturbed. It shares our kernels, so it shows less than ``transformers``."""

    def __init__(
        self, model_dir: Path, dtype: str, max_model_len: int | None = None, kernels: str = "auto",
        device: str = "cpu",
    ) -> None:
        flags: dict[str, object] = {
            "model": str(model_dir), "dtype": dtype, "instances": 1, "overload": "recompute", "num_threads": 1,
            "enable_prefix_caching": False, "max_num_seqs": 1, "max_num_batched_tokens": 128,
            "max_model_len": max_model_len, "kernels": kernels, "device": device,
        }  # fmt: skip
        sized = assemble(EngineConfig.resolve(**flags | {"memory": "1GiB"}))  # type: ignore[arg-type]
        num_blocks = -(-min(MAX_TOKENS, sized.limits.max_model_len) // sized.limits.block_size) + 4
        flags["memory"] = sized.memory_for_blocks(num_blocks)
        self._config = EngineConfig.resolve(**flags)  # type: ignore[arg-type]
        self._known: dict[tuple[tuple[int, ...], Grammar | None], list[int]] = {}

    def check(self, prompt: list[int], output: list[int], grammar: Grammar | None = None) -> Verdict:
        """See ``Reference.check``. Without logits at hand a difference is always a mismatch."""
        for index, (ours, theirs) in enumerate(zip(output, self._answer(prompt, len(output), grammar), strict=True)):
            if ours != theirs:
                return Verdict(index + 1, True, False)
        return Verdict(len(output), False, False)

    def _answer(self, prompt: list[int], num_tokens: int, grammar: Grammar | None) -> list[int]:
        """The greedy answer's beginning. Events share prompts, so answers are kept."""
        known = self._known.get((tuple(prompt), grammar), [])
        if len(known) < num_tokens:
            with LocalCluster(self._config) as cluster:
                params = SamplingParams(
                    max_tokens=num_tokens, temperature=0.0, ignore_eos=True, grammar=grammar)
                cluster.submit("reference", prompt, params)
                cluster.run()
                known = cluster.completions["reference"].token_ids
            self._known[tuple(prompt), grammar] = known
        return known[:num_tokens]

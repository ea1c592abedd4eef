"""Each architecture with layers of its own through moves of memory: its tokens are transformers' all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from jettison.device.model.create import create_model
from jettison.device.reference import TransformersReference, transformers_available
from jettison.live.verify.proof_table import compare
from jettison.live.verify.run import SCENARIOS
from jettison.live.verify.scenarios import Setting

WINDOW = {"sliding_window": 24}
MODELS: dict[str, dict[str, object]] = {
    "mistral": WINDOW, "gemma2": WINDOW, "gemma3_text": {**WINDOW, "sliding_window_pattern": 2}, "olmo2": {},
    "olmo3": WINDOW | {"rope_theta": 5e5},
    "granite": {"embedding_multiplier": 12.0, "attention_multiplier": 0.3, "residual_multiplier": 0.4},
    "glm4": {}, "smollm3": {}, "exaone4": WINDOW, "starcoder2": {"sliding_window": 24}, "cohere2": WINDOW,
}  # fmt: skip
"""Model type -> keys of its own."""
EVENTS = ("chunked prefill", "swap out + in", "migrate while decoding", "drop + exchange (live)", "restore + split",
          "harvest: freed from checkpoints")  # fmt: skip
"""Chunks, the host pool, another instance, two stages with KV elsewhere, and the way back; checkpoints."""


@pytest.mark.skipif(not transformers_available(), reason="needs transformers")
@pytest.mark.parametrize("arch", MODELS)
def test_moves_change_no_token(arch: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    create_model(
        folder, arch=arch, layers=4, hidden=32, heads=4, kv_heads=2, std=0.3, max_position_embeddings=1024,
        dtype="float64", tied=arch in ("gemma2", "gemma3_text", "cohere2", "starcoder2"), extra=MODELS[arch],
    )  # fmt: skip
    reference = TransformersReference(folder, "float64")
    # Two of the events for each, so that all are covered by twos.
    first = list(MODELS).index(arch)
    for event in {EVENTS[first % len(EVENTS)], "drop + exchange (live)"}:
        outcome = SCENARIOS[event](Setting(folder, "float64", 40, seed=1))
        assert outcome.happened, (event, outcome.evidence)
        row = compare(arch, event, outcome, reference)
        assert (row.mismatches, row.incomplete) == (0, 0), event
        assert row.tokens_compared > 100

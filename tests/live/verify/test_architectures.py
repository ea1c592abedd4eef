"""Each architecture with layers of its own through moves of memory: its tokens are transformers' all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from jettison.device.model.samples import make_sample
from jettison.device.reference import TransformersReference, transformers_available
from jettison.live.verify.proof_table import compare
from jettison.live.verify.run import BRIEF, OTHERS, SCENARIOS
from jettison.live.verify.scenarios import Setting
from longrun import LONG


@pytest.mark.skipif(not transformers_available(), reason="needs transformers")
@pytest.mark.parametrize("number", range(len(OTHERS)), ids=[each.name for each in OTHERS])
def test_moves_change_no_token(number: int, tmp_path: Path) -> None:
    """Of the moves one in turn, and where KV elsewhere is merged in a way of its own, that, too; ``verify --full`` has
    all of each, ``benchmarks models table`` with log-probabilities."""
    architecture = OTHERS[number]
    folder = make_sample(architecture, tmp_path / "model", seed=1)
    reference = TransformersReference(folder, "float64")
    merged = {"drop + exchange (live)"} if LONG or architecture.name in ("Gemma 2", "gpt-oss") else set()
    for event in {BRIEF[number % len(BRIEF)], *merged}:
        outcome = SCENARIOS[event](Setting(folder, "float64", 40, seed=1))
        assert outcome.happened, (event, outcome.evidence)
        row = compare(architecture.name, event, outcome, reference)
        assert (row.mismatches, row.incomplete) == (0, 0), event
        assert row.tokens_compared > 100

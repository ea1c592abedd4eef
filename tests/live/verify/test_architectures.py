"""Each architecture with layers of its own through moves of memory: its tokens are transformers' all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from jettison.device.reference import TransformersReference, transformers_available
from jettison.live.verify.proof_table import compare
from jettison.live.verify.run import BRIEF, OTHERS, SCENARIOS, check_served, kept_setting, make_own
from jettison.live.verify.scenarios import Setting
from longrun import LONG


@pytest.mark.skipif(not transformers_available(), reason="needs transformers")
@pytest.mark.parametrize("number", range(len(OTHERS)), ids=[each.name for each in OTHERS])
def test_moves_change_no_token(number: int, tmp_path: Path) -> None:
    """Of the moves one in turn, and where KV elsewhere is merged in a way of its own, that, too; ``verify --full`` has
    all of each, ``benchmarks models table`` with log-probabilities."""
    architecture = OTHERS[number]
    model = make_own(architecture, tmp_path / "model", seed=1)
    setting = Setting(model.folder, "float64", 40, seed=1)
    more = {"drop + exchange (live)"} if LONG or architecture.name in ("Gemma 2", "gpt-oss") else set()
    if model.is_kept:
        setting = kept_setting(setting)
        assert len(check_served(setting).model.kept) == 4 * 4
        more = {"drop + exchange (live)", "restore + split"}
    reference = TransformersReference(model.exact, "float64")
    for event in {BRIEF[number % len(BRIEF)], *more}:
        outcome = SCENARIOS[event](setting)
        assert outcome.happened, (event, outcome.evidence)
        row = compare(architecture.name, event, outcome, reference)
        assert (row.mismatches, row.incomplete) == (0, 0), event
        assert row.tokens_compared > 100

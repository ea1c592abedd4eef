"""Each architecture with layers of its own through moves of memory: its tokens are transformers' all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from jettison.device.reference import TransformersReference, transformers_available
from jettison.live.verify.proof_table import compare
from jettison.live.verify.run import BRIEF, OWN_LAYERS, SCENARIOS, check_served, kept_setting, make_own
from jettison.live.verify.scenarios import Setting


@pytest.mark.skipif(not transformers_available(), reason="needs transformers")
@pytest.mark.parametrize("number", range(len(OWN_LAYERS)), ids=[each.name for each in OWN_LAYERS])
def test_moves_change_no_token(number: int, tmp_path: Path) -> None:
    """The one with KV elsewhere, and another of the moves in turn; ``verify --full`` has all of each."""
    architecture = OWN_LAYERS[number]
    model = make_own(architecture, tmp_path / "model", seed=1)
    setting = Setting(model.folder, "float64", 40, seed=1)
    if model.is_kept:
        setting = kept_setting(setting)
        assert len(check_served(setting).model.kept) == 4 * 4
    reference = TransformersReference(model.exact, "float64")
    more = {"restore + split"} if model.is_kept else set()
    for event in {BRIEF[number % len(BRIEF)], "drop + exchange (live)"} | more:
        outcome = SCENARIOS[event](setting)
        assert outcome.happened, (event, outcome.evidence)
        row = compare(architecture.name, event, outcome, reference)
        assert (row.mismatches, row.incomplete) == (0, 0), event
        assert row.tokens_compared > 100

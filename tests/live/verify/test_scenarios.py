"""The whole engine in one process over real memory: every scenario of ``jettison verify``, on one small model."""

from __future__ import annotations

from pathlib import Path

import pytest

from jettison.device.reference import TransformersReference, transformers_available
from jettison.live.verify.run import compare
from jettison.live.verify.scenarios import SCENARIOS, Setting
from jettison.live.verify.scenarios_ahead import AHEAD, AHEAD_TOO
from jettison.live.verify.scenarios_grammars import GRAMMARS
from jettison.live.verify.scenarios_harvest import HARVEST, HARVEST_IN_PIPELINES
from jettison.live.verify.scenarios_many import MANY
from jettison.live.verify.scenarios_migration import MIGRATIONS
from jettison.live.verify.scenarios_packing import PACKING
from jettison.live.verify.scenarios_sleep import SLEEP
from jettison.live.verify.scenarios_together import RUNGS_TOGETHER
from longrun import part_of

EVENTS = (
    SCENARIOS | MIGRATIONS | RUNGS_TOGETHER | MANY | HARVEST | HARVEST_IN_PIPELINES | SLEEP | PACKING | AHEAD | GRAMMARS
)
SOME = (
    "chunked prefill", "prefix hit", "migrate while decoding", "drop + exchange (live)", "drop again during restore",
    "cancel in mid-exchange (transfer)", "migrate as tokens, instance to instance",
)  # fmt: skip


@pytest.mark.skipif(not transformers_available(), reason="the reference needs transformers")
@pytest.mark.parametrize("event", EVENTS)
def test_tokens_do_not_depend_on_memory_events(event: str, model_dir: Path) -> None:
    outcome = EVENTS[event](Setting(model_dir, "float64", 64, seed=1))
    row = compare("qwen3", event, outcome, TransformersReference(model_dir, "float64"))
    assert outcome.happened, outcome.evidence
    assert row.mismatches == 0
    assert row.tokens_compared > 300


@pytest.mark.skipif(not transformers_available(), reason="the reference needs transformers")
@pytest.mark.parametrize("event", part_of(tuple(AHEAD_TOO), [f"{name}, steps ahead" for name in SOME]))
def test_nor_do_they_depend_on_when_a_step_was_planned(event: str, model_dir: Path) -> None:
    outcome = AHEAD_TOO[event](Setting(model_dir, "float64", 48, seed=1))
    row = compare("qwen3", event, outcome, TransformersReference(model_dir, "float64"))
    assert outcome.happened, outcome.evidence
    assert row.mismatches == 0 and row.tokens_compared > 200

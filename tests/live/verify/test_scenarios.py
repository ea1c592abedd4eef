"""The whole engine in one process over real memory: every scenario of ``jettison verify``, on one small model."""

from __future__ import annotations

from pathlib import Path

import pytest

from jettison.device.reference import TransformersReference, Verdict, transformers_available
from jettison.errors import JettisonError
from jettison.live.engine.local_cluster import LocalCluster
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
from jettison.types import Grammar
from longrun import part_of

EVENTS = (
    SCENARIOS | MIGRATIONS | RUNGS_TOGETHER | MANY | HARVEST | HARVEST_IN_PIPELINES | SLEEP | PACKING | AHEAD | GRAMMARS
)
SOME = (
    "chunked prefill", "prefix hit", "migrate while decoding", "drop + exchange (live)", "drop again during restore",
    "cancel in mid-exchange (transfer)", "migrate as tokens, instance to instance",
)  # fmt: skip


class AskedOnce:
    """A reference that judges the same answer once: most events are those of the same requests."""

    def __init__(self, reference: TransformersReference) -> None:
        self._reference = reference
        self._verdicts: dict[tuple[tuple[int, ...], tuple[int, ...]], Verdict] = {}

    def check(self, prompt: list[int], output: list[int], grammar: Grammar | None = None) -> Verdict:
        if grammar is not None:
            return self._reference.check(prompt, output, grammar)
        asked = tuple(prompt), tuple(output)
        if asked not in self._verdicts:
            self._verdicts[asked] = self._reference.check(prompt, output)
        return self._verdicts[asked]


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> AskedOnce:
    if not transformers_available():
        pytest.skip("the reference needs transformers")
    return AskedOnce(TransformersReference(model_dir, "float64"))


@pytest.mark.parametrize("event", EVENTS)
def test_tokens_do_not_depend_on_memory_events(
    event: str, model_dir: Path, reference: AskedOnce
) -> None:
    outcome = EVENTS[event](Setting(model_dir, "float64", 64, seed=1))
    row = compare("qwen3", event, outcome, reference)
    assert outcome.happened, outcome.evidence
    assert row.mismatches == 0
    assert row.tokens_compared > 300


@pytest.mark.parametrize(("event", "undone"), [
    ("drop + restore over migrating requests", "request_restore"), ("restore + split, 3 instances", "request_drop"),
])  # fmt: skip
def test_what_did_not_happen_is_no_event(
    event: str, undone: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert event in EVENTS
    monkeypatch.setattr(LocalCluster, undone, lambda *_, **__: None)
    try:
        outcome = EVENTS[event](Setting(model_dir, "float64", 64, seed=1))
    except JettisonError:
        return
    assert not outcome.happened, outcome.evidence


@pytest.mark.parametrize("event", part_of(tuple(AHEAD_TOO), [f"{name}, steps ahead" for name in SOME]))
def test_nor_do_they_depend_on_when_a_step_was_planned(
    event: str, model_dir: Path, reference: AskedOnce
) -> None:
    outcome = AHEAD_TOO[event](Setting(model_dir, "float64", 48, seed=1))
    row = compare("qwen3", event, outcome, reference)
    assert outcome.happened, outcome.evidence
    assert row.mismatches == 0 and row.tokens_compared > 200

"""How well the predictor of step times foretells recorded live steps.

    python -m benchmarks predictor record --out FOLDER            # live, some minutes
    python -m benchmarks predictor replay FOLDER/*.json.gz [--json OUT]

Each recording is replayed in order of its steps' ends: a step is predicted, and then the predictor is told what it
took. A figure is the median of |predicted / took - 1|, after the first ``WARM_UP`` predictions of a use. Both with the
model's profile and without, beside the profile alone. Uses:

    lone step       a step of a group of one stage, from issue to end
    merged step     the same of a pipeline, with its waits
    stage           what the last stage of a pipeline computes
    throughput      8 microbatches of a busy pipeline, one behind another
    prefill rate    prompt tokens a second of steps almost full of them
    ahead           lone steps when all is predicted from what was known a second before
"""

from __future__ import annotations

import gzip
import json
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from benchmarks.shared import Row, keep, parse, print_rows
from jettison.cost.model import ChunkShape, CostModel
from jettison.cost.predictor import StepTimePredictor
from jettison.cost.stepwork import StepWork, last_stage_of, period_of, step_of

FORMAT = "jettison-predictor-2"
WARM_UP = 20
WINDOW = 8
"""Microbatches whose time together is one figure of throughput."""
FULL = 0.8
"""Of the token budget, prompt tokens in a step whose prefill rate counts."""
AHEAD_NS = 1_000_000_000
SLACK_NS = 200_000
"""Between the end of one step and the issue of the next the controller works."""

USES = ("lone step", "merged step", "stage", "throughput", "prefill rate", "ahead")


@dataclass(frozen=True)
class Step:
    """One recorded step."""

    group: int
    num_stages: int
    chunks: tuple[tuple[int, int], ...]
    issued_ns: int
    ended_ns: int
    stage_s: float
    """What the last stage computed."""
    stage_layers: int
    period_s: float | None
    """Since the end of the one before, where all places of the pipeline were taken all the while."""

    @property
    def work(self) -> StepWork:
        return StepWork.of(self.chunks)

    @property
    def step_s(self) -> float:
        return (self.ended_ns - self.issued_ns) / 1e9


class Recording(NamedTuple):
    name: str
    num_layers: int
    budget: int
    cost: CostModel
    added_stage_s: float
    """What each of two stages takes beyond half of a lone step, as profiled."""
    steps: list[Step]


def read(path: Path) -> Recording:
    """A file of ``record.py``. Raises ValueError where it is none."""
    document = json.loads(gzip.decompress(path.read_bytes()))
    if document.get("format") != FORMAT:
        raise ValueError(f"{path} is no recording of steps")
    profile = document["profile"]
    return Recording(
        f"{document['model']} {document['workload']}", document["num_layers"], document["budget"],
        CostModel(**profile["cost"]), profile["added_stage_s"], list(steps_of(document["steps"])),
    )


def steps_of(rows: Sequence[Mapping[str, Any]]) -> Iterator[Step]:
    """In order of their ends."""
    rows = sorted(rows, key=lambda row: row["ended_ns"])
    by_group: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_group.setdefault(row["group"], []).append(row)
    before: dict[int, int] = {}
    for row in rows:
        ended_ns, num_stages = row["ended_ns"], len(row["stages"])
        since_ns, before[row["group"]] = before.get(row["group"]), ended_ns
        period_s = None
        if num_stages > 1 and since_ns is not None:
            places = [r for r in by_group[row["group"]] if r["issued_ns"] < ended_ns <= r["ended_ns"]]
            is_busy = len(places) >= num_stages and all(r["issued_ns"] <= since_ns + SLACK_NS for r in places)
            period_s = (ended_ns - since_ns) / 1e9 if is_busy else None
        worker, lo, hi = row["stages"][-1]
        stage_s = next((end - begin) / 1e9 for w, begin, end in row["spans"] if w == worker)
        yield Step(
            row["group"], num_stages, tuple((c, p) for c, p in row["chunks"]), row["issued_ns"], ended_ns, stage_s,
            hi - lo, period_s,
        )


class Contender(Protocol):
    """Predicts, and learns. None: it does not know, or was never asked for that."""

    def step_s(self, step: Step) -> float | None: ...

    def stage_s(self, step: Step) -> float | None: ...

    def period_s(self, step: Step) -> float | None: ...

    def observe(self, step: Step) -> None: ...


class Profiled:
    """The profile alone."""

    def __init__(self, recording: Recording) -> None:
        self._cost, self._num_layers = recording.cost, recording.num_layers
        self._added_stage_s = recording.added_stage_s

    def _batch_s(self, step: Step, layers: int | None = None, *, is_first: bool = True) -> float:
        shapes = [ChunkShape(context, tokens) for tokens, context in step.chunks]
        return self._cost.batch_cost_s(shapes, layers, is_first=is_first)

    def step_s(self, step: Step) -> float:
        return self._batch_s(step) + (step.num_stages - 1) * self._cost.step_s

    def stage_s(self, step: Step) -> float:
        return self._batch_s(step, step.stage_layers, is_first=step.num_stages == 1)

    def period_s(self, step: Step) -> float:
        return self._batch_s(step) / step.num_stages + self._added_stage_s

    def observe(self, step: Step) -> None: ...


class New:
    """``StepTimePredictor`` for every use."""

    def __init__(self, recording: Recording, is_profiled: bool) -> None:
        self._predictor = StepTimePredictor(
            recording.num_layers, recording.cost if is_profiled else None,
            added_stage_s=(lambda num_stages: recording.added_stage_s) if is_profiled else None,
        )

    def step_s(self, step: Step) -> float | None:
        return self._predictor.predict_s(step.work, step_of(step.num_stages))

    def stage_s(self, step: Step) -> float | None:
        return self._predictor.predict_s(step.work, last_stage_of(step.num_stages, step.stage_layers))

    def period_s(self, step: Step) -> float | None:
        return self._predictor.predict_s(step.work, period_of(step.num_stages))

    def observe(self, step: Step) -> None:
        work, end_ns, told = step.work, step.ended_ns, self._predictor.observe
        told(work, (step.issued_ns, end_ns), step.group, step_of(step.num_stages))
        if step.num_stages > 1:
            stage = last_stage_of(step.num_stages, step.stage_layers)
            told(work, (end_ns - round(step.stage_s * 1e9), end_ns), step.group, stage)
        if step.period_s is not None:
            told(work, (end_ns - round(step.period_s * 1e9), end_ns), step.group, period_of(step.num_stages))


@dataclass
class Errors:
    """Relative errors of one contender in one recording, by use."""

    of: dict[str, list[float]] = field(default_factory=lambda: {use: [] for use in USES})
    _window: list[tuple[float, float]] = field(default_factory=list)

    def note(self, use: str, predicted: float | None, took: float) -> None:
        if predicted is not None and took > 0.0:
            self.of[use].append(abs(predicted / took - 1.0))

    def note_period(self, predicted: float | None, took: float) -> None:
        """Windows of microbatches: how fast a pipeline is, not how long one microbatch takes."""
        if predicted is None:
            return
        self._window.append((predicted, took))
        if len(self._window) == WINDOW:
            self.note("throughput", *(sum(column) for column in zip(*self._window, strict=True)))
            self._window.clear()


def replay(recording: Recording, contender: Contender, *, ahead_ns: int = 0) -> Errors:
    """Predict, then observe; ``ahead_ns``: what a step took is told so long after its end, and only ``ahead`` noted."""
    errors, told = Errors(), deque[Step]()
    for step in recording.steps:
        while told and told[0].ended_ns <= step.issued_ns - ahead_ns:
            contender.observe(told.popleft())
        predicted_s = contender.step_s(step)
        if ahead_ns:
            if step.num_stages == 1:
                errors.note("ahead", predicted_s, step.step_s)
            told.append(step)
            continue
        errors.note("lone step" if step.num_stages == 1 else "merged step", predicted_s, step.step_s)
        if predicted_s and step.work.num_tokens - step.work.num_rows > FULL * recording.budget:
            errors.note("prefill rate", 1.0 / predicted_s, 1.0 / step.step_s)
        if step.num_stages > 1:
            errors.note("stage", contender.stage_s(step), step.stage_s)
            if step.period_s is not None:
                errors.note_period(contender.period_s(step), step.period_s)
        contender.observe(step)
    return errors


CONTENDERS: dict[str, Callable[[Recording], Contender]] = {
    "profile alone": Profiled, "predictor": lambda recording: New(recording, False),
    "predictor, profiled": lambda recording: New(recording, True),
}  # fmt: skip


def compare(recording: Recording) -> dict[str, Errors]:
    """Every contender over one recording."""
    found = {}
    for name, make in CONTENDERS.items():
        found[name] = replay(recording, make(recording))
        found[name].of["ahead"] = replay(recording, make(recording), ahead_ns=AHEAD_NS).of["ahead"]
    return found


def median(errors: Sequence[float]) -> float | None:
    """Of what comes after the warm-up."""
    counted = errors[WARM_UP if len(errors) > 4 * WARM_UP else 0 :]
    return statistics.median(counted) if counted else None


def rows_of(found: Mapping[str, Mapping[str, Errors]]) -> list[Row]:
    """A row for each recording and use, and one a use: the median over the recordings that have ``WARM_UP`` of it."""
    rows: list[Row] = []
    for use in USES:
        for name, errors in found.items():
            medians = {contender: median(e.of[use]) for contender, e in errors.items()}
            num = len(errors["predictor, profiled"].of[use])
            if num:
                rows.append({"use": use, "recording": name, "num": num, "median_error": medians})
        mine = [row for row in rows if row["use"] == use and row["num"] >= WARM_UP]
        pooled = {
            contender: statistics.median(known)
            for contender in CONTENDERS
            if (known := [e for row in mine if (e := row["median_error"][contender]) is not None])
        }
        if mine:
            num = sum(row["num"] for row in mine)
            rows.append({"use": use, "recording": "all", "num": num, "median_error": pooled})
    return rows


def main() -> None:
    args = parse(__doc__, recordings=(None, {"nargs": "+", "type": Path, "positional": True}))
    found: dict[str, dict[str, Errors]] = {}
    for path in args.recordings:
        recording = read(path)
        name = recording.name if recording.name not in found else f"{recording.name} ({len(found)})"
        found[name] = compare(recording)
    rows = rows_of(found)
    print_rows([row | row["median_error"] for row in rows], ("use", "recording", "num", *CONTENDERS))
    keep(args.json, {"rows": rows}, "cost")

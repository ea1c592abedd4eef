"""The smallest cluster that holds a workload within an objective: a search over the number of instances.

More instances nearly always help, so the search doubles and halves; but queues, bursts and routing are no smooth
functions, so neighbours of what it finds are tried, too, and a result says where more instances did *worse*.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jettison.report.results import RunResult
from jettison.simulate.cases import Case, workers_of
from jettison.simulate.machines import changes_inside
from jettison.simulate.spec import DEFAULT_POLICY, parse_spec

NEIGHBOURS = 2
"""So many smaller clusters must fail in a row before the smallest is believed."""

Search = Generator[list[int], Mapping[int, bool], "Found"]
"""Asks for numbers of instances, is told which of them hold."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a search has come to."""

    smallest: int | None
    """None: not even the largest holds."""
    held: Mapping[int, bool]
    """Every number that was tried."""

    @property
    def exceptions(self) -> list[int]:
        """Larger clusters that were tried and do not hold."""
        return [n for n, holds in self.held.items() if self.smallest is not None and n > self.smallest and not holds]


def search(largest: int) -> Search:
    """Find the smallest number from 1 to ``largest`` that holds, if more never holds less; else one that holds, and
    whose neighbours below do not."""
    held: dict[int, bool] = {}

    def ask(numbers: Iterable[int]) -> Generator[list[int], Mapping[int, bool], None]:
        new = [n for n in numbers if 1 <= n <= largest and n not in held]
        if new:
            answers = yield new
            held.update({n: answers[n] for n in new})

    low, high = 0, 1  # low has failed (nothing serves nothing); high is to be tried
    while True:
        yield from ask([high])
        if held[high]:
            break
        low = high
        if high == largest:
            return Found(None, dict(sorted(held.items())))
        high = min(largest, 2 * high)
    while high - low > 1:
        middle = (low + high) // 2
        yield from ask([middle])
        low, high = (low, middle) if held[middle] else (middle, high)
    while True:
        below = list(range(max(1, high - NEIGHBOURS), high))
        yield from ask([*below, high + 1])
        smaller = [n for n in below if held[n]]
        if not smaller:
            return Found(high, dict(sorted(held.items())))
        high = smaller[0]


@dataclass(frozen=True, slots=True)
class Objective:
    """P99s that a cluster must keep, of every seed; None is not asked for."""

    ttft_p99_s: float | None = None
    tpot_p99_s: float | None = None

    def holds(self, runs: Sequence[RunResult]) -> bool:
        """In every run: all requests served, and the P99s within."""
        return all(self._holds(run) for run in runs)

    def _holds(self, run: RunResult) -> bool:
        ttft, tpot = run.ttft_s.p99, run.tpot_s.p99
        if run.requests.completed < run.requests.submitted or ttft is None:
            return False
        return (self.ttft_p99_s is None or ttft <= self.ttft_p99_s) and (
            self.tpot_p99_s is None or tpot is None or tpot <= self.tpot_p99_s
        )

    def describe(self) -> str:
        """``P99 TTFT 1 s and P99 TPOT 0.1 s``."""
        parts = [("P99 TTFT", self.ttft_p99_s), ("P99 TPOT", self.tpot_p99_s)]
        return " and ".join(f"{name} {value:g} s" for name, value in parts if value is not None)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked at one point of a sweep."""

    objective: Objective
    largest: int
    """Number of instances up to which is searched."""
    price_per_gpu_hour: float | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """One number of instances, all seeds."""

    num_instances: int
    holds: bool
    ttft_p99_s: float | None
    """Of the worst seed."""
    tpot_p99_s: float | None
    completed: int
    submitted: int
    num_gpus: int | None
    num_faults_left_out: int = 0
    """Listed faults of workers that so small a cluster does not have."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """What one variant needs at one point of a sweep."""

    variant: str
    policy: str
    point: Mapping[str, Any]
    wanted: Wanted
    found: Found
    trials: Mapping[int, Trial] = field(default_factory=dict)
    runs: Sequence[RunResult] = field(default=(), repr=False)
    """Of the smallest that holds, by seed; none where none does."""
    largest_runs: Sequence[RunResult] = field(default=(), repr=False)
    """Of the largest that was tried, by seed, where none holds."""

    @property
    def shown_run(self) -> RunResult | None:
        """The first seed's of ``best``."""
        return next(iter((*self.runs, *self.largest_runs)), None)

    @property
    def best(self) -> Trial:
        """The smallest that holds; else the largest tried."""
        number = max(self.trials) if self.found.smallest is None else self.found.smallest
        return self.trials[number]


RunCases = Callable[[Sequence[Case]], list[RunResult]]


def point_key(point: Mapping[str, Any]) -> str:
    """A point of a sweep as something that can be looked up."""
    return str(sorted(point.items()))


def size_all(cases: Sequence[Case], wanted: Mapping[str, Wanted], run: RunCases) -> list[Sizing]:
    """Search for every variant and point among ``cases`` at once, so that probes of several searches run side by side.

    ``cases``: as of ``cases.cases_of``; their number of instances is replaced. ``wanted``: by ``point_key``.
    Of all runs only those of the smallest clusters that hold are kept; of searches that find none those of the largest.
    """
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        groups.setdefault((point_key(case.point), case.variant), []).append(case)
    open_searches = {key: search(wanted[key[0]].largest) for key in groups}
    asked = {key: next(found) for key, found in open_searches.items()}
    trials: dict[tuple[str, str], dict[int, Trial]] = {key: {} for key in groups}
    done: dict[tuple[str, str], Found] = {}
    kept: dict[tuple[str, str], list[RunResult]] = {}
    failed: dict[tuple[str, str], list[RunResult]] = {}
    while asked:
        probes = [(key, n, with_instances(case, n)) for key, ns in asked.items() for n in ns for case in groups[key]]
        runs = run([case for _, _, case in probes])
        results: dict[tuple[tuple[str, str], int], list[RunResult]] = {}
        for (key, number, _), result in zip(probes, runs, strict=True):
            results.setdefault((key, number), []).append(result)
        for (key, number), same in results.items():
            num_left_out = len(_faults(groups[key][0])) - len(_faults(with_instances(groups[key][0], number)))
            smallest = min((n for n, trial in trials[key].items() if trial.holds), default=number)
            trials[key][number] = _trial(number, same, wanted[key[0]].objective, num_left_out)
            if trials[key][number].holds and number <= smallest:
                kept[key] = same
                failed.pop(key, None)
            elif key not in kept and number == max(trials[key]):
                failed[key] = same
        again: dict[tuple[str, str], list[int]] = {}
        for key, numbers in asked.items():
            try:
                again[key] = open_searches[key].send({n: trials[key][n].holds for n in numbers})
            except StopIteration as end:
                done[key] = end.value
        asked = again
    return [
        Sizing(
            same[0].variant, same[0].raw["variants"][0].get("policy") or DEFAULT_POLICY, same[0].point, wanted[key[0]],
            done[key], trials[key], kept.get(key, ()), failed.get(key, ()),
        )
        for key, same in groups.items()
    ]


def with_instances(case: Case, number: int) -> Case:
    """The case on so many instances: without the listed faults of workers that it then does not have, and with changes
    of the link that they were meant for, wherever so many instances stand."""
    cluster = case.raw["cluster"]
    cluster = {"preset": cluster} if isinstance(cluster, str) else dict(cluster)
    spec = parse_spec(case.raw, case.name)
    is_inside = changes_inside(spec.cluster)
    if is_inside is not None:
        cluster["link"] = {**cluster["link"], "within_node": is_inside}
    raw = {**case.raw, "cluster": {**cluster, "instances": number}}
    if isinstance(spec.faults, tuple) and spec.faults:
        listed = zip(_faults(case), spec.faults, strict=True)
        raw["faults"] = [written for written, fault in listed if max(workers_of(fault)) < number]
    return replace(case, raw=raw, name=f"{case.name} instances={number}")


def _faults(case: Case) -> Sequence[Any]:
    """Those that are listed; a schedule that is drawn fits any cluster."""
    faults = case.raw.get("faults")
    return faults if isinstance(faults, list | tuple) else ()


def _trial(number: int, runs: Sequence[RunResult], objective: Objective, num_faults_left_out: int) -> Trial:
    ttft = [run.ttft_s.p99 for run in runs if run.ttft_s.p99 is not None]
    tpot = [run.tpot_s.p99 for run in runs if run.tpot_s.p99 is not None]
    return Trial(
        number, objective.holds(runs), max(ttft, default=None), max(tpot, default=None),
        sum(run.requests.completed for run in runs), sum(run.requests.submitted for run in runs),
        runs[0].config["cluster"]["gpus"], num_faults_left_out,
    )  # fmt: skip

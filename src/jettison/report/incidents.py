"""The overloads of a run: drops, declined drops, and late requests without either.

Pure functions over a stored run and its decisions (``report.decisions``).

- ``drop``: from a decision to drop that freed memory until every layer is back.
- ``no drop``: verdicts against a drop, and failed drops, less than ``SPELL_GAP_S`` apart and outside of the former;
  until the requests that waited at the last of them have their first token.
- ``wait``: requests with late first tokens, less than ``SPELL_GAP_S`` apart, with requests in the queue, and outside of
  the former two. A policy without drops has these, and a queue that no rung assessed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from jettison.report.decisions import Decision, decisions_of, waiting_at
from jettison.report.results import RunResult, percentile

DEFAULT_SLO_TTFT_S = 1.0

SPELL_GAP_S = 10.0
"""Events less apart than this are one spell: a lasting verdict against a drop is logged every 5 s only
(``core.load.monitor.NEWS_INTERVAL_NS``)."""

Kind = Literal["drop", "no drop", "wait"]

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Counterfactual:
    """The result of the same arrivals under another policy, over the same span of time."""

    policy: str
    p50_ttft_s: float | None
    p99_ttft_s: float | None
    num_over_slo: int
    tells_saved: bool = True
    """Whether its count may be compared with this run's; False where a simulation stands for a measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The figures of the requests in a span of a run, here and under other policies."""

    begin_s: float
    end_s: float
    num_arrivals: int
    p50_ttft_s: float | None
    p99_ttft_s: float | None
    num_over_slo: int
    counterfactuals: tuple[Counterfactual, ...] = ()

    def num_saved(self, policy: str) -> int | None:
        """Net number of requests within the objective here that would have missed it under that policy; None if
        unknown."""
        return next(
            (c.num_over_slo - self.num_over_slo for c in self.counterfactuals if c.policy == policy and c.tells_saved),
            None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident(Comparison):
    """One overload. Its requests are scheduled between the oldest one that waited at its trigger and its end."""

    kind: Kind
    is_over: bool
    """Whether it was over before the run ended: all layers back, and no request left without a token."""
    trigger: Decision
    """Its first decision; for a ``wait``, a decision made up of the measurements."""
    drops: tuple[Decision, ...] = ()
    """The trigger, and the drops that followed before the end."""
    declined: tuple[Decision, ...] = ()
    """The trigger, and further verdicts against a drop."""
    bytes_freed: int = 0
    workers: tuple[int, ...] = ()
    most_waiting: int | None = None
    """Most requests without their first token at one time; None without details."""


class _Stretch(NamedTuple):
    """The span of an overload, before its requests are counted."""

    kind: Kind
    begin_s: float
    end_s: float
    oldest_s: float
    """Scheduled time of the oldest request that waited at the trigger."""
    is_over: bool
    trigger: Decision
    decisions: tuple[Decision, ...]


class _Met(NamedTuple):
    """Counts of the requests scheduled in a span of time."""

    num_arrivals: int
    p50_ttft_s: float | None
    p99_ttft_s: float | None
    num_over_slo: int
    """Requests with a late first token, unanswered ones included."""


def slo_ttft_of(run: RunResult, asked_s: float | None = None) -> float:
    """The objective for the first token: ``asked_s``, else the run's own, else ``DEFAULT_SLO_TTFT_S``."""
    own_s = (run.goodput or {}).get("slo_ttft_s")
    return next((float(s) for s in (asked_s, own_s) if s is not None), DEFAULT_SLO_TTFT_S)


def incidents_of(
    run: RunResult, slo_ttft_s: float, others: Mapping[str, RunResult] | None = None, *,
    untold: Collection[str] = (),
) -> list[Incident]:
    """The run's overloads, by time. ``others``: runs of the same arrivals under other policies, by policy. ``untold``:
    the policies in ``others`` that must not be used to count saved requests (``simulate.counterfactual.untold_of``).

    A run without rows by request has no ``wait``.
    """
    decisions = decisions_of(run)
    found = _dropped(run, decisions)
    found += _declined(run, decisions, found)
    found += _waited(run, decisions, slo_ttft_s, found)
    return [
        _incident(run, stretch, slo_ttft_s, others or {}, untold)
        for stretch in sorted(found, key=lambda stretch: stretch.begin_s)
    ]


def whole_run(
    run: RunResult, slo_ttft_s: float, others: Mapping[str, RunResult], *, untold: Collection[str] = ()
) -> Comparison:
    """The comparison over all requests of a run, in overloads or not. Arguments are as for ``incidents_of``."""
    return Comparison(**_compared(run, -math.inf, math.inf, slo_ttft_s, others, untold) | {
        "begin_s": 0.0, "end_s": run.duration_s,
    })


def _incident(
    run: RunResult, stretch: _Stretch, slo_ttft_s: float, others: Mapping[str, RunResult], untold: Collection[str]
) -> Incident:
    drops = stretch.decisions if stretch.kind == "drop" else ()
    compared = _compared(run, stretch.oldest_s, stretch.end_s, slo_ttft_s, others, untold)
    return Incident(
        **compared | {"begin_s": stretch.begin_s},
        kind=stretch.kind,
        is_over=stretch.is_over,
        trigger=stretch.trigger,
        drops=drops,
        declined=stretch.decisions if stretch.kind == "no drop" else (),
        bytes_freed=sum(d.outcome["bytes_to_kv"] for d in drops),
        workers=tuple(sorted({w for d in drops for w in d.workers})),
        most_waiting=_most_waiting(run, stretch.oldest_s, stretch.end_s),
    )


# --- where layers were dropped


def _dropped(run: RunResult, decisions: Sequence[Decision]) -> list[_Stretch]:
    found: list[_Stretch] = []
    drops = [d for d in decisions if _freed(d)]
    restores = _restored(run.log())
    for trigger in drops:
        if found and trigger.at_s < found[-1].end_s:
            continue
        end_s, chain, is_over = _extent(trigger, drops, restores, run.duration_s)
        found.append(
            _Stretch("drop", trigger.at_s, end_s, _oldest_s(run, trigger.at_s), is_over, trigger, tuple(chain))
        )
    return found


def _restored(log: Sequence[Row]) -> list[tuple[float, set[int]]]:
    """Restores: the time of each end, and the workers with all layers back then. Workers that a split left in smaller
    pipelines, or left until they were restored on their own, are not among them."""
    still_merged: dict[frozenset[int], set[int]] = {}
    restored = []
    for event in log:
        if event["kind"] == "split":
            homes: list[list[int]] = list((event.get("homes") or {}).values())
            left_over = set(event.get("left_over") or [])
            everyone = left_over.union(*homes)
            merged = left_over.union(*(members for members in homes if len(members) > 1))
            still_merged[frozenset(everyone)] = merged
        elif event["kind"] == "restore_done":
            workers = set(event.get("workers") or [])
            restored.append((event["t"], workers - still_merged.pop(frozenset(workers), set())))
        elif event["kind"] == "came_home":
            restored.append((event["t"], {event["worker"]}))
    return restored


def _freed(decision: Decision) -> bool:
    return decision.kind == "drop" and bool(decision.outcome.get("bytes_to_kv"))


def _extent(
    trigger: Decision, drops: Sequence[Decision], restores: Sequence[tuple[float, set[int]]], run_end_s: float
) -> tuple[float, list[Decision], bool]:
    """The end of the overload, when all layers were back; the drops until then; and whether it was over."""
    chain, merged = [trigger], set(trigger.workers)
    later: list[tuple[float, Decision | None, set[int]]] = [
        *((d.at_s, d, set(d.workers)) for d in drops if d.at_s > trigger.at_s),
        *((at_s, None, workers) for at_s, workers in restores if at_s > trigger.at_s),
    ]
    for at_s, drop, workers in sorted(later, key=lambda happening: happening[0]):
        if drop is not None:
            chain.append(drop)
            merged |= workers
            continue
        merged -= workers
        if not merged:
            return at_s, chain, True
    return run_end_s, chain, False


# --- where drops were declined


def _declined(run: RunResult, decisions: Sequence[Decision], dropped: Sequence[_Stretch]) -> list[_Stretch]:
    marks = [
        (d.at_s, d.at_s, d) for d in decisions
        if (d.kind == "no drop" or (d.kind == "drop" and not _freed(d)))
        and not any(stretch.begin_s <= d.at_s < stretch.end_s for stretch in dropped)
    ]
    begins_s = [stretch.begin_s for stretch in dropped]
    found = []
    for spell in _spells(marks, begins_s):
        trigger, last_s = spell[0], spell[-1].at_s
        ends_s = (row["scheduled_s"] + row["ttft_s"] for row in waiting_at(run, last_s))
        next_s = min((s for s in begins_s if s >= last_s), default=math.inf)
        end_s = min(max(ends_s, default=last_s), next_s)
        found.append(_Stretch(
            "no drop", trigger.at_s, end_s, _oldest_s(run, trigger.at_s), end_s < run.duration_s, trigger, tuple(spell)
        ))
    return found


# --- where requests were late


def _waited(
    run: RunResult, decisions: Sequence[Decision], slo_ttft_s: float, others: Sequence[_Stretch]
) -> list[_Stretch]:
    late = [
        (row["scheduled_s"], _wait_end_s(row, slo_ttft_s), row)
        for row in run.requests_detail or [] if _is_late(row, slo_ttft_s)
    ]
    own = [
        (begin_s, end_s, (end_s, row)) for begin_s, end_s, row in late
        if not any(begin_s <= stretch.end_s and stretch.oldest_s <= end_s for stretch in others)
    ]
    found = []
    for spell in _spells(own, [stretch.begin_s for stretch in others]):
        begin_s, end_s = spell[0][1]["scheduled_s"], max(until_s for until_s, _ in spell)
        in_queue = _values(run, "queue", begin_s, end_s)
        if len(in_queue) > 1 and not any(in_queue):  # late because of long prompts, say: no request was kept waiting
            continue
        told = [d for d in decisions if begin_s <= d.at_s <= end_s]
        trigger = Decision(
            begin_s, "wait", None, (), _seen(run, len(spell), begin_s, end_s), {}, _done_meanwhile(run, told)
        )
        found.append(_Stretch("wait", begin_s, end_s, begin_s, end_s < run.duration_s, trigger, ()))
    return found


def _is_late(row: Row, slo_ttft_s: float) -> bool:
    """Whether its first token was late. A request without one was late, too, unless its client gave up before the
    objective."""
    if row["ttft_s"] is not None:
        return bool(row["ttft_s"] > slo_ttft_s)
    return row["status"] != "cancelled" or (row.get("e2e_s") or 0.0) > slo_ttft_s


def _wait_end_s(row: Row, slo_ttft_s: float) -> float:
    """Time of a late request's first token; without one, the time of its end, but no earlier than the objective."""
    waited_s = row["ttft_s"]
    if waited_s is None:
        waited_s = max(row.get("e2e_s") or 0.0, slo_ttft_s)
    return float(row["scheduled_s"] + waited_s)


def _seen(run: RunResult, num_late: int, begin_s: float, end_s: float) -> dict[str, Any]:
    """The measurements of a wait."""
    seen: dict[str, Any] = {"late_requests": num_late}
    for label, name in (("most_in_queue", "queue"), ("highest_kv_usage", "kv_usage")):
        if values := _values(run, name, begin_s, end_s):
            seen[label] = max(values)
    return seen


def _values(run: RunResult, name: str, begin_s: float, end_s: float) -> list[float]:
    """Values of a series: the last one before the begin, and all samples until the end."""
    points = run.series.get(name) or []
    before = [value for at_s, value in points if at_s < begin_s]
    return [*before[-1:], *(value for at_s, value in points if begin_s <= at_s <= end_s)]


def _done_meanwhile(run: RunResult, decisions: Iterable[Decision]) -> dict[str, Any]:
    """The policy, and its decisions during a wait; preemptions are counted for the whole run only."""
    counts = Counter(decision.kind for decision in decisions)
    done: dict[str, Any] = {"policy": run.config.get("policy"), "decisions": dict(counts) or "none"}
    done["preemptions_in_the_whole_run"] = run.events.get("preemptions")
    return {name: value for name, value in done.items() if value is not None}


# --- what they have in common

_Marked = TypeVar("_Marked")


def _spells(marks: Iterable[tuple[float, float, _Marked]], walls_s: Sequence[float]) -> list[list[_Marked]]:
    """Marks grouped into spells: within ``SPELL_GAP_S`` of each other, with no wall between them. Marks are (begin,
    end, value)."""
    spells: list[list[_Marked]] = []
    until_s = -math.inf
    for begin_s, end_s, what in sorted(marks, key=lambda mark: mark[:2]):
        is_parted = begin_s - until_s >= SPELL_GAP_S or any(until_s <= wall_s <= begin_s for wall_s in walls_s)
        if is_parted:
            spells.append([])
        spells[-1].append(what)
        until_s = max(until_s, end_s)
    return spells


def _oldest_s(run: RunResult, at_s: float) -> float:
    """Scheduled time of the oldest request that waited at this time."""
    return min((row["scheduled_s"] for row in waiting_at(run, at_s)), default=at_s)


def _most_waiting(run: RunResult, begin_s: float, end_s: float) -> int | None:
    if not run.requests_detail:
        return None
    changes: list[tuple[float, int]] = []
    for row in run.requests_detail:
        waited_s = row["ttft_s"] if row["ttft_s"] is not None else row.get("e2e_s") or 0.0
        until_s = row["scheduled_s"] + waited_s
        if row["scheduled_s"] < end_s and until_s > begin_s:
            changes += [(max(row["scheduled_s"], begin_s), 1), (until_s, -1)]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def _compared(
    run: RunResult, begin_s: float, end_s: float, slo_ttft_s: float, others: Mapping[str, RunResult],
    untold: Collection[str],
) -> dict[str, Any]:
    """Fields of a ``Comparison``."""
    counterfactuals = []
    for policy, other in others.items():
        _, p50, p99, late = _met(other, begin_s, end_s, slo_ttft_s)
        counterfactuals.append(Counterfactual(policy, p50, p99, late, policy not in untold))
    met = _met(run, begin_s, end_s, slo_ttft_s)._asdict()
    return {"begin_s": begin_s, "end_s": end_s, **met, "counterfactuals": tuple(counterfactuals)}


def _met(run: RunResult, begin_s: float, end_s: float, slo_ttft_s: float) -> _Met:
    """Counts of the requests scheduled in this span."""
    rows = [r for r in run.requests_detail or [] if begin_s <= r["scheduled_s"] < end_s]
    ttft = [r["ttft_s"] for r in rows if r["ttft_s"] is not None]
    late = sum(r["ttft_s"] is None or r["ttft_s"] > slo_ttft_s for r in rows)
    return _Met(len(rows), percentile(ttft, 50), percentile(ttft, 99), late)

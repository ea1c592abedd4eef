"""The opening of a report: one sentence on the results, and the eight rows that an operator needs first.

The sentence is computed from the runs: unanswered requests come first, then the tail of the first tokens against the
baseline, better or worse, then its cost. Pure; ``report.html`` shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from jettison.report.classes import CLASSES
from jettison.report.results import RunResult
from jettison.report.summary import format_count, format_value
from jettison.report.variants import Variant, loads_of, variants_of

_TTFT, _TPOT, _SPEED = "TTFT p99", "TPOT p50", "output tokens/s"

_SAME = 1.05
"""Ratios of first tokens closer to 1 than this count as equal."""
_SAME_COST = 0.02
"""Costs below this share count as none."""

_MOST_CLAUSES = 2
"""More comparisons than this are summarised."""
_MOST_NAMED = 6
"""More variants than this are not listed one by one."""


@dataclass(frozen=True, slots=True)
class KeyRow:
    """One of the eight rows: its label, its meaning in plain words, and a (figure, ratio) for each variant."""

    label: str
    meaning: str
    cells: tuple[tuple[str, str], ...]


# --- the sentence ---------------------------------------------------------------------------------------------------


def opening_sentence(runs: Sequence[RunResult]) -> str:
    """The result of these runs in one sentence."""
    if not runs:
        return "There is no run to report."
    variants = variants_of(runs)
    if not any(run.requests.completed for run in runs):
        return f"No request was answered{_first_names(variants)}."
    missing = _unanswered(variants)
    told = _told(variants)
    text = f"Not every request was answered ({missing}); of what was answered, {told}" if missing else told
    return f"{text[0].upper()}{text[1:]}."


def _told(variants: Sequence[Variant]) -> str:
    compared = [variant for variant in variants if variant.has_baseline]
    if not compared:
        return _alone(variants)
    if len(compared) <= _MOST_CLAUSES:
        return "; ".join(_clause(variant) for variant in compared)
    loads = loads_of(variants)
    if len(loads) == 1 and len(variants) <= _MOST_NAMED:
        return _ranked(variants)
    return _tallied(compared)


def _first_names(variants: Sequence[Variant]) -> str:
    return f" in {', '.join(v.name for v in variants)}" if len(variants) <= _MOST_NAMED else ""


def _unanswered(variants: Sequence[Variant]) -> str:
    """Each variant with its failed and refused requests, out of how many."""
    counts = [
        (v.name, sum(r.requests.unanswered for r in v.runs), sum(r.requests.submitted for r in v.runs))
        for v in variants
    ]
    found = [f"{name}: {count:,} of {total:,} failed or were refused" for name, count, total in counts if count]
    if len(found) > _MOST_NAMED:
        return f"{sum(count for _, count, _ in counts):,} of {sum(total for _, _, total in counts):,} requests"
    return ", ".join(found)


def _alone(variants: Sequence[Variant]) -> str:
    """The sentence for runs without a baseline: figures of each, without comparison."""
    clauses = [_alone_clause(variant) for variant in variants[:_MOST_CLAUSES]]
    more = len(variants) - len(clauses)
    if more:
        clauses.append(f"{more} more runs are below")
    if len(variants) > 1:
        clauses.append("they met different requests or conditions, so nothing is compared")
    return "; ".join(clauses)


def _alone_clause(variant: Variant) -> str:
    completed = sum(run.requests.completed for run in variant.runs)
    submitted = sum(run.requests.submitted for run in variant.runs)
    half, tail = variant.figure("TTFT p50"), variant.figure(_TTFT)
    times = f": half of the first tokens came within {_time(half)} and 99 of 100 within {_time(tail)}"
    moves = _moved(variant)
    seeds = f" (medians of {len(variant.runs)} seeds)" if len(variant.runs) > 1 else ""
    return (
        f"{variant.name} answered {completed:,} of {submitted:,} requests{times if tail is not None else ''}{seeds}"
        f"{', with ' + moves if moves else ''}"
    )


def _moved(variant: Variant) -> str:
    """Drops, restores and preemptions in words; empty where none is recorded."""
    found = []
    for name, one, many in (("drops", "drop", "drops"), ("restores", "restore", "restores"),
                            ("preemptions", "preemption", "preemptions")):  # fmt: skip
        if (count := variant.event(name)) is not None:
            found.append(f"{'no' if not count else format_count(count)} {one if count == 1 else many}")
    return _listed(found)


def _clause(variant: Variant) -> str:
    """One variant against its baseline: the tail, better or worse, then its cost."""
    load, _, name = variant.name.rpartition(": ")
    baseline = variant.baseline_name.rpartition(": ")[2] if load else variant.baseline_name
    place = f"in {load}, " if load else ""
    times = variant.ratios(_TTFT)
    if not times:
        return f"{place}there are no first tokens to compare of {name} and {baseline}"
    theirs = median(run.ttft_s.p99 for run in variant.baselines if run.ttft_s.p99 is not None)
    return (
        f"{place}99 of 100 first tokens came within {_time(variant.figure(_TTFT))} with {name}, in place of"
        f" {_time(theirs)} with {baseline}: {_verdict(times)}{_cost(variant)}"
    )


def _verdict(times: Sequence[float]) -> str:
    middle = median(times)
    spread = f" ({len(times)} seeds: {_spread(times)})" if len(times) > 1 else ""
    if middle >= _SAME:
        return f"{_times(middle)} sooner{spread}"
    if middle <= 1 / _SAME:
        return f"{_times(1 / middle)} later{spread}, so here it did worse"
    return f"about the same{spread}"


def _spread(times: Sequence[float]) -> str:
    """The range from the worst seed to the best, with the direction of each."""
    return " to ".join(
        f"{_times(1 / end)} later" if end < 1 else f"{_times(end)} sooner" for end in (min(times), max(times))
    )


def _cost(variant: Variant) -> str:
    """The change of later tokens and throughput, and whether any layers were dropped."""
    parts = []
    if per_token := variant.ratios(_TPOT):
        change = 1 / median(per_token) - 1
        how = "as fast" if abs(change) < _SAME_COST else f"{abs(change):.0%} {'slower' if change > 0 else 'faster'}"
        parts.append(f"later tokens came {how}")
    if speed := variant.ratios(_SPEED):
        change = median(speed) - 1
        how = "was the same" if abs(change) < _SAME_COST else f"{'rose' if change > 0 else 'fell'} by {abs(change):.0%}"
        parts.append(f"throughput {how}")
    drops = [run.events.get("drops") for run in (*variant.runs, *variant.baselines)]
    if not any(drops) and None not in drops:
        parts.append("no layers were dropped")
    return f", while {_listed(parts)}" if parts else ""


def _ranked(variants: Sequence[Variant]) -> str:
    """Several variants of one load, the shortest tail first."""
    known = sorted(
        ((tail, v) for v in variants if (tail := v.figure(_TTFT)) is not None),
        key=lambda pair: (pair[0], pair[1].index),
    )
    first = next(v for v in variants if not v.has_baseline)
    named = [f"{_time(tail)} with {v.name}{' (the baseline)' if v is first else ''}" for tail, v in known]
    seeds = max(len(variant.runs) for variant in variants)
    over = f" (medians of {seeds} seeds)" if seeds > 1 else ""
    without = [v.name for v in variants if v.figure(_TTFT) is None]
    none = f"; no first token with {', '.join(without)}" if without else ""
    return f"99 of 100 first tokens came within {_listed(named)}{over}{none}"


def _tallied(compared: Sequence[Variant]) -> str:
    """A summary of many comparisons: how many are better or worse, and by how much."""
    times = [median(found) for variant in compared if (found := variant.ratios(_TTFT))]
    sooner = [each for each in times if each >= _SAME]
    later = [1 / each for each in times if each <= 1 / _SAME]
    parts = [
        f"{len(sooner)} of {len(compared)} comparisons had an earlier tail of first tokens (P99) than its baseline"
        + (f", at most {_times(max(sooner))}" if sooner else ""),
        f"{len(later)} had a later one" + (f", at most {_times(max(later))}" if later else ""),
        f"{len(times) - len(sooner) - len(later)} about the same",
    ]
    return "; ".join(parts)


def _listed(parts: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join(part for part in (", ".join(parts[:-1]), *parts[-1:]) if part)


def _time(value_s: float | None) -> str:
    """A time with three digits, for a sentence."""
    return "-" if value_s is None else format_value(float(f"{value_s:.3g}"), "s")


def _times(value: float) -> str:
    return f"{value:.2f} times" if value < 2 else f"{float(f'{value:.2g}'):,g} times"


# --- eight rows -----------------------------------------------------------------------------------------------------


def key_rows(variants: Sequence[Variant]) -> list[KeyRow]:
    """The eight rows, always the same but for the sixth, which with an objective is the share within it. A ninth
    follows where a batch ran beside."""
    sixth = ("end to end p99", "P99 end to end", "99 of 100 answers were whole within", "s")
    if any(variant.figure("goodput share") is not None for variant in variants):
        sixth = ("goodput share", "goodput", "share of all requests within the objectives", "%")
    figures = (
        ("TTFT p50", "P50 TTFT", "half of the first tokens came within", "s"),
        (_TTFT, "P99 TTFT", "99 of 100 first tokens came within", "s"),
        (_TPOT, "P50 TPOT", "time per later token, median request", "s"),
        ("ITL p99", "P99 ITL", "99 of 100 gaps between tokens", "s"),
        sixth,
        (_SPEED, "tokens/s", "output tokens a second", ""),
    )
    answered = KeyRow("answered", "of all requests", tuple((_answered(variant), "") for variant in variants))
    moves = KeyRow(
        "drops, restores, preemptions", "layers let go, brought back; requests thrown back",
        tuple((_moves(variant), "") for variant in variants),
    )  # fmt: skip
    middle = [
        KeyRow(label, meaning, tuple((_shown(v.figure(name), unit), _ratio(v, name)) for v in variants))
        for name, label, meaning, unit in figures
    ]
    return [answered, *middle, *_class_rows(variants), moves]


def _class_rows(variants: Sequence[Variant]) -> list[KeyRow]:
    """One further row where both classes were served."""
    total = "first-time tokens/s"
    if all(variant.figure(total) is None for variant in variants):
        return []
    cells = tuple(
        (" + ".join(_shown(variant.figure(f"{name} {total}"), "") for name in CLASSES), _ratio(variant, total))
        for variant in variants
    )
    return [KeyRow("online + offline tokens/s", "prompt and output, computed for the first time", cells)]


def _answered(variant: Variant) -> str:
    completed = sum(run.requests.completed for run in variant.runs)
    return f"{completed:,} of {sum(run.requests.submitted for run in variant.runs):,}"


def _shown(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.1%}" if unit == "%" else format_value(value, unit)


def _ratio(variant: Variant, name: str) -> str:
    times = variant.ratios(name)
    return f"{median(times):.2f}x" if times else ""


def _moves(variant: Variant) -> str:
    counts = [variant.event(name) for name in ("drops", "restores", "preemptions")]
    return "-" if counts == [None] * 3 else ", ".join(format_count(count) for count in counts)

"""A request's way in plain words: where its time went, why, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jettison.core.ports import Record
from jettison.policy.slo import Objectives
from jettison.report.results import percentile
from jettison.server.console.journal import Row, Rows
from jettison.server.console.words import Told, counted, reason_of, span
from jettison.types import NANOSECONDS

MOST_EVENTS = 100
"""Events told of one request."""
SLOW = 2.0
"""A time is called long from so many times the usual one on: less is what requests differ by anyway."""
NOTICED_S = 0.1
"""A wait below this is called short: a reader does not notice it."""
SHARE = 0.25
"""A part of the time to the first token is a cause from this share on."""


@dataclass(slots=True)
class Usual:
    """What is usual here, for comparison: medians of online requests that were kept; None where there are none."""

    ttft_s: float | None
    gap_s: float | None

    @classmethod
    def of(cls, requests: Sequence[Rows]) -> Usual:
        """Of these requests, by the first choice of each."""
        online = [rows[0] for rows in requests if not rows[0].is_offline]
        firsts = [row.ttft_ns / NANOSECONDS for row in online if row.ttft_ns is not None]
        gaps = [gap for row in online if (gap := gap_s(row)) is not None]
        return cls(percentile(firsts, 50), percentile(gaps, 50))


def gap_s(row: Row) -> float | None:
    """Mean time between its tokens, in seconds; None where it has fewer than two."""
    if row.first_ns is None or row.ended_ns is None or row.num_output < 2:
        return None
    return (row.ended_ns - row.first_ns) / NANOSECONDS / (row.num_output - 1)


@dataclass(frozen=True, slots=True)
class Meanwhile:
    """What the server did while a request was in it."""

    events: Sequence[tuple[Record, Told]]
    """Oldest first."""
    is_whole: bool
    """Whether these are all: the log keeps so many records, and so many are read."""

    def of(self, row: Row, now_ns: int) -> Meanwhile:
        """From the row's arrival to its end."""
        end_ns = row.ended_ns or now_ns
        return Meanwhile([each for each in self.events if row.arrival_ns <= each[0].time_ns <= end_ns], self.is_whole)


@dataclass(slots=True)
class _Story:
    row: Row
    now_ns: int
    usual: Usual
    meanwhile: Meanwhile
    objectives: Objectives
    why: list[str] = field(default_factory=list)
    do: list[str] = field(default_factory=list)

    @property
    def end_ns(self) -> int:
        return self.row.ended_ns or self.now_ns

    @property
    def is_split(self) -> bool:
        """Whether it is known which part of the time to its first token was waiting."""
        return self.row.scheduled_ns is not None or (self.row.is_timed and self.row.first_ns is None)

    @property
    def queue_s(self) -> float:
        """Where ``is_split``."""
        until = self.row.scheduled_ns or self.row.first_ns or self.end_ns
        return max(0.0, (until - self.row.arrival_ns) / NANOSECONDS)

    @property
    def prompt_s(self) -> float | None:
        """None: not begun, or not known when it began."""
        if self.row.scheduled_ns is None:
            return None
        return max(0.0, ((self.row.first_ns or self.end_ns) - self.row.scheduled_ns) / NANOSECONDS)

    @property
    def first_s(self) -> float:
        """Until its first token, or until now."""
        return ((self.row.first_ns or self.end_ns) - self.row.arrival_ns) / NANOSECONDS

    def happened(self, kinds: Sequence[str], until_ns: int) -> list[Record]:
        return [r for r, _ in self.meanwhile.events if r.kind in kinds and r.time_ns <= until_ns]


def way_of(
    row: Row, now_ns: int, usual: Usual, meanwhile: Meanwhile, objectives: Objectives, at_s: Callable[[int], float]
) -> dict[str, Any]:
    """The document of one choice. ``meanwhile``: from its arrival to its end; ``at_s``: the page's clock."""
    story = _Story(row, now_ns, usual, meanwhile, objectives)
    _tell_first(story)
    _tell_answer(story)
    if not story.why:
        is_quick = story.first_s < NOTICED_S
        story.why.append("Nothing held it up." if is_quick else "Nothing unusual: others here take about as long.")
    events = [(is_about(record, row), record.time_ns, said) for record, said in meanwhile.events]
    first = sorted(events, key=lambda event: (not event[0], event[1]))[:MOST_EVENTS]
    shown = [{"t": at_s(time_ns), "what": said.what, "why": said.why, "mine": is_mine}
             for is_mine, time_ns, said in sorted(first, key=lambda event: event[1])]
    return brief(row, now_ns, at_s) | {
        "verdict": _verdict(story), "why": story.why, "do": story.do, "stages": _stages(story), "events": shown,
        "left_out": len(events) - len(shown), "gap": gap_s(row), "usual_gap": usual.gap_s,
    }


def brief(row: Row, now_ns: int, at_s: Callable[[int], float]) -> dict[str, Any]:
    """The row for a list, times in seconds."""
    ttft_ns = row.ttft_ns
    return {
        "id": row.names[0] if row.names else row.request_id, "t": at_s(row.arrival_ns), "batch": row.is_offline,
        "ttft": None if ttft_ns is None else round(ttft_ns / NANOSECONDS, 4),
        "took": round(((row.ended_ns or now_ns) - row.arrival_ns) / NANOSECONDS, 4), "ended": row.reason,
        "prompt": row.num_prompt, "cached": row.num_cached, "output": row.num_output,
        "preempted": row.num_preemptions, "choices": row.num_choices,
    }


def is_about(record: Record, row: Row) -> bool:
    """Whether the record names this request."""
    ids = record.fields.get("request_ids")
    return record.fields.get("request") == row.request_id or (isinstance(ids, list) and row.request_id in ids)


def _verdict(story: _Story) -> str:
    row, first = story.row, span(story.first_s)
    if row.first_ns is None:
        return f"It runs, and has waited {first} for its first token." if not row.reason else (
            f"It ended after {first} without a token ({row.reason}).")
    usual = story.usual.ttft_s
    compared = "" if usual is None else f" Usual here: {span(usual)}."
    limit_s = story.objectives.ttft_s
    late = "" if limit_s is None or row.is_offline else (
        f" The objective is {span(limit_s)}: {'kept' if story.first_s <= limit_s else 'missed'}.")
    return f"Its first token came after {first}.{compared}{late}"


def _tell_first(story: _Story) -> None:
    """Why its first token took as long as it did."""
    row, first_s = story.row, story.first_s
    if row.is_offline:
        story.why.append("It is of a batch, or of the tier flex: it runs in what the chat leaves of each step.")
        story.do.append("Send it without service_tier flex if it must not wait.")
        return
    usual = story.usual.ttft_s
    if first_s < NOTICED_S or (usual is not None and first_s < SLOW * usual):
        return
    until_ns = row.first_ns or story.end_ns
    if not story.is_split:
        story.why.append("What part of this time it waited, and what part it was computed, is not known.")
        if not row.reason and not _tell_shortage(story, until_ns):
            story.why.append("Steps are full of the requests before it, or of its own prompt: the log has no shortage "
                             "of memory meanwhile." if story.meanwhile.is_whole else
                             "The log no longer covers this time whole, so what it waits for is not known.")
    elif story.queue_s >= SHARE * first_s:
        _tell_queue(story, until_ns)
    prompt_s = story.prompt_s
    if prompt_s is not None and prompt_s >= SHARE * first_s:
        new = row.num_prompt - row.num_cached
        story.why.append(
            f"Its prompt took {span(prompt_s)}: {counted(new, 'token')} to compute"
            + (f", {row.num_cached:,} more were cached." if row.num_cached else ", none were cached.")
        )
        story.do.append(
            "Prompts that begin alike are computed once: put what changes at the end. More compute, or fewer requests "
            "at one time, make prompts faster; more memory does not.")
    if (lost := story.happened(("worker_lost",), until_ns)):
        story.why.append(f"{counted(len(lost), 'instance')} died meanwhile, and requests started over.")
        story.do.append("See the server's log for why the process ended.")


def _tell_queue(story: _Story, until_ns: int) -> None:
    """Why it waited before its first step."""
    row = story.row
    beside = f"{counted(row.num_beside, 'other request')} {'was' if row.num_beside == 1 else 'were'}"
    waited = f"waited {span(story.queue_s)} before" if row.scheduled_ns is not None else (
        f"{'waited' if row.reason else 'has waited'} {span(story.queue_s)} for")
    story.why.append(f"It {waited} its first step; {beside} in the server when it came.")
    if _tell_shortage(story, until_ns):
        return
    if not story.meanwhile.is_whole:
        story.why.append("The log no longer covers that time whole, so what it waited for is not known.")
    else:
        story.why.append("The log has no shortage of memory meanwhile, so steps were full of the requests before it.")
        story.do.append("More instances or cores make the queue shorter; --max-num-queued-reqs bounds it.")


def _tell_shortage(story: _Story, until_ns: int) -> bool:
    """Which shortage of memory the log has meanwhile, and whether it has one."""
    drops = story.happened(("drop", "drop_decided"), until_ns)
    declined = story.happened(("drop_declined",), until_ns)
    preempted = story.happened(("preempted",), until_ns)
    woken = story.happened(("wake_decided", "woken"), until_ns)
    if drops:
        story.why.append("Memory for requests was full: layers were dropped meanwhile to make room.")
    if declined:
        story.why.append(
            f"Memory for requests was full, and layers were not dropped: {reason_of(declined[-1].fields)}.")
    if preempted and not drops and not declined:
        story.why.append("Memory for requests was full: others gave theirs up meanwhile.")
    if woken:
        story.why.append("An instance had to be woken first.")
        story.do.append("Keep more instances awake: --min-awake.")
    if drops or declined or preempted:
        story.do.append("Give instances more --memory, or start more of them (--instances); --max-num-queued-reqs "
                        "refuses what would wait too long.")
    return bool(drops or declined or preempted or woken)


def _tell_answer(story: _Story) -> None:
    """Why its tokens came as slowly as they did."""
    row, mine, usual = story.row, gap_s(story.row), story.usual.gap_s
    if row.num_preemptions:
        times = "once" if row.num_preemptions == 1 else f"{row.num_preemptions} times"
        story.why.append(f"It lost its place {times}, and what it had was computed again or copied back.")
        story.do.append("More --memory, or fewer requests at one time (--max-num-seqs), keep requests in their places.")
    limit_s = story.objectives.tpot_s
    is_late = mine is not None and limit_s is not None and mine > limit_s
    if mine is not None and not row.is_offline and (is_late or (usual is not None and mine >= SLOW * usual)):
        told_usual = "" if usual is None else f" (usual here: {span(usual)})"
        story.why.append(f"Its tokens came every {span(mine)}{told_usual}: its steps were shared with other requests, "
                         "or its group was one pipeline.")
    if row.reason == "abort":
        story.why.append("Its client went away, or the server stopped it, before it was over.")
    elif row.reason == "error":
        story.why.append("It ended with an error; the client was told, and the server's log has it.")


def _stages(story: _Story) -> list[dict[str, Any]]:
    """Where its time went: waiting and prompt, or both in one where that is all that is known, then answer; in
    seconds."""
    row = story.row
    stages = [{"name": "waiting", "s": round(story.queue_s, 4)} if story.is_split
              else {"name": "first", "s": round(story.first_s, 4)}]
    if story.prompt_s is not None:
        stages.append({"name": "prompt", "s": round(story.prompt_s, 4)})
    if row.first_ns is not None:
        stages.append({"name": "answer", "s": round((story.end_ns - row.first_ns) / NANOSECONDS, 4)})
    return stages

"""When each token of each stream came, and what the server's time line tells of that moment: for live benchmarks.

Client and server share the machine's monotonic clock, so a gap between two tokens can be held against the steps, the
moves and the evictions of its own request.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np

from jettison.workload.observe import parse_metrics
from jettison.workload.traces import Workload

POLL_S = 0.25
AROUND_S = 0.05
"""What the server tells so long before and after a gap is listed with it."""
TOLD = ("migrated", "pack", "woken", "asleep", "falling_asleep", "wake_decided", "rebalanced", "drop")
"""Kinds of records that are listed."""


# --- the client


@dataclass
class Answer:
    """One stream. Times are of the machine's monotonic clock, which the server's time line has, too."""

    due_s: float
    num_prompt: int
    request_id: str = ""
    """The engine's, which its client never learns: `TimeLine.name`."""
    token_ids: list[int] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    """Of each chunk with tokens."""
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """From when it was due."""
        return self.at_s[0] - self.due_s

    @property
    def tpot_s(self) -> float:
        """Mean gap; 0 of one token."""
        return (self.at_s[-1] - self.at_s[0]) / max(1, len(self.token_ids) - 1)

    @property
    def gaps(self) -> Iterator[tuple[float, float]]:
        """(Begin, end) between two chunks."""
        return itertools.pairwise(self.at_s)


async def stream(session: aiohttp.ClientSession, url: str, body: dict[str, Any], answer: Answer) -> None:
    """One request to its end; what goes wrong is noted, not raised."""
    await asyncio.sleep(max(0.0, answer.due_s - time.monotonic()))
    finish = None
    try:
        async with session.post(f"{url}/v1/completions", json=body | {"stream": True}) as response:
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {await response.text()}"
                return
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk, now_s = json.loads(line[6:]), time.monotonic()
                if "error" in chunk:
                    answer.error = str(chunk["error"])
                    return
                choice = chunk["choices"][0]
                finish = choice["finish_reason"] or finish
                if choice.get("token_ids"):
                    answer.token_ids += choice["token_ids"]
                    answer.at_s.append(now_s)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        answer.error = f"{type(error).__name__}: {error}"
        return
    if finish is None:
        answer.error = "the stream ended early"


class Scrapes:
    """What the server says at /metrics, every ``POLL_S``. Read when all is over: reading one takes tens of ms,
    and all streams of this client would wait for it."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    async def collect(self, session: aiohttp.ClientSession, url: str) -> None:
        """Until cancelled."""
        while True:
            async with session.get(f"{url}/metrics") as response:
                self._texts.append(await response.text())
            await asyncio.sleep(POLL_S)

    def read(self) -> tuple[list[dict[str, float]], dict[str, float]]:
        """(Gauges of each scrape, what the totals have grown by)."""
        read = [parse_metrics(text) for text in self._texts]
        first, last = read[0][1], read[-1][1]
        return [gauges for gauges, _ in read], {name: total - first.get(name, 0.0) for name, total in last.items()}


async def replay(
    url: str, load: Workload, requests: Sequence[dict[str, Any]], timeout_s: float
) -> tuple[list[Answer], Scrapes]:
    """All answers, and what the server said of itself while they were given."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        scrapes = Scrapes()
        watching = asyncio.create_task(scrapes.collect(session, url))
        start_s = time.monotonic() + 0.5
        answers = [Answer(start_s + row.arrival_s, row.input_tokens) for row in load.rows]
        await asyncio.gather(*(
            stream(session, url, body, answer) for body, answer in zip(requests, answers, strict=True)
        ))
        await asyncio.sleep(2 * POLL_S)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        return answers, scrapes


# --- the server


class Request(NamedTuple):
    """As the engine knows one that has ended."""

    name: str
    came_s: float
    lengths: tuple[int, int]
    """Tokens of prompt and answer."""
    num_evictions: int
    group: int
    """At its end."""


@dataclass(frozen=True)
class TimeLine:
    """What the server wrote, on the machine's monotonic clock: steps by group, and what the engine told."""

    steps: dict[int, list[tuple[float, float]]]
    """(Began, ended), in order."""
    records: list[tuple[float, str, dict[str, Any]]]
    requests: list[Request]

    @classmethod
    def read(cls, path: Path) -> TimeLine:
        """Raises ValueError where something of the run has been forgotten."""
        document = json.loads(path.read_text(encoding="utf-8"))
        other = document["otherData"]
        if other["forgotten_events"]:
            raise ValueError(f"{path}: {other['forgotten_events']} events were forgotten")
        steps: dict[int, list[tuple[float, float]]] = {}
        records, requests = [], []
        for event in document["traceEvents"]:
            at_s = other["first_ns"] / 1e9 + event.get("ts", 0.0) / 1e6
            if event.get("cat") == "step":
                steps.setdefault(event["args"]["group"], []).append((at_s, at_s + event["dur"] / 1e6))
            elif event.get("cat") == "decision":
                records.append((at_s, event["name"], event["args"]))
            elif event.get("cat") == "request" and "preemptions" in event.get("args", ()):
                told = event["args"]
                lengths = told["prompt_tokens"], told["output_tokens"]
                requests.append(Request(event["name"], at_s, lengths, told["preemptions"], told["group"]))
        return cls(steps, records, requests)

    def name(self, answers: Sequence[Answer]) -> None:
        """Tell each answer whose it is: the request of its lengths that came first after it was due. Raises ValueError
        where there is none."""
        left: dict[tuple[int, int], list[Request]] = {}
        for request in sorted(self.requests, key=lambda each: each.came_s):
            left.setdefault(request.lengths, []).append(request)
        for answer in sorted(answers, key=lambda each: each.due_s):
            mine = left.get((answer.num_prompt, len(answer.token_ids)))
            if not mine:
                raise ValueError(f"no request of {answer.num_prompt} and {len(answer.token_ids)} tokens was told of")
            answer.request_id = mine.pop(0).name

    @property
    def evictions(self) -> dict[str, int]:
        """By request."""
        return {request.name: request.num_evictions for request in self.requests}

    def moves(self) -> list[tuple[float, float, dict[str, Any]]]:
        """(Began, ended, what is told) of migrations that arrived."""
        return [(at_s - r["ms"] / 1e3, at_s, r) for at_s, kind, r in self.records if kind == "migrated"]

    def groups_of(self, request_id: str) -> set[int]:
        """Where it has been; all, of one that was evicted: nobody tells where it was queued then."""
        mine = next((request for request in self.requests if request.name == request_id), None)
        if mine is None or mine.num_evictions:
            return set(self.steps)
        ends = {r[n] for _, _, r in self.records if r.get("request") == request_id for n in ("source", "destination")}
        return ends | {mine.group}

    def longest_step_s(self, groups: set[int], begin_s: float, end_s: float) -> float:
        """Of steps of these groups that ran then."""
        mine = itertools.chain.from_iterable(self.steps.get(group, ()) for group in groups)
        return max((until - since for since, until in mine if until > begin_s and since < end_s), default=0.0)

    def around(self, begin_s: float, end_s: float) -> list[str]:
        """What was told then, in short."""
        return [
            f"{(at_s - begin_s) * 1e3:+.0f} ms {kind} "
            + " ".join(f"{k}={v}" for k, v in fields.items() if isinstance(v, str | int | float))[:160]
            for at_s, kind, fields in self.records
            if kind in TOLD and begin_s - AROUND_S <= at_s <= end_s + AROUND_S
        ]


# --- figures


def overlaps(spans: Sequence[tuple[float, float]], begin_s: float, end_s: float) -> bool:
    """Whether some span has a moment in common with this one."""
    return any(began < end_s and ended > begin_s for began, ended in spans)


def long_gaps(answers: Sequence[Answer], line: TimeLine) -> dict[str, Any]:
    """Gaps above two steps and the stop of the request's own move: those during moves, and how many at other times and
    how many of who was evicted."""
    moves = line.moves()
    spans = [(began, ended) for began, ended, _ in moves]
    others = [end - begin for a in answers for begin, end in a.gaps if not overlaps(spans, begin, end)]
    token_s = float(np.percentile(others, 99)) if others else 0.0
    found, counts = [], {"other_long_gaps": 0, "evicted_gaps": 0}
    for index, answer in enumerate(answers):
        groups, num_evictions = line.groups_of(answer.request_id), line.evictions.get(answer.request_id, 0)
        stops = [(at_s, r["stop_ms"] / 1e3) for _, at_s, r in moves if r["request"] == answer.request_id]
        for begin_s, end_s in sorted(answer.gaps, key=lambda gap: gap[0] - gap[1]):
            if end_s - begin_s <= 2.0 * token_s:
                break
            step_s = max(token_s, line.longest_step_s(groups, begin_s, end_s))
            stop_s = sum(stop for at_s, stop in stops if begin_s < at_s and at_s - stop < end_s)
            if end_s - begin_s <= 2.0 * step_s + stop_s:
                continue
            if not stop_s and num_evictions:
                num_evictions -= 1
                counts["evicted_gaps"] += 1
            elif not overlaps(spans, begin_s, end_s):
                counts["other_long_gaps"] += 1
            else:
                found.append({
                    "request": index, "at_s": begin_s - answers[0].due_s, "gap_ms": 1e3 * (end_s - begin_s),
                    "step_ms": 1e3 * step_s, "stop_ms": 1e3 * stop_s, "told": line.around(begin_s, end_s),
                })  # fmt: skip
    return {"long_gaps": found, "token_ms": 1e3 * token_s} | counts


def during(answers: Sequence[Answer], line: TimeLine) -> list[int]:
    """Who got tokens while somebody was on the way."""
    spans = [(began, ended) for began, ended, _ in line.moves()]
    return [index for index, answer in enumerate(answers) if overlaps(spans, answer.at_s[0], answer.at_s[-1])]


def latencies(answers: Sequence[Answer], line: TimeLine) -> dict[str, Any]:
    """At the client, and steps by the server's time line; milliseconds."""
    gaps = [end_s - begin_s for answer in answers for begin_s, end_s in answer.gaps]
    times = {
        "ttft": [a.ttft_s for a in answers], "tpot": [a.tpot_s for a in answers], "itl": gaps,
        "step": [end - begin for group in line.steps.values() for begin, end in group],
    }  # fmt: skip
    figures = {f"{name}_p{q}_ms": 1e3 * float(np.percentile(times[name], q)) for name in times for q in (50, 99)}
    each = {f"{name}_ms": [1e3 * seconds for seconds in times[name]] for name in ("ttft", "tpot")}
    return figures | each | {"itl_max_ms": 1e3 * max(gaps), "step_max_ms": 1e3 * max(times["step"])}


def moved(answers: Sequence[Answer], line: TimeLine) -> dict[str, Any]:
    """Migrations, who was there meanwhile, and gaps that are too long."""
    moves = line.moves()
    num_tokens = sum("went_as" in told for _, _, told in moves)
    return {
        "moves_kv": len(moves) - num_tokens, "moves_tokens": num_tokens,
        "stops_ms": [told["stop_ms"] for _, _, told in moves], "moves_ms": [told["ms"] for _, _, told in moves],
        "during_moves": during(answers, line),
    } | long_gaps(answers, line)

"""The live data of the console: one snapshot a second, encoded once and shared by all pages; none while no page asks.

Pages poll with the number of the last event that they have; an answer is the shared document with the later events.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from typing import Any

import jettison
from jettison.core.ports import Record
from jettison.report.results import percentile
from jettison.server.console.journal import Journal
from jettison.server.console.picture import at_work, groups, instances
from jettison.server.console.words import KINDS, told
from jettison.server.errors import ApiError
from jettison.server.json_out import encode
from jettison.server.state import ServerState
from jettison.types import NANOSECONDS

PERIOD_NS = NANOSECONDS * 9 // 10
"""A snapshot serves all pages for so long. Pages ask once a second, so each finds one that is new to it."""
MOST_ANSWERS = 32
"""Answers from one snapshot, which bounds the pages that may be open."""
MOST_EVENTS = 60
"""Events in one answer; what is older is left out, and the page says how many."""
FIRST_LOOK_NS = 600 * NANOSECONDS
"""The first page in a while is told of events so far back."""
MOST_RECORDS = 500
"""Records read for one snapshot; what is older is left out, and counted."""
WINDOW_NS = 60 * NANOSECONDS
"""Of quantiles of first tokens."""
RATE_NS = 5 * NANOSECONDS
"""A rate over a longer time than this would say nothing about now."""

MARKED = ("drop", "restore_done")
"""Kinds that the pictures of memory show as a line."""

_TOTALS = ("num_preemptions", "drops", "restores", "migrations", "worker_losses")


class Feed:
    """Of one server."""

    def __init__(self, state: ServerState, journal: Journal) -> None:
        self._state = state
        self._journal = journal
        self._clock = state.settings.console.clock or time.monotonic_ns
        self.start_ns = self._clock()
        """Zero of the page's clock."""
        self._life = secrets.token_hex(4)
        """So that a page notices a restart."""
        self._made_ns: int | None = None
        self._num_answers = 0
        self._head = b""
        self._events: deque[tuple[int, bytes]] = deque(maxlen=MOST_RECORDS)
        self._num_events = 0
        """Those that were left out have numbers, too."""
        self._seen_ns = 0
        """Time of the newest record that was read."""
        self._reasons: dict[str, str] = {}
        self._tokens: tuple[int, int] | None = None
        """Time, and tokens of answers until then."""
        self.num_made = 0
        """Snapshots so far."""

    def answer(self, after: int | None) -> bytes:
        """The document for a page that has the events up to number ``after``; None: its first. Raises ApiError 429
        where too many pages ask."""
        now_ns = self._clock()
        if self._made_ns is None or not 0 <= now_ns - self._made_ns < PERIOD_NS:
            self._make(now_ns)
        if self._num_answers >= MOST_ANSWERS:
            message = f"At most {MOST_ANSWERS} pages can watch this server: close some."
            raise ApiError(429, message, code="too_many_viewers", headers={"retry-after": "5"})
        self._num_answers += 1
        newer = [body for number, body in self._events if number > (after or 0)][-MOST_EVENTS:]
        left_out = 0 if after is None else max(0, self._num_events - after - len(newer))
        return b"%s,\"left_out\":%d,\"events\":[%s]}" % (self._head, left_out, b",".join(newer))

    def _make(self, now_ns: int) -> None:
        self._read_events(now_ns)
        document = self._document(now_ns) | {"last_event": self._num_events}
        self._head = encode(document)[:-1]
        self._made_ns, self._num_answers = now_ns, 0
        self.num_made += 1

    def _read_events(self, now_ns: int) -> None:
        after_ns = max(self._seen_ns, now_ns - FIRST_LOOK_NS)
        part = self._state.settings.console.records(after_ns, MOST_RECORDS, KINDS)
        self._num_events += part.num_older
        for record in part.records:
            self._seen_ns = max(self._seen_ns, record.time_ns)
            self._add(record)

    def _add(self, record: Record) -> None:
        said = told(record)
        if said is None:
            return
        self._num_events += 1
        if said.why:
            self._reasons[said.rung] = said.why
        at_s = round((record.time_ns - self.start_ns) / NANOSECONDS, 3)
        body = {"n": self._num_events, "t": at_s, "rung": said.rung, "what": said.what, "why": said.why}
        if record.kind in MARKED:
            body["mark"] = True
        self._events.append((self._num_events, encode(body)))

    def _document(self, now_ns: int) -> dict[str, Any]:
        state = self._state
        snapshot = state.engine.snapshot()
        firsts = self._journal.firsts_since(now_ns - WINDOW_NS)
        offline = [group.offline for group in snapshot.groups]
        return {
            "life": self._life, "version": jettison.__version__, "t": round((now_ns - self.start_ns) / NANOSECONDS, 3),
            "state": state.status, "models": state.settings.model_names,
            "has_chat": state.tokenizer.chat_template is not None, "troubles": snapshot.troubles,
            "running": sum(g.num_running + g.num_moving for g in snapshot.groups),
            "waiting": snapshot.num_waiting, "connected": state.admission.num_active,
            "batch": [sum(o.offline_running for o in offline), sum(o.offline_waiting for o in offline)
                      + snapshot.num_unplaced_offline],
            "ttft": [percentile(firsts, 50), percentile(firsts, 99), len(firsts)],
            "slo": list(snapshot.slo), "tokens_per_s": self._rate(now_ns),
            "totals": {name: snapshot.counters[name] for name in _TOTALS if name in snapshot.counters},
            "instances": instances(snapshot), "groups": groups(snapshot),
            "at_work": [said._asdict() for said in at_work(snapshot, self._reasons)],
        }  # fmt: skip

    def _rate(self, now_ns: int) -> float | None:
        """Tokens of answers a second since the snapshot before; None after a pause."""
        num, before = self._state.all_metrics().num_generation_tokens, self._tokens
        self._tokens = (now_ns, num)
        if before is None or not 0 < now_ns - before[0] < RATE_NS:
            return None
        return round((num - before[1]) * NANOSECONDS / (now_ns - before[0]), 1)

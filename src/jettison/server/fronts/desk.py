"""The controller's side of front ends, beside their streams: places of keys, books of the console, recordings,
responses that are kept, and the sum of all that was observed.

Each is the one that the controller's own routes use, so a limit or a list does not care where a request came in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import msgspec

from jettison.errors import JettisonError, OverCapacityError, RequestError
from jettison.live.engine.api import EngineState
from jettison.live.frontend import wire as w
from jettison.live.frontend.hub import Front, FrontId, Hub, StreamEngine
from jettison.server.console.journal import Row
from jettison.server.doors.response_store import StoredResponse
from jettison.server.errors import ApiError
from jettison.server.fronts import topics as t
from jettison.server.limits import Arrival
from jettison.server.metrics import Observed, ServerMetrics
from jettison.server.state import ServerState
from jettison.types import RequestId

logger = logging.getLogger(__name__)

GATHER_S = 1.0
"""Most time that a scrape waits for counts; those of a front end that is late are a second old."""

T = TypeVar("T")


class _Place(NamedTuple):
    """One request's."""

    arrival: Arrival
    leaving: ExitStack


class FarGeneration:
    """A request under way in a front end, as the console and the controller's end see it (``Generation``)."""

    def __init__(self, hub: Hub, engine: StreamEngine, front: FrontId, began: t.Began) -> None:
        self._hub = hub
        self._engine = engine
        self._front = front
        self._began = began

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self._began.rows[0].tenant

    @property
    def is_offline(self) -> bool:
        """Whether it is served as an offline request."""
        return self._began.rows[0].is_offline

    @property
    def arrival_ns(self) -> int:
        """When it came."""
        return self._began.rows[0].arrival_ns

    @property
    def has_begun(self) -> bool:
        """Whether its first choice has a token; one that is over has."""
        stream = self._hub.stream(self._began.request_id)
        return stream is None or stream.has_begun

    def is_named(self, name: str) -> bool:
        """See ``Generation``."""
        rows = self._began.rows
        return name in rows[0].names or any(name == row.request_id for row in rows)

    def rows(self, first: int, most: int) -> list[Row]:
        """See ``Generation``."""
        return [self._now(row) for row in self._began.rows[first : first + most]]

    def cut_off(self) -> list[Row]:
        """Choices that end if its front end does: the others, it has counted."""
        return [self._now(row) for row in self._began.rows if self._hub.stream(row.request_id) is not None]

    def _now(self, row: Row) -> Row:
        stream = self._hub.stream(row.request_id)
        if stream is None:
            return row
        told = self._engine.timings(row.request_id)
        return replace(
            row, first_ns=stream.first_ns, num_output=stream.num_output, num_cached=stream.num_cached,
            scheduled_ns=None if told is None else told.first_scheduled_ns,
            num_preemptions=0 if told is None else told.num_preemptions, is_timed=told is not None)

    def abort(self, error: ApiError) -> None:
        """Stop now; its front end tells its client of the server's end, as ``error`` does."""
        self._hub.say(self._front, w.Abort(self._began.request_id))


class FrontDesk:
    """Implements ``live.frontend.hub.Desk`` and ``state.Fronts`` over the controller's state."""

    def __init__(
        self, state: ServerState, engine: StreamEngine, on_lost: Callable[[Front, str], None],
        on_serves: Callable[[FrontId], None] = lambda front: None,
    ) -> None:
        """``on_serves`` is called when one takes connections."""
        self._state = state
        self._on_serves = on_serves
        self._engine = engine
        self._places: dict[tuple[FrontId, int], _Place] = {}
        self._under_way: dict[tuple[FrontId, RequestId], FarGeneration] = {}
        self._counts: dict[FrontId, Observed] = {}
        self._serving: set[FrontId] = set()
        """Those that take connections."""
        self._ended = ServerMetrics(engine, state.settings.model_name)
        """Counts of front ends that have ended: a total does not fall."""
        self.hub = Hub(engine, self, on_lost)
        self.num_wanted = 0
        """Front ends that there should be."""
        state.fronts = self

    # --- Fronts

    def tell(self) -> None:
        """See ``Fronts``."""
        self.hub.tell_all()

    async def gather(self) -> None:
        """See ``Fronts``."""
        await self.hub.ask_counts(GATHER_S)

    def observed(self) -> Iterable[Observed]:
        """See ``Fronts``."""
        return (self._ended.observed(), *self._counts.values())

    def health(self) -> Mapping[str, Any]:
        """See ``Fronts``."""
        return {"front_ends": {"alive": len(self._serving), "total": self.num_wanted}}

    def troubles(self) -> Sequence[str]:
        """See ``Fronts``."""
        total = self.num_wanted
        missing = total - len(self._serving)
        return [f"{missing} of {total} front ends take no connections: a process starts"] if missing else []

    # --- Desk

    def state(self) -> EngineState:
        """See ``Desk``."""
        return self._state.status

    def key_digests(self) -> tuple[bytes, ...]:
        """See ``Desk``."""
        return self._state.keys.digests

    def arrive(self, front: FrontId, number: int, tenant: str) -> w.Answer:
        """See ``Desk``."""
        leaving = ExitStack()
        try:
            self._state.check_ready()
            arrival = leaving.enter_context(self._state.admission.arrival(tenant))
        except JettisonError as error:
            return w.Answer(number, w.refusal_of(error))
        self._places[front, number] = _Place(arrival, leaving)
        arrival.look()
        try:
            arrival.check_queue(is_offline=False)
        except OverCapacityError as error:
            return w.Answer(number, w.refusal_of(error), is_full=True, body=_packed(arrival.num_beside))
        return w.Answer(number, body=_packed(arrival.num_beside))

    def came(self, front: FrontId, number: int) -> None:
        """See ``Desk``."""
        if (place := self._places.get((front, number))) is not None:
            place.arrival.come()

    def claim(self, front: FrontId, number: int, num_choices: int, param: str) -> None:
        """See ``Desk``."""
        place = self._places.get((front, number))
        if place is None:
            raise JettisonError("a request that is not here claims places")
        try:
            place.arrival.claim(num_choices, param)
        except ApiError as error:
            raise RequestError(error.message, error.param, error.code) from None

    def landed(self, front: FrontId, number: int, *, is_accepted: bool) -> None:
        """See ``Desk``."""
        if (place := self._places.get((front, number))) is not None:
            if is_accepted:
                place.arrival.accepted()
            else:
                place.arrival.submitted()

    def leave(self, front: FrontId, number: int) -> None:
        """See ``Desk``."""
        if (place := self._places.pop((front, number), None)) is not None:
            place.leaving.close()

    def back(self, front: FrontId, number: int, tenant: str, num_choices: int) -> None:
        """See ``Desk``."""
        leaving = ExitStack()
        arrival = leaving.enter_context(self._state.admission.returned(tenant, num_choices))
        self._places[front, number] = _Place(arrival, leaving)

    def note(self, front: FrontId, topic: str, body: bytes) -> None:
        """See ``Desk``."""
        try:
            self._note(front, topic, body)
        except msgspec.MsgspecError as error:
            logger.error("front end %d: a note on %s cannot be read: %s", front, topic, error)

    def _note(self, front: FrontId, topic: str, body: bytes) -> None:
        state = self._state
        match topic:
            case t.COUNTS:
                self._counts[front] = _read(body, Observed)
            case t.BEGAN:
                began = _read(body, t.Began)
                self._over(front, began.request_id)  # told again, where it began before this controller was ready
                generation = FarGeneration(self.hub, self._engine, front, began)
                self._under_way[front, began.request_id] = generation
                state.far_generations.add(generation)
            case t.GONE:
                self._over(front, _read(body, str))
            case t.ENDED if state.journal is not None:
                state.journal.add(_read(body, list[Row]))
            case t.FIRST if state.journal is not None:
                state.journal.note_first(*_read(body, tuple[int, float]))
            case t.RECORD if state.settings.record_request is not None:
                state.settings.record_request(*_read(body, t.Recorded))
            case t.KEEP:
                kept = _read(body, t.Kept)
                state.responses.put(
                    kept.tenant, kept.response_id, StoredResponse(kept.document, kept.items, kept.output))

    def ask(self, front: FrontId, topic: str, body: bytes) -> bytes | None:
        """See ``Desk``."""
        if topic != t.RESPONSE:
            raise JettisonError(f"nothing is known of {topic}")
        tenant, response_id = _read(body, tuple[str, str])
        stored = self._state.own_responses.get(tenant, response_id)
        return None if stored is None else _packed(stored)

    def serves(self, front: FrontId) -> None:
        """See ``Desk``."""
        self._serving.add(front)
        self._on_serves(front)

    def gone(self, front: FrontId) -> None:
        """See ``Desk``."""
        self._serving.discard(front)
        for key in [key for key in self._places if key[0] == front]:
            self.leave(*key)
        for owner, request_id in [key for key in self._under_way if key[0] == front]:
            for row in self._under_way[owner, request_id].cut_off():
                self._ended.count_finished("abort", row.num_prompt, row.num_output, None)
            self._over(owner, request_id)
        if (counts := self._counts.pop(front, None)) is not None:
            self._ended.add(counts)

    def _over(self, front: FrontId, request_id: RequestId) -> None:
        if (generation := self._under_way.pop((front, request_id), None)) is not None:
            self._state.far_generations.discard(generation)


def _packed(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def _read(body: bytes, kind: type[T]) -> T:
    return msgspec.msgpack.decode(body, type=kind)

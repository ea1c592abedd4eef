"""A front end's own application: the paths that make or count tokens, over a ``RemoteEngine``. All other requests go to
the controller as they came, so every path works through every front end."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jettison.errors import JettisonError, OverCapacityError
from jettison.live.frontend import wire as w
from jettison.live.frontend.remote_engine import RemoteEngine
from jettison.policy.refusal import why_never_in_share
from jettison.server.chat import ChatEndpoint
from jettison.server.completions import CompletionEndpoint
from jettison.server.console.journal import Journal, Row, Rows
from jettison.server.doors.messages import MessagesEndpoint
from jettison.server.doors.response_store import StoredResponse
from jettison.server.doors.responses import ResponsesEndpoint
from jettison.server.errors import bad_request, handle_error
from jettison.server.fronts import topics as t
from jettison.server.fronts.forward import Forward
from jettison.server.gate import Gate
from jettison.server.generation import Generation
from jettison.server.info_routes import InfoRoutes
from jettison.server.limits import Admission, Arrival
from jettison.server.paths import plain_path
from jettison.server.sampling import seed_source
from jettison.server.settings import ServerSettings
from jettison.server.state import ServerState, shutting_down
from jettison.server.tokenizer import Tokenizer
from jettison.types import RequestId

OWN_PATHS = frozenset({
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/tokenize", "/detokenize",
})  # fmt: skip
"""Paths whose POST is answered here."""

MOST_WAITING = 1000
"""Requests that wait here for the next controller to let them in. Those whose clients have left count, too: no
connection bounds their number."""


class FarArrival(Arrival):
    """A request whose place is in the controller. What its body may take is bounded here."""

    def __init__(self, admission: FarAdmission, settings: ServerSettings, tenant: str) -> None:
        super().__init__(admission, settings, tenant)
        self._engine = admission.engine
        self._most = settings.max_active_reqs_per_key
        self._limit = None  # of the share in this process
        self._number: int | None = None
        self._num_beside = 0

    @property
    def num_beside(self) -> int:
        """Other generating requests in the server, those of all front ends."""
        return self._num_beside

    async def let_in(self) -> None:
        """See ``Arrival``."""

        def arrive(number: int) -> w.Arrive:
            self._number = number
            return w.Arrive(number, self._tenant)

        answer = await self._engine.asked(arrive)
        if answer.body is not None:
            self._num_beside = msgspec.msgpack.decode(answer.body, type=int)
        if answer.refusal is None:
            return
        error = w.error_of(answer.refusal)
        if not answer.is_full or not isinstance(error, OverCapacityError):
            raise error
        self._why_full = error

    def come(self) -> None:
        """See ``Arrival``. The controller counts; its word on the queue is that of ``let_in``, and the engine's."""
        if self._number is not None:
            self._engine.say(w.Came(self._number))

    async def claimed(self, num_choices: int, param: str) -> None:
        """See ``Arrival``. The place of one choice is there since ``let_in``."""
        if (why_never := why_never_in_share(num_choices, self._most)) is not None:
            raise bad_request(why_never, param)
        number = self._number
        if num_choices == 1 or number is None:
            return
        answer = await self._engine.asked(lambda ask: w.Claim(ask, number, num_choices, param))
        if answer.refusal is not None:
            raise w.error_of(answer.refusal)

    def accepted(self) -> None:
        """See ``Arrival``."""
        if self._number is not None:
            self._engine.say(w.Landed(self._number, True))
        super().accepted()

    def give_back(self) -> None:
        """See ``Arrival``."""
        if self._number is not None:
            self._engine.say(w.Leave(self._number))
            self._number = None
        super().give_back()


class FarAdmission(Admission):
    """Bounds of bodies and of tokenizer requests here; those of keys and of the queue are the controller's."""

    def __init__(self, engine: RemoteEngine, settings: ServerSettings) -> None:
        super().__init__(engine, settings)
        self.engine = engine

    def arrival_of(self, tenant: str) -> Arrival:
        """See ``Admission``."""
        return FarArrival(self, self._settings, tenant)


class FarJournal(Journal):
    """The console's list, which the controller keeps."""

    def __init__(self, engine: RemoteEngine) -> None:
        super().__init__()
        self._engine = engine

    def note_first(self, at_ns: int, ttft_s: float) -> None:
        """See ``Journal``."""
        self._engine.note(t.FIRST, (at_ns, ttft_s))

    def add(self, rows: Rows) -> None:
        """See ``Journal``."""
        self._engine.note(t.ENDED, [as_text(row) for row in rows])


def as_text(row: Row) -> Row:
    """The row with ids that are text: a client's may have halves of characters in it."""
    try:
        "".join(row.names).encode()
    except UnicodeEncodeError:
        return replace(row, names=tuple(name.encode("utf-8", "replace").decode() for name in row.names))
    return row


class UnderWay(set[Generation]):
    """Generations of this front end, of which the controller is told."""

    def __init__(self, engine: RemoteEngine) -> None:
        super().__init__()
        self._engine = engine
        self._by_id: dict[RequestId, Generation] = {}

    def add(self, generation: Generation) -> None:
        """See ``ServerState.generations``."""
        super().add(generation)
        request_id = generation.jobs[0].request.request_id
        self._by_id[request_id] = generation
        self._tell(request_id, generation)

    def _tell(self, request_id: RequestId, generation: Generation) -> None:
        rows = [as_text(row) for row in generation.rows(0, len(generation.jobs))]
        self._engine.note(t.BEGAN, t.Began(request_id, rows))

    def tell_again(self) -> None:
        """To a later controller."""
        for request_id, generation in self._by_id.items():
            self._tell(request_id, generation)

    def discard(self, generation: object) -> None:
        """See ``ServerState.generations``."""
        super().discard(generation)
        assert isinstance(generation, Generation)
        request_id = generation.jobs[0].request.request_id
        self._by_id.pop(request_id, None)
        self._engine.note(t.GONE, request_id)

    def abort(self, request_id: RequestId) -> None:
        """End one, as the server ends."""
        if (generation := self._by_id.get(request_id)) is not None:
            generation.abort(shutting_down())


class FarResponses:
    """Responses, which the controller keeps (``ResponseKeeper``)."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine

    def put(self, tenant: str, response_id: str, response: StoredResponse) -> None:
        """See ``ResponseKeeper``. Leaves at once, before its client can ask for it elsewhere."""
        kept = t.Kept(tenant, response_id, response.document, response.items, response.output)
        self._engine.note(t.KEEP, kept)
        self._engine.channel.flush()  # nothing where there is no controller

    async def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        """See ``ResponseKeeper``."""
        try:
            response_id.encode()
        except UnicodeEncodeError:
            return None
        return await self._engine.ask(t.RESPONSE, (tenant, response_id), StoredResponse)

    def delete(self, tenant: str, response_id: str) -> bool:
        """See ``ResponseKeeper``. Raises JettisonError: its path is answered by the controller."""
        raise JettisonError("a front end deletes no responses")


class FrontState(ServerState):
    """The state behind a front end's endpoints."""

    def __init__(self, engine: RemoteEngine, tokenizer: Tokenizer, settings: ServerSettings, series: str) -> None:
        """``series`` sets the seeds drawn here apart from those of other front ends, and of this one's other lives."""
        super().__init__(engine, tokenizer, settings)
        self._remote = engine
        self.admission = FarAdmission(engine, settings)
        if self.journal is not None:
            self.journal = FarJournal(engine)
        self.under_way = UnderWay(engine)
        self.generations = self.under_way
        self.responses = FarResponses(engine)
        self.draw_seed = seed_source(settings.default_seed, series)
        engine.on_abort = self.under_way.abort
        engine.on_tell = partial(self._tell, engine)
        engine.on_back = self.under_way.tell_again
        engine.on_status = self._on_status
        self._told_before = self.metrics.observed()
        """The counts of the controllers before this one."""

    def check_ready(self) -> None:
        """See ``ServerState``. A request that comes between two controllers waits until the next one lets it in; its
        body is not read before. None waits where this process is told to end."""
        waits = self._remote.awaits_next and self._remote.num_asked < MOST_WAITING and self.status == "loading"
        if not waits:
            super().check_ready()

    def begin_counts_again(self) -> None:
        """A controller has ended. Its own counts, and those of front ends that ended under it, are gone: a sum in which
        only these went on would be a little smaller than before, and Prometheus would count it all once more."""
        self._told_before = self.metrics.observed()

    def _tell(self, engine: RemoteEngine) -> None:
        engine.note(t.COUNTS, self.metrics.observed().since(self._told_before))

    def _on_status(self, status: w.Status) -> None:
        self.keys.replace_digests(status.key_digests)


class FrontApp:
    """The ASGI application of a front end."""

    def __init__(self, state: FrontState, own: Starlette, forward: Forward) -> None:
        self.state = own.state
        self._server_state = state
        self._root_path = state.settings.root_path
        self._own = own
        self._forward = forward

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, here or there."""
        if scope["type"] != "http":
            return
        is_own = scope["method"] == "POST" and plain_path(scope["path"], self._root_path) in OWN_PATHS
        if is_own:
            await self._own(scope, receive, send)
            return
        with self._server_state.transfer():
            await self._forward(scope, receive, send)


def create_front(state: FrontState, forward: Forward) -> FrontApp:
    """The application over a state."""
    info = InfoRoutes(state)
    routes = [
        Route("/v1/chat/completions", ChatEndpoint(state), methods=["POST"]),
        Route("/v1/completions", CompletionEndpoint(state), methods=["POST"]),
        *ResponsesEndpoint(state).routes(),
        *MessagesEndpoint(state).routes(),
        Route("/tokenize", info.tokenize, methods=["POST"]),
        Route("/detokenize", info.detokenize, methods=["POST"]),
    ]
    own = Starlette(
        routes=routes, middleware=[*state.settings.cors.middleware(), Middleware(Gate, state=state)],
        exception_handlers={HTTPException: handle_error})
    own.router.redirect_slashes = False
    own.state.jettison = state
    return FrontApp(state, own, forward)

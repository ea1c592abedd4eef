"""The state that the endpoints of an application share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from jettison.errors import NotReadyError
from jettison.live.engine.api import EngineClient, EngineState
from jettison.policy.refusal import retry_after_ms, why_not_offline
from jettison.server.answer_form import AnswerForms
from jettison.server.auth import KeyRing
from jettison.server.compiling import GrammarCompiler
from jettison.server.console.journal import Journal, Row
from jettison.server.doors.response_store import ResponseKeeper, ResponseStore
from jettison.server.errors import NOT_READY_RETRY_MS, ApiError, bad_request, retry_headers
from jettison.server.fields import FieldWarnings
from jettison.server.generation import Generation
from jettison.server.limits import Admission
from jettison.server.metrics import Observed, ServerMetrics
from jettison.server.sampling import seed_source
from jettison.server.settings import ServerSettings
from jettison.server.sse import StreamKeeper
from jettison.server.tokenizer import Tokenizer

_DRAIN_POLL_S = 0.02

MOST_UNREAD_VALUES = 1 << 18
"""Most tokens and log-probabilities of one request that wait for a client to read, some 100 bytes each: with 20
log-probabilities more than 12,000 tokens. A client that reads a little at a time keeps its connection, so nothing else
bounds them."""

_NOT_READY = {
    "loading": "The server is loading its model; retry later.",
    "draining": "The server is shutting down; retry elsewhere or later.",
    "failed": "The server's engine has failed.",
}


class FarGeneration(Protocol):
    """What is known here of a request under way in a front end: as much as the console shows of a ``Generation``."""

    @property
    def tenant(self) -> str: ...

    @property
    def is_offline(self) -> bool: ...

    @property
    def arrival_ns(self) -> int: ...

    @property
    def has_begun(self) -> bool: ...

    def is_named(self, name: str) -> bool: ...

    def rows(self, first: int, most: int) -> list[Row]: ...

    def abort(self, error: ApiError) -> None: ...


class Fronts(Protocol):
    """Front ends in processes of their own, as the controller's routes see them."""

    def tell(self) -> None:
        """Tell them the engine's state, where it has changed."""
        ...

    async def gather(self) -> None:
        """Have them tell what they have observed until now."""
        ...

    def observed(self) -> Iterable[Observed]:
        """What they, and those that have ended, have observed."""
        ...

    def health(self) -> Mapping[str, Any]:
        """For ``/health``: how many there are."""
        ...

    def troubles(self) -> Sequence[str]:
        """For ``/health``: a line for what is missing."""
        ...


class ServerState:
    """Engine, tokenizer, limits, metrics and lifecycle of the server. Cheap to make; owns no resource."""

    def __init__(self, engine: EngineClient, tokenizer: Tokenizer, settings: ServerSettings) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.settings = settings
        self.metrics = ServerMetrics(engine, settings.model_name, settings.card_uses)
        self.admission = Admission(engine, settings)
        self.keeper = StreamKeeper(settings)
        self.keys = KeyRing(settings.api_keys, may_change=settings.keys_may_change)
        self.admin_keys = KeyRing(settings.admin_keys)
        self.warnings = FieldWarnings()
        self.forms = AnswerForms(tokenizer.chat)
        self.draw_seed = seed_source(settings.default_seed)
        self.grammars = GrammarCompiler(tokenizer.special_tokens)
        has_readers = settings.console.is_on or settings.trace_request is not None
        self.journal = Journal(settings.trace_request) if has_readers else None
        """Requests that ended, for the console and for traces."""
        self.generations: set[Generation] = set()
        self.far_generations: set[FarGeneration] = set()
        """Those under way in front ends."""
        self.lines: set[Generation] = set()
        """Lines of batches under way, for the console: their service ends them itself."""
        self.own_responses = ResponseStore()
        self.responses: ResponseKeeper = self.own_responses
        """Where endpoints keep responses."""
        self.fronts: Fronts | None = None
        """Front ends in processes of their own, where this is their controller."""
        self._num_transfers = 0
        self._is_draining = False

    @property
    def status(self) -> EngineState:
        """The engine's state, or draining from the first signal on."""
        state = self.engine.state
        return "draining" if self._is_draining and state != "failed" else state

    def all_metrics(self) -> ServerMetrics:
        """Those of front ends included, as far as they have told them."""
        return self.metrics if self.fronts is None else self.metrics.summed(self.fronts.observed())

    def check_ready(self) -> None:
        """Raises NotReadyError."""
        if (status := self.status) != "ready":
            raise NotReadyError(_NOT_READY[status], self.retry_after_ms())

    def retry_after_ms(self) -> int:
        """Delay until a retry of a request that came before the server was ready; as short as possible once the server
        is over."""
        left_s = self.engine.ready_in_s() if self.status == "loading" else None
        return NOT_READY_RETRY_MS if left_s is None else retry_after_ms(left_s)

    def check_model(self, model: str | None) -> str:
        """The model's name for the answer: the first, whichever was asked for, as in vLLM; an empty name asks for none.
        Raises ApiError 404 for a model that is not served."""
        if model and model not in self.settings.model_names:
            served = ", ".join(map(repr, self.settings.model_names))
            # Clients test for "does not exist", the words of OpenAI's and vLLM's APIs, and for the code.
            message = f"The model `{model[:200]}` does not exist here: this server serves {served}."
            raise ApiError(404, message, param="model", code="model_not_found")
        return self.settings.model_name

    def check_offline(self, param: str | None = None) -> None:
        """Raises ApiError 400 where offline requests are not served; ``param``: the field that asks for one."""
        why_not = why_not_offline(self.settings.serves_offline)
        if why_not is not None:
            raise bad_request(why_not, param, "offline_disabled")

    def begin_drain(self) -> None:
        """New requests get 503 from now on; running ones go on. Idempotent."""
        self._is_draining = True

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """Count a request that may take long without generating: the server's end waits for it, too."""
        self._num_transfers += 1
        try:
            yield
        finally:
            self._num_transfers -= 1

    @property
    def num_running(self) -> int:
        """Requests that the server's end waits for."""
        return self.admission.num_active + self._num_transfers

    async def drained(self) -> None:
        """Returns when no generating request is left, and no transfer."""
        while self.num_running:
            await asyncio.sleep(_DRAIN_POLL_S)

    def end_unread(self) -> None:
        """End requests of which too much waits for their clients. Called about every second."""
        for generation in tuple(self.generations):
            if generation.num_unread_values > MOST_UNREAD_VALUES:
                message = "The answer is read more slowly than it is made."
                generation.abort(ApiError(503, message, code="reads_too_slowly"))
                if generation.cut_off is not None:  # else all that waits would be kept for as long as the client likes
                    generation.cut_off()

    def abort_all(self) -> None:
        """End all running requests; their clients get an error."""
        error = shutting_down()
        for generation in (*self.generations, *self.far_generations):
            generation.abort(error)


def shutting_down() -> ApiError:
    """For a request that the end of the server cuts off."""
    headers = retry_headers(NOT_READY_RETRY_MS)
    return ApiError(503, "The server is shutting down.", code="shutting_down", headers=headers)


def require(value: object, name: str) -> None:
    """Raises ApiError 400 when a field is missing."""
    if value is None:
        raise bad_request(f"{name} is missing.", name, "missing_required_parameter")

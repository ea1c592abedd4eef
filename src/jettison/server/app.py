"""The application: routes, the gate in front of them, and one state behind them.

Plain Starlette. Request bodies are decoded by msgspec and chunks are joined from bytes, because every token of every
stream pays the cost of a token here.
"""

from __future__ import annotations

from typing import Protocol

from starlette.applications import Starlette
from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jettison.live.engine.api import EngineClient
from jettison.server.batches.api import BatchRoutes
from jettison.server.batches.service import BatchService
from jettison.server.batches.settings import BatchSettings
from jettison.server.chat import ChatEndpoint
from jettison.server.completions import CompletionEndpoint
from jettison.server.console.routes import ConsoleRoutes
from jettison.server.doors.messages import MessagesEndpoint
from jettison.server.doors.responses import ResponsesEndpoint
from jettison.server.errors import handle_error
from jettison.server.gate import Gate
from jettison.server.info_routes import InfoRoutes
from jettison.server.settings import ServerSettings
from jettison.server.sleep_routes import SleepRoutes
from jettison.server.state import ServerState
from jettison.server.tokenizer import Tokenizer

__all__ = ["BatchSettings", "ServerSettings", "Tokenizer", "batch_service", "create_app", "server_state"]


def create_app(
    engine: EngineClient, tokenizer: Tokenizer, settings: ServerSettings, batches: BatchSettings | None = None
) -> Starlette:
    """The HTTP application over a running engine. Starts nothing; ``serving.run_server`` runs it.

    With ``batches`` it keeps files and batches: the caller has to start and close ``batch_service``.
    """
    state = ServerState(engine, tokenizer, settings)
    service = None if batches is None else BatchService(state, batches)
    routes = [
        Route("/v1/chat/completions", ChatEndpoint(state), methods=["POST"]),
        Route("/v1/completions", CompletionEndpoint(state), methods=["POST"]),
        *ResponsesEndpoint(state).routes(),
        *MessagesEndpoint(state).routes(),
        *InfoRoutes(state).routes(),
        *([] if settings.sleep_control is None else SleepRoutes(settings.sleep_control).routes()),
        *([] if state.journal is None or not settings.console.is_on else ConsoleRoutes(state, state.journal).routes()),
        *([] if service is None else BatchRoutes(state, service).routes()),
    ]
    app = Starlette(
        routes=routes,
        middleware=[*settings.cors.middleware(), Middleware(Gate, state=state)],
        exception_handlers={HTTPException: handle_error},
    )
    app.router.redirect_slashes = False
    app.state.jettison = state
    app.state.batches = service
    return app


class Application(Protocol):
    """What ``serving.run_server`` runs."""

    @property
    def state(self) -> State: ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


def server_state(app: Application) -> ServerState:
    """The state of an application that ``create_app`` made."""
    state = app.state.jettison
    assert isinstance(state, ServerState)
    return state


def batch_service(app: Starlette) -> BatchService:
    """The files and batches of an application made with ``batches``."""
    service = app.state.batches
    assert isinstance(service, BatchService)
    return service

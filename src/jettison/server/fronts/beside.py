"""Front ends beside the controller of a server: what each is told, and the socket over which they forward."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import NamedTuple, cast

from jettison.config import EngineConfig
from jettison.live.frontend.hub import FrontId, StreamEngine
from jettison.live.machine.run_folder import RunFolder
from jettison.server.fronts.desk import FrontDesk
from jettison.server.fronts.start import FrontStart, carried, divided
from jettison.server.fronts.supervisor import FrontEnds
from jettison.server.serving import BACKLOG, tell_address
from jettison.server.state import ServerState
from jettison.server.tls import TlsSettings


def forward_socket(path: str) -> socket.socket:
    """Listen for what front ends forward. The folder is its user's alone."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


class Beside(NamedTuple):
    """The controller's side of its front ends."""

    listener: socket.socket
    """Where its own application is to be served."""
    fronts: FrontEnds


async def _watch(fronts: FrontEnds, on_served: Callable[[], None], on_failed: Callable[[], None]) -> None:
    """Tell once which of both it is."""
    served, failed = (asyncio.create_task(event.wait()) for event in (fronts.served, fronts.failed))
    try:
        await asyncio.wait({served, failed}, return_when=asyncio.FIRST_COMPLETED)
        (on_served if fronts.served.is_set() else on_failed)()
    finally:
        served.cancel()
        failed.cancel()


@asynccontextmanager
async def front_ends(
    state: ServerState, config: EngineConfig, byte_tokens: int | None, *, on_served: Callable[[], None],
    on_failed: Callable[[], None],
) -> AsyncIterator[Beside]:
    """Front ends that serve while this is open. ``on_served`` is called when the first one takes connections,
    ``on_failed`` where none ever does. Raises ConfigError where the address cannot be bound."""
    server, settings = config.server, state.settings
    engine = cast(StreamEngine, state.engine)
    fronts = FrontEnds(config.api_servers, partial(FrontDesk, state, engine))
    port = fronts.listen(server.host, server.port)
    with RunFolder() as folder:
        path = f"{folder.path}/http"

        def start_of(front: FrontId, life: int) -> FrontStart:
            return FrontStart(
                settings=carried(divided(settings, config.api_servers)), tls=TlsSettings(**asdict(config.tls)),
                tokenizer_dir=str(config.model.tokenizer_dir), byte_tokens=byte_tokens, forward_path=path,
                series=f"{front}.{life}", has_journal=state.journal is not None,
                reads_traces=settings.trace_request is not None, records=settings.record_request is not None,
                log_level=str(config.log_level))

        def served() -> None:
            tell_address(state, server.host, port)
            on_served()

        listener = forward_socket(path)
        watching: asyncio.Task[None] | None = None
        try:
            fronts.start(start_of)
            watching = asyncio.create_task(_watch(fronts, served, on_failed))
            yield Beside(listener, fronts)
        finally:
            if watching is not None:
                watching.cancel()
            listener.close()
            await fronts.close()

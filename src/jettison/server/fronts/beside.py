"""Front ends beside the controller of a server: what each is told, and the socket over which they forward."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import cast

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


@asynccontextmanager
async def front_ends(state: ServerState, config: EngineConfig, byte_tokens: int | None) -> AsyncIterator[socket.socket]:
    """Front ends that serve while this is open; gives the socket on which the controller's own application is to be
    served. Raises ConfigError where the address cannot be bound."""
    server, settings = config.server, state.settings
    engine = cast(StreamEngine, state.engine)
    fronts = FrontEnds(config.api_servers, lambda on_lost: FrontDesk(state, engine, on_lost))
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

        listener = forward_socket(path)
        try:
            fronts.start(start_of)
            tell_address(state, server.host, port)
            yield listener
        finally:
            listener.close()
            await fronts.close()

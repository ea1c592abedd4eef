"""Front ends beside the controller of a server: what they are told, and the sockets at which they come."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

import msgspec

from jettison.config import EngineConfig
from jettison.live.frontend.hub import Front, FrontId, StreamEngine
from jettison.server.fronts.desk import FrontDesk
from jettison.server.fronts.start import FrontStart, carried, divided
from jettison.server.parent.line import ParentLine
from jettison.server.serving import tell_address
from jettison.server.state import ServerState
from jettison.server.tls import TlsSettings

logger = logging.getLogger(__name__)


@asynccontextmanager
async def front_ends(
    state: ServerState, config: EngineConfig, byte_tokens: int | None, line: ParentLine, tls: TlsSettings, *,
    on_served: Callable[[], None],
) -> AsyncIterator[socket.socket]:
    """Front ends that serve while this is open; yields the socket at which the controller's own application is to be
    served. ``tls``: with what its files held. ``on_served`` is called when the first one takes connections. In the end
    they are told to end where the server does; else they wait for the next controller."""
    served = asyncio.Event()

    def on_serves(front: FrontId) -> None:
        if not served.is_set():
            served.set()
            tell_address(state, config.server.host, line.port)
            on_served()

    def on_lost(front: Front, why: str) -> None:
        """Its channel is closed: a process that has not ended is of no use."""
        logger.debug("front end %d is lost: %s", front.id, why)
        if not line.is_told_to_stop:
            line.end_front(front.id, front.life)

    desk = FrontDesk(state, cast(StreamEngine, state.engine), on_lost, on_serves)
    desk.num_wanted = config.api_servers
    settings = state.settings
    server = await desk.hub.listen(line.fronts)
    try:
        line.start_fronts(msgspec.json.encode(FrontStart(
            settings=carried(divided(settings, config.api_servers)), tls=tls,
            tokenizer_dir=str(config.model.tokenizer_dir), byte_tokens=byte_tokens, folder=line.folder,
            orphan_timeout_s=config.faults.orphan_timeout_s, has_journal=state.journal is not None,
            reads_traces=settings.trace_request is not None, records=settings.record_request is not None,
            log_level=str(config.log_level))))
        yield line.forward
    finally:
        if line.is_told_to_stop:
            line.fronts_end()
            await desk.hub.close()
        server.close()

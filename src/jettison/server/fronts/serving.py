"""A front end from its first word with the controller to its end, in a process of its own or (in tests) in another."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import replace

from jettison.live.frontend import wire as w
from jettison.live.frontend.remote_engine import RemoteEngine
from jettison.server.fronts import topics as t
from jettison.server.fronts.forward import Forward
from jettison.server.fronts.front import FrontState, create_front
from jettison.server.serving import ABORT_GRACE_S, run_on
from jettison.server.settings import ServerSettings
from jettison.server.tokenizer import Tokenizer


def front_settings(engine: RemoteEngine, settings: ServerSettings, *, records: bool, traces: bool) -> ServerSettings:
    """With what the controller's books want to know of each request."""

    def record(
        arrival_ns: int, num_prompt: int, num_output: int, num_cached: int, is_offline: bool, tenant: str
    ) -> None:
        engine.note(t.RECORD, t.Recorded(arrival_ns, num_prompt, num_output, num_cached, is_offline, tenant))

    return replace(
        settings, record_request=record if records else None,
        trace_request=(lambda rows: None) if traces else None,  # the rows go to the controller's journal, which traces
    )


async def serve_front(
    make_state: Callable[[RemoteEngine], FrontState], forward_path: str, channel: socket.socket,
    listener: socket.socket, on_started: Callable[[], None] | None = None,
) -> None:
    """Serve until the controller tells to end, or is gone. Nothing is served before it has told its keys."""
    engine, stop, told = RemoteEngine(), asyncio.Event(), asyncio.Event()
    state = make_state(engine)
    before, engine.on_stop = engine.on_status, stop.set

    def on_status(status: w.Status) -> None:
        if before is not None:
            before(status)
        told.set()

    engine.on_status = on_status

    def started() -> None:
        engine.say(w.Serves())
        if on_started is not None:
            on_started()

    await asyncio.get_running_loop().create_connection(lambda: engine.channel, sock=channel)
    waits = [asyncio.ensure_future(event.wait()) for event in (told, stop)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    try:
        if told.is_set():
            # ``open_socket`` has taken it away; without it connections of this server that are closed, which the
            # kernel still keeps, would bar the address to the next one.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            await run_on(
                create_front(state, Forward(forward_path, state.settings)), listener, shutdown_timeout_s=ABORT_GRACE_S,
                on_started=started, stop=stop, takes_signals=False)
    finally:
        listener.close()
        engine.channel.close()
        await asyncio.to_thread(state.grammars.close)


def state_of(
    engine: RemoteEngine, tokenizer: Tokenizer, settings: ServerSettings, series: str, *, records: bool, traces: bool
) -> FrontState:
    """The state of a front end."""
    return FrontState(engine, tokenizer, front_settings(engine, settings, records=records, traces=traces), series)



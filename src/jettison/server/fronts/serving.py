"""A front end from its first word with a controller to its end, in a process of its own or (in tests) in another."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace

from jettison.live.frontend import wire as w
from jettison.live.frontend.channel import TurnChannel
from jettison.live.frontend.remote_engine import RemoteEngine
from jettison.server.fronts import topics as t
from jettison.server.fronts.forward import Forward
from jettison.server.fronts.front import FrontState, create_front
from jettison.server.serving import ABORT_GRACE_S, run_on
from jettison.server.settings import ServerSettings
from jettison.server.tokenizer import Tokenizer

Connect = Callable[[TurnChannel], Awaitable[None]]
"""Has a channel connected to the controller, however long that takes."""


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
    engine: RemoteEngine, make_state: Callable[[RemoteEngine], FrontState], forward_path: str, connect: Connect,
    listener: socket.socket, hello: w.Hello, on_started: Callable[[], None] | None = None,
) -> None:
    """Serve until a controller tells to end, or there is none and none will be. Nothing is served before one has told
    its keys."""
    stop, told, parted, serves = asyncio.Event(), asyncio.Event(), asyncio.Event(), asyncio.Event()
    state = make_state(engine)
    before, engine.on_stop, engine.on_parted = engine.on_status, stop.set, parted.set

    def on_status(status: w.Status) -> None:
        if before is not None:
            before(status)
        told.set()

    engine.on_status = on_status

    async def stay_connected() -> None:
        channel = engine.channel
        while True:
            parted.clear()
            channel.say(hello)
            if serves.is_set():
                channel.say(w.Serves())
            await connect(channel)
            await parted.wait()
            state.begin_counts_again()
            channel = engine.reopened()

    def started() -> None:
        serves.set()
        engine.say(w.Serves())
        if on_started is not None:
            on_started()

    connecting = asyncio.create_task(stay_connected(), name="jettison-controller")
    waits = [asyncio.ensure_future(event.wait()) for event in (told, stop)]
    await asyncio.wait([*waits, connecting], return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    try:
        if told.is_set():
            # ``open_socket`` has taken it away; without it connections of this server that are closed, which the
            # kernel still keeps, would bar the address to the next one.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            await run_on(
                create_front(state, Forward(forward_path, state.settings)), listener, shutdown_timeout_s=ABORT_GRACE_S,
                on_started=started, stop=stop, force=asyncio.Event())
    finally:
        listener.close()
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        engine.channel.close()
        await asyncio.to_thread(state.grammars.close)


def state_of(
    engine: RemoteEngine, tokenizer: Tokenizer, settings: ServerSettings, series: str, *, records: bool, traces: bool
) -> FrontState:
    """The state of a front end. ``series``: see ``FrontState``."""
    return FrontState(engine, tokenizer, front_settings(engine, settings, records=records, traces=traces), series)

"""Running the application: one socket, one event loop, and an orderly end.

On the first SIGTERM or SIGINT new requests get 503 (and ``/health`` says draining) while running ones finish, up to the
timeout; the second signal ends everything at once. The stream of a request that is cut off ends with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import uvicorn

from jettison.server.app import Application, server_state
from jettison.server.descriptors import DescriptorWatch
from jettison.server.http_protocol import bounded_protocol
from jettison.server.quiet_log import Seldom
from jettison.server.sockets import BACKLOG, open_socket
from jettison.server.state import ServerState
from jettison.server.tls import HANDSHAKE_TIMEOUT_S

logger = logging.getLogger(__name__)

ABORT_GRACE_S = 1.0
"""Time for the errors of cut-off streams to be sent, and for connections to close."""

LOOK_TICKS = 10
"""Ticks of 0.1 s between two looks at the connections."""

LOADING_YET = ", not serving yet: until the model is loaded, requests are told 503 and when to come again"
"""Text of the log before the server is ready. A script that waits for a line of the log must not take it for that of a
ready server."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Server(uvicorn.Server):
    """uvicorn without its own handling of signals, and with an end that does not wait for the next tick."""

    def __init__(self, config: uvicorn.Config, watch: DescriptorWatch, state: ServerState) -> None:
        super().__init__(config)
        self._state = state
        self._stopped = asyncio.Event()
        self._watch = watch

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, on open sockets, which begin to listen, and with bounds on the time of a TLS connection's begin
        and end."""
        config, loop, settings = self.config, asyncio.get_running_loop(), self._state.settings

        def protocol() -> asyncio.Protocol:
            return config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=self.server_state, app_state=self.lifespan.state, _loop=loop)

        self.servers = []
        for sock in sockets or ():
            is_unix = sock.family == socket.AF_UNIX  # of front ends, which have undone TLS
            make, tls = (loop.create_unix_server, None) if is_unix else (loop.create_server, settings.tls)
            begin_s, end_s = (None, None) if tls is None else (HANDSHAKE_TIMEOUT_S, settings.write_timeout_s)
            self.servers.append(await make(
                protocol, sock=sock, ssl=tls, backlog=BACKLOG, ssl_handshake_timeout=begin_s,
                ssl_shutdown_timeout=end_s))
        self.started = True

    def stop(self, *, force: bool) -> None:
        """End ``serve``; with ``force`` without waiting for connections."""
        self.should_exit, self.force_exit = True, force
        self._stopped.set()

    async def main_loop(self) -> None:
        """A tick every 0.1 s updates the date header; about every second connections are checked."""
        num_ticks = 0
        while not await self.on_tick(num_ticks):
            num_ticks = (num_ticks + 1) % 864000
            if num_ticks % LOOK_TICKS == 0:
                self._look(time.monotonic())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), 0.1)

    def _look(self, now_s: float) -> None:
        for connection in tuple(self.server_state.connections):
            connection.look(now_s)  # type: ignore[union-attr]  # they are BoundedHttpProtocol, all of them
        self._state.end_unread()
        self._watch.look()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are handled by ``run_server``."""
        yield


async def run_server(
    app: Application,
    host: str,
    port: int,
    *,
    shutdown_timeout_s: float,
    on_drain: Callable[[float], Awaitable[object]] | None = None,
    on_started: Callable[[int], None] | None = None,
    on_hangup: Callable[[], None] | None = None,
    stop: asyncio.Event | None = None,
) -> int:
    """``run_on`` a socket at an address. ``on_started`` gets the port. Raises ConfigError when the address cannot be
    bound."""
    listener = open_socket(host, port)
    bound_port = listener.getsockname()[1]

    def started() -> None:
        tell_address(server_state(app), host, bound_port)
        if on_started is not None:
            on_started(bound_port)

    return await run_on(
        app, listener, shutdown_timeout_s=shutdown_timeout_s, on_drain=on_drain, on_started=started,
        on_hangup=on_hangup, stop=stop)


async def run_on(
    app: Application,
    listener: socket.socket,
    *,
    shutdown_timeout_s: float,
    on_drain: Callable[[float], Awaitable[object]] | None = None,
    on_started: Callable[[], None] | None = None,
    on_hangup: Callable[[], None] | None = None,
    stop: asyncio.Event | None = None,
    force: asyncio.Event | None = None,
) -> int:
    """Serve until a signal (or ``stop``); returns the exit code: 1 when a second signal (or ``force``) forced the end,
    else 0.

    ``listener`` is closed at the end. ``on_drain`` is called once when draining begins, with the seconds it may take,
    and awaited for no longer. ``on_hangup`` is called for every SIGHUP, which without it ends the process.
    ``force``: given where another process decides when this one ends; signals say nothing then.
    """
    state = server_state(app)
    first, second = stop or asyncio.Event(), force or asyncio.Event()
    watch = DescriptorWatch(Seldom(logger))
    server = _Server(_uvicorn_config(app, state), watch, state)
    signals = _signals(first, second, on_hangup) if force is None else contextlib.nullcontext()
    with signals, _accept_errors(watch):
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        stopping = asyncio.create_task(first.wait())
        try:
            while not server.started and not serving.done():
                await asyncio.sleep(0.005)
            if server.started and on_started is not None:
                on_started()
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            await _drain(state, shutdown_timeout_s, on_drain, second)
            return 1 if second.is_set() else 0
        finally:
            stopping.cancel()
            server.stop(force=second.is_set())
            with contextlib.suppress(asyncio.CancelledError):
                await serving
            listener.close()


def tell_address(state: ServerState, host: str, port: int) -> None:
    """Log where clients find the server."""
    scheme = "http" if state.settings.tls is None else "https"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    logger.info("listening on %s%s", url, LOADING_YET if state.status == "loading" else "")


def _uvicorn_config(app: Application, state: ServerState) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=bounded_protocol(state.settings),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=state.settings.idle_timeout_s,  # type: ignore[arg-type]  # it only goes to call_later
        timeout_graceful_shutdown=int(ABORT_GRACE_S),
    )


@contextlib.contextmanager
def _accept_errors(watch: DescriptorWatch) -> Iterator[None]:
    """Replace asyncio's own reports: its loop logs a traceback each second while it has no descriptor for a
    connection."""
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()

    def on_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and watch.note(error):
            return
        if before is None:
            loop.default_exception_handler(context)
        else:
            before(loop, context)

    loop.set_exception_handler(on_exception)
    try:
        yield
    finally:
        loop.set_exception_handler(before)


@contextlib.contextmanager
def _signals(first: asyncio.Event, second: asyncio.Event, on_hangup: Callable[[], None] | None) -> Iterator[None]:
    """The first signal sets one event, every later one the other. Only the main thread receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal() -> None:
        (second if first.is_set() else first).set()

    loop = asyncio.get_running_loop()
    handlers: dict[signal.Signals, Callable[[], None]] = dict.fromkeys(SIGNALS, on_signal)
    if on_hangup is not None:
        handlers[signal.SIGHUP] = on_hangup
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


async def _drain(
    state: ServerState,
    timeout_s: float,
    on_drain: Callable[[float], Awaitable[object]] | None,
    force: asyncio.Event,
) -> None:
    """Let running requests finish, up to the timeout or ``force``; then cut them off."""
    state.begin_drain()
    logger.info("draining: %d requests run", state.num_running)
    async with _background(force.wait()) as forced, _background(_all_drained(state, timeout_s, on_drain)) as drained:
        await asyncio.wait({forced, drained}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    if state.num_running:
        logger.warning("cutting off %d requests that still run", state.num_running)
        state.abort_all()
        async with _background(state.drained()) as drained:
            await asyncio.wait({drained}, timeout=ABORT_GRACE_S)


async def _all_drained(
    state: ServerState, timeout_s: float, on_drain: Callable[[float], Awaitable[object]] | None
) -> None:
    if on_drain is not None:
        try:
            await on_drain(timeout_s)
        except Exception:
            logger.exception("the drain hook failed")
    await state.drained()


@contextlib.asynccontextmanager
async def _background(work: Awaitable[object]) -> AsyncIterator[asyncio.Task[object]]:
    async def run() -> object:
        return await work

    task = asyncio.create_task(run())
    try:
        yield task
    finally:
        task.cancel()

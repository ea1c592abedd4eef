"""A front end's process: ``python -m jettison.server.fronts.process LISTENER_FD PARENT_FD FRONT LIFE``, started by
``parent.front_ends``. It ends by a controller's word, or with its parent; a controller that ends is not the end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import uvloop

from jettison.live.frontend import wire as w
from jettison.live.frontend.channel import TurnChannel
from jettison.live.frontend.remote_engine import RemoteEngine
from jettison.live.machine.garbage import settle_garbage_collector
from jettison.live.machine.process_name import FRONT_END, name_process
from jettison.server.console.settings import ConsoleSettings
from jettison.server.descriptors import WANTED, raise_descriptor_limit
from jettison.server.fronts.front import FrontState
from jettison.server.fronts.paths import channel_path, forward_path
from jettison.server.fronts.serving import serve_front, state_of
from jettison.server.fronts.start import FrontStart, settings_of
from jettison.server.quiet_log import install_log
from jettison.server.tokenizer import Tokenizer

RETRY_S = 0.05
"""Between two tries to connect. The parent keeps the socket, so that one waits there for the next controller; a try
fails where too many wait."""
SERVES = b"serves"
"""Told to the parent when connections are taken."""


async def run(start: FrontStart, listener: socket.socket, parent: socket.socket, hello: w.Hello) -> None:
    """Serve to the end."""
    loop = asyncio.get_running_loop()
    engine = RemoteEngine(start.orphan_timeout_s)
    settings = replace(
        settings_of(start.settings), tls=start.tls.context(), console=ConsoleSettings(start.has_journal))
    logging.disable(logging.INFO)  # the controller has told what it found in the same files
    tokenizer = Tokenizer.from_dir(
        Path(start.tokenizer_dir), max_template_chars=settings.max_template_chars, templates=settings.templates,
        byte_tokens=start.byte_tokens)
    settle_garbage_collector()
    logging.disable(logging.NOTSET)

    def state(remote: RemoteEngine) -> FrontState:
        series = f"{hello.front}.{hello.life}"
        return state_of(remote, tokenizer, settings, series, records=start.records, traces=start.reads_traces)

    async def connect(channel: TurnChannel) -> None:
        while True:
            try:
                await loop.create_unix_connection(lambda: channel, channel_path(start.folder))
                return
            except OSError:
                await asyncio.sleep(RETRY_S)

    def on_parent() -> None:
        """It says nothing, and so this is its end."""
        loop.remove_reader(parent)
        engine.give_up()

    def on_started() -> None:
        with suppress(OSError):
            parent.send(SERVES)

    parent.setblocking(False)
    loop.add_reader(parent, on_parent)
    await serve_front(engine, state, forward_path(start.folder), connect, listener, hello, on_started)


def main() -> None:
    """Serve until told to end."""
    name_process(FRONT_END)
    # A service manager signals every process of a service, a terminal every process of its group; the parent hears it,
    # the controller lets requests end, and tells when they have.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    listener, parent = (socket.socket(fileno=int(text)) for text in sys.argv[1:3])
    hello = w.Hello(int(sys.argv[3]), int(sys.argv[4]))
    start = msgspec.json.decode(sys.stdin.buffer.read(), type=FrontStart)
    install_log(start.log_level)
    raise_descriptor_limit(WANTED)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(start, listener, parent, hello))


if __name__ == "__main__":
    main()

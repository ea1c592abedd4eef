"""A front end's process: ``python -m jettison.server.fronts.process LISTENER_FD CHANNEL_FD``, started by
``fronts.supervisor``. It ends with its controller, by whose word alone it ends."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import uvloop

from jettison.live.frontend.remote_engine import RemoteEngine
from jettison.live.machine.garbage import settle_garbage_collector
from jettison.server.console.settings import ConsoleSettings
from jettison.server.descriptors import WANTED, raise_descriptor_limit
from jettison.server.fronts.front import FrontState
from jettison.server.fronts.serving import serve_front, state_of
from jettison.server.fronts.start import FrontStart, settings_of
from jettison.server.quiet_log import PlainFormatter, TracebackLimit
from jettison.server.tokenizer import Tokenizer


def main() -> None:
    """Serve until the controller tells to end, or is gone."""
    # A service manager signals every process of a service, a terminal every process of its group; the controller hears
    # it, lets requests end, and tells when they have.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    listener, channel = (socket.socket(fileno=int(text)) for text in sys.argv[1:3])
    start = msgspec.json.decode(sys.stdin.buffer.read(), type=FrontStart)
    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.addFilter(TracebackLimit())
    logging.basicConfig(level=start.log_level.upper(), handlers=[handler])
    raise_descriptor_limit(WANTED)
    settings = replace(
        settings_of(start.settings), tls=start.tls.context(), console=ConsoleSettings(start.has_journal))
    logging.disable(logging.INFO)  # the controller has told what it found in the same files
    tokenizer = Tokenizer.from_dir(
        Path(start.tokenizer_dir), max_template_chars=settings.max_template_chars, templates=settings.templates,
        byte_tokens=start.byte_tokens)

    def state(engine: RemoteEngine) -> FrontState:
        return state_of(engine, tokenizer, settings, start.series, records=start.records, traces=start.reads_traces)

    settle_garbage_collector()
    logging.disable(logging.NOTSET)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_front(state, start.forward_path, channel, listener))


if __name__ == "__main__":
    main()

"""The controller's line to the process that takes keepers of other hosts (``engine.host_server``)."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

import msgspec

from jettison.errors import JettisonError
from jettison.live.host.heritage import Heritage
from jettison.live.host.keeper import worker_environment
from jettison.live.wire import host_orders as h
from jettison.transport.handshake import Identity
from jettison.transport.tls import Papers

log = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
"""It imports what it needs in a second or two."""
_CLOSE_TIMEOUT_S = 5.0
_COMMAND = (sys.executable, "-P", "-m", "jettison.live.engine.host_server")


class HostDoor:
    """Started, and again once it has ended. All calls and callbacks on the controller's loop.

    ``on_word`` gets what each keeper says, in order, and ``Lost`` as its last; ``on_end`` is called if the process ends
    before ``close``, or says what cannot be read: then every keeper ends, too.
    """

    def __init__(
        self, lease_s: float, on_word: Callable[[Identity, h.HostEvent | h.Lost], None], on_end: Callable[[], None]
    ) -> None:
        self._lease_s = lease_s
        self._on_word = on_word
        self._on_end = on_end
        self._process: asyncio.subprocess.Process | _Found | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        """The process is there."""
        return self._listening is not None and not self._listening.done()

    async def find(self, heritage: Heritage) -> h.DoorTaken | None:
        """The process of an earlier controller, with the keepers that have outlived that one; None: there is none that
        obeys this controller."""
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, _path(heritage))
            process = _Found.at(sock)
        except FileNotFoundError:  # none has been there: the ordinary first start
            sock.close()
            return None
        except OSError as error:
            sock.close()
            log.info("there are no keepers of an earlier controller: %s", error)
            return None
        reader, self._writer = await asyncio.open_unix_connection(sock=sock, limit=h.MAX_MESSAGE_BYTES)
        self._tell(h.TakeDoor(heritage.epoch, heritage.signature))
        try:
            line = await asyncio.wait_for(reader.readline(), _START_TIMEOUT_S)
        except (OSError, TimeoutError):  # should it wake up: ``close`` tells it to end
            line = b""
        taken = msgspec.json.decode(line, type=h.DoorWord) if line.endswith(b"\n") else None
        if not isinstance(taken, h.DoorTaken):
            process.close()
            log.error("the process with the keepers of an earlier controller does not obey")
            return None
        self._process = process
        self._listening = asyncio.create_task(self._listen(reader), name="jettison-hosts")
        return taken

    async def start(self, address: str, papers: Papers, heritage: Heritage | None = None) -> str:
        """Listen at ``tcp:<interface>:<port>``; returns the address with the port that it has got. With a ``heritage``
        the process outlives this one. Raises OSError, JettisonError."""
        await self.close()  # what an earlier one has left
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *_COMMAND, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=worker_environment(1),
                start_new_session=True,
            )  # fmt: skip
        reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=h.MAX_MESSAGE_BYTES)
        self._tell(h.OpenDoor(
            address=address, lease_s=self._lease_s, key_pem=papers.key.decode(),
            certificate_pem=papers.certificate.decode(), authority_pem=papers.authority.decode(),
            succession=None if heritage is None else _succession(heritage),
        ))
        try:
            line = await asyncio.wait_for(reader.readline(), _START_TIMEOUT_S)
        except TimeoutError:
            raise JettisonError(f"what takes keepers at {address} was not there in {_START_TIMEOUT_S:g} s") from None
        opened = msgspec.json.decode(line, type=h.DoorWord) if line else None
        if not isinstance(opened, h.DoorOpened) or opened.why_not is not None:
            raise JettisonError(f"keepers cannot be taken at {address}: {getattr(opened, 'why_not', opened)}")
        self._listening = asyncio.create_task(self._listen(reader), name="jettison-hosts")
        return opened.address

    def expect(self, post: h.KeeperPost) -> None:
        """Let this life of a keeper in, once."""
        self._tell(h.Expect(post))

    def send(self, keeper: Identity, command: h.HostCommand) -> None:
        """Never blocks. To a keeper that is gone it is dropped: ``Lost`` tells."""
        self._tell(h.Order(keeper, command))

    def dismiss(self, keeper: Identity) -> None:
        """Hang up, which ends the keeper and its workers, and let it in no more. ``Lost`` is told if it was there."""
        self._tell(h.Dismiss(keeper))

    async def close(self) -> None:
        """Hang up on all. Idempotent."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        self._tell(h.CloseDoor())
        process, self._process = self._process, None
        if process is not None:
            await ended(process, "the process that takes keepers", _CLOSE_TIMEOUT_S)
        if self._writer is not None:  # not before: what it still says would break the line, and with it this word
            self._writer.close()

    def _tell(self, command: h.OpenDoor | h.TakeDoor | h.DoorCommand) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(msgspec.json.encode(command) + b"\n")

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                said = msgspec.json.decode(line, type=h.Said)
                self._on_word(said.keeper, said.word)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("the process that takes keepers is not understood")
        if self._process is not None and self._process.returncode is None:
            self._process.kill()  # should it live: no keeper may, of which nothing is heard any more
        self._on_end()


class _Found:
    """A process that another controller has started: what is asked here of one of ``asyncio.subprocess``."""

    def __init__(self, pid: int) -> None:
        """Raises ProcessLookupError."""
        self._pidfd: int | None = os.pidfd_open(pid)

    @classmethod
    def at(cls, sock: socket.socket) -> _Found:
        """What listens at the other end of a connected Unix socket. Raises OSError."""
        pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        return cls(pid)

    @property
    def returncode(self) -> int | None:
        """None while it has not ended, as far as is known; its code is its parent's to know."""
        return None if self._pidfd is not None else 0

    def kill(self) -> None:
        """Idempotent."""
        if self._pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def wait(self) -> int:
        """Until it has ended."""
        if self._pidfd is not None:
            loop, over = asyncio.get_running_loop(), asyncio.Event()
            loop.add_reader(self._pidfd, over.set)
            try:
                await over.wait()
            finally:
                loop.remove_reader(self._pidfd)
            self.close()
        return 0

    def close(self) -> None:
        """Watch it no more. Idempotent."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def _path(heritage: Heritage) -> str:
    """Where later controllers find the process."""
    return f"{heritage.folder}/hosts"


def _succession(heritage: Heritage) -> h.Succession:
    return h.Succession(
        path=_path(heritage), epoch=heritage.epoch, secret_hex=heritage.secret.hex(),
        public_key_hex=heritage.public_key.hex(), parent_pid=heritage.parent_pid, timeout_s=heritage.orphan_timeout_s,
    )


async def ended(process: asyncio.subprocess.Process | _Found, what: str, timeout_s: float) -> None:
    """Wait for the end of a process that has been told to end; kill it where it does not. ``what``: its name for the
    log."""
    try:
        await asyncio.wait_for(process.wait(), timeout_s)
    except TimeoutError:
        log.warning("%s does not end and is killed", what)
        process.kill()
        await process.wait()

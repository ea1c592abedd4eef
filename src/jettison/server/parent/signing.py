"""The authority of a server's certificates: its key is the parent's, and a controller asks for each signature.

They have a pair of sockets of their own for it, on which one question waits for one answer: a signature takes a part
of a millisecond, and no turn of the parent's loop is long.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import msgspec

from jettison.errors import LinkDownError
from jettison.transport.authority import MAX_REQUEST_BYTES, Authority, LentAuthority
from jettison.transport.handshake import Identity

ANSWER_TIMEOUT_S = 5.0
_MOST_BYTES = 4 * MAX_REQUEST_BYTES


class Sign(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sign this request (DER)."""

    number: int
    """Of the question: an answer that comes too late is none to the next one."""
    request: bytes
    identity: Identity


class Signed(msgspec.Struct, frozen=True, tag="signed", forbid_unknown_fields=True):
    """The certificate, PEM."""

    number: int
    certificate: bytes


class Refused(msgspec.Struct, frozen=True, tag="refused", forbid_unknown_fields=True):
    """There is none."""

    number: int
    why: str


class SigningDesk:
    """The parent's end, for one controller after another."""

    def __init__(self) -> None:
        self._authority = Authority()
        self.certificate = self._authority.certificate
        """Of the authority, PEM."""
        self.line: socket.socket | None = None
        """To the present controller."""

    def open(self) -> socket.socket:
        """For a controller that is about to be forked; returns its end. Raises OSError."""
        self.close()
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.line.setblocking(False)
        return theirs

    def answer(self) -> None:
        """The controller has asked, or is gone."""
        assert self.line is not None
        try:
            asked = self.line.recv(_MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            asked = b""
        if not asked:
            self.close()
            return
        answer: Signed | Refused
        try:
            wanted = msgspec.msgpack.decode(asked, type=Sign)
        except msgspec.DecodeError:  # no controller says such a thing
            self.close()
            return
        try:
            answer = Signed(wanted.number, self._authority.sign(wanted.request, wanted.identity))
        except LinkDownError as error:
            answer = Refused(wanted.number, str(error))
        with suppress(OSError):  # the controller is gone
            self.line.send(msgspec.msgpack.encode(answer))

    def close(self) -> None:
        """Idempotent."""
        if self.line is not None:
            self.line.close()
            self.line = None


def lent_authority(line: socket.socket, certificate: bytes) -> LentAuthority:
    """A controller's end: an authority whose key is the parent's."""
    return LentAuthority(certificate, partial(_ask, line, itertools.count()))


def _ask(line: socket.socket, numbers: Iterator[int], request: bytes, identity: Identity) -> bytes:
    """Raises LinkDownError."""
    number, ends_s = next(numbers), time.monotonic() + ANSWER_TIMEOUT_S
    if len(request) > MAX_REQUEST_BYTES:
        raise LinkDownError(f"no signing request of {identity}: {len(request)} bytes")
    try:
        line.settimeout(ANSWER_TIMEOUT_S)
        line.send(msgspec.msgpack.encode(Sign(number, request, identity)))
        answered = None
        while answered is None or answered.number != number:
            line.settimeout(max(0.001, ends_s - time.monotonic()))
            answered = msgspec.msgpack.decode(line.recv(_MOST_BYTES), type=Signed | Refused)
    except (OSError, msgspec.DecodeError) as error:
        raise LinkDownError(f"the parent does not sign: {error}") from None
    if isinstance(answered, Refused):
        raise LinkDownError(answered.why)
    return answered.certificate

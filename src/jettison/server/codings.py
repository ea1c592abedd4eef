"""Content codings of request bodies: gzip, deflate, zstd. Bytes in, bounded pieces out; no I/O, and no HTTP.

A piece is never larger than ``PIECE_BYTES``, whatever a few bytes claim to become: the caller counts, and stops.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

try:
    from compression import zstd  # type: ignore[import-not-found,unused-ignore]  # Python 3.14 has it
except ImportError:
    try:
        from backports import zstd  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:  # an installation without it takes the other codings
        zstd = None

PIECE_BYTES = 64 << 10
SPARE_MEMBERS = 64
LEAST_MEMBER_BYTES = 1 << 10
"""A member has a price beside its bytes: beyond the spare ones they have so many each, on average."""
_WINDOW_LOG = 23
"""8 MiB, which RFC 8878 asks decoders for: the most memory that a zstd frame can make us hold. What fills it comes out,
and is counted; inside of another coding it would not be."""


class BrokenCodingError(Exception):
    """What came is not in this coding."""


class _Stream(Protocol):
    """One member of a coded body, as zlib and zstd have it."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class Decoder:
    """One coding of one body. Members behind each other are one body, as RFC 1952 and 8878 say."""

    def __init__(self, start: Callable[[bytes], _Stream], num_sniffed_bytes: int = 0) -> None:
        """``start``: makes a member's stream, told its first bytes."""
        self._start = start
        self._num_sniffed_bytes = num_sniffed_bytes
        self._head = b""
        self._stream: _Stream | None = None
        self._num_bytes = 0
        self._num_members = 0

    @property
    def is_complete(self) -> bool:
        """At the end of a member, or nothing has come at all."""
        return not self._head and (self._stream is None or self._stream.eof)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Pieces of what ``data`` adds. To be consumed whole, or the decoder not to be used again.

        Raises BrokenCodingError."""
        pending = data
        self._num_bytes += len(data)
        while True:
            if self._stream is None or self._stream.eof:
                self._head += pending
                if not self._head or len(self._head) < self._num_sniffed_bytes:
                    return
                pending, self._head = self._head, b""
                self._stream = self._start(pending)
                self._num_members += 1
                if self._num_members > SPARE_MEMBERS + self._num_bytes // LEAST_MEMBER_BYTES:
                    raise BrokenCodingError("it has too many members")
            try:
                piece = self._stream.decompress(pending, PIECE_BYTES)
            except _ERRORS as error:
                raise BrokenCodingError(str(error)) from None
            if self._stream.eof:
                pending = self._stream.unused_data
            else:
                # zlib gives back what it has not looked at, zstd keeps it.
                pending = getattr(self._stream, "unconsumed_tail", b"")
            if piece:
                yield piece
            if not pending and (self._stream.eof or len(piece) < PIECE_BYTES):
                return


def _deflate_stream(head: bytes) -> Any:
    """The standard means zlib's format by it; some clients send the bare one, which begins otherwise."""
    is_zlib = head[0] & 0x0F == 8 and head[0] >> 4 <= 7 and int.from_bytes(head[:2], "big") % 31 == 0
    return zlib.decompressobj(15 if is_zlib else -15)


def _zstd_stream(head: bytes) -> Any:
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG})


_ERRORS: tuple[type[Exception], ...] = (zlib.error,) if zstd is None else (zlib.error, zstd.ZstdError)

_CODINGS: dict[str, Callable[[], Decoder]] = {
    "gzip": lambda: Decoder(lambda head: zlib.decompressobj(31)),
    "deflate": lambda: Decoder(_deflate_stream, 2),
}
if zstd is not None:
    _CODINGS["zstd"] = lambda: Decoder(_zstd_stream)

TAKEN = tuple(_CODINGS)
"""Their names, the most common first."""


def named_coding(content_encoding: str) -> str:
    """Of the value of a Content-Encoding field, in one spelling; empty where the body is as it is.

    Several, one inside the other, are sent by no honest client: they stay as they stand, and are none of ``TAKEN``.
    """
    names = [name.strip().lower().removeprefix("x-") for name in content_encoding.split(",")]
    return ", ".join(name for name in names if name not in ("", "identity"))


def decoder_of(name: str) -> Decoder:
    """For one of ``TAKEN``."""
    return _CODINGS[name]()

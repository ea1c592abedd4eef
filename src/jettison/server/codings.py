"""Content codings of request bodies: gzip, deflate, zstd. Bytes in, bounded pieces out; no I/O, and no HTTP.

A piece is never larger than ``PIECE_BYTES``, however large a few bytes may decode: the caller counts, and stops.
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
    except ImportError:  # an installation without zstd supports the other codings
        zstd = None

PIECE_BYTES = 64 << 10
SPARE_MEMBERS = 64
LEAST_MEMBER_BYTES = 1 << 10
"""Least mean size of members, beyond a number of free ones: each member costs work besides its bytes."""
_WINDOW_LOG = 23
"""8 MiB, the window that RFC 8878 recommends to decoders, and the most memory that a zstd frame can make us hold. Bytes
that fill it are output, and counted; inside of another coding they would not be."""


class BrokenCodingError(Exception):
    """The bytes are not in this coding."""


class _Stream(Protocol):
    """One member of a coded body, as zlib and zstd have it."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class Decoder:
    """One coding of one body. Consecutive members are one body, by RFC 1952 and 8878."""

    def __init__(self, start: Callable[[bytes], _Stream], num_sniffed_bytes: int = 0) -> None:
        """``start``: makes a member's stream, given its first bytes."""
        self._start = start
        self._num_sniffed_bytes = num_sniffed_bytes
        self._head = b""
        self._stream: _Stream | None = None
        self._num_bytes = 0
        self._num_members = 0

    @property
    def is_complete(self) -> bool:
        """Whether the bytes so far end with a member, or are none."""
        return not self._head and (self._stream is None or self._stream.eof)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Pieces decoded from ``data``. Consume them all, or do not use the decoder again.

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
                # zlib returns the bytes that it has not read, zstd keeps them.
                pending = getattr(self._stream, "unconsumed_tail", b"")
            if piece:
                yield piece
            if not pending and (self._stream.eof or len(piece) < PIECE_BYTES):
                return


def _deflate_stream(head: bytes) -> Any:
    """A stream for ``deflate``: the standard means zlib's format; some clients send raw deflate, which begins
    otherwise."""
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
"""Names of the supported codings, the most common first."""


def named_coding(content_encoding: str) -> str:
    """The coding in the value of a Content-Encoding field, in one spelling; empty where the body is not coded.

    No honest client nests several: such a value is returned unchanged, and is not in ``TAKEN``.
    """
    names = [name.strip().lower().removeprefix("x-") for name in content_encoding.split(",")]
    return ", ".join(name for name in names if name not in ("", "identity"))


def decoder_of(name: str) -> Decoder:
    """A decoder for one of ``TAKEN``."""
    return _CODINGS[name]()

"""Incoming request bodies: coded ones are decoded, unwanted ones are discarded.

``limits`` bounds the bytes held; ``codings`` undoes the codings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from starlette.types import Message, Receive

from jettison.server.codings import TAKEN, BrokenCodingError, decoder_of, named_coding
from jettison.server.errors import ApiError

DISCARD_LIMIT_BYTES = 32 << 20
DISCARD_LIMIT_S = 2.0

CLOSE = {"connection": "close"}


def body_too_large(max_bytes: int) -> ApiError:
    """413. The connection is closed, because the rest of the body follows on it."""
    return ApiError(413, f"The request body is larger than {max_bytes} bytes.", code="request_too_large", headers=CLOSE)


async def discard_body(receive: Receive) -> None:
    """Read on for a moment and discard the bytes, so that an honest client receives the answer to its large body."""
    if isinstance(receive, DecodedBody):
        await receive.discard()
        return
    num_bytes = 0
    try:
        async with asyncio.timeout(DISCARD_LIMIT_S):
            while num_bytes < DISCARD_LIMIT_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body"):
                    return
    except TimeoutError:
        return


def decoded_body(receive: Receive, headers: Sequence[tuple[bytes, bytes]], max_bytes: int) -> Receive:
    """``receive`` for the decoded body, by the coding in the request's headers; itself where they name none."""
    values = [value.decode("latin-1") for name, value in headers if name == b"content-encoding"]
    coding = named_coding(", ".join(values))
    return DecodedBody(receive, coding, max_bytes) if coding else receive


class DecodedBody:
    """ASGI's ``receive`` for a coded body. Nothing is read before the application asks for the body.

    Raises ApiError: 415 for an unsupported coding, 400 for a broken one, 413 where the bytes on the wire, or the
    decoded bytes, are more than ``max_bytes``. Endpoints with lower limits check them themselves.
    """

    def __init__(self, receive: Receive, coding: str, max_bytes: int) -> None:
        self._receive = receive
        self._coding = coding
        self._max_bytes = max_bytes
        self._decoder = decoder_of(coding) if coding in TAKEN else None
        self._num_coded_bytes = self._num_bytes = 0
        self._pieces: Iterator[bytes] = iter(())
        self._has_all = False
        """Whether the last byte on the wire has come."""
        self._is_over = False

    async def __call__(self) -> Message:
        """The next piece; after the last one, the messages of the wire."""
        if self._is_over:
            return await self._receive()
        if self._decoder is None:
            raise _not_taken(self._coding)
        try:
            while (piece := next(self._pieces, None)) is None:
                if self._has_all:
                    self._is_over = True
                    if not self._decoder.is_complete:
                        raise _broken(f"ends in the middle of its {self._coding}")
                    return {"type": "http.request", "body": b"", "more_body": False}
                message = await self._receive()
                if message["type"] != "http.request":
                    self._is_over = True
                    return message
                self._has_all = not message.get("more_body")
                coded = message.get("body", b"")
                self._num_coded_bytes += len(coded)
                self._check(self._num_coded_bytes)
                self._pieces = self._decoder.feed(coded)
            self._num_bytes += len(piece)
            self._check(self._num_bytes)
        except (ApiError, BrokenCodingError) as error:
            await self.discard()
            if isinstance(error, ApiError):
                raise
            raise _broken(f"is broken: {error}") from None
        return {"type": "http.request", "body": piece, "more_body": True}

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise body_too_large(self._max_bytes)

    async def discard(self) -> None:
        """Discard the rest of the body, still coded."""
        self._is_over = True
        if not self._has_all:
            await discard_body(self._receive)


def _not_taken(coding: str) -> ApiError:
    taken = ", ".join(TAKEN)
    message = f"The content-encoding {coding[:80]!r} is not taken here: send {taken}, or the body as it is."
    return ApiError(415, message, code="unsupported_content_encoding", headers={"accept-encoding": taken})


def _broken(why: str) -> ApiError:
    return ApiError(400, f"The encoded request body {why}.", code="invalid_content_encoding")

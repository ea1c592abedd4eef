"""The upload of a file as multipart/form-data: parsed and written in pieces, never whole in memory.

The event loop gets time between pieces, and a thread writes, so that streams go on beside 200 MB.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import IO

from python_multipart import MultipartParser
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import parse_options_header
from starlette.types import Message, Receive

from jettison.server.batches.outcome import open_private
from jettison.server.bodies import CLOSE, body_too_large, discard_body
from jettison.server.errors import ApiError, bad_request

MAX_FIELD_BYTES = 4096
MAX_PARTS = 16
OVERHEAD_BYTES = 64 << 10
"""Most bytes of a body besides its file."""
PIECE_BYTES = 64 << 10
PAUSE_S = 0.003
"""Pause after each piece, for streams: 200 MB take eight seconds or more."""
PLAIN_ENCODINGS = (b"binary", b"8bit", b"7bit")
"""Transfer encodings of a part that change nothing; others are refused. RFC 7578 has none any more, and an old client
that names base64 does use it."""
LEAST_BYTES_PER_S = 16 << 10
"""A slower client is cut off, as it holds a place that others want."""


class Upload:
    """One body: ``receive`` it once; then ``fields``, ``filename`` and ``num_bytes`` are known, ``path`` is written."""

    def __init__(self, content_type: bytes, path: Path, max_bytes: int, timeout_s: float) -> None:
        """Raises ApiError where the content type is no form's."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind.lower() != b"multipart/form-data" or not boundary or len(boundary) > 256:
            raise ApiError(415, "The content-type must be multipart/form-data.", code="unsupported_media_type")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.num_bytes = 0
        self._path, self._max_bytes, self._timeout_s = path, max_bytes, timeout_s
        self._form = _Form(boundary)

    async def receive(self, receive: Receive) -> None:
        """Receive the body. Raises ApiError (400, 408, 413) and OSError, and then leaves no file."""
        file = await asyncio.to_thread(open_private, self._path)
        try:
            with file:
                await self._receive(receive, file)
                await asyncio.to_thread(_sync, file)
        except BaseException:
            self._path.unlink(missing_ok=True)
            raise

    async def _receive(self, receive: Receive, file: IO[bytes]) -> None:
        begun_s, num_received = time.monotonic(), 0
        num_since_pause, is_last = 0, False
        while not is_last:
            message = await self._next(receive, begun_s, num_received)
            body = message.get("body", b"")
            is_last = not message.get("more_body")
            num_received += len(body)
            num_since_pause += len(body)
            try:
                self._form.feed(body)
            except MultipartParseError as error:
                raise bad_request(f"The form is broken: {error}.", code="invalid_multipart") from None
            self.num_bytes = self._form.num_file_bytes
            if self.num_bytes > self._max_bytes or num_received > self._max_bytes + OVERHEAD_BYTES:
                if not is_last:
                    await discard_body(receive)
                raise body_too_large(self._max_bytes)
            if (num_since_pause >= PIECE_BYTES or is_last) and (data := self._form.take()):
                num_since_pause = 0
                await asyncio.to_thread(file.write, data)
                await asyncio.sleep(PAUSE_S)
        if not self._form.is_complete:
            raise bad_request("The form has no end.", code="invalid_multipart")
        if self._form.filename is None:
            raise bad_request("file is missing.", "file", "missing_required_parameter")
        self.fields, self.filename = self._form.fields, self._form.filename

    async def _next(self, receive: Receive, begun_s: float, num_received: int) -> Message:
        deadline_s = begun_s + self._timeout_s + num_received / LEAST_BYTES_PER_S
        try:
            async with asyncio.timeout(max(0.0, min(self._timeout_s, deadline_s - time.monotonic()))):
                message = await receive()
        except TimeoutError:
            raise ApiError(408, "The file arrives too slowly.", code="request_timeout", headers=CLOSE) from None
        if message["type"] == "http.disconnect":
            raise ApiError(499, "The client went away.", code="client_disconnected")
        return message


class _Form:
    """The parser's state: small fields whole, and the file's bytes that have not been taken yet."""

    def __init__(self, boundary: bytes) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.num_file_bytes = 0
        self.is_complete = False
        self._num_parts = 0
        self._header = (bytearray(), bytearray())
        self._name: str | None = None
        self._is_file = False
        self._value = bytearray()
        self._data: list[bytes] = []
        self._parser = MultipartParser(boundary, {
            "on_part_begin": self._begin_part, "on_part_data": self._take_data, "on_part_end": self._end_part,
            "on_header_field": self._take_name, "on_header_value": self._take_value, "on_header_end": self._end_header,
            "on_end": self._end,
        })  # fmt: skip

    def feed(self, data: bytes) -> None:
        """Raises MultipartParseError, ApiError."""
        self._parser.write(data)

    def take(self) -> bytes:
        """Bytes of the file that have come since the last call."""
        data, self._data = b"".join(self._data), []
        return data

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise bad_request(f"The form has more than {MAX_PARTS} fields.", code="invalid_multipart")
        self._name, self._is_file, self._value = None, False, bytearray()

    def _take_name(self, data: bytes, start: int, end: int) -> None:
        self._header[0].extend(data[start:end])
        self._check_header()

    def _take_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1].extend(data[start:end])
        self._check_header()

    def _check_header(self) -> None:
        if sum(map(len, self._header)) > MAX_FIELD_BYTES:
            raise bad_request("A header in the form is too long.", code="invalid_multipart")

    def _end_header(self) -> None:
        name, value = bytes(self._header[0]), bytes(self._header[1])
        self._header = (bytearray(), bytearray())
        if name.lower() == b"content-transfer-encoding" and value.strip().lower() not in PLAIN_ENCODINGS:
            message = f"The form's content-transfer-encoding {value.decode(errors='replace')!r:.60} is not taken."
            raise bad_request(message, code="invalid_multipart")
        if name.lower() != b"content-disposition":
            return
        _, options = parse_options_header(value)
        self._name = options.get(b"name", b"").decode(errors="replace")
        if self._name == "file":
            if self.filename is not None:
                raise bad_request("The form has more than one file.", "file")
            self._is_file = True
            given = os.path.basename(options.get(b"filename", b"").decode(errors="replace").replace("\\", "/"))
            self.filename = given[:255] or "upload.jsonl"

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._data.append(data[start:end])
            self.num_file_bytes += end - start
            return
        self._value.extend(data[start:end])
        if len(self._value) > MAX_FIELD_BYTES:
            raise bad_request(f"The field {self._name!r:.80} is too long.", self._name and self._name[:80])

    def _end_part(self) -> None:
        if not self._is_file and self._name:
            self.fields[self._name] = self._value.decode(errors="replace")

    def _end(self) -> None:
        self.is_complete = True


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())

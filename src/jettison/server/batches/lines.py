"""The lines of an input file, read one by one, and the checks of a line before its body is read. Pure but for
reading."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from jettison.server.batches.records import BatchError
from jettison.server.coercion import as_kind

MAX_CUSTOM_ID_CHARS = 512
BOM = b"\xef\xbb\xbf"


class LineError(Exception):
    """A line that cannot run; the others do."""

    def __init__(self, code: str, message: str, param: str | None = None, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.custom_id = custom_id

    def at(self, line: int) -> BatchError:
        """The error as shown, with the line's number."""
        return BatchError(code=self.code, message=str(self), line=line, param=self.param)


class Line(msgspec.Struct, frozen=True):
    """One request of a batch."""

    custom_id: str
    body: dict[str, Any]


def read_lines(path: Path, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Number (from 1, as editors count) and bytes of each line that is not blank; None for one above ``max_bytes``."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(max_bytes + 1):
            number += 1
            is_whole = raw.endswith(b"\n") or len(raw) <= max_bytes
            if not is_whole:
                while raw and not raw.endswith(b"\n"):
                    raw = file.readline(1 << 16)
                yield number, None
                continue
            raw = raw.removeprefix(BOM).strip()  # of any line: joined files have their marks in the middle
            if raw:
                yield number, raw


def parse_line(raw: bytes | None, endpoint: str, max_bytes: int) -> Line:
    """The request of a line. Raises LineError. The endpoint checks the body."""
    if raw is None:
        raise LineError("line_too_large", f"The line is larger than {max_bytes} bytes.")
    try:
        document = msgspec.json.decode(raw)
    except RecursionError:
        raise LineError("invalid_json_line", "The line is nested too deeply.") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        why = why_not_json(raw) or f"is not valid JSON: {error}"
        raise LineError("invalid_json_line", f"The line {why}.") from None
    if not isinstance(document, dict):
        what = "a JSON array: each of its elements must be a line" if isinstance(document, list) else "no JSON object"
        raise LineError("invalid_json_line", f"The line is {what}.")
    custom_id = custom_id_of(document)
    if custom_id is None:
        code = "missing_required_parameter" if document.get("custom_id") is None else "invalid_custom_id"
        raise LineError(code, f"custom_id must be a text of 1 to {MAX_CUSTOM_ID_CHARS} characters.", "custom_id")
    return Line(custom_id, _body(document, endpoint, custom_id))


def why_not_json(raw: bytes) -> str | None:
    """The named cause why a line is no JSON, as the end of a sentence; None where the parser's message is clearer."""
    bare = raw.strip(b"\0 \t\r\n")
    if not bare:
        return "is NUL bytes: the file was cut off, or not all of it was written"
    if b"\0" in bare:
        return "has NUL bytes in it: the file may be UTF-16 or binary; it must be UTF-8"
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        byte = f"byte 0x{raw[error.start]:02X} at {error.start}"
        return f"is not UTF-8 ({byte}): it may be Latin-1 or Windows-1252; save the file as UTF-8"
    if bare != raw.strip():
        at = "begins with" if raw[0] == 0 else "ends in"
        return f"{at} NUL bytes: the file was cut off, or not all of it was written"
    if _is_json(bare.removesuffix(b",")):
        return "ends in a comma, which lines of JSON do not have"
    if re.match(r"\{\s*'", text):
        return "is not JSON: keys and texts stand in single quotes (Python's form); they need double ones"
    try:
        _, end = json.JSONDecoder(parse_constant=_no_constant).raw_decode(text)
        return f"has more than one JSON value: another begins at character {end}" if text[end:].strip() else None
    except _ConstantError as constant:
        return f"is not JSON: it has {constant} in it, which is no number there"
    except (ValueError, RecursionError):
        pass
    if text[0] == "{" and text[-1] != "}":
        return "does not end: a JSON object is spread over several lines, or cut off"
    if text[0] not in '{["':
        return f"is not JSON: it begins with {text[:20]!r}"
    return None


class _ConstantError(Exception):
    """A word that Python takes for a number, and JSON does not."""


def _no_constant(word: str) -> object:
    raise _ConstantError(word)


def _is_json(raw: bytes) -> bool:
    try:
        msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True


def custom_id_of(document: object) -> str | None:
    """The ``custom_id`` of a document; None where it is no valid one."""
    custom_id = document.get("custom_id") if isinstance(document, dict) else None
    return custom_id if isinstance(custom_id, str) and 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS else None


def custom_id_in(raw: bytes | None) -> str | None:
    """The ``custom_id`` of an unchecked line; None where it has no valid one."""
    try:
        return custom_id_of(msgspec.json.decode(raw or b"null"))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _body(document: dict[str, Any], endpoint: str, custom_id: str) -> dict[str, Any]:
    if document.get("method") != "POST":
        raise LineError("invalid_method", "method must be 'POST'.", "method", custom_id)
    if document.get("url") != endpoint:
        raise LineError("invalid_url", f"url must be the batch's endpoint, {endpoint!r}.", "url", custom_id)
    body = document.get("body")
    if not isinstance(body, dict):
        raise LineError("invalid_body", "body must be a JSON object.", "body", custom_id)
    if body.get("model") is None:
        raise LineError("missing_required_parameter", "body.model is missing.", "body.model", custom_id)
    if as_kind(body.get("stream"), bool):
        raise LineError("unsupported_parameter", "stream is not possible in a batch.", "body.stream", custom_id)
    return body

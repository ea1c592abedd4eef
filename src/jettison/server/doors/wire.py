"""What both doors share: named events, fields by other names in errors, and texts of parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from jettison.server.errors import ApiError, bad_request
from jettison.server.json_out import encode


def named_event(name: str, document: Mapping[str, Any]) -> bytes:
    """One event of a stream; its data says its name, too."""
    return b"event: " + name.encode() + b"\ndata: " + encode({"type": name, **document}) + b"\n\n"


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """An error of the chat that a request became, in the request's own words. ``names``: fields of chats, and what they
    are called here."""
    message, param = error.message, error.param
    for old, new in names.items():
        message = message.replace(old, new)
        param = None if param is None else param.replace(old, new)
    return ApiError(error.status, message, param=param, code=error.code, headers=error.headers)


def raw(value: object, path: str) -> msgspec.Raw:
    """The value as JSON, to be put into answers: once it has been written, it can be written anywhere. Raises ApiError
    400 where it is nested so deeply that it was only just read."""
    try:
        return msgspec.Raw(encode(value))
    except RecursionError:
        raise bad_request(f"{path} is nested too deeply.", path) from None


def unsupported(path: str, what: str, why: str) -> ApiError:
    """400 for a thing that is not done here."""
    return bad_request(f"{path}: {what[:100]!r} is not supported by this server: {why}.", path, "unsupported_parameter")


def wrong_type(path: str, must_be: str) -> ApiError:
    """400 for a value of another type."""
    return bad_request(f"{path} must be {must_be}.", path, "invalid_type")


def checked_object(value: object, path: str) -> dict[str, Any]:
    """The value, which must be an object. Raises ApiError 400."""
    if not isinstance(value, dict):
        raise wrong_type(path, "an object")
    return value


def checked_text(value: object, path: str) -> str:
    """The value, which must be a string. Raises ApiError 400."""
    if not isinstance(value, str):
        raise wrong_type(path, "a string")
    return value


def kind_of(item: Mapping[str, Any], path: str, default: str | None = None) -> str:
    """The item's ``type``. Raises ApiError 400."""
    kind = item.get("type")
    return checked_text(default if kind is None else kind, f"{path}.type")

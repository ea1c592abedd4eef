"""All errors as OpenAI's error body, ``{"error": {message, type, param, code}}``; of ``/v1/messages`` as Anthropic's.

Only this module decides the messages that clients see. Internals never leave the process: an unexpected exception
becomes a generic message with a correlation id, which is logged with the traceback.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jettison.errors import (
    KeyLimitError,
    NotReadyError,
    OverCapacityError,
    RequestError,
    SleepRefusedError,
    TooLongError,
)
from jettison.server.json_out import encode
from jettison.server.paths import is_messages_path, left_out, prefix_hint

logger = logging.getLogger(__name__)

NOT_READY_RETRY_MS = 1000

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    499: "cancelled",
    500: "server_error",
    503: "service_unavailable",
}


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


class ApiError(Exception):
    """An answer other than 200, ready to be sent."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> bytes:
        """The JSON document, whole answer or payload of a stream's error event alike."""
        kind = _ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return encode({"error": error})

    @property
    def anthropic_status(self) -> int:
        """The status in Anthropic's API, which has one of its own for a server that is full."""
        return 529 if self.code == "queue_full" else self.status

    @property
    def anthropic_body(self) -> bytes:
        """The JSON document of Anthropic's API."""
        kind = _ANTHROPIC_TYPES.get(
            self.anthropic_status, "invalid_request_error" if self.status < 500 else "api_error")
        # Agents look for these words, and make their history shorter.
        front = "prompt is too long: " if self.code == "context_length_exceeded" else ""
        return encode({"type": "error", "error": {"type": kind, "message": front + self.message}})

    def response(self, path: str = "") -> Response:
        """The HTTP answer, in the form of the API that has this path."""
        is_anthropic = is_messages_path(path)
        return Response(
            self.anthropic_body if is_anthropic else self.body,
            self.anthropic_status if is_anthropic else self.status,
            headers=self.headers, media_type="application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400, which the client can correct. ``param`` names the field."""
    return ApiError(400, message, param=param, code=code or "invalid_value")


def retry_headers(retry_after_ms: int) -> dict[str, str]:
    """The time of a retry, in the two usual headers."""
    # ``retry-after`` has whole seconds and must not promise less than ``retry-after-ms``.
    return {"retry-after": str(max(1, -(-retry_after_ms // 1000))), "retry-after-ms": str(retry_after_ms)}


def refusal_code(error: OverCapacityError) -> str:
    """The reason for a 429, as clients and metrics see it."""
    return "key_limit_reached" if isinstance(error, KeyLimitError) else "queue_full"


def as_api_error(error: Exception) -> ApiError:
    """The answer to any exception. Unexpected ones are logged here, with the id that the client sees."""
    match error:
        case ApiError():
            return error
        case TooLongError():
            code = error.code or "context_length_exceeded"
            return ApiError(400, str(error), param=error.param or "max_tokens", code=code)
        case SleepRefusedError():
            return ApiError(409, str(error), code=error.code)
        case RequestError():
            return ApiError(400, str(error), param=error.param, code=error.code or "invalid_value")
        case OverCapacityError():
            headers = retry_headers(error.retry_after_ms)
            return ApiError(429, str(error), code=refusal_code(error), headers=headers)
        case NotReadyError():
            return ApiError(503, str(error), code="not_ready", headers=retry_headers(error.retry_after_ms))
        case HTTPException():
            return _from_http(error)
        case RecursionError():
            # What could only just be read may be too deep to be written again: only clients' values are nested so.
            return bad_request("The request is nested too deeply.", code="invalid_json")
        case _:
            correlation_id = secrets.token_hex(8)
            logger.error("request failed; correlation id %s", correlation_id, exc_info=error)
            return ApiError(500, f"Internal error; correlation id {correlation_id}.", code="internal_error")


def _from_http(error: HTTPException) -> ApiError:
    codes = {404: "not_found", 405: "method_not_allowed"}
    return ApiError(error.status_code, error.detail, code=codes.get(error.status_code), headers=error.headers)


async def handle_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for the exceptions that endpoints raise on purpose."""
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        what = "There is no" if error.status_code == 404 else "Not allowed:"
        path = request.url.path[:200]
        hint = (left_out(path) or prefix_hint(path)) if error.status_code == 404 else ""
        error.detail = f"{what} {request.method} {path}.{hint}"
    return as_api_error(error).response(request.url.path)

"""The first layer for a request: it checks size and key before anything is read or routed.

It also normalises the path, has coded bodies decoded, owns the answer's request id, and turns every exception into an
answer, so that nothing internal leaks.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from contextlib import nullcontext

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jettison.server.auth import ADMIN_PATHS, CONSOLE_DATA
from jettison.server.bodies import body_too_large, decoded_body, discard_body
from jettison.server.errors import ApiError, as_api_error, bad_request
from jettison.server.paths import has_controls, is_messages_path, plain_path
from jettison.server.state import ServerState

UPLOAD_PATH = "/v1/files"
METRICS_PATH = "/metrics"
CONSOLE_PATH = "/console"

REQUEST_LABEL = "jettison.request_label"
"""Entry of a request's scope: its answer's ``x-request-id``, in bytes."""

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Gate:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let one request in, or answer it here."""
        if scope["type"] != "http":
            return  # no lifespan, no web sockets
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = label_of(headers)
        is_started = False
        path = ""

        async def send_labelled(message: Message) -> None:
            nonlocal is_started
            if not is_started:
                is_started = True
                message["headers"] = [*message.get("headers", ()), *label_headers(path, request_id)]
            await send(message)

        try:
            path = plain_path(scope["path"], self._state.settings.root_path)
            _check_keys_once(scope["headers"])
            if has_controls(path):
                raise bad_request("The path has a control character in it.", code="invalid_path")
            max_bytes = await self._check_size(path, headers, receive)
            scope = self._with_key(path, scope, headers)
            self._check_key(path, headers.get(b"authorization"))
            receive = decoded_body(receive, scope["headers"], max_bytes)
            is_transfer = path == UPLOAD_PATH or path.startswith(f"{UPLOAD_PATH}/")
            with self._state.transfer() if is_transfer else nullcontext():
                told = {**scope, "path": path, "root_path": "", REQUEST_LABEL: request_id}
                await self._app(told, receive, send_labelled)
        except Exception as error:
            answer = as_api_error(error)  # logs what was not expected
            if is_started:
                raise
            await answer.response(path)(scope, receive, send_labelled)

    async def _check_size(self, path: str, headers: dict[bytes, bytes], receive: Receive) -> int:
        """Most bytes of the body. Raises ApiError 413 where its announced length is more."""
        settings = self._state.settings
        max_bytes = settings.max_body_bytes
        if path == UPLOAD_PATH and settings.max_upload_bytes is not None:
            max_bytes = settings.max_upload_bytes
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > max_bytes:
            if b"expect" not in headers:  # a client with this header asks before it sends
                await discard_body(receive)
            raise body_too_large(max_bytes)
        return max_bytes

    def _with_key(self, path: str, scope: Scope, headers: dict[bytes, bytes]) -> Scope:
        """The request with the key of ``x-api-key``, where Anthropic's clients send it, as if it were sent in
        ``authorization``: also in ``headers``. A key there that fits goes before."""
        own, authorization = headers.get(b"x-api-key"), headers.get(b"authorization")
        keys = self._state.keys
        if own is None or keys.is_empty or path in ADMIN_PATHS or (
            authorization is not None and keys.admits(path, authorization)
        ):
            return scope
        headers[b"authorization"] = b"Bearer " + own
        rest = [(name, value) for name, value in scope["headers"] if name != b"authorization"]
        return {**scope, "headers": [*rest, (b"authorization", headers[b"authorization"])]}

    def _check_key(self, path: str, authorization: bytes | None) -> None:
        """Raises ApiError 401, 403."""
        keys = self._state.keys
        if path == METRICS_PATH and not self._state.settings.metrics_need_key:
            return
        if path == CONSOLE_PATH or path.startswith(CONSOLE_PATH + "/"):
            if self._opens_console(path, authorization):
                return
        if path in ADMIN_PATHS and not (self._state.admin_keys.is_empty and keys.is_empty):
            if self._state.admin_keys.is_empty:
                raise ApiError(403, "Administration is closed: start the server with --admin-key.", code="no_admin_key")
            keys = self._state.admin_keys
        if not keys.admits(path, authorization):
            # Clients test for the first words of either message, which are those of OpenAI's API.
            wrong = "You didn't provide an API key" if authorization is None else "Incorrect API key provided"
            message = f"{wrong}: send it as `Authorization: Bearer KEY`."
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    def _opens_console(self, path: str, authorization: bytes | None) -> bool:
        """Whether a path of the console is open without a client's key: its page, and its data by a flag or with a key
        of administration."""
        console, admin = self._state.settings.console, self._state.admin_keys
        if not console.is_on or path not in CONSOLE_DATA:
            return console.is_on
        return console.is_open or (not admin.is_empty and admin.admits(path, authorization))


def _check_keys_once(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises ApiError 400 for two headers with keys of one kind: a reader of the first and one of the last would tell
    the client's tenant and limits by different keys."""
    names = [name for name, _ in headers]
    for key in (b"authorization", b"x-api-key"):
        if names.count(key) > 1:
            raise bad_request(f"There is more than one {key.decode()} header.", code="duplicate_header")


def label_of(headers: Mapping[bytes, bytes]) -> bytes:
    """The client's own request id, which is only echoed; ours where its headers have none."""
    request_id = headers.get(b"x-request-id")
    if request_id is not None and _REQUEST_ID.fullmatch(request_id):
        return request_id
    return secrets.token_hex(16).encode()


def label_headers(path: str, request_id: bytes) -> list[tuple[bytes, bytes]]:
    """Of an answer: its request id, for paths of Anthropic's API under their name, too."""
    names = (b"x-request-id", b"request-id") if is_messages_path(path) else (b"x-request-id",)
    return [(name, request_id) for name in names]

"""``/v1/files`` and ``/v1/batches``, as OpenAI defines them. Files and batches belong to the key that made them; no
other key finds them."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from jettison.errors import ConfigError, NotReadyError
from jettison.server import field_table
from jettison.server.batches.records import Batch, StoredFile, new_id
from jettison.server.batches.service import BatchService
from jettison.server.batches.settings import ENDPOINTS
from jettison.server.batches.uploads import Upload
from jettison.server.batches.window import window_s
from jettison.server.bodies import CLOSE, body_too_large, discard_body
from jettison.server.endpoint import check_content_type
from jettison.server.errors import NOT_READY_RETRY_MS, ApiError, bad_request, retry_headers
from jettison.server.field_table import Table
from jettison.server.fields import parse_fields, parse_json, refusal
from jettison.server.info_routes import json_response
from jettison.server.json_out import encode
from jettison.server.pages import is_newest_first, limit_of, page_of
from jettison.server.sampling import MAX_METADATA
from jettison.server.state import ServerState, require

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_BODY_BYTES = 64 << 10
MAX_PAGE = 100
MAX_FILES_PAGE = 10_000
LATER = retry_headers(NOT_READY_RETRY_MS * 10)


class BatchFields(msgspec.Struct, kw_only=True):
    """``POST /v1/batches``."""

    table: ClassVar[Table] = field_table.BATCH

    input_file_id: str | None = None
    endpoint: str | None = None
    completion_window: str | None = None
    metadata: dict[str, Any] | None = None


class BatchRoutes:
    """Handlers over one server's files and batches."""

    def __init__(self, state: ServerState, service: BatchService) -> None:
        self._state = state
        self._service = service
        self._num_uploads = 0

    def routes(self) -> list[Route]:
        """All of them, with their paths."""
        return [
            Route("/v1/files", self.upload, methods=["POST"]),
            Route("/v1/files", self.list_files),
            Route("/v1/files/{file_id}", self.file),
            Route("/v1/files/{file_id}", self.delete_file, methods=["DELETE"]),
            Route("/v1/files/{file_id}/content", self.content),
            Route("/v1/batches", self.create_batch, methods=["POST"]),
            Route("/v1/batches", self.list_batches),
            Route("/v1/batches/{batch_id}", self.batch),
            Route("/v1/batches/{batch_id}/cancel", self.cancel_batch, methods=["POST"]),
        ]

    def _owner(self, request: Request) -> str:
        return self._state.keys.owner(request.headers.get("authorization", "").encode("latin-1"))

    async def _call(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run ``work`` in the store's thread. Raises ApiError 507 where the disk is full."""
        try:
            return await self._service.call(work, *arguments)
        except (sqlite3.OperationalError, OSError) as error:
            logger.error("files and batches cannot be kept: %s", error)
            raise _full() from None

    async def _open(self) -> None:
        """Raises NotReadyError while draining, ApiError where there is no folder for batches."""
        if self._state.status in ("draining", "failed"):
            raise NotReadyError("The server is shutting down; retry elsewhere or later.")
        try:
            await self._service.open()
        except ConfigError as error:
            logger.error("%s", error)
            raise ApiError(503, "This server has no place to keep files.", code="storage_unavailable") from None

    # --- files

    async def upload(self, request: Request) -> Response:
        """Keep a file."""
        await self._open()
        if self._num_uploads >= self._service.settings.max_uploads:
            await discard_body(request.receive)
            message = "Too many files are being uploaded; retry later."
            raise ApiError(429, message, code="too_many_uploads", headers=LATER | CLOSE)
        self._num_uploads += 1  # at once: while the store is asked, others arrive
        try:
            return json_response((await self._received(request)).document())
        finally:
            self._num_uploads -= 1

    async def _received(self, request: Request) -> StoredFile:
        """The file in a request's form, stored."""
        settings, store, owner = self._service.settings, self._service.store, self._owner(request)
        num_files, num_bytes = await self._call(store.usage, owner)
        if num_files >= settings.max_files:
            await discard_body(request.receive)
            raise _too_many_files(num_files, settings.max_files)
        room = settings.max_stored_bytes - num_bytes
        file_id = new_id("file-")
        upload = Upload(
            request.headers.get("content-type", "").encode("latin-1"), store.incoming(file_id),
            min(settings.max_file_bytes, max(0, room)), self._state.settings.body_timeout_s)
        try:
            await upload.receive(request.receive)
        except OSError as error:
            logger.error("a file cannot be kept: %s", error)
            raise _full() from None
        except ApiError as error:
            if error.status == 413 and room < settings.max_file_bytes:
                raise _no_room(num_bytes, settings.max_stored_bytes) from None
            raise
        assert upload.filename is not None
        file = StoredFile(
            id=file_id, owner=owner, filename=upload.filename, purpose="batch", num_bytes=upload.num_bytes,
            created_at=int(time.time()))

        def add() -> None:
            """In the store's thread: other uploads of this key may have ended meanwhile."""
            num_files, num_bytes = store.usage(owner)
            if num_files >= settings.max_files:
                raise _too_many_files(num_files, settings.max_files)
            if num_bytes + file.num_bytes > settings.max_stored_bytes:
                raise _no_room(num_bytes, settings.max_stored_bytes)
            store.add_file(file)

        try:
            _check_form(upload.fields)
            await self._call(add)
        except ApiError:
            store.incoming(file_id).unlink(missing_ok=True)
            raise
        return file

    async def list_files(self, request: Request) -> Response:
        """A page of them, newest first unless asked otherwise."""
        limit, newest_first = limit_of(request, MAX_FILES_PAGE, MAX_FILES_PAGE), is_newest_first(request)
        after, purpose = request.query_params.get("after") or None, request.query_params.get("purpose")
        files: list[StoredFile] | None = []
        if self._service.is_open:
            files = await self._call(
                lambda: self._service.store.files(
                    self._owner(request), limit + 1, after, purpose, newest_first=newest_first))
        if files is None:
            raise _no_such("file", after or "", "after")
        return json_response(page_of([file.document() for file in files], limit))

    async def file(self, request: Request) -> Response:
        """The document of a file."""
        return json_response((await self._file(request)).document())

    async def content(self, request: Request) -> Response:
        """The bytes of a file."""
        file = await self._file(request)
        path = self._service.store.path_of(file.id)
        return FileResponse(path, media_type="application/octet-stream", filename=file.filename)

    async def delete_file(self, request: Request) -> Response:
        """Remove a file that no batch reads."""
        file = await self._file(request)

        def delete() -> bool:
            store = self._service.store
            return not store.is_needed(file.id) and (store.delete_file(file.owner, file.id) or True)

        if not await self._call(delete):
            raise bad_request("A batch that is not over reads this file; cancel it first.", "file_id", "file_in_use")
        return json_response({"id": file.id, "object": "file", "deleted": True})

    async def _file(self, request: Request) -> StoredFile:
        return await self._find_file(self._owner(request), request.path_params["file_id"], "file_id")

    async def _find_file(self, owner: str, file_id: str, param: str) -> StoredFile:
        found = None
        if self._service.is_open:
            found = await self._call(self._service.store.file, owner, file_id)
        if found is None:
            raise _no_such("file", file_id, param)
        return found

    # --- batches

    async def create_batch(self, request: Request) -> Response:
        """Begin a batch; its lines are validated later."""
        check_content_type(request.scope)
        await self._open()
        fields = parse_fields(parse_json(await self._body(request)), BatchFields, self._state.warnings)
        for name in ("input_file_id", "endpoint", "completion_window"):
            require(getattr(fields, name), name)
        assert fields.endpoint is not None and fields.completion_window is not None
        _check_batch(fields)
        self._state.check_offline()
        owner, now_s = self._owner(request), int(time.time())
        seconds = _window(fields.completion_window)
        file = await self._find_file(owner, fields.input_file_id or "", "input_file_id")
        if file.purpose != "batch":
            raise bad_request("The file's purpose must be 'batch'.", "input_file_id")
        batch = Batch(
            id=new_id("batch_"), owner=owner, endpoint=fields.endpoint, input_file_id=file.id, created_at=now_s,
            completion_window=fields.completion_window, expires_at=now_s + seconds, metadata=_metadata(fields))
        added = await self._call(self._add, batch)
        self._service.take_up(added)
        return self._batch_response(added)

    def _add(self, batch: Batch) -> Batch:
        """In the store's thread."""
        store, limit = self._service.store, self._service.settings.max_open_batches
        if sum(other.owner == batch.owner for other in store.open_batches()) >= limit:
            message = f"This key has {limit} batches that are not over, and may have no more; retry later."
            raise ApiError(429, message, code="too_many_batches", headers=LATER)
        if store.file(batch.owner, batch.input_file_id) is None:
            raise _no_such("file", batch.input_file_id, "input_file_id")
        return store.add_batch(batch)

    async def list_batches(self, request: Request) -> Response:
        """A page of them, newest first."""
        limit, after = limit_of(request, 20, MAX_PAGE), request.query_params.get("after") or None
        batches: list[Batch] | None = []
        if self._service.is_open:
            batches = await self._call(self._service.store.batches, self._owner(request), limit + 1, after)
        if batches is None:
            raise _no_such("batch", after or "", "after")
        return json_response(page_of([self._document(batch) for batch in batches], limit))

    async def batch(self, request: Request) -> Response:
        """The document of a batch."""
        return self._batch_response(await self._batch(request))

    async def cancel_batch(self, request: Request) -> Response:
        """Cancel a batch; its results stay."""
        await self._open()
        batch = await self._service.cancel(await self._batch(request))
        if batch.is_over or "cancelling" not in batch.reached_at:
            raise bad_request(f"A batch that is {batch.status} cannot be cancelled.", "batch_id", "invalid_state")
        return self._batch_response(batch)

    async def _batch(self, request: Request) -> Batch:
        batch_id, found = request.path_params["batch_id"], None
        if self._service.is_open:
            found = await self._call(self._service.store.batch, self._owner(request), batch_id)
        if found is None:
            raise _no_such("batch", batch_id, "batch_id")
        return found

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(self._state.settings.body_timeout_s):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > MAX_BODY_BYTES:
                        raise body_too_large(MAX_BODY_BYTES)
        except TimeoutError:
            raise ApiError(408, "The request body did not arrive in time.", code="request_timeout",
                           headers=CLOSE) from None  # fmt: skip
        except ClientDisconnect:
            raise ApiError(499, "The client went away.", code="client_disconnected") from None
        return bytes(body)

    def _document(self, batch: Batch) -> dict[str, Any]:
        return batch.document(self._service.estimated_completion_at(batch))

    def _batch_response(self, batch: Batch) -> Response:
        return json_response(self._document(batch))


def _check_form(fields: Mapping[str, str]) -> None:
    require(fields.get("purpose"), "purpose")
    if any(name.startswith("expires_after") for name in fields):
        raise refusal(field_table.FILE, "expires_after")
    if fields["purpose"] != "batch":
        raise bad_request("purpose must be 'batch': files serve for nothing else here.", "purpose")


def _check_batch(fields: BatchFields) -> None:
    if fields.endpoint not in ENDPOINTS:
        raise bad_request(
            f"The endpoint {str(fields.endpoint)[:100]!r} is not served in batches: {' and '.join(ENDPOINTS)} are.",
            "endpoint", "unsupported_endpoint")  # fmt: skip


def _metadata(fields: BatchFields) -> dict[str, str] | None:
    """A batch's metadata as texts; numbers and booleans as JSON writes them."""
    if fields.metadata is None:
        return None
    metadata = {key: _metadata_text(value) for key, value in fields.metadata.items()}
    if len(metadata) > MAX_METADATA or any(len(key) > 64 or len(value) > 512 for key, value in metadata.items()):
        message = f"metadata may have at most {MAX_METADATA} entries, of 64 and 512 characters."
        raise bad_request(message, "metadata")
    return metadata


def _metadata_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return encode(value).decode()
    raise bad_request("metadata values must be texts or numbers.", "metadata", "invalid_type")


def _window(text: str) -> int:
    try:
        return window_s(text)
    except ValueError as error:
        raise bad_request(str(error), "completion_window") from None


def _full() -> ApiError:
    return ApiError(507, "There is no room on the server for this.", code="storage_full")


def _too_many_files(num_files: int, max_files: int) -> ApiError:
    message = f"This key has {num_files} files, and may have {max_files}; delete some."
    return ApiError(429, message, code="too_many_files", headers=CLOSE)


def _no_room(num_bytes: int, max_bytes: int) -> ApiError:
    message = f"This key has {num_bytes} of {max_bytes} bytes of files; delete some."
    return ApiError(413, message, code="storage_limit_reached", headers=CLOSE)


def _no_such(kind: str, item_id: str, param: str) -> ApiError:
    """404, the same for a missing item and for one of another key."""
    return ApiError(404, f"There is no {kind} {item_id[:100]!r}.", param=param, code="not_found")

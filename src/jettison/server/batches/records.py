"""The stored records of files and batches, the states of a batch, and their documents in OpenAI's API. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from jettison.server.json_out import encode


class Status(StrEnum):
    """State of a batch, in OpenAI's words."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


FOLLOWS: Mapping[Status, frozenset[Status]] = {
    Status.VALIDATING: frozenset({Status.IN_PROGRESS, Status.FAILED, Status.CANCELLING}),
    Status.IN_PROGRESS: frozenset({Status.FINALIZING, Status.CANCELLING}),
    Status.FINALIZING: frozenset({Status.COMPLETED, Status.EXPIRED}),
    Status.CANCELLING: frozenset({Status.CANCELLED}),
    Status.FAILED: frozenset(),
    Status.COMPLETED: frozenset(),
    Status.EXPIRED: frozenset(),
    Status.CANCELLED: frozenset(),
}
"""Status -> the possible next ones."""

OUTPUT_SUFFIX, ERROR_SUFFIX = "_output.jsonl", "_error.jsonl"
"""Suffixes of the names of a batch's files."""

OVER = frozenset(status for status, following in FOLLOWS.items() if not following)

NEVER_RUN = {
    Status.EXPIRED: ("batch_expired", "This request was not finished before the completion window ended."),
    Status.CANCELLED: ("batch_cancelled", "This request was not finished before the batch was cancelled."),
}
"""Final status of a batch -> code and message of its lines without a result."""


def new_id(prefix: str) -> str:
    """``file-...`` or ``batch_...``: never derived from a client's values."""
    return f"{prefix}{secrets.token_hex(16)}"


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file. Its bytes lie under its id."""

    id: str
    owner: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int

    @property
    def is_of_errors(self) -> bool:
        """Whether it is a batch's error file."""
        return self.filename.endswith(ERROR_SUFFIX)

    def document(self) -> dict[str, Any]:
        """The document of OpenAI's API."""
        return {
            "id": self.id, "object": "file", "bytes": self.num_bytes, "created_at": self.created_at,
            "expires_at": None, "filename": self.filename, "purpose": self.purpose, "status": "processed",
            "status_details": None,
        }  # fmt: skip


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    """The error of a failed batch, or of a failed line."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """One batch. Times are seconds of the wall clock: they outlive the process."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    status: Status = Status.VALIDATING
    reached_at: dict[str, int] = {}
    """Status -> the time at which it was reached."""
    errors: list[BatchError] = []
    num_lines: int = 0
    num_runnable: int = 0
    """Lines without errors."""
    num_prompt_tokens: int = 0
    max_output_tokens: int = 0
    """Most output tokens of these lines."""
    output_file_id: str | None = None
    error_file_id: str | None = None
    seq: int = 0
    """The store's number of the batch; later batches have higher ones."""
    num_completed: int = 0
    num_failed: int = 0

    @property
    def is_over(self) -> bool:
        """Whether the batch is final."""
        return self.status in OVER

    @property
    def num_done(self) -> int:
        """Lines with a result."""
        return self.num_completed + self.num_failed

    @property
    def num_left(self) -> int:
        """Lines that can be computed and have no result yet."""
        num_bad = self.num_lines - self.num_runnable
        return max(0, self.num_runnable - max(0, self.num_done - num_bad))

    def to(self, status: Status, now_s: int, **changes: Any) -> Batch:
        """The batch in its next state. Raises ValueError for a status that cannot follow."""
        if status not in FOLLOWS[self.status]:
            raise ValueError(f"a batch that is {self.status} cannot become {status}")
        reached_at = {**self.reached_at, status: now_s}
        return msgspec.structs.replace(self, status=status, reached_at=reached_at, **changes)

    def document(self, estimated_completion_at: int | None) -> dict[str, Any]:
        """The document of OpenAI's API, with one additional field."""
        times = {f"{status}_at": self.reached_at.get(status) for status in Status if status is not Status.VALIDATING}
        errors = {"object": "list", "data": self.errors} if self.errors else None
        counts = {"total": self.num_lines, "completed": self.num_completed, "failed": self.num_failed}
        return {
            "id": self.id, "object": "batch", "endpoint": self.endpoint, "errors": errors,
            "input_file_id": self.input_file_id, "completion_window": self.completion_window, "status": self.status,
            "output_file_id": self.output_file_id if self.is_over else None,
            "error_file_id": self.error_file_id if self.is_over else None,
            "created_at": self.created_at, "expires_at": self.expires_at, **times, "request_counts": counts,
            "metadata": self.metadata, "estimated_completion_at": estimated_completion_at,
        }  # fmt: skip


class Result(msgspec.Struct, frozen=True):
    """The outcome of one line: its line of the output or error file, without the line end."""

    line: int
    is_error: bool
    body: bytes


def output_line(custom_id: str, request_id: str, answer: bytes) -> bytes:
    """A line of the output file. ``answer`` is JSON already."""
    response = {"status_code": 200, "request_id": request_id, "body": msgspec.Raw(answer)}
    return encode(
        {"id": new_id("batch_req_"), "custom_id": custom_id, "response": response, "error": None})


def error_line(custom_id: str | None, error: BatchError, status: int | None = None, answer: bytes = b"") -> bytes:
    """A line of the error file; with ``status`` and ``answer`` where the endpoint itself refused or failed."""
    response = None
    if status is not None:
        response = {"status_code": status, "request_id": new_id("req_"), "body": msgspec.Raw(answer)}
    return encode(
        {"id": new_id("batch_req_"), "custom_id": custom_id, "response": response, "error": error})

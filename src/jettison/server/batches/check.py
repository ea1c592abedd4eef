"""The check of a file's lines: each is parsed, checked by its endpoint, and tokenized.

It runs in a process of its own, at low priority (``check_process``). A file is up to a hundred thousand times the work
of a request, and a thread would delay streams: it holds the interpreter's lock, even while the kernel lets it wait.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec

from jettison.live.engine.api import EngineClient, EngineInfo
from jettison.server.batches.inputs import whole_cause
from jettison.server.batches.lines import Line, LineError, parse_line, read_lines
from jettison.server.batches.patience import prepared_patiently
from jettison.server.batches.records import BatchError, Result, error_line
from jettison.server.chat import ChatEndpoint
from jettison.server.chat_renderer import TemplateSettings
from jettison.server.completions import CompletionEndpoint
from jettison.server.endpoint import GenerationEndpoint
from jettison.server.errors import as_api_error
from jettison.server.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from jettison.server.settings import ServerSettings
from jettison.server.state import ServerState
from jettison.server.tokenizer import Tokenizer

ENDPOINT_OF: dict[str, type[GenerationEndpoint]] = {
    "/v1/chat/completions": ChatEndpoint, "/v1/completions": CompletionEndpoint,
}  # fmt: skip
TELL_EVERY = 100
"""Lines between two verdicts."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The input of a check."""

    path: str
    endpoint: str
    tokenizer_dir: str
    byte_tokens: int | None = None
    model_names: tuple[str, ...]
    max_model_len: int
    max_request_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_line_bytes: int
    max_lines: int
    default_chat_max_tokens: int | None
    default_completion_max_tokens: int
    sampling_defaults: SamplingDefaults = NO_DEFAULTS
    max_choices: int
    max_stops: int
    max_logprobs: int | None
    templates: TemplateSettings = TemplateSettings()


class Verdict(msgspec.Struct, kw_only=True):
    """The result of a check, reported in between, too, so that a check without a reader ends."""

    num_lines: int = 0
    num_runnable: int = 0
    num_prompt_tokens: int = 0
    max_output_tokens: int = 0
    is_last: bool = False
    failure: BatchError | None = None
    """The reason for which no line can run; None: some can."""
    bad_lines: list[BatchError] = []
    """Bad lines since the last verdict; ``results`` holds the same as lines of the error file."""
    results: list[Result] = []


def endpoint_for(job: Job) -> GenerationEndpoint:
    """The endpoint that would answer, without an engine behind it. Raises ModelError."""
    room = job.max_request_tokens
    info = EngineInfo(job.tokenizer_dir, job.max_model_len, room, room, job.vocab_size, job.eos_token_ids)
    settings = ServerSettings(
        model_names=job.model_names, default_chat_max_tokens=job.default_chat_max_tokens,
        default_completion_max_tokens=job.default_completion_max_tokens, max_choices=job.max_choices,
        max_stops=job.max_stops, max_logprobs=job.max_logprobs, sampling_defaults=job.sampling_defaults,
        templates=job.templates,
    )
    engine = cast(EngineClient, SimpleNamespace(info=info, state="ready"))
    tokenizer = Tokenizer.from_dir(Path(job.tokenizer_dir), templates=job.templates, byte_tokens=job.byte_tokens)
    state = ServerState(engine, tokenizer, settings)
    return ENDPOINT_OF[job.endpoint](state, thread_chars=1 << 62, is_offline=True)


async def check_file(job: Job, endpoint: GenerationEndpoint) -> AsyncIterator[Verdict]:
    """Verdicts so far, then the last one."""
    verdict, seen = Verdict(), _Seen()
    for number, raw in read_lines(Path(job.path), job.max_line_bytes):
        if verdict.num_lines == job.max_lines:
            verdict.failure = BatchError(code="too_many_lines", message=f"A batch has at most {job.max_lines} lines.")
            break
        verdict.num_lines += 1
        await _check_line(job, endpoint, seen, verdict, number, raw)
        if verdict.num_lines % TELL_EVERY == 0:
            yield verdict
            verdict.bad_lines, verdict.results = [], []
    if verdict.num_lines == 0:
        verdict.failure = BatchError(code="empty_file", message="The file has no lines.")
    elif verdict.num_runnable == 0 and verdict.failure is None:
        if (cause := whole_cause(Path(job.path))) is not None:
            verdict.failure = BatchError(code="invalid_file", message=cause, line=1)
        else:
            verdict.failure = BatchError(code="no_valid_lines", message="No line of the file can run.")
    verdict.is_last = True
    yield verdict


class _Seen:
    """The line of each ``custom_id``, by hash, as a file may have millions of bytes of ids."""

    def __init__(self) -> None:
        self._lines: dict[int, int] = {}

    def first_line(self, custom_id: str, number: int) -> int:
        return self._lines.setdefault(int.from_bytes(_digest(custom_id), "big"), number)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


async def _check_line(
    job: Job, endpoint: GenerationEndpoint, seen: _Seen, verdict: Verdict, number: int, raw: bytes | None
) -> None:
    custom_id, answered = None, None
    try:
        line = parse_line(raw, job.endpoint, job.max_line_bytes)
        custom_id = line.custom_id
        first = seen.first_line(custom_id, number)
        if first != number:
            raise LineError("duplicate_custom_id", f"custom_id stands in line {first} already.", "custom_id", custom_id)
        num_prompt_tokens, max_output_tokens = await _sizes(endpoint, line)
    except LineError as error:
        custom_id = custom_id or error.custom_id
        if error.custom_id is not None:
            seen.first_line(error.custom_id, number)
        told = error.at(number)
    except Exception as error:  # noqa: BLE001  # of one line; as_api_error logs what is not expected
        answered = as_api_error(error)
        told = BatchError(
            code=answered.code or "invalid_value", message=answered.message, line=number, param=answered.param)
    else:
        verdict.num_runnable += 1
        verdict.num_prompt_tokens += num_prompt_tokens
        verdict.max_output_tokens += max_output_tokens
        return
    verdict.bad_lines.append(told)
    status, answer = (None, b"") if answered is None else (answered.status, answered.body)
    verdict.results.append(Result(number, True, error_line(custom_id, told, status, answer)))


async def _sizes(endpoint: GenerationEndpoint, line: Line) -> tuple[int, int]:
    """Prompt tokens, and most output tokens, of a line. Raises ApiError."""
    plan, prompts, _ = await prepared_patiently(endpoint, line.body)
    generation = endpoint.generation(plan, prompts, 0, "")
    return generation.num_prompt_tokens, sum(job.request.params.max_tokens for job in generation.jobs)

"""``jettison batch run``: one file through an engine of its own, without a server, on the same code path as in a
server.

Results are kept in a folder beside the output until that is complete, so a killed run continues when it is started
again.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from jettison.config import EngineConfig
from jettison.errors import JettisonError, UserError
from jettison.live.engine.engine import Engine
from jettison.policy.refusal import why_not_offline
from jettison.report.output import check_writable
from jettison.server.batches.inputs import InputKind, kind_of, lines_of
from jettison.server.batches.lines import BOM, why_not_json
from jettison.server.batches.outcome import open_private
from jettison.server.batches.records import Batch, Status, StoredFile, new_id
from jettison.server.batches.service import BatchService
from jettison.server.batches.settings import ENDPOINTS
from jettison.server.batches.store import sync_folder
from jettison.server.chat_renderer import template_settings
from jettison.server.launch import batch_settings, sampling_defaults
from jettison.server.settings import ServerSettings
from jettison.server.state import ServerState
from jettison.server.structured import JsonDefaults
from jettison.server.tokenizer import Tokenizer

POLL_S = 0.2
NO_LIMIT = 1 << 62
NEVER_S = 1 << 33
"""A second of the wall clock, in the year 2242: no run ends by its window. In nanoseconds it is still an int64."""

Progress = Callable[[Batch, float | None], None]
"""Called with the batch's state, and the predicted seconds until its end (None: not known)."""


def error_path(out: Path) -> Path:
    """The file of lines without an answer."""
    return out.with_name(f"{out.stem}.errors{out.suffix or '.jsonl'}")


def work_folder(out: Path) -> Path:
    """The folder of work in progress."""
    return out.with_name(f"{out.name}.batch")


def _unfinished(target: Path) -> Path:
    """A file that is written, before it gets its name."""
    return target.with_name(f"{target.name}.part")


def run_alone(config: EngineConfig, path: Path, out: Path, progress: Progress) -> Batch:
    """Compute all lines of ``path``; write the answers to ``out``, and the failed lines to ``error_path(out)``.

    Raises UserError for an error of the caller, JettisonError where the engine fails. The returned batch tells the
    rest.
    """
    if (why_not := why_not_offline(config.offline.mode != "none")) is not None:
        raise UserError(why_not)
    _check_apart(path, out)
    check_writable(out)
    with asyncio.Runner() as runner:
        return runner.run(_run(config, path, out, progress))


def _check_apart(path: Path, out: Path) -> None:
    """Raises UserError where the run would replace or remove its own requests."""
    written = [file for target in (out, error_path(out)) for file in (target, _unfinished(target))]
    is_written = path.exists() and any(file.exists() and file.samefile(path) for file in written)
    if is_written or path.resolve().is_relative_to(work_folder(out).resolve()):
        raise UserError(f"{path} has the requests, and would be replaced or removed: name another output than {out}")


async def _run(config: EngineConfig, path: Path, out: Path, progress: Progress) -> Batch:
    kind = await asyncio.to_thread(input_kind, path)
    endpoint, digest = await asyncio.to_thread(lambda: (_endpoint_of(path, kind), _digest(path)))
    engine = Engine(config)
    settings = replace(
        batch_settings(config, engine.prepare()), folder=work_folder(out), is_made_at_once=True, max_lines=NO_LIMIT)
    server = ServerSettings(
        model_names=config.model.served_model_names, default_seed=config.model.seed,
        max_stops=config.server.max_stop_strings, max_logprobs=config.server.max_logprobs,
        sampling_defaults=sampling_defaults(config),
        json_defaults=JsonDefaults.of(config.server.structured_outputs_config),
        templates=template_settings(config.templates))
    tokenizer = Tokenizer.from_dir(
        settings.tokenizer_dir, max_template_chars=server.max_template_chars, templates=server.templates,
        byte_tokens=settings.byte_tokens)
    state = ServerState(engine, tokenizer, server)
    service = BatchService(state, settings)
    try:
        await service.start()
        batch = await _batch_for(service, path, kind, endpoint, digest)
        await engine.start()
        while not batch.is_over:
            if engine.state == "failed":
                raise JettisonError(f"the engine failed: {engine.failure}; run the same command again to go on")
            await asyncio.sleep(POLL_S)
            batch = await service.call(service.store.known_batch, batch.seq)
            progress(batch, service.seconds_left(batch))
        await asyncio.to_thread(_deliver, service, batch, out)
    finally:
        await service.close()
        await asyncio.to_thread(state.grammars.close)
        await engine.close()
    if batch.status in (Status.COMPLETED, Status.FAILED):  # what else there is, is in the folder alone
        await asyncio.to_thread(shutil.rmtree, settings.folder)
    return batch


async def _batch_for(service: BatchService, path: Path, kind: InputKind, endpoint: str, digest: str) -> Batch:
    """The batch in the folder already, or a new one; neither ever expires."""
    found = await service.call(service.store.batches, "", 1, None)
    if found:
        if found[0].metadata != {"input": digest}:
            raise UserError(f"{service.settings.folder} holds work on another input: remove it, or name another output")
        return await service.call(
            service.store.change, found[0].seq, lambda batch: msgspec.structs.replace(batch, expires_at=NEVER_S))

    def add() -> Batch:
        store, now_s = service.store, int(time.time())
        file_id = new_id("file-")
        _copy_lines(path, kind, store.incoming(file_id))
        store.add_file(StoredFile(
            id=file_id, owner="", filename=path.name, purpose="batch",
            num_bytes=store.incoming(file_id).stat().st_size, created_at=now_s))
        return store.add_batch(Batch(
            id=new_id("batch_"), owner="", endpoint=endpoint, input_file_id=file_id, completion_window="none",
            created_at=now_s, expires_at=NEVER_S, metadata={"input": digest}))

    batch = await service.call(add)
    service.take_up(batch)
    return batch


def input_kind(path: Path) -> InputKind:
    """The kind of the file. Raises UserError where it cannot be read, or holds no requests."""
    try:
        kind = kind_of(path)
    except IsADirectoryError:
        raise UserError(f"{path}: a folder, where a file of requests is expected") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not kind.is_taken and kind.cause is not None:
        raise UserError(f"{path} {kind.cause}")
    return kind


def _endpoint_of(path: Path, kind: InputKind) -> str:
    """The ``url`` of the first line with a known one; all lines must have the same. Without any, raises UserError with
    the fault of the first line."""
    why = None
    for number, raw in enumerate(lines_of(path, kind), 1):
        line = raw.removeprefix(BOM).strip()
        if not line:
            continue
        endpoint, reason = _url_in(line)
        if endpoint is not None:
            return endpoint
        why = why or f"line {number} {reason}"
    raise UserError(f"{path}: {why or 'the file has no lines'}")


def _url_in(line: bytes) -> tuple[str | None, str]:
    """A line's endpoint; else None, and the reason."""
    try:
        document = msgspec.json.decode(line)
    except RecursionError:
        return None, "is nested too deeply"
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return None, why_not_json(line) or f"is not valid JSON: {error}"
    if not isinstance(document, dict):
        return None, "is no JSON object"
    url, known = document.get("url"), " and ".join(ENDPOINTS)
    if url in ENDPOINTS:
        return str(url), ""
    if url is None:
        has = ", ".join(map(repr, list(document)[:5])) or "nothing"
        return None, f"has no url, but {has}: a request is custom_id, method, url ({known}) and body"[:300]
    return None, f"has the url {str(url)[:100]!r}: {known} are served, written like that"


def _copy_lines(path: Path, kind: InputKind, target: Path) -> None:
    """Copy the file unchanged, or its requests as lines where it is not in lines."""
    if kind.is_plain:
        shutil.copyfile(path, target)
        return
    try:
        with target.open("wb") as file:
            file.writelines(lines_of(path, kind))
    except UserError:
        target.unlink()
        raise


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _deliver(service: BatchService, batch: Batch, out: Path) -> None:
    """Put both files in place, each complete; without failed lines, an earlier run's error file is removed."""
    if batch.status is not Status.COMPLETED:
        return
    for file_id, target in ((batch.output_file_id, out), (batch.error_file_id, error_path(out))):
        written = _unfinished(target)
        written.unlink(missing_ok=True)
        if file_id is None and target != out:
            target.unlink(missing_ok=True)
            continue
        with open_private(written) as file:
            if file_id is not None:
                with service.store.path_of(file_id).open("rb") as source:
                    shutil.copyfileobj(source, file)
            file.flush()
            os.fsync(file.fileno())
        written.replace(target)
    sync_folder(out.absolute().parent)

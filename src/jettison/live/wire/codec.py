"""Bytes of the control channel: steps as raw arrays behind one struct header, everything else as msgspec.

Stateless. A step is the one record that is large and sent hundreds of times a second, so its arrays travel as
they lie in memory; its rare parts (sampling rows, prompt logprobs) follow as msgpack. Nothing here knows
sockets.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from jettison.core.ports import StepCompleted
from jettison.device.step import PromptLogprobsRow, RemoteKV, SamplingRow, StepInput
from jettison.live.wire import messages as m
from jettison.types import SampledToken, TokenLogprobs

MAX_LOGPROBS_BYTES = 16 << 20
"""Logprobs of one message, beside which everything else of it is small (its limit: ``live.wire.channel``)."""


class CodecError(ValueError):
    """Bytes that are not what they should be: peers of different versions, or a broken channel."""


# --- commands and events: one byte says which record follows. A coder of msgspec keeps no state between calls, so one
# of each serves the process.

_COMMANDS, _EVENTS = get_args(m.Command), get_args(m.Event)
_CODE_OF = {kind: bytes([code]) for code, kind in enumerate((*_COMMANDS, *_EVENTS))}
_encoder = msgspec.msgpack.Encoder()
_command_decoders = {_CODE_OF[kind][0]: msgspec.msgpack.Decoder(kind) for kind in _COMMANDS}
_event_decoders = {_CODE_OF[kind][0]: msgspec.msgpack.Decoder(kind) for kind in _EVENTS}


def encode(message: m.Command | m.Event) -> bytes:
    """Wire form of a command or an event."""
    return _CODE_OF[type(message)] + _encoder.encode(message)


def decode_command(data: bytes) -> m.Command:
    """Inverse of ``encode`` for a command. Raises CodecError."""
    command: m.Command = _decode(_command_decoders, data)
    return command


def decode_event(data: bytes) -> m.Event:
    """Inverse of ``encode`` for an event. Raises CodecError."""
    event: m.Event = _decode(_event_decoders, data)
    return event


def _decode(decoders: Mapping[int, msgspec.msgpack.Decoder[Any]], data: bytes) -> Any:
    decoder = decoders.get(data[0]) if data else None
    if decoder is None:
        raise CodecError(f"no message that is known here begins with {data[:1]!r}")
    try:
        return decoder.decode(memoryview(data)[1:])
    except msgspec.MsgspecError as error:
        raise CodecError(f"not a message: {error}") from None


# --- steps

_STEP_MAGIC = 0x4A535435  # "JST5": change the digit with the format
_STEP = struct.Struct("<I i q q q q i i i i i i i i i i i")
_NO_WORKER = _NO_STEP = _NONE = -1
_INT32 = np.dtype("<i4")


class _StepExtras(msgspec.Struct, array_like=True):
    sampling: list[SamplingRow]
    prompt_logprobs: list[PromptLogprobsRow]
    remote: list[RemoteKV] = []


_extras_decoder = msgspec.msgpack.Decoder(_StepExtras)


def encode_step(step: StepInput) -> bytes:
    """Wire form of a step: header, token_ids, query_lens, context_lens, sample_rows, block_tables, extras."""
    tables = step.block_tables
    num_rows, width = tables.shape if tables.ndim == 2 else (len(step.query_lens), 0)
    if not num_rows == len(step.query_lens) == len(step.context_lens):
        raise ValueError(f"step {step.step_id}: {num_rows} block tables, {len(step.query_lens)} query lengths and "
                         f"{len(step.context_lens)} context lengths")
    header = _STEP.pack(
        _STEP_MAGIC,
        step.group_id,
        step.step_id,
        step.epoch,
        _NO_STEP if step.follows_step is None else step.follows_step,
        _NO_STEP if step.resumes_step is None else step.resumes_step,
        step.layer_lo,
        step.layer_hi,
        _NO_WORKER if step.prev_worker is None else step.prev_worker,
        _NO_WORKER if step.next_worker is None else step.next_worker,
        len(step.token_ids),
        num_rows,
        width,
        len(step.sample_rows),
        step.safepoint_layers,
        _NONE if step.sheds_from is None else step.sheds_from,
        _NONE if step.most_layers is None else step.most_layers,
    )
    parts = [header]
    for array in (step.token_ids, step.query_lens, step.context_lens, step.sample_rows, tables):
        parts.append(array.astype(_INT32, order="C", copy=False).tobytes())
    if step.sampling or step.prompt_logprobs or step.remote:
        parts.append(_encoder.encode(_StepExtras(step.sampling, step.prompt_logprobs, step.remote)))
    return b"".join(parts)


def decode_step(payload: bytes | bytearray | memoryview) -> StepInput:
    """The step in ``payload``. Its arrays are writable views of one copy of the payload. Raises CodecError."""
    # One copy of some tens of KiB buys aligned, writable arrays, which torch takes as they are.
    buffer = bytearray(payload)
    if len(buffer) < _STEP.size:
        raise CodecError(f"a step of {len(buffer)} bytes has no header")
    (magic, group_id, step_id, epoch, follows_step, resumes_step, layer_lo, layer_hi, prev_worker, next_worker,
     num_tokens, num_rows, width, num_samples, safepoint_layers, sheds_from, most_layers) = _STEP.unpack_from(buffer)
    if magic != _STEP_MAGIC:
        raise CodecError(f"step magic {magic:#x}; this worker speaks {_STEP_MAGIC:#x}")
    if min(num_tokens, num_rows, width, num_samples, safepoint_layers) < 0:
        raise CodecError(f"step {step_id}: negative length in the header")
    num_ints = num_tokens + 2 * num_rows + num_samples + num_rows * width
    extras_at = _STEP.size + 4 * num_ints
    if extras_at > len(buffer):
        raise CodecError(f"step {step_id}: header promises {extras_at} bytes, {len(buffer)} came")
    ints: npt.NDArray[np.int32] = np.frombuffer(buffer, dtype=_INT32, count=num_ints, offset=_STEP.size)
    extras = _decode_extras(step_id, memoryview(buffer)[extras_at:])
    rows_at = num_tokens
    samples_at = rows_at + 2 * num_rows
    tables_at = samples_at + num_samples
    return StepInput(
        step_id=step_id,
        epoch=epoch,
        group_id=group_id,
        layer_lo=layer_lo,
        layer_hi=layer_hi,
        prev_worker=None if prev_worker == _NO_WORKER else prev_worker,
        next_worker=None if next_worker == _NO_WORKER else next_worker,
        token_ids=ints[:rows_at],
        query_lens=ints[rows_at : rows_at + num_rows],
        context_lens=ints[rows_at + num_rows : samples_at],
        sample_rows=ints[samples_at:tables_at],
        block_tables=ints[tables_at:].reshape(num_rows, width),
        sampling=extras.sampling,
        prompt_logprobs=extras.prompt_logprobs,
        remote=extras.remote,
        safepoint_layers=safepoint_layers,
        follows_step=None if follows_step == _NO_STEP else follows_step,
        sheds_from=None if sheds_from == _NONE else sheds_from,
        resumes_step=None if resumes_step == _NO_STEP else resumes_step,
        most_layers=None if most_layers == _NONE else most_layers,
    )


def _decode_extras(step_id: int, data: memoryview) -> _StepExtras:
    if not data:
        return _StepExtras([], [])
    try:
        return _extras_decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise CodecError(f"step {step_id}: bad sampling rows: {error}") from None


def step_command(step: StepInput) -> m.Step:
    """The command that runs ``step``."""
    return m.Step(encode_step(step))


def step_answer(done: m.StepDone, max_part_bytes: int = MAX_LOGPROBS_BYTES) -> list[m.StepLogprobs | m.StepDone]:
    """The messages that tell ``done``: itself, or first its logprobs in parts of at most about ``max_part_bytes``.

    Clients decide how many logprobs a step yields, so no configuration keeps them under the limit of a message. One
    token's are never divided: 16 bytes for each word of the vocabulary at most.
    """
    completed = done.completed
    entries = [(False, i, token.logprobs) for i, token in enumerate(completed.tokens) if token.logprobs is not None]
    entries += [(True, row, entry) for row, entries_of_row in completed.prompt_logprobs.items()
                for entry in entries_of_row]
    if sum(_logprobs_bytes(entry) for _, _, entry in entries) <= max_part_bytes:
        return [done]
    parts: list[m.StepLogprobs] = []
    room = 0
    for is_prompt, key, entry in entries:
        size = _logprobs_bytes(entry)
        if not parts or size > room:
            parts.append(m.StepLogprobs(done.worker_id, done.step_id, {}, {}))
            room = max_part_bytes
        room -= size
        if is_prompt:
            parts[-1].prompt_logprobs.setdefault(key, []).append(entry)
        else:
            parts[-1].logprobs[key] = entry
    tokens = [SampledToken(token.token_id) for token in completed.tokens]
    return [*parts, msgspec.structs.replace(done, completed=completed._replace(tokens=tokens, prompt_logprobs={}))]


def _logprobs_bytes(logprobs: TokenLogprobs) -> int:
    """Upper bound as msgpack, with its key."""
    return 32 + 16 * len(logprobs.top)


def with_parts(completed: StepCompleted, parts: Sequence[m.StepLogprobs]) -> StepCompleted:
    """Inverse of ``step_answer``."""
    tokens = list(completed.tokens)
    prompt_logprobs = {row: list(entries) for row, entries in completed.prompt_logprobs.items()}
    for part in parts:
        for place, entry in part.logprobs.items():
            tokens[place] = tokens[place]._replace(logprobs=entry)
        for row, entries in part.prompt_logprobs.items():
            prompt_logprobs.setdefault(row, []).extend(entries)
    return completed._replace(tokens=tokens, prompt_logprobs=prompt_logprobs)

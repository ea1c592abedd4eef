"""Bytes of the control channel: steps as raw arrays behind one struct header, everything else as msgspec.

Stateless. A step is the one record that is large and sent hundreds of times a second, so its arrays travel as
they lie in memory; its rare parts (sampling rows, prompt logprobs) follow as msgpack. Nothing here knows
sockets.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from jettison.device.step import PromptLogprobsRow, RemoteKV, SamplingRow, StepInput, StepOutput
from jettison.live.wire import messages as m
from jettison.memory.layout import LayoutOffer, LayoutResult, LayoutSpec, RetainedKV
from jettison.types import LayerRange, TokenLogprobs, WorkerId

MAX_LOGPROBS_BYTES = 16 << 20
"""Logprobs of one message, beside which everything else of it is small (its limit: ``live.wire.channel``)."""


class CodecError(ValueError):
    """Bytes that are not what they should be: peers of different versions, or a broken channel."""


# --- commands and events: msgspec coders keep no state between calls, so one of each serves the process.

_command_encoder = msgspec.msgpack.Encoder()
_command_decoder = msgspec.msgpack.Decoder(m.Command)
_event_decoder = msgspec.msgpack.Decoder(m.Event)


def encode_command(command: m.Command) -> bytes:
    """Wire form of a command."""
    return _command_encoder.encode(command)


def decode_command(data: bytes | memoryview) -> m.Command:
    """Raises CodecError."""
    try:
        return _command_decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise CodecError(f"not a command: {error}") from None


def encode_event(event: m.Event) -> bytes:
    """Wire form of an event."""
    return _command_encoder.encode(event)


def decode_event(data: bytes | memoryview) -> m.Event:
    """Raises CodecError."""
    try:
        return _event_decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise CodecError(f"not an event: {error}") from None


# --- steps

_STEP_MAGIC = 0x4A535433  # "JST3": change the digit with the format
_STEP = struct.Struct("<I i q q i i i i i i i i i")
_NO_WORKER = -1
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
        step.layer_lo,
        step.layer_hi,
        _NO_WORKER if step.prev_worker is None else step.prev_worker,
        _NO_WORKER if step.next_worker is None else step.next_worker,
        len(step.token_ids),
        num_rows,
        width,
        len(step.sample_rows),
        step.safepoint_layers,
    )
    parts = [header]
    for array in (step.token_ids, step.query_lens, step.context_lens, step.sample_rows, tables):
        parts.append(array.astype(_INT32, order="C", copy=False).tobytes())
    if step.sampling or step.prompt_logprobs or step.remote:
        parts.append(_command_encoder.encode(_StepExtras(step.sampling, step.prompt_logprobs, step.remote)))
    return b"".join(parts)


def decode_step(payload: bytes | bytearray | memoryview) -> StepInput:
    """The step in ``payload``. Its arrays are writable views of one copy of the payload. Raises CodecError."""
    # One copy of some tens of KiB buys aligned, writable arrays, which torch takes as they are.
    buffer = bytearray(payload)
    if len(buffer) < _STEP.size:
        raise CodecError(f"a step of {len(buffer)} bytes has no header")
    (magic, group_id, step_id, epoch, layer_lo, layer_hi, prev_worker, next_worker,
     num_tokens, num_rows, width, num_samples, safepoint_layers) = _STEP.unpack_from(buffer)
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


def _logprobs_record(logprobs: TokenLogprobs) -> m.SampledRecord:
    return m.SampledRecord(logprobs.token_id, logprobs.logprob, logprobs.rank, list(logprobs.top))


def logprobs_from_record(record: m.SampledRecord) -> TokenLogprobs:
    """Inverse of what ``step_done`` does with logprobs."""
    return TokenLogprobs(record.token_id, record.logprob, record.rank, tuple(record.top))


def step_done(
    worker_id: WorkerId, output: StepOutput, compute_ns: int, span: tuple[int, int] = (0, 0), input_delay_ns: int = 0,
    remote_wait_ns: int = 0,
) -> m.StepDone:
    """The event that tells ``output``; ``span`` is when the stage began and ended it, on the worker's clock."""
    return m.StepDone(
        worker_id,
        output.step_id,
        [token.token_id for token in output.tokens],
        compute_ns,
        {i: _logprobs_record(token.logprobs) for i, token in enumerate(output.tokens) if token.logprobs is not None},
        {row: [_logprobs_record(entry) for entry in entries] for row, entries in output.prompt_logprobs.items()},
        *span,
        input_delay_ns,
        remote_wait_ns,
    )


def step_answer(done: m.StepDone, max_part_bytes: int = MAX_LOGPROBS_BYTES) -> list[m.StepLogprobs | m.StepDone]:
    """The messages that tell ``done``: itself, or first its logprobs in parts of at most about ``max_part_bytes``.

    Clients decide how many logprobs a step yields, so no configuration keeps them under the limit of a message. One
    token's are never divided: 16 bytes for each word of the vocabulary at most.
    """
    entries = [(False, i, record) for i, record in done.logprobs.items()]
    entries += [(True, row, record) for row, records in done.prompt_logprobs.items() for record in records]
    if sum(_record_bytes(record) for _, _, record in entries) <= max_part_bytes:
        return [done]
    parts: list[m.StepLogprobs] = []
    room = 0
    for is_prompt, key, record in entries:
        size = _record_bytes(record)
        if not parts or size > room:
            parts.append(m.StepLogprobs(done.worker_id, done.step_id, {}, {}))
            room = max_part_bytes
        room -= size
        if is_prompt:
            parts[-1].prompt_logprobs.setdefault(key, []).append(record)
        else:
            parts[-1].logprobs[key] = record
    return [*parts, msgspec.structs.replace(done, logprobs={}, prompt_logprobs={})]


def _record_bytes(record: m.SampledRecord) -> int:
    """Upper bound as msgpack, with its key."""
    return 32 + 16 * len(record.top)


def with_parts(done: m.StepDone, parts: Sequence[m.StepLogprobs]) -> m.StepDone:
    """Inverse of ``step_answer``."""
    logprobs = dict(done.logprobs)
    prompt_logprobs = {row: list(records) for row, records in done.prompt_logprobs.items()}
    for part in parts:
        logprobs |= part.logprobs
        for row, records in part.prompt_logprobs.items():
            prompt_logprobs.setdefault(row, []).extend(records)
    return msgspec.structs.replace(done, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


# --- layouts


def layout_to_record(spec: LayoutSpec) -> m.LayoutSpecRecord:
    """Wire form of a layout; shards sorted, so that equal specs have equal bytes."""
    retained = [m.RetainedKVRecord(kv.layers.lo, kv.layers.hi, list(kv.block_ids)) for kv in spec.retained]
    return m.LayoutSpecRecord(sorted(spec.shards), spec.kv_layers.lo, spec.kv_layers.hi, retained)


def layout_from_record(record: m.LayoutSpecRecord) -> LayoutSpec:
    """Inverse of ``layout_to_record``."""
    retained = tuple(
        RetainedKV(LayerRange(kv.layer_lo, kv.layer_hi), tuple(kv.block_ids)) for kv in record.retained
    )
    return LayoutSpec(frozenset(record.shards), LayerRange(record.layer_lo, record.layer_hi), retained)


def layout_offered(worker_id: WorkerId, call_id: int, offer: LayoutOffer) -> m.LayoutOffered:
    """The event that tells ``offer``."""
    return m.LayoutOffered(worker_id, call_id, offer.version, offer.evacuate_from_block, offer.capacity_blocks)


def offer_from_event(event: m.LayoutOffered) -> LayoutOffer:
    """Inverse of ``layout_offered``."""
    return LayoutOffer(event.version, event.evacuate_from_block, event.capacity_blocks)


def layout_applied(worker_id: WorkerId, call_id: int, result: LayoutResult, memory: dict[str, int]) -> m.LayoutApplied:
    """The event that tells ``result``."""
    return m.LayoutApplied(
        worker_id,
        call_id,
        result.version,
        result.capacity_blocks,
        result.bytes_to_kv,
        result.num_map_calls,
        result.duration_ns,
        sorted(result.intact_shards),
        sorted(result.missing_shards),
        memory,
    )


def result_from_event(event: m.LayoutApplied) -> LayoutResult:
    """Inverse of ``layout_applied``."""
    return LayoutResult(
        event.version,
        event.capacity_blocks,
        event.bytes_to_kv,
        event.num_map_calls,
        event.duration_ns,
        frozenset(event.intact_shards),
        frozenset(event.missing_shards),
    )

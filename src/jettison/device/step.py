"""Records of one forward step of one stage, as sent to a worker and back.

Plain arrays (numpy) in msgspec structs: no torch, no request objects, no state. A step is self-contained, so a worker
can run it after any event (restart, drop, migration); but for one that was planned ahead (``follows_step``), which
follows one other step or fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from jettison.types import SampledToken, TokenLogprobs

Int32s = npt.NDArray[np.int32]

_WIRE_INT32 = np.dtype("<i4")


def pack_ints(values: Sequence[int] | Int32s) -> bytes:
    """Token ids or counts in the form of a ``SamplingRow``: little-endian int32."""
    return np.asarray(values, dtype=_WIRE_INT32).tobytes()


def unpack_ints(data: bytes) -> Int32s:
    """Inverse of ``pack_ints``; read-only. Raises ValueError for bytes that are no whole int32s."""
    ints: Int32s = np.frombuffer(data, dtype=_WIRE_INT32)
    return ints


_IDS, _BITS = b"\0", b"\1"


def pack_token_set(token_ids: Sequence[int] | Int32s) -> bytes:
    """A set of token ids in the form of a ``SamplingRow``: a list or, where that is shorter, a bit for each id.

    Never longer than the largest id / 8 + 2 bytes, so a set takes at most a bit for each token of the vocabulary.
    """
    ids = np.asarray(token_ids, dtype=_WIRE_INT32)
    is_in = np.zeros(int(ids.max(initial=-1)) + 1, dtype=np.bool_)
    is_in[ids] = True
    if 4 * np.count_nonzero(is_in) <= (len(is_in) + 7) // 8:
        return _IDS + np.flatnonzero(is_in).astype(_WIRE_INT32).tobytes()
    return _BITS + np.packbits(is_in, bitorder="little").tobytes()


def bits_token_set(bits: bytes) -> bytes:
    """A set of token ids in the same form, from a bit for each id (the lowest bit of a byte first)."""
    return _BITS + bits


def set_bits(data: bytes) -> npt.NDArray[np.uint8] | None:
    """The bytes of a set that is written as bits; None where it is a list. Raises ValueError for other bytes."""
    if data[:1] not in (_IDS, _BITS):
        raise ValueError(f"a set of token ids begins with {data[:1]!r}")
    return np.frombuffer(data, dtype=np.uint8, offset=1) if data[:1] == _BITS else None


def token_mask(data: bytes, vocab_size: int) -> npt.NDArray[np.bool_]:
    """[vocab_size]: which tokens a set has. Raises ValueError for other bytes, IndexError for ids beyond."""
    if data[:1] == _BITS:
        bits = np.frombuffer(data, dtype=np.uint8, offset=1)
        return np.unpackbits(bits, count=vocab_size, bitorder="little").view(np.bool_)
    mask = np.zeros(vocab_size, dtype=np.bool_)
    mask[unpack_token_set(data)] = True
    return mask


def token_words(data: bytes, vocab_size: int) -> npt.NDArray[np.int32]:
    """[ceil(vocab_size / 32)]: a bit for each token of a set, the lowest first. Raises as ``token_mask`` does."""
    num_bytes = -(-vocab_size // 32) * 4
    if (bits := set_bits(data)) is None:
        bits = np.packbits(token_mask(data, 8 * num_bytes), bitorder="little")
    words = np.zeros(num_bytes, dtype=np.uint8)
    words[: len(bits)] = bits[:num_bytes]
    return words.view(_WIRE_INT32)


def is_in_token_set(data: bytes, token_id: int) -> bool:
    """Whether a set has a token. Raises ValueError for other bytes."""
    if (bits := set_bits(data)) is None:
        return token_id in unpack_token_set(data)
    return token_id < 8 * len(bits) and bool(bits[token_id // 8] >> (token_id % 8) & 1)


def is_set_inside(data: bytes, vocab_size: int) -> bool:
    """Whether a set has no ids beyond a vocabulary; an empty one is none. Bits beyond are nothing."""
    if data[:1] != _IDS:
        return True
    ids = unpack_ints(data[1:])
    return not len(ids) or bool(ids.min() >= 0 and ids.max() < vocab_size)


def unpack_token_set(data: bytes) -> npt.NDArray[np.integer]:
    """Inverse of ``pack_token_set``: the ids, ascending. Raises ValueError for other bytes."""
    kind, rest = data[:1], data[1:]
    if kind == _IDS:
        return unpack_ints(rest)
    if kind == _BITS:
        return np.flatnonzero(np.unpackbits(np.frombuffer(rest, dtype=np.uint8), bitorder="little"))
    raise ValueError(f"a set of token ids begins with {kind!r}")


class GrammarRow(msgspec.Struct, array_like=True):
    """What a row's grammar needs beside the model's vocabulary to say which tokens may come next."""

    request_id: str
    """Whose state it is: a device may keep that from step to step, and can make it anew at any time."""
    text: str
    """See ``types.Grammar``; empty: as in an earlier step of the same request on this worker."""
    begins_after: str
    num_before: int
    """Tokens of the output before ``output_ids``; 0 where the text is sent."""
    output_ids: bytes
    """``pack_ints`` of the output's tokens from there on, in order."""
    end_token_ids: tuple[int, ...]


class SamplingRow(msgspec.Struct, array_like=True):
    """Sampling of one row that is not plain greedy."""

    row: int
    """Index into the step's rows."""
    position: int
    """Position (index in prompt + output) of the token to draw: with ``seed`` the key of the draw."""
    seed: int
    temperature: float
    top_p: float
    top_k: int
    """0 = all tokens."""
    min_p: float
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int = -1
    """Number of alternatives to report; -1 = no logprobs for this row."""
    banned_token_ids: tuple[int, ...] = ()
    """Tokens that may not be drawn here: stop tokens before ``min_tokens``, last tokens of bad words."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    prompt_ids: bytes = b""
    """``pack_ints`` of the distinct tokens of the prompt; only sent with a repetition penalty."""
    output_ids: bytes = b""
    """``pack_ints`` of the distinct tokens of the output so far; only sent with a penalty."""
    output_counts: bytes = b""
    """``pack_ints`` of the number of occurrences of each of ``output_ids`` in the output."""
    allowed_token_ids: bytes = b""
    """``pack_token_set`` of the only tokens that may be drawn; empty: all."""
    logprob_token_ids: tuple[int, ...] = ()
    """With ``logprobs``: report these tokens instead of the likeliest ones."""
    grammar: GrammarRow | None = None


class RowMasks(Protocol):
    """What the grammars of a step's rows allow, which is being worked out beside the step."""

    def applied(self, sampling: Sequence[SamplingRow], vocab_size: int) -> tuple[list[SamplingRow], dict[int, int]]:
        """Sampling rows of the step, with masks among their allowed tokens; and for each row that cannot be sampled, or
        not yet, what stands in place of its token (``types.LATER_TOKEN_ID``). Waits for what is nearly there. Raises
        GrammarLostError."""
        ...


class PromptLogprobsRow(msgspec.Struct, array_like=True):
    """Ask for logprobs of the prompt tokens that follow each position of this row's chunk."""

    row: int
    num_top: int
    target_token_ids: tuple[int, ...]
    """The token at ``context_len + i + 1`` for each chunk position i that has one in the prompt
    (so one fewer on the prompt's last chunk)."""


class RemoteKV(msgspec.Struct, array_like=True):
    """Leading KV of one row that is not (or not yet) at this stage, and the worker that attends to it (KunServe v1
    section 4.2)."""

    row: int
    worker: int
    """The worker that holds it, retained."""
    layer_lo: int
    layer_hi: int
    num_tokens: int
    """Positions 0..num_tokens-1, in whole blocks."""
    block_ids: list[int]
    """Their blocks in that worker's arenas."""


class StepInput(msgspec.Struct, kw_only=True, eq=False):
    """One microbatch for one stage. R rows (one chunk of one request each), T tokens in all.

    Rows are ordered as the core planned them. ``token_ids`` is only read by the first stage and
    ``sample_rows``/``sampling`` only by the last one.
    """

    step_id: int
    """Unique in the cluster; also tags the activations of this microbatch."""
    epoch: int = 0
    """The group's epoch: a worker refuses steps of an older one."""
    group_id: int = 0
    layer_lo: int
    layer_hi: int
    prev_worker: int | None = None
    """None on the first stage."""
    next_worker: int | None = None
    """None on the last stage, which samples."""
    token_ids: Int32s
    """int32 [T]; empty on later stages, and without rows that the step resumes. With ``follows_step``, -1 - i is the
    i-th token that that step samples."""
    query_lens: Int32s
    """int32 [R]: tokens of each row in this step."""
    context_lens: Int32s
    """int32 [R]: tokens of each row already in the KV cache before this step."""
    block_tables: Int32s
    """int32 [R, max_blocks]: block ids in this worker's arenas, padded with 0."""
    sample_rows: Int32s
    """int32 [n]: rows that are sampled, at their last token, ascending."""
    sampling: list[SamplingRow] = []
    """Rows of ``sample_rows`` that are not plain greedy; all others are argmax."""
    prompt_logprobs: list[PromptLogprobsRow] = []
    remote: list[RemoteKV] = []
    """KV at other workers that this stage's rows attend to; for one row and layer at most one entry."""
    safepoint_layers: int = 0
    """A first stage may abandon the step before every so many layers; 0: nowhere."""
    follows_step: int | None = None
    """The step before it on this worker, where it was planned before the tokens of that one were known."""
    sheds_from: int | None = None
    """Row from which on a first stage keeps the rows where it would abandon the step; the others run on. None: it
    abandons the whole step."""
    resumes_step: int | None = None
    """The step that has shed this one's rows from ``sheds_from`` on, of which the first stage keeps the hidden states:
    it begins with the others, which these join at the layer that they have reached."""
    most_layers: int | None = None
    """Of a step that resumes: layers after which the first stage keeps those rows again; None: they run to their
    end."""
    masks: RowMasks | None = None
    """Of rows with grammars, on the device that samples; they do not travel."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.query_lens.sum())

    def leading(self, num_rows: int) -> StepInput:
        """The step of its first rows alone, which sheds none."""
        num_samples = int(np.searchsorted(self.sample_rows, num_rows))
        query_lens = self.query_lens[:num_rows]
        step = StepInput(
            step_id=self.step_id, epoch=self.epoch, group_id=self.group_id, layer_lo=self.layer_lo,
            layer_hi=self.layer_hi, prev_worker=self.prev_worker, next_worker=self.next_worker,
            token_ids=self.token_ids[: int(query_lens.sum())], query_lens=query_lens,
            context_lens=self.context_lens[:num_rows], block_tables=self.block_tables[:num_rows],
            sample_rows=self.sample_rows[:num_samples], sampling=[s for s in self.sampling if s.row < num_rows],
            prompt_logprobs=[p for p in self.prompt_logprobs if p.row < num_rows],
            remote=[r for r in self.remote if r.row < num_rows],
        )  # fmt: skip
        step.masks = self.masks
        return step


class Shed(NamedTuple):
    """What a first stage has made of a step that has shed rows."""

    num_layers: int
    """Layers of the stage that the rows have behind them."""
    result: Any
    """Of the other rows, as of a step of them alone; None where there are none."""


class StepOutput(msgspec.Struct, eq=False):
    """The output of a step's last stage."""

    step_id: int
    tokens: list[SampledToken]
    """One per ``sample_rows`` entry, in its order."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    """Row -> logprobs of the row's prompt tokens in ``target_token_ids`` order."""
    compute_ns: int = 0
    routed: tuple[int, int] = (0, 0)
    """See ``model.routing.Routed``."""


class Running(Protocol):
    """A step that has been started on a device."""

    def poll(self) -> bool:
        """Whether the step is over. Never waits for the device; what the step needs of the caller's thread to go on is
        done here."""
        ...

    @property
    def is_launched(self) -> bool:
        """The device needs nothing more of the caller's thread: polls only look whether it is over."""
        ...

    def wait(self, most_s: float) -> None:
        """Leave the core and the interpreter's lock to other threads for so long, or less: called where ``poll`` has
        said no and the caller has nothing else to do. Returns at once where the step needs the caller to go on."""
        ...

    def result(self) -> Any:
        """What the step has made, once; waits until it is over. Raises what made it fail."""
        ...

    has_prepared: bool
    """Whether it has also prepared later ones, by captures of its layers: steps like it take less time from now on.
    Known once it is over."""

    @property
    def may_be_followed(self) -> bool:
        """Whether another step may be started before this one is over: all of this one is launched, and the device
        knows its tokens before the host does."""
        ...


class Ended:
    """A step that was over when it had been started."""

    __slots__ = ("_result",)
    is_launched = True
    has_prepared = False

    def __init__(self, result: Any) -> None:
        self._result = result

    def poll(self) -> bool:
        """It is."""
        return True

    def wait(self, most_s: float) -> None:
        """There is nothing to wait for."""

    def result(self) -> Any:
        """See ``Running.result``."""
        return self._result

    @property
    def may_be_followed(self) -> bool:
        """It is over."""
        return False

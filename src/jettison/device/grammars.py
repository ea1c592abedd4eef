"""Which tokens a row's grammar allows next: masks, made on a thread of their own while a step's layers run.

A state is a parser (llguidance's) that has been fed the output's tokens. It belongs to its request and is kept here
from step to step, but it can be made anew from what a row says: so it follows its request through every move of memory.
What a row counts on and is not here any more fails the step (GrammarLostError), which then runs again with all of it. A
row whose mask is not there when the step has been computed is sampled in a later one (``types.LATER_TOKEN_ID``): a
grammar that is compiled, a vocabulary that is read, keep no other row waiting.

Not here: how a mask changes logits (``sampler``), what clients may ask (``server.structured``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from jettison.device.markers import Marker
from jettison.device.model.end_tokens import read_end_tokens
from jettison.device.model.vocabulary import Vocabulary, gently, read_vocabulary
from jettison.device.step import GrammarRow, SamplingRow, bits_token_set, pack_ints, token_mask, unpack_ints
from jettison.errors import GrammarLostError
from jettison.types import GRAMMAR_FAILED_TOKEN_ID, LATER_TOKEN_ID, Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

Bits = npt.NDArray[np.uint32]

LIMITS = {
    "initial_lexer_fuel": 2_000_000, "step_lexer_fuel": 400_000, "step_max_items": 50_000, "max_items_in_row": 2_000,
    "max_lexer_states": 50_000, "max_grammar_size": 500_000, "verbose_errors": False,
}  # fmt: skip
"""Of one grammar here: llguidance's own, but for its lexer: twice its fuel (front ends compile with half of that, so
that what compiled there compiles here), and a fifth of its states, which take one to two KiB each."""

STACK_BYTES = 16 << 20
"""Of the threads here: four times what front ends compile with, so that what did not overflow there does not here."""
LEAST_WAIT_S = 0.005
"""A step waits for masks at its end as long as it has computed until then, at least so long: running a row again costs
a small model more than that in messages."""
KEPT_STEPS = 256
"""A state that no step has asked for in so many is given up: its request has ended, or waits elsewhere. The encoder
sends the text again where it has sent nothing for half as many."""
MAX_COMPILED_BYTES = 16 << 20
"""Of grammars that are kept compiled, by ``compiled_bytes``: many requests have the same one. They lie outside of the
device's budget, and compiling one again takes less than a step or two (docs/performance.md)."""
_NOT_YET = object()


class _Words:
    """A vocabulary as ``LLTokenizer`` reads it. Where a grammar leaves only one text, llguidance asks for its tokens
    and allows no others: those of the model's own tokenizer or, where that changes the text, the longest ones."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, end_token_id: int) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = sorted(vocabulary.special_ids)
        self.eos_token_id = end_token_id
        self._special_ids = vocabulary.special_ids
        self._encode = vocabulary.encode
        self._ids: dict[bytes, int] = {}
        for at, word in enumerate(gently(self.tokens)):
            if word and at not in vocabulary.special_ids:
                self._ids[word] = at
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        try:
            ids = self._encode(data.decode())
        except UnicodeDecodeError:
            return self._longest_first(data)
        if b"".join(self.tokens[token] for token in ids) == data and self._special_ids.isdisjoint(ids):
            return ids
        return self._longest_first(data)

    def _longest_first(self, data: bytes) -> list[int]:
        """As far as the vocabulary goes."""
        ids: list[int] = []
        at = 0
        while at < len(data):
            lengths = range(min(self._longest, len(data) - at), 0, -1)
            length = next((length for length in lengths if data[at : at + length] in self._ids), 0)
            if not length:
                break
            ids.append(self._ids[data[at : at + length]])
            at += length
        return ids


def make_tokenizer(vocabulary: Vocabulary, end_token_ids: Sequence[int], vocab_size: int) -> LLTokenizer:
    """What grammars are compiled for. ``vocab_size``: of the model, which may have more tokens than the tokenizer, or
    fewer."""
    from llguidance import LLTokenizer  # on the thread that reads the vocabulary, as steps run

    return LLTokenizer(
        _Words(vocabulary, end_token_ids[0]),  # type: ignore[arg-type]  # it is told by its attributes
        n_vocab=max(vocab_size, len(vocabulary.tokens)),
        eos_token=list(end_token_ids),
        slices=LLTokenizer.json_slices(),
    )


def compiled_bytes(text: str) -> int:
    """What a grammar takes once it is compiled, at most: with llguidance 1.9 texts of 54 to 125 characters took 47 to
    134 KiB with their first mask, one of 1,847 took 368 KiB, one of 15,324 took 1.8 MB; other vocabularies less."""
    return (128 << 10) + 128 * len(text)


class GrammarFailure(Exception):
    """A grammar went beyond its bounds, or allows nothing; its request alone fails."""


def compile_grammar(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    """At its beginning; where it cannot be compiled, it says so itself (``is_error``)."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**LIMITS)  # type: ignore[arg-type]
    return LLMatcher(tokenizer, text, log_level=0, limits=limits)


class GrammarState:
    """One request's grammar and how far its output is in it."""

    def __init__(self, tokenizer: LLTokenizer, row: GrammarRow, compiled: LLMatcher | None = None) -> None:
        """For an output of which nothing is known yet; ``advance`` tells of it. ``compiled``: the grammar, for this
        state alone; None: it is compiled when it is first asked for."""
        self.text = row.text
        self._tokenizer = tokenizer
        self._marker = Marker(tokenizer, row.begins_after) if row.begins_after else None
        """None: the grammar has begun."""
        self._end_token_ids = frozenset(row.end_token_ids)
        self._matcher = compiled
        self._tokens: list[int] = []
        self._has_ended = False
        self._mask: bytes | object | None = _NOT_YET
        """As of ``mask_behind``, for the output as it has been told."""
        self.mask_s = 0.0
        """Seconds that the last mask took."""
        self.is_owed = False
        """A step has asked for its mask, and it has not been made since."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the output that it has been told."""
        return len(self._tokens)

    @property
    def matcher(self) -> LLMatcher:
        """Compiled when it is first asked for. Raises GrammarFailure."""
        if self._matcher is None:
            self._matcher = compile_grammar(self._tokenizer, self.text)
            self._check()
        return self._matcher

    def is_before(self, num_before: int, output_ids: bytes) -> bool:
        """Whether its tokens are the beginning of an output, of which those from ``num_before`` on are given."""
        num_tokens, output = len(self._tokens), unpack_ints(output_ids)
        if not num_before <= num_tokens <= num_before + len(output):
            return False
        return self._tokens[num_before:num_tokens] == output[: num_tokens - num_before].tolist()

    def mask_behind(self, row: GrammarRow) -> bytes | None:
        """A bit for each token that may come behind the row's output, which is told to it; None: all may. One that was
        made is kept until the output is longer: it may have come too late for its step. Raises GrammarFailure."""
        more = unpack_ints(row.output_ids)[self.num_tokens - row.num_before :].tolist()
        if more or self._mask is _NOT_YET:
            begin_s = time.perf_counter()
            self._mask = _NOT_YET
            self.advance(more)
            self._mask = self._make_mask()
            self.mask_s = time.perf_counter() - begin_s
        return self._mask  # type: ignore[return-value]

    def urgency(self, row: GrammarRow) -> tuple[bool, bool, float]:
        """The states of a step in the order in which their masks are made: those that are there first, then those that
        are owed, so that each has its turn, and the cheap ones first, as what is expensive keeps others waiting."""
        is_there = self._mask is not _NOT_YET and row.num_before + len(unpack_ints(row.output_ids)) == self.num_tokens
        return not is_there, not self.is_owed, self.mask_s

    def _make_mask(self) -> bytes | None:
        bits: Bits = np.zeros((self._tokenizer.vocab_size + 31) // 32, dtype=np.uint32)
        if self._marker is not None:
            refused = self._refused(self._marker)
            if not refused:
                return None
            bits[:] = ~bits
            for token in refused:
                bits[token // 32] &= ~np.uint32(1 << token % 32)
        else:
            self.fill(bits)
        return bits.tobytes()

    def advance(self, tokens: Sequence[int]) -> None:
        """The output has got these tokens. Raises GrammarFailure where they are none that the grammar allows."""
        at = 0
        while at < len(tokens) and self._marker is not None:
            behind = self._marker.behind(tokens[at])
            if behind is not None:
                self._begin(behind)
            self._tokens.append(tokens[at])
            at += 1
        self._tokens += tokens[at:]
        for token in tokens[at:]:
            if self._has_ended:
                return
            if token in self._end_token_ids and self.matcher.is_accepting():
                self._has_ended = True
            elif not self.matcher.consume_token(token):
                self._check()
                raise GrammarFailure(f"token {token} is not allowed here")

    def _refused(self, marker: Marker) -> list[int]:
        """Tokens that would complete the marker with text behind it that the grammar does not take."""
        return [token for behind, tokens in marker.endings() if self._spelled(behind) is None for token in tokens]

    def _begin(self, behind: bytes) -> None:
        """The grammar begins with what the marker's last token has behind it. Raises GrammarFailure, each time that it
        is told the token again: then nothing has changed."""
        spelled = self._spelled(behind)
        if spelled is None or (spelled and not self.matcher.consume_tokens(spelled)):
            self._check()
            raise GrammarFailure(f"{behind!r} is not allowed behind the marker")
        self._marker = None

    def _spelled(self, behind: bytes) -> list[int] | None:
        """Tokens of a text that the grammar may begin with; None where it may not. White space before the grammar's own
        text is the thoughts', where the grammar does not take it. Raises GrammarFailure."""
        for text in (behind, behind.lstrip()):
            spelled = self._tokenizer.tokenize_bytes(text) if text else []
            if self._tokenizer.decode_bytes(spelled) != text:
                continue
            if not spelled or self.matcher.validate_tokens(spelled) == len(spelled):
                return spelled
            self._check()
        return None

    def fill(self, bits: Bits) -> None:
        """Write the mask of the next token into zeros. Raises GrammarFailure."""
        if not self._has_ended and not self.matcher.is_stopped():
            self.matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._check()
        is_end_allowed = self._has_ended or self.matcher.is_accepting()
        for token in self._end_token_ids:
            word, bit = divmod(token, 32)
            bits[word] = bits[word] | np.uint32(1 << bit) if is_end_allowed else bits[word] & ~np.uint32(1 << bit)
        if not bits.any():
            raise GrammarFailure("no token is allowed here")

    def _check(self) -> None:
        if self._matcher is not None and self._matcher.is_error():
            raise GrammarFailure(" ".join(self._matcher.get_error().split())[:200])


class Masks:
    """Of one step, on their way: a ``RowMasks``."""

    def __init__(self) -> None:
        self._begin_s = time.perf_counter()
        self._lost: GrammarLostError | None = None
        self._made: dict[int, bytes | GrammarFailure | None] = {}
        """Row -> what is known of it, written by the thread as it goes on; None: all tokens are allowed."""
        self._parts: list[Future[Any]] = []
        self._built: dict[int, Future[_Built]] = {}
        """Row -> its state, which was not there when the step began."""
        self._is_over = False
        """What is made now comes too late."""

    def lose(self, why: str) -> None:
        """The step cannot be sampled."""
        self._lost = GrammarLostError(why)

    def await_masks(self, known: Sequence[_Known], thread: ThreadPoolExecutor) -> None:
        """Have these rows filled in, in this order."""
        self._parts.append(thread.submit(self._make, known))

    def _make(self, known: Sequence[_Known]) -> None:
        """For as long as the step waits: a later one asks for the rest anew, and is not to wait behind this one."""
        for row, grammar, state in known:
            if self._is_over:
                return
            try:
                self._made[row] = state.mask_behind(grammar)
                state.is_owed = False
            except BaseException as error:  # noqa: BLE001 - a panic of the library too; it concerns this row only
                self._made[row] = _as_failure(error)

    def await_state(self, row: int, built: Future[_Built]) -> None:
        """The row's mask comes with its state: soon, or in a later step, as compiling may take seconds."""
        self._built[row] = built

    def applied(self, sampling: Sequence[SamplingRow], vocab_size: int) -> tuple[list[SamplingRow], dict[int, int]]:
        """See ``RowMasks``. Where a client's own list leaves none of a grammar's tokens, the grammar alone counts."""
        if self._lost is not None:
            raise self._lost
        wait(self._parts, max(LEAST_WAIT_S, time.perf_counter() - self._begin_s))
        wait(self._built.values(), LEAST_WAIT_S)
        self._is_over = True
        rows: list[SamplingRow] = []
        instead: dict[int, int] = {}
        for row in sampling:
            if row.grammar is None:
                rows.append(row)
                continue
            mask = self._mask(row.row)
            if isinstance(mask, GrammarFailure):
                logger.warning("the grammar of row %d: %s", row.row, mask)
                instead[row.row] = GRAMMAR_FAILED_TOKEN_ID
            elif mask is _NOT_YET:
                instead[row.row] = LATER_TOKEN_ID
            given = row.allowed_token_ids
            allowed = _both(given, mask, vocab_size) if isinstance(mask, bytes) else given
            rows.append(msgspec.structs.replace(row, grammar=None, allowed_token_ids=allowed))
        return rows, instead

    def _mask(self, row: int) -> bytes | GrammarFailure | object | None:
        built = self._built.get(row)
        if built is None:
            return self._made.get(row, _NOT_YET)
        return built.result().mask if built.done() and not built.cancelled() else _NOT_YET


def _both(allowed: bytes, mask: bytes, vocab_size: int) -> bytes:
    if not allowed:
        return bits_token_set(mask)
    both = token_mask(allowed, vocab_size) & token_mask(bits_token_set(mask), vocab_size)
    return bits_token_set(np.packbits(both, bitorder="little").tobytes() if both.any() else mask)


class _Built(NamedTuple):
    """A state that was made for a row, and the row's mask."""

    state: GrammarState | None
    """None where it failed."""
    mask: bytes | GrammarFailure | None


class _Kept(NamedTuple):
    """A request's state, which may be under way."""

    text: str
    built: Future[_Built]
    step: int
    """The last step that asked for it, by the count of ``Grammars``."""


_Known = tuple[int, GrammarRow, GrammarState]
"""A row, and its state."""


class Grammars:
    """The states of one device. Cheap to make: the vocabulary is read with the first grammar.

    Two threads, so that a grammar that is compiled, or a long output that is read again, keeps no other's mask waiting.
    """

    def __init__(self, read: Callable[[], Vocabulary], vocab_size: int) -> None:
        """``read``: the model's vocabulary."""
        self._read = read
        self._vocab_size = vocab_size
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}
        self._compiled: OrderedDict[tuple[str, tuple[int, ...]], LLMatcher] = OrderedDict()
        """Grammars at their beginnings, of which states are copies. Of the thread that makes states."""
        self._num_compiled_bytes = 0
        self._states: OrderedDict[str, _Kept] = OrderedDict()
        """By request, the least lately asked for first."""
        self._num_steps = 0
        self._threads: tuple[ThreadPoolExecutor, ThreadPoolExecutor] | None = None
        """For masks, and for states."""

    def begin(self, sampling: Sequence[SamplingRow]) -> Masks | None:
        """Begin to make the masks of a step; None where no row of it has a grammar."""
        asked = [(row.row, row.grammar) for row in sampling if row.grammar is not None]
        if not asked:
            return None
        if self._threads is None:
            self._threads = _thread("masks"), _thread("grammars")
        self._num_steps += 1
        masks, known = Masks(), list[_Known]()
        for row, grammar in asked:
            found = self._find(grammar)
            if found is None:
                masks.lose(f"the grammar of request {grammar.request_id} is not kept here")
            elif isinstance(found, GrammarState):
                known.append((row, grammar, found))
            else:
                masks.await_state(row, found)
        if known:
            known.sort(key=lambda entry: entry[2].urgency(entry[1]))
            for _, _, state in known:
                state.is_owed = True
            masks.await_masks(known, self._threads[0])
        while self._states and next(iter(self._states.values())).step < self._num_steps - KEPT_STEPS:
            self._states.popitem(last=False)[1].built.cancel()
        return masks

    def close(self) -> None:
        """End the threads. Idempotent."""
        threads, self._threads = self._threads, None
        for thread in threads or ():
            thread.shutdown(cancel_futures=True)

    def _find(self, row: GrammarRow) -> GrammarState | Future[_Built] | None:
        """The request's state, or that it is being made; None where it would have to be, and the row says too
        little."""
        kept = self._states.pop(row.request_id, None)
        if kept is not None and row.text in ("", kept.text):
            found: GrammarState | Future[_Built] | None = kept.built  # a text that came again changes nothing
            if kept.built.done() and (state := kept.built.result().state) is not None:
                found = state if state.is_before(row.num_before, row.output_ids) else None
            if found is not None:
                self._states[row.request_id] = kept._replace(step=self._num_steps)
                return found
        if kept is not None:
            kept.built.cancel()
        if not row.text or row.num_before or self._threads is None:
            return None
        built = self._threads[1].submit(self._build, row)
        self._states[row.request_id] = _Kept(row.text, built, self._num_steps)
        return built

    def _build(self, row: GrammarRow) -> _Built:
        """A new state, told of the whole output."""
        try:
            tokenizer = self._tokenizer(row.end_token_ids)
            state = GrammarState(tokenizer, row, self._copy(tokenizer, row))
            return _Built(state, state.mask_behind(row))
        except BaseException as error:  # noqa: BLE001 - a panic of the library too; it concerns this request only
            return _Built(None, _as_failure(error))

    def _copy(self, tokenizer: LLTokenizer, row: GrammarRow) -> LLMatcher:
        """The row's grammar at its beginning, compiled once for all requests that have it."""
        key = row.text, row.end_token_ids
        compiled = self._compiled.pop(key, None)
        if compiled is None:
            compiled = compile_grammar(tokenizer, row.text)
            self._num_compiled_bytes += compiled_bytes(row.text)
        self._compiled[key] = compiled
        while self._num_compiled_bytes > MAX_COMPILED_BYTES:
            (text, _), _ = self._compiled.popitem(last=False)
            self._num_compiled_bytes -= compiled_bytes(text)
        return compiled.deep_copy()

    def _tokenizer(self, end_token_ids: tuple[int, ...]) -> LLTokenizer:
        tokenizer = self._tokenizers.get(end_token_ids)
        if tokenizer is None:
            if not end_token_ids:
                raise GrammarFailure("the model has no end token")
            tokenizer = make_tokenizer(self._read(), end_token_ids, self._vocab_size)
            self._tokenizers[end_token_ids] = tokenizer
        return tokenizer


def _as_failure(error: BaseException) -> GrammarFailure:
    if isinstance(error, GrammarFailure):
        return error
    logger.error("a grammar cannot be followed", exc_info=error)
    return GrammarFailure(str(error))


def _thread(name: str) -> ThreadPoolExecutor:
    """One thread with a stack of its own size: grammars are compiled by recursion."""
    before = threading.stack_size(STACK_BYTES)
    try:
        pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        pool.submit(int).result()  # starts it
    finally:
        threading.stack_size(before)
    return pool


def output_masks(
    model_dir: Path, vocab_size: int, grammar: Grammar, output: Sequence[int]
) -> npt.NDArray[np.bool_]:
    """[tokens, vocab_size]: which tokens the grammar allows at each place of an output, each worked out from the
    tokens before it alone. Raises ModelError, GrammarFailure."""
    ends = tuple(sorted(read_end_tokens(model_dir, vocab_size).ids))
    tokenizer = make_tokenizer(read_vocabulary(model_dir), ends, vocab_size)
    masks = np.ones((len(output), vocab_size), dtype=np.bool_)
    for place in range(len(output)):
        row = GrammarRow("", grammar.text, grammar.begins_after, 0, pack_ints(output[:place]), ends)
        mask = GrammarState(tokenizer, row).mask_behind(row)
        if mask is not None:
            masks[place] = token_mask(bits_token_set(mask), vocab_size)
    return masks

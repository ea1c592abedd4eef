"""Which tokens a row's grammar allows next: masks, made on a thread of their own while a step's layers run.

A state is a parser (llguidance's) that has been fed the output's tokens. It belongs to its request and is kept here
from step to step, but it can be made anew from what a row says: so it follows its request through every move of memory.
What a row counts on and is not here any more fails the step (GrammarLostError), which then runs again with all of it.

Not here: how a mask changes logits (``sampler``), what clients may ask (``server.structured``).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import llguidance
import msgspec
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from jettison.device.model.vocabulary import Vocabulary
from jettison.device.step import GrammarRow, Int32s, SamplingRow, bits_token_set, token_mask, unpack_ints
from jettison.errors import GrammarLostError

logger = logging.getLogger(__name__)

Bits = npt.NDArray[np.uint32]

LIMITS = {
    "initial_lexer_fuel": 2_000_000, "step_lexer_fuel": 400_000, "step_max_items": 50_000, "max_items_in_row": 2_000,
    "max_lexer_states": 50_000, "max_grammar_size": 500_000, "verbose_errors": False,
}  # fmt: skip
"""Of one grammar here: llguidance's own, but for its lexer: twice its fuel (front ends compile with half of that, so
that what compiled there compiles here), and a fifth of its states, which take one to two KiB each."""


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
        self._ids = {word: at for at, word in enumerate(self.tokens) if word and at not in vocabulary.special_ids}
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
    return LLTokenizer(
        _Words(vocabulary, end_token_ids[0]),  # type: ignore[arg-type]  # it is told by its attributes
        n_vocab=max(vocab_size, len(vocabulary.tokens)),
        eos_token=list(end_token_ids),
        slices=LLTokenizer.json_slices(),
    )


class GrammarFailure(Exception):
    """A grammar went beyond its bounds, or allows nothing; its request alone fails."""


class GrammarState:
    """One request's grammar and how far its output is in it."""

    def __init__(self, tokenizer: LLTokenizer, row: GrammarRow) -> None:
        """For an output of which nothing is known yet; ``advance`` tells of it."""
        self.text = row.text
        self._tokenizer = tokenizer
        self._begins_after = row.begins_after
        self._end_token_ids = frozenset(row.end_token_ids)
        self._matcher: LLMatcher | None = None
        self._tokens: list[int] = []
        self._has_begun = not row.begins_after
        self._has_ended = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the output that it has been told."""
        return len(self._tokens)

    @property
    def matcher(self) -> LLMatcher:
        """Compiled when it is first asked for. Raises GrammarFailure."""
        if self._matcher is None:
            self._matcher = LLMatcher(
                self._tokenizer, self.text, log_level=0, limits=llguidance.LLParserLimits(**LIMITS))  # type: ignore[arg-type]
            self._check()
        return self._matcher

    @property
    def is_free(self) -> bool:
        """Whether the grammar has not begun."""
        return not self._has_begun

    @property
    def has_ended(self) -> bool:
        """Whether an end token has been drawn behind it."""
        return self._has_ended

    def is_before(self, num_before: int, output: Int32s) -> bool:
        """Whether its tokens are the beginning of an output, of which those from ``num_before`` on are given."""
        num_tokens = len(self._tokens)
        if not num_before <= num_tokens <= num_before + len(output):
            return False
        return self._tokens[num_before:] == output[: num_tokens - num_before].tolist()

    def advance(self, tokens: Sequence[int]) -> None:
        """The output has got these tokens. Raises GrammarFailure where they are none that the grammar allows."""
        at = 0
        while at < len(tokens) and not self._has_begun:
            self._tokens.append(tokens[at])
            at += 1
            self._has_begun = tuple(self._tokens[-len(self._begins_after) :]) == self._begins_after
        bound = tokens[at:]
        self._tokens += bound
        for token in bound:
            if self._has_ended:
                return
            if token in self._end_token_ids and self.matcher.is_accepting():
                self._has_ended = True
            elif not self.matcher.consume_token(token):
                self._check()
                raise GrammarFailure(f"token {token} is not allowed here")

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

    def __init__(self, made: Future[dict[int, bytes | GrammarFailure]]) -> None:
        self._made = made

    def applied(self, sampling: Sequence[SamplingRow], vocab_size: int) -> tuple[list[SamplingRow], frozenset[int]]:
        """See ``RowMasks``. Where a client's own list leaves none of a grammar's tokens, the grammar alone counts."""
        made = self._made.result()
        rows, failed = [], set()
        for row in sampling:
            mask = made.get(row.row)
            if isinstance(mask, GrammarFailure):
                logger.warning("the grammar of row %d: %s", row.row, mask)
                failed.add(row.row)
            elif mask is not None:
                row = msgspec.structs.replace(
                    row, grammar=None, allowed_token_ids=_both(row.allowed_token_ids, mask, vocab_size))
            rows.append(row)
        return rows, frozenset(failed)


def _both(allowed: bytes, mask: bytes, vocab_size: int) -> bytes:
    if not allowed:
        return bits_token_set(mask)
    both = token_mask(allowed, vocab_size) & token_mask(bits_token_set(mask), vocab_size)
    return bits_token_set(np.packbits(both, bitorder="little").tobytes() if both.any() else mask)


class Grammars:
    """The states of one device. Cheap to make: the vocabulary is read with the first grammar."""

    def __init__(self, read: Callable[[], Vocabulary], vocab_size: int, max_states: int) -> None:
        """``read``: the model's vocabulary; ``max_states``: the least lately used ones beyond these are given up."""
        self._read = read
        self._vocab_size = vocab_size
        self._max_states = max_states
        self._vocabulary: Vocabulary | None = None
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}
        self._states: OrderedDict[str, GrammarState] = OrderedDict()
        self._thread: ThreadPoolExecutor | None = None

    def begin(self, sampling: Sequence[SamplingRow]) -> Masks | None:
        """Begin to make the masks of a step; None where no row of it has a grammar."""
        asked = [(row.row, row.grammar) for row in sampling if row.grammar is not None]
        if not asked:
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        return Masks(self._thread.submit(self._make, asked))

    def close(self) -> None:
        """End the thread. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()

    def _make(self, asked: list[tuple[int, GrammarRow]]) -> dict[int, bytes | GrammarFailure]:
        made: dict[int, bytes | GrammarFailure] = {}
        for row, grammar in asked:
            try:
                mask = self._mask(grammar)
                if mask is not None:
                    made[row] = mask
            except GrammarFailure as failure:
                self._states.pop(grammar.request_id, None)
                made[row] = failure
        while len(self._states) > self._max_states:
            self._states.popitem(last=False)
        return made

    def _mask(self, row: GrammarRow) -> bytes | None:
        """A bit for each token; None: all are allowed."""
        tokenizer = self._tokenizer(row.end_token_ids)
        state = self._state(row, tokenizer)
        output = unpack_ints(row.output_ids)
        state.advance(output[state.num_tokens - row.num_before :].tolist())
        if state.is_free:
            return None
        bits: Bits = np.zeros((tokenizer.vocab_size + 31) // 32, dtype=np.uint32)
        state.fill(bits)
        return bits.tobytes()

    def _state(self, row: GrammarRow, tokenizer: LLTokenizer) -> GrammarState:
        """The request's state, as far as it is right; a new one where the row has all that it needs."""
        state = self._states.get(row.request_id)
        if state is not None and (not row.text or row.text == state.text):
            if state.is_before(row.num_before, unpack_ints(row.output_ids)):
                self._states.move_to_end(row.request_id)
                return state
        if not row.text or row.num_before:
            raise GrammarLostError(f"the grammar of request {row.request_id} is not kept here")
        self._states.pop(row.request_id, None)
        state = self._states[row.request_id] = GrammarState(tokenizer, row)
        return state

    def _tokenizer(self, end_token_ids: tuple[int, ...]) -> LLTokenizer:
        tokenizer = self._tokenizers.get(end_token_ids)
        if tokenizer is None:
            if not end_token_ids:
                raise GrammarFailure("the model has no end token")
            if self._vocabulary is None:
                self._vocabulary = self._read()
            tokenizer = make_tokenizer(self._vocabulary, end_token_ids, self._vocab_size)
            self._tokenizers[end_token_ids] = tokenizer
        return tokenizer



"""Masks of grammars: what follows them is valid, states can be made anew, and what is lost is told."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import psutil
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jettison.device import grammars as grammars_module
from jettison.device.grammars import KEPT_STEPS, GrammarFailure, Grammars, GrammarState, make_tokenizer
from jettison.device.model.byte_tokenizer import byte_level_tokenizer, write_tokenizer
from jettison.device.model.vocabulary import Vocabulary, read_vocabulary
from jettison.device.step import GrammarRow, SamplingRow, bits_token_set, pack_ints, token_mask
from jettison.errors import GrammarLostError
from jettison.server.grammar_texts import grammar_text
from jettison.types import GRAMMAR_FAILED_TOKEN_ID, LATER_TOKEN_ID

VOCAB_SIZE = 600
END = (257, 260)
SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["é", "中", None, 2]}},
     "required": ["b"], "additionalProperties": False},
    {"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 1, "maxItems": 3},
    {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"const": "no"}]},
    {"$ref": "#/$defs/tree", "$defs": {"tree": {
        "type": "object", "properties": {"v": {"type": "boolean"}, "next": {"$ref": "#/$defs/tree"}},
        "required": ["v"], "additionalProperties": False}}},
    {"type": "string", "pattern": "^[a-f]{2}-[0-9]+$"},
]  # fmt: skip


def byte_level(folder: Path) -> None:
    """As models of a byte-level vocabulary have it, and as GGUF folders write it."""
    write_tokenizer(folder, VOCAB_SIZE, 512)


def sentencepiece(folder: Path) -> None:
    """Llama 2's: spaces are marks, bytes are tokens of their own, a leading space goes."""
    words = [f"<0x{byte:02X}>" for byte in range(256)] + ["<s>", "</s>", "<unk>", "<x>", "<end>"]
    words += ["▁", "▁no", '{"', '":', "▁{", "true", "false", *map(chr, range(32, 127)), "é", "▁é"]
    vocab = {word: at for at, word in enumerate(dict.fromkeys(words))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_tokens([AddedToken("▁▁", special=False, normalized=False)])  # Gemma's runs of spaces
    finish(backend, folder)


def metaspace(folder: Path) -> None:
    """T5's kind: a mark before each word, which decoding takes away at the beginning."""
    words = [f"<{byte}>" for byte in range(256)] + ["<s>", "</s>", "<unk>", "<x>", "<end>"]
    words += ["▁", "▁no", '{"', '":', *map(chr, range(32, 127)), "é", "中"]
    vocab = {word: at for at, word in enumerate(dict.fromkeys(words))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    finish(backend, folder)


def finish(backend: Tokenizer, folder: Path) -> None:
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>", "<unk>", "<end>")])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


@pytest.fixture(params=[byte_level, sentencepiece, metaspace], ids=lambda write: write.__name__)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    request.param(tmp_path)
    return tmp_path


class Drawing:
    """Draws tokens at random of those that a row's masks allow."""

    def __init__(self, vocabulary: Vocabulary, text: str, seed: int = 0, begins_after: str = "") -> None:
        self.vocabulary = vocabulary
        self.text = text
        self.begins_after = begins_after
        self.output: list[int] = []
        self.rng = random.Random(seed)

    def row(self, *, anew: bool = False, overlap: int = 3) -> SamplingRow:
        anew = anew or not self.output
        before = 0 if anew else max(0, len(self.output) - overlap)
        grammar = GrammarRow("r", self.text if anew else "", self.begins_after, before,
                             pack_ints(self.output[before:]), END)
        return SamplingRow(0, 0, 0, 0.0, 1.0, 0, 0.0, grammar=grammar)

    def mask(self, grammars: Grammars, *, anew: bool = False) -> np.ndarray[Any, Any] | None:
        row = self.row(anew=anew)
        while True:
            masks = grammars.begin([row])
            assert masks is not None
            (allowed,), instead = masks.applied([row], VOCAB_SIZE)
            if LATER_TOKEN_ID not in instead.values():
                break
        assert not instead
        return token_mask(allowed.allowed_token_ids, VOCAB_SIZE) if allowed.allowed_token_ids else None

    def step(self, grammars: Grammars) -> bool:
        """Whether an end token was drawn."""
        mask = self.mask(grammars)
        ids = list(range(VOCAB_SIZE)) if mask is None else np.flatnonzero(mask).tolist()
        # Now and then the end, where it is allowed, so that open texts end.
        ends = [token for token in END if token in ids]
        self.output.append(self.rng.choice(ends if ends and self.rng.random() < 0.3 else ids))
        return self.output[-1] in END

    @property
    def said(self) -> str:
        return b"".join(self.vocabulary.tokens[token] for token in self.output if token not in END).decode()


def make(folder: Path) -> tuple[Vocabulary, Grammars]:
    vocabulary = read_vocabulary(folder)
    return vocabulary, Grammars(lambda: vocabulary, VOCAB_SIZE)


def test_the_vocabulary_is_what_decoding_adds(folder: Path) -> None:
    vocabulary, backend = read_vocabulary(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    anchor = backend.token_to_id("x")
    before = backend.decode([anchor], skip_special_tokens=False)
    for token, data in enumerate(vocabulary.tokens):
        try:
            text = data.decode()
        except UnicodeDecodeError:
            continue
        if token not in vocabulary.special_ids:
            assert backend.decode([anchor, token], skip_special_tokens=False) == before + text, token


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: next(iter(schema)))
def test_what_ends_is_valid(folder: Path, schema: Any) -> None:
    vocabulary, grammars = make(folder)
    text = grammar_text("json", json.dumps(schema), "[ ]{0,2}", {})
    num_ended = 0
    for seed in range(12):
        drawing = Drawing(vocabulary, text, seed)
        for _ in range(120):
            if drawing.step(grammars):
                jsonschema.validate(json.loads(drawing.said), schema)
                num_ended += 1
                break
        grammars.close()
        _, grammars = make(folder)
    grammars.close()
    assert num_ended > 4


def test_a_state_made_anew_allows_the_same(folder: Path) -> None:
    """Also at a device that has never seen the request, and at one that has seen some of it."""
    vocabulary, grammars = make(folder)
    others = make(folder)[1]
    drawing = Drawing(vocabulary, grammar_text("json", json.dumps(SCHEMAS[0]), None, {}), 3)
    for at in range(40):
        mine = drawing.mask(grammars)
        assert np.array_equal(mine, drawing.mask(make(folder)[1], anew=True))
        if at % 3 == 0:
            assert np.array_equal(mine, drawing.mask(others, anew=True))
        if drawing.step(grammars):
            break
    grammars.close()
    others.close()


def test_what_is_not_kept_is_told(folder: Path) -> None:
    vocabulary, grammars = make(folder)
    drawing = Drawing(vocabulary, grammar_text("regex", "[a-z]{9}", None, {}))
    for _ in range(3):
        drawing.step(grammars)
    other = make(folder)[1]
    with pytest.raises(GrammarLostError):
        drawing.mask(other)
    row = drawing.row(overlap=0)
    assert row.grammar is not None
    gap = GrammarRow("r", "", "", 7, pack_ints([97]), END)
    row.grammar = gap
    masks = grammars.begin([row])
    assert masks is not None
    with pytest.raises(GrammarLostError):
        masks.applied([row], VOCAB_SIZE)
    assert drawing.mask(grammars, anew=True) is not None
    grammars.close()
    other.close()


def test_end_tokens_are_allowed_where_it_may_end_and_alone_behind_it(folder: Path) -> None:
    vocabulary, grammars = make(folder)
    drawing = Drawing(vocabulary, grammar_text("regex", "ab?", None, {}))
    spelled = vocabulary.tokens

    def allowed() -> set[int]:
        mask = drawing.mask(grammars)
        assert mask is not None
        return set(np.flatnonzero(mask).tolist())

    assert {spelled[token] for token in allowed()} <= {b"a", b"ab"}
    drawing.output.append(next(token for token in allowed() if spelled[token] == b"a"))
    assert {spelled[token] for token in allowed() - set(END)} == {b"b"} and allowed() >= set(END)
    drawing.output.append(next(token for token in allowed() if spelled[token] == b"b"))
    assert allowed() == set(END)
    drawing.output += [END[0], END[1]]
    assert allowed() == set(END), "behind an end token that did not count"
    grammars.close()


def test_it_begins_behind_its_marker(folder: Path) -> None:
    vocabulary, grammars = make(folder)
    marker = vocabulary.tokens.index(b"o"), vocabulary.tokens.index(b"k")
    drawing = Drawing(vocabulary, grammar_text("choice", '["yes"]', None, {}), begins_after="ok")
    drawing.output = [1, marker[0], marker[0]]
    assert drawing.mask(grammars, anew=True) is None
    drawing.output.append(marker[1])
    mask = drawing.mask(grammars)
    assert mask is not None and {vocabulary.tokens[token][:1] for token in np.flatnonzero(mask)} == {b"y"}
    grammars.close()


PIECES = (b".</", b"</", b"think", b">", b">\n\n", b">\n ye", b">ye", b"><", b"</think>", "é".encode()[:1], b"\xa9</")
"""Tokens as byte-pair merges make them, so that a marker of ordinary text begins and ends inside of some."""


def with_pieces(folder: Path, special: bytes = b"") -> tuple[Vocabulary, dict[bytes, int]]:
    """A byte-level vocabulary whose last tokens are ``PIECES``, and their ids. ``special``: it is no text."""
    byte_level(folder)
    plain = read_vocabulary(folder)
    first = VOCAB_SIZE - len(PIECES)
    ids = {piece: first + at for at, piece in enumerate(PIECES)}
    marks = {ids[special]} if special else set()
    return plain._replace(tokens=[*plain.tokens[:first], *PIECES], special_ids=plain.special_ids | marks), ids


@pytest.mark.parametrize(("special", "output", "begins"), [
    (b"", [b".</", b"think", b">"], b"y"),
    (b"", [b"</", b"think", b">\n\n"], b"y"),
    (b"", [PIECES[-2], PIECES[-1], b"think", b">"], b"y"),
    (b"", [b"</", b"</", b"think", b">"], b"y"),
    (b"", [b"</", b"think", b">ye"], b"s"),
    (b"", [b"</", b"think", b">\n ye"], b"s"),
    (b"", [b"</think>"], b"y"),
    (b"</think>", [b"think", b"</think>"], b"y"),
], ids=str)  # fmt: skip
def test_a_marker_is_found_however_tokens_spell_it(
    tmp_path: Path, special: bytes, output: list[bytes], begins: bytes
) -> None:
    """What the marker's last token has behind it is the grammar's, but for white space that it does not take. A state
    that is told all of it at once comes to the same."""
    vocabulary, ids = with_pieces(tmp_path, special)
    grammars = Grammars(lambda: vocabulary, VOCAB_SIZE)
    drawing = Drawing(vocabulary, grammar_text("choice", '["yes"]', None, {}), begins_after="</think>")
    for piece in output:
        mask = drawing.mask(grammars)
        assert mask is None or mask[ids[piece]]
        drawing.output.append(ids[piece])
    others = Grammars(lambda: vocabulary, VOCAB_SIZE)
    for mask in (drawing.mask(grammars), drawing.mask(others, anew=True)):
        assert mask is not None and {vocabulary.tokens[token][:1] for token in np.flatnonzero(mask)} == {begins}
    grammars.close()
    others.close()


@pytest.mark.parametrize(("output", "refused"), [
    ([], [b".</think>*"]),
    ([b"<"], [b".</think>*"]),
    ([b"</", b"think"], [b"><", b".</think>*"]),
    ([b"</", b"think", b"</"], [b".</think>*"]),
], ids=str)  # fmt: skip
def test_no_token_ends_a_marker_with_what_the_grammar_does_not_take(
    tmp_path: Path, output: list[bytes], refused: list[bytes]
) -> None:
    vocabulary, ids = with_pieces(tmp_path)
    vocabulary = vocabulary._replace(tokens=[*vocabulary.tokens[:-1], b".</think>*"])
    grammars = Grammars(lambda: vocabulary, VOCAB_SIZE)
    drawing = Drawing(vocabulary, grammar_text("choice", '["yes"]', None, {}), begins_after="</think>")
    drawing.output = [ids[piece] if piece in ids else vocabulary.tokens.index(piece) for piece in output]
    mask = drawing.mask(grammars, anew=True)
    assert mask is not None and [vocabulary.tokens[token] for token in np.flatnonzero(~mask)] == refused
    grammars.close()


def test_white_space_behind_a_marker_counts_where_the_grammar_takes_it(tmp_path: Path) -> None:
    vocabulary, ids = with_pieces(tmp_path)
    tokenizer = make_tokenizer(vocabulary, END, VOCAB_SIZE)
    output = pack_ints([ids[piece] for piece in (b"</", b"think", b">\n\n")])
    for pattern, allowed in ((r"\n{3}", {b"\n"}), (r"\n{0,2}a", {b"a"}), (r"\na", {b"\n"})):
        row = GrammarRow("r", grammar_text("regex", pattern, None, {}), "</think>", 0, output, END)
        mask = GrammarState(tokenizer, row).mask_behind(row)
        assert mask is not None
        ids_allowed = np.flatnonzero(token_mask(bits_token_set(mask), VOCAB_SIZE))
        assert {vocabulary.tokens[token][:1] for token in ids_allowed} == allowed, pattern


def test_a_marker_counts_once_and_what_may_not_be_behind_it_fails_each_time(tmp_path: Path) -> None:
    vocabulary, ids = with_pieces(tmp_path)
    tokenizer = make_tokenizer(vocabulary, END, VOCAB_SIZE)
    text = grammar_text("regex", "a(</think>)?b", None, {})
    output = [ids[b"</"], ids[b"think"], ids[b">"], ord("a"), ids[b"</"], ids[b"think"], ids[b">"]]
    row = GrammarRow("r", text, "</think>", 0, pack_ints(output), END)
    mask = GrammarState(tokenizer, row).mask_behind(row)
    assert mask is not None
    assert [*np.flatnonzero(token_mask(bits_token_set(mask), VOCAB_SIZE))] == [ord("b")]
    row.output_ids = pack_ints([*output[:2], ids[b"><"]])
    state = GrammarState(tokenizer, row)
    for _ in range(2):
        with pytest.raises(GrammarFailure, match="not allowed behind the marker"):
            state.mask_behind(row)


def test_masks_that_come_late_are_those_of_the_next_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making them anew each time, behind one another, no step would ever have one."""
    vocabulary, grammars = make(folder)
    drawing = Drawing(vocabulary, grammar_text("choice", '["yes"]', None, {}))
    drawing.step(grammars)
    fill, made = GrammarState.fill, []

    def slowly(state: GrammarState, bits: np.ndarray[Any, Any]) -> None:
        made.append(state)
        time.sleep(4 * grammars_module.LEAST_WAIT_S)
        fill(state, bits)

    monkeypatch.setattr(GrammarState, "fill", slowly)
    assert drawing.mask(grammars) is not None and len(made) == 1
    grammars.close()


def test_what_was_not_reached_has_its_turn_and_what_is_there_costs_nothing(folder: Path) -> None:
    """An expensive mask waits for one step of cheap ones, and no longer."""
    tokenizer = make_tokenizer(read_vocabulary(folder), END, VOCAB_SIZE)
    text = grammar_text("choice", '["yes"]', None, {})
    begun = GrammarRow("r", text, "", 0, b"", END)
    longer = GrammarRow("r", text, "", 0, pack_ints(tokenizer.tokenize_str("yes")), END)
    states = [GrammarState(tokenizer, begun) for _ in range(3)]
    for state, cost_s in zip(states, (3.0, 1.0, 2.0), strict=True):
        state.mask_behind(begun)
        state.mask_s = cost_s

    def order(*rows: GrammarRow) -> list[int]:
        return sorted(range(3), key=lambda at: states[at].urgency(rows[at]))

    assert order(begun, begun, begun) == [1, 2, 0] == order(longer, longer, longer)
    states[0].is_owed = True
    assert order(longer, longer, longer) == [0, 1, 2], "it has not been reached before"
    assert order(longer, longer, begun) == [2, 0, 1], "it is there"
    states[2].mask_behind(begun)
    assert states[2].mask_s == 2.0, "to find a mask is not to make one"


def test_a_mask_is_owed_until_it_is_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary, grammars = make(folder)
    drawing = Drawing(vocabulary, grammar_text("regex", "(yes)*", None, {}))
    drawing.step(grammars)
    drawing.mask(grammars)
    state = grammars._states["r"].built.result().state
    assert state is not None and not state.is_owed
    with monkeypatch.context() as patched:
        patched.setattr(grammars_module.Masks, "_make", lambda *_: None)  # the step before takes all the time
        assert grammars.begin([drawing.row()]) is not None
    assert state.is_owed
    drawing.mask(grammars)
    assert not state.is_owed
    grammars.close()


def test_a_grammar_that_goes_beyond_its_bounds_fails_alone(folder: Path) -> None:
    vocabulary, grammars = make(folder)
    good = Drawing(vocabulary, grammar_text("choice", '["yes"]', None, {})).row()
    bad = SamplingRow(1, 0, 0, 0.0, 1.0, 0, 0.0, grammar=GrammarRow("s", "start: nothing", "", 0, b"", END))
    plain = SamplingRow(2, 0, 0, 0.0, 1.0, 0, 0.0)
    masks = grammars.begin([good, bad, plain])
    assert masks is not None
    while LATER_TOKEN_ID in masks.applied([good, bad, plain], VOCAB_SIZE)[1].values():
        pass
    rows, instead = masks.applied([good, bad, plain], VOCAB_SIZE)
    assert instead == {1: GRAMMAR_FAILED_TOKEN_ID} and rows[0].allowed_token_ids and rows[2] is plain
    grammars.close()


def test_what_is_not_ready_is_for_later_and_keeps_no_other_waiting(tmp_path: Path) -> None:
    """A vocabulary that is not read yet, then a grammar that is not compiled yet."""
    byte_level(tmp_path)
    vocabulary, may_go_on = read_vocabulary(tmp_path), threading.Event()

    def read() -> Vocabulary:
        may_go_on.wait(60)
        return vocabulary

    grammars = Grammars(read, VOCAB_SIZE)
    drawing = Drawing(vocabulary, grammar_text("choice", '["yes"]', None, {}))
    for _ in range(3):
        row = drawing.row(anew=True)
        assert row.grammar is not None
        row.grammar.text = row.grammar.text if not _ else ""
        masks = grammars.begin([row])
        assert masks is not None
        assert masks.applied([row], VOCAB_SIZE)[1] == {0: LATER_TOKEN_ID}
    may_go_on.set()
    while not drawing.step(grammars):
        pass
    assert drawing.said == "yes"
    grammars.close()


def request(name: str, text: str) -> SamplingRow:
    grammar = GrammarRow(name, text, "", 0, b"", END)
    return SamplingRow(0, 0, 0, 0.0, 1.0, 0, 0.0, grammar=grammar)


def begun(grammars: Grammars, row: SamplingRow) -> dict[int, int]:
    masks = grammars.begin([row])
    assert masks is not None
    return masks.applied([row], VOCAB_SIZE)[1]


def test_a_text_that_comes_again_is_compiled_once_for_all_that_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    byte_level(tmp_path)
    vocabulary, may_go_on, compiled = read_vocabulary(tmp_path), threading.Event(), []

    def read() -> Vocabulary:
        may_go_on.wait(60)
        return vocabulary

    def compile_grammar(tokenizer: LLTokenizer, text: str) -> LLMatcher:
        compiled.append(text)
        return made(tokenizer, text)

    made = grammars_module.compile_grammar
    monkeypatch.setattr(grammars_module, "compile_grammar", compile_grammar)
    grammars, text = Grammars(read, VOCAB_SIZE), grammar_text("regex", "[a-z]{9}", None, {})
    for _ in range(3):
        for name in "abcd":
            assert begun(grammars, request(name, text)) == {0: LATER_TOKEN_ID}
    may_go_on.set()
    for name in "abcd":
        while begun(grammars, request(name, "")):
            pass
    assert compiled == [text]
    grammars.close()


def test_what_is_kept_compiled_is_bounded_by_the_memory_that_it_takes(tmp_path: Path) -> None:
    """Clients' grammars differ in a name: 1,500 of these would take 150 MB, from texts of 150 kB."""
    byte_level(tmp_path)
    grammars = Grammars(lambda: read_vocabulary(tmp_path), VOCAB_SIZE)

    def ask(numbers: range) -> None:
        for at in numbers:
            schema = json.dumps({"type": "object", "properties": {f"name{at}": {"type": "string"}}})
            row = request(str(at), grammar_text("json", schema, None, {}))
            while LATER_TOKEN_ID in begun(grammars, row).values():
                pass

    ask(range(400))  # as many as are kept, of states and of grammars
    before_bytes = psutil.Process().memory_info().rss
    ask(range(400, 1900))
    assert psutil.Process().memory_info().rss - before_bytes < 40 << 20
    grammars.close()


def test_states_that_steps_ask_for_are_kept_and_no_others(folder: Path) -> None:
    """However many take turns, as in a pipeline; those of requests that have ended go."""
    _, grammars = make(folder)
    text = grammar_text("regex", "[a-z]{9}", None, {})
    names = [str(at) for at in range(KEPT_STEPS // 2)]
    for sent in (text, "", ""):
        for name in names:
            while begun(grammars, request(name, sent)):
                pass
    assert set(grammars._states) >= set(names)
    for _ in range(KEPT_STEPS + 1):
        begun(grammars, request("still there", text))
    assert set(grammars._states) == {"still there"}
    with pytest.raises(GrammarLostError):
        begun(grammars, request(names[0], ""))
    grammars.close()


def test_rows_without_grammars_begin_nothing() -> None:
    grammars = Grammars(lambda: Vocabulary([], frozenset()), VOCAB_SIZE)
    assert grammars.begin([SamplingRow(0, 0, 0, 0.0, 1.0, 0, 0.0)]) is None


def test_a_forced_text_has_the_models_own_tokens() -> None:
    """Where the tokenizer has one token for what a grammar forces, that is what comes."""
    backend = byte_level_tokenizer(VOCAB_SIZE)
    tokens = [b""] * VOCAB_SIZE
    for token, at in backend.get_vocab().items():
        tokens[at] = token.encode()
    vocabulary = Vocabulary(tokens, frozenset(range(256, 261)), lambda text: backend.encode(text).ids)
    grammars = Grammars(lambda: vocabulary, VOCAB_SIZE)
    drawing = Drawing(vocabulary, grammar_text("choice", '["eat"]', None, {}))
    while not drawing.step(grammars):
        pass
    assert drawing.output[:-1] == backend.encode("eat").ids
    grammars.close()

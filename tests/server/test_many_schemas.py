"""Of three hundred constraints most can be compiled, and what is drawn at random under one of them follows it."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from many_schemas import NUM_OTHERS, NUM_SCHEMAS, Published, other, published, schema

from jettison.device.grammars import Grammars
from jettison.device.model.tokenizer_files import byte_tokenizer_files
from jettison.device.model.vocabulary import Vocabulary, vocabulary_of
from jettison.device.step import GrammarRow, SamplingRow, pack_ints, token_mask
from jettison.server.compile_jobs import Compiled, Job
from jettison.server.compile_process import Compiler
from jettison.server.structured import Constraint
from jettison.types import LATER_TOKEN_ID

VOCAB_SIZE, END, MOST_TOKENS = 500, (257, 260), 150
CONSTRAINTS = [
    *(Constraint("json", json.dumps(schema(number)), whitespace_pattern="[ ]{0,1}") for number in range(NUM_SCHEMAS)),
    *(other(number) for number in range(NUM_OTHERS)),
]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return vocabulary_of(byte_tokenizer_files(VOCAB_SIZE))


@pytest.fixture(scope="module")
def compiled() -> list[Compiled]:
    compiler = Compiler({})
    return [
        compiler.compiled(Job(kind=each.kind, text=each.text, white_space=each.whitespace_pattern))
        for each in CONSTRAINTS
    ]


def draw(grammars: Grammars, vocabulary: Vocabulary, name: str, text: str, seed: int) -> tuple[bytes, bool]:
    """What was said, and whether it ended by itself; ends and closing characters are likelier than others."""
    rng, output = random.Random(seed), list[int]()
    closing = [token for token, data in enumerate(vocabulary.tokens) if data in (b'"', b"}", b"]", b",")]
    while len(output) < MOST_TOKENS:
        before = max(0, len(output) - 3)
        grammar = GrammarRow(name, "" if output else text, "", before, pack_ints(output[before:]), END)
        row = SamplingRow(0, 0, 0, 0.0, 1.0, 0, 0.0, grammar=grammar)
        masks = grammars.begin([row])
        assert masks is not None
        while LATER_TOKEN_ID in masks.applied([row], VOCAB_SIZE)[1].values():
            pass
        (row,), instead = masks.applied([row], VOCAB_SIZE)
        assert not instead
        allowed = np.flatnonzero(token_mask(row.allowed_token_ids, VOCAB_SIZE)).tolist()
        likely = [token for token in (*END, *closing) if token in allowed]
        output.append(rng.choice(likely if likely and rng.random() < 0.5 else allowed))
        if output[-1] in END:
            return b"".join(vocabulary.tokens[token] for token in output[:-1]), True
    return b"".join(vocabulary.tokens[token] for token in output), False


def follows(constraint: Constraint, text: str) -> bool:
    if constraint.kind == "json":
        jsonschema.validate(json.loads(text), json.loads(constraint.text))
        return True
    if constraint.kind == "regex":
        return re.fullmatch(constraint.text, text) is not None
    if constraint.kind == "choice":
        return text in json.loads(constraint.text)
    return True


def test_most_are_compiled_and_the_others_say_why(compiled: list[Compiled]) -> None:
    refused = [each.error for each in compiled if each.error is not None]
    assert len(compiled) == 300 and len(compiled) - len(refused) >= 250
    assert all("\n" not in why and len(why) < 400 for why in refused)


def test_what_ends_is_valid_and_what_is_cut_goes_on(vocabulary: Vocabulary, compiled: list[Compiled]) -> None:
    grammars = Grammars(lambda: vocabulary, VOCAB_SIZE)
    num_ended, wrong = 0, list[Any]()
    try:
        for at, (constraint, made) in enumerate(zip(CONSTRAINTS, compiled, strict=True)):
            if made.error is not None:
                continue
            for seed in range(2):
                said, has_ended = draw(grammars, vocabulary, f"{at}-{seed}", made.grammar, seed)
                num_ended += has_ended
                try:
                    if has_ended and not follows(constraint, said.decode()):
                        wrong.append((at, constraint.text, said))
                except (ValueError, jsonschema.ValidationError) as error:
                    wrong.append((at, constraint.text, said, str(error)[:200]))
    finally:
        grammars.close()
    assert not wrong, "\n".join(map(str, wrong[:5]))
    assert num_ended > 350


FORMS_READ_LOOSELY = ("time: ", "date-time: ", "hostname: ")
"""Formats of which a part is not checked: leap seconds, and names in Punycode."""


@pytest.fixture(scope="module")
def suite() -> list[tuple[Published, Compiled]]:
    compiler = Compiler({})
    return [(one, compiler.compiled(Job(kind="json", text=json.dumps(one.schema), white_space=None)))
            for one in published()]


BYTES = LLTokenizer("byte")


def accepts(grammar: str, value: Any) -> bool:
    """Whether a value can be written, with its own characters or with escapes."""
    for text in {json.dumps(value), json.dumps(value, ensure_ascii=False)}:
        matcher = LLMatcher(BYTES, grammar, log_level=0)
        tokens = [*text.encode(errors="replace")]
        if matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting():
            return True
    return False


def test_of_the_suite_no_value_that_is_not_valid_can_be_written(suite: list[tuple[Published, Compiled]]) -> None:
    """Every schema of JSON Schema's own test suite is followed, or refused with a reason."""
    wrong, num_written, num_valid = list[Any](), 0, 0
    for one, made in suite:
        if made.error is not None:
            assert made.error and "\n" not in made.error
            continue
        loose = one.name.startswith(FORMS_READ_LOOSELY)
        wrong += [(one.name, value) for value in one.invalid if not loose and accepts(made.grammar, value)]
        num_valid += len(one.valid)
        num_written += sum(accepts(made.grammar, value) for value in one.valid)
    assert not wrong, wrong[:5]
    assert sum(made.error is None for _, made in suite) >= 170 and len(suite) > 350
    assert num_written > 0.95 * num_valid > 350


def test_of_the_suite_what_ends_is_valid(vocabulary: Vocabulary, suite: list[tuple[Published, Compiled]]) -> None:
    grammars = Grammars(lambda: vocabulary, VOCAB_SIZE)
    num_ended, wrong = 0, list[Any]()
    try:
        for at, (one, made) in enumerate(suite):
            if made.error is not None:
                continue
            said, has_ended = draw(grammars, vocabulary, f"suite-{at}", made.grammar, at)
            if not has_ended:
                continue
            num_ended += 1
            try:
                jsonschema.validate(json.loads(said), one.schema)
            except (re.error, jsonschema.SchemaError):  # a pattern beyond Python's
                continue
            except (ValueError, jsonschema.ValidationError) as error:
                wrong.append((one.name, one.schema, said, str(error)[:200]))
    finally:
        grammars.close()
    assert not wrong, "\n".join(map(str, wrong[:5]))
    assert num_ended > 100

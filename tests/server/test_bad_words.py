"""Bad words as vLLM tokenizes them: as they begin a text and, where that is another token, behind a space."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import pre_tokenizers

from jettison.server.bad_words import checked_words, word_tokens
from jettison.server.errors import ApiError

WORDS = ["hello", "Ġhello", "Ġwo", "wo", "rld", "Ġ", "h", "ell", "o", "x", "y", "z"]


@pytest.fixture(scope="module")
def encode():
    """``hello`` is one token with and without a space; ``world`` two in both; ``x`` one, and two behind a space."""
    vocabulary = {word: at for at, word in enumerate(WORDS)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="x", continuing_subword_prefix=""))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return lambda text: backend.encode(text, add_special_tokens=False).ids


def ids(*words):
    return tuple(WORDS.index(word) for word in words)


def test_a_word_begins_a_text_or_follows_a_space(encode):
    assert word_tokens(("hello",), encode, 100) == (ids("hello"), ids("Ġhello"))
    assert word_tokens((" hello",), encode, 100) == (ids("hello"), ids("Ġhello")), "its own space does not count"
    assert word_tokens(("world",), encode, 100) == (ids("wo", "rld"), ids("Ġwo", "rld"))


def test_a_space_that_is_a_token_of_its_own_makes_no_second_sequence(encode):
    assert word_tokens(("z",), encode, 100) == (ids("z"),)


def test_several_words_keep_their_order(encode):
    assert word_tokens(("world", "z"), encode, 100) == (ids("wo", "rld"), ids("Ġwo", "rld"), ids("z"))
    assert word_tokens((), encode, 100) == ()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([""], "empty"), ([" "], "no tokens"), (["x" * 513], "512 characters"),
        ([f"{at}" for at in range(129)], "128 words"), (["hello"] * 5 + ["z"] * 200, None),
    ],
)  # fmt: skip
def test_what_is_refused(encode, words, told):
    if told is None:
        assert checked_words(words) == ("hello", "z"), "each counts once"
        return
    with pytest.raises(ApiError, match=told) as caught:
        word_tokens(checked_words(words), encode, 100)
    assert (caught.value.status, caught.value.param) == (400, "bad_words")


def test_tokens_are_bounded_and_lie_in_the_vocabulary(encode):
    with pytest.raises(ApiError, match="1024 tokens"):
        word_tokens(tuple("x" * (500 - at) for at in range(3)), lambda text: [9] * len(text), 100)
    with pytest.raises(ApiError, match="128 token sequences"):
        word_tokens(tuple(f"{at}" for at in range(100)), lambda text: [len(text) - len(text.strip())], 100)
    with pytest.raises(ApiError, match="beyond the model's 5"):
        word_tokens(("z",), encode, 5)

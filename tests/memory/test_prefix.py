"""Names of blocks: equal for equal histories under one secret and salt, and for nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.memory.prefix import DIGEST_BYTES, PrefixHasher

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(TOKENS, st.integers(1, 9))
def test_only_full_blocks_have_names(tokens, block_size):
    names = PrefixHasher(block_size, b"s").chain(tokens, "")
    assert len(names) == len(tokens) // block_size
    assert len(set(names)) == len(names) and all(len(name) == DIGEST_BYTES for name in names)


@given(TOKENS, st.integers(1, 5), st.integers(0, 8))
def test_a_chain_may_be_computed_in_parts(tokens, block_size, cut):
    hasher = PrefixHasher(block_size, b"s")
    whole = hasher.chain(tokens, "salt")
    first = whole[:cut]
    parent = first[-1] if first else None
    assert first + hasher.chain(tokens[len(first) * block_size :], "salt", parent) == whole


@given(TOKENS.filter(lambda t: len(t) >= 4), st.data())
def test_a_changed_token_renames_its_block_and_all_after(tokens, data):
    hasher = PrefixHasher(4, b"s")
    where = data.draw(st.integers(0, len(tokens) // 4 * 4 - 1))
    changed = [*tokens]
    changed[where] ^= 1
    before, after = hasher.chain(tokens, ""), hasher.chain(changed, "")
    same = where // 4
    assert before[:same] == after[:same] and not set(before[same:]) & set(after[same:])


def test_secret_salt_and_block_size_each_change_every_name():
    tokens = list(range(16))
    chains = [
        PrefixHasher(4, b"s").chain(tokens, ""),
        PrefixHasher(4, b"t").chain(tokens, ""),
        PrefixHasher(4, b"s" * 200).chain(tokens, ""),
        PrefixHasher(4, b"s").chain(tokens, "salt"),
        PrefixHasher(8, b"s").chain(tokens, ""),
    ]
    names = [name for chain in chains for name in chain]
    assert len(set(names)) == len(names)


def test_same_input_same_names_in_another_hasher():
    assert PrefixHasher(2, b"s").chain([1, 2, 3, 4], "x") == PrefixHasher(2, b"s").chain((1, 2, 3, 4, 5), "x")


def test_what_is_no_token_is_refused():
    with pytest.raises(OverflowError):
        PrefixHasher(1, b"s").chain([2**31], "")
    with pytest.raises(ValueError):
        PrefixHasher(0, b"s")

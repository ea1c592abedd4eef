from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.jsontext import in_one_line, text_in_one_line

ENDS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
"""All that str.splitlines() splits at."""

OTHERS = "\\\"'\u2027\u202a\u0084\u0086é"
TEXTS = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(ENDS + OTHERS)))


@given(TEXTS)
def test_no_reader_sees_a_line_end_and_every_reader_sees_the_same(text: str) -> None:
    for document in (text, {text: [text, {"a": text}]}):
        written = in_one_line(msgspec.json.encode(document))
        assert len(written.decode().splitlines()) == 1
        assert json.loads(written) == document == msgspec.json.decode(written)
        assert in_one_line(written) == written
        told = text_in_one_line(json.dumps(document, ensure_ascii=False))
        assert len(told.splitlines()) == 1 and json.loads(told) == document


@pytest.mark.parametrize("end", ENDS)
def test_each_of_them(end: str) -> None:
    assert len(f"a{end}b".splitlines()) == 2, "or it need not be looked at"
    assert in_one_line(msgspec.json.encode(end)).isascii()


def test_what_needs_nothing_is_handed_back() -> None:
    for document in (b'"plain"', '"é \u201c \u2026"'.encode()):
        assert in_one_line(document) == document
    assert in_one_line(plain := b"{}") is plain

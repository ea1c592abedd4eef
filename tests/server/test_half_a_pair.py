"""Half of a surrogate pair in a body is named: the JSON decoder takes it for a body that was cut off."""

from __future__ import annotations

import pytest

from jettison.server.errors import ApiError
from jettison.server.fields import parse_json


@pytest.mark.parametrize(("body", "at"), [
    (rb'{"a": "\ud800x"}', 7), (rb'{"a": "x\uDBFF"}', 8), (rb'{"a": "\\\\\ud83d"}', 11),
    (rb'{"a": "\ud83d\ude00", "b": "\ud83d\u0041"}', 28),
])  # fmt: skip
def test_it_is_named_with_its_place(body: bytes, at: int) -> None:
    with pytest.raises(ApiError) as refused:
        parse_json(body)
    told = refused.value.message
    assert f"{body[at : at + 6].decode()} at byte {at} is half of a surrogate pair" in told


@pytest.mark.parametrize("body", [
    rb'{"a": "\ud83d\ude00"}', rb'{"a": "\\ud800"}', rb'{"a": "\\\\ud800x"}', rb'{"a": "\u00e9"}'])
def test_whole_pairs_and_escaped_backslashes_are_taken(body: bytes) -> None:
    assert set(parse_json(body)) == {"a"}


def test_a_body_that_was_cut_off_is_told_as_such() -> None:
    with pytest.raises(ApiError, match="truncated"):
        parse_json(rb'{"a": "\ud83d\ude00')

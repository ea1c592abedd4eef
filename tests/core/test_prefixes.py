"""What requests have in common, as the packing is told."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jettison.core.ladder.packing.prefixes import Prefixes, Shared

PROMPTS = st.lists(st.lists(st.integers(0, 1), max_size=9), min_size=1, max_size=12)


def names(prompt: list[int]) -> list[bytes]:
    """As chained hashes: of a block and all before it."""
    return [bytes(prompt[: i + 1]) for i in range(len(prompt))]


def test_two_of_one_prefix_have_it_in_common_and_the_first_is_told_too() -> None:
    prefixes = Prefixes()
    assert prefixes.join("a", names([1] * 5)).shared is None
    joined = prefixes.join("b", names([1] * 4 + [0]))
    assert joined.also == "a" and joined.shared == Shared(bytes([1] * 4).hex(), 4)
    assert prefixes.shared("a") == prefixes.shared("b") == joined.shared
    assert prefixes.join("c", names([0] * 5)).shared is None
    prefixes.leave("b")
    assert prefixes.join("d", names([1] * 8)).shared == joined.shared, "a's, which is there still"


@given(PROMPTS, st.data())
def test_what_is_told_is_shared(prompts: list[list[int]], data: st.DataObject) -> None:
    prefixes = Prefixes()
    there: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        joined = prefixes.join(f"r{i}", names(prompt))
        assert joined.also is None or joined.also in there
        there[f"r{i}"] = prompt
        by_key: dict[Shared, list[list[int]]] = {}
        for request_id, tokens in there.items():
            shared = prefixes.shared(request_id)
            if shared is not None:
                assert 0 < shared.num_blocks <= len(tokens)
                by_key.setdefault(shared, []).append(tokens[: shared.num_blocks])
        assert all(head == heads[0] for heads in by_key.values() for head in heads)
        if data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(there)))
            prefixes.leave(gone)
            del there[gone]
    for request_id in there:
        prefixes.leave(request_id)
    assert prefixes.join("new", names([1, 1, 1])).shared is None, "nothing is left of those who left"

"""What the sampler is told beside numbers (allowed tokens, bad words, tokens whose logprobs are asked for) is the same
wherever a request's memory goes: its tokens are those that it gets alone."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from moved_answers import Requests, serve, served_alone

from jettison.device.step import pack_token_set
from jettison.live.engine.local_cluster import Completion
from jettison.types import SamplingParams

NUM_REQUESTS = 12
NUM_TOKENS = 24
EVEN = tuple(range(0, 200, 2))


@pytest.fixture(scope="module")
def requests(model_dir: Path) -> Requests:
    """Bad words are pairs and triples of tokens that the same requests produce when nothing is forbidden."""
    rng = random.Random(5)
    prompts = {f"r{i}": [rng.randrange(1, 200) for _ in range(rng.randint(4, 30))] for i in range(NUM_REQUESTS)}
    free = {
        name: (prompt, SamplingParams(
            max_tokens=NUM_TOKENS, temperature=0.0 if i % 2 else 1.1, seed=i, ignore_eos=True))
        for i, (name, prompt) in enumerate(prompts.items())
    }  # fmt: skip
    done, _ = serve(model_dir, free, 400)
    made = {}
    for i, (name, (prompt, params)) in enumerate(free.items()):
        ids = done[name].token_ids
        words = tuple({tuple(ids[at : at + 2 + at % 2]) for at in range(0, NUM_TOKENS - 3, 3)})
        some = [
            {"bad_words": (*words, (ids[0],))},
            {"allowed_token_ids": pack_token_set(EVEN), "bad_words": words},
            {"allowed_token_ids": pack_token_set([7, 9]), "logprobs": 0, "logprob_token_ids": (9, 7)},
        ][i % 3]
        made[name] = prompt, replace(params, **some)  # type: ignore[arg-type]
    return made


@pytest.fixture(scope="module")
def alone(model_dir: Path, requests: Requests) -> dict[str, Completion]:
    return served_alone(model_dir, requests)


def test_alone_it_is_what_was_asked(alone: dict[str, Completion]) -> None:
    for done in alone.values():
        params, ids = done.params, done.token_ids
        assert len(ids) == NUM_TOKENS
        for word in params.bad_words:
            assert all(tuple(ids[at : at + len(word)]) != word for at in range(len(ids)))
        if params.logprob_token_ids:
            assert set(ids) <= {7, 9}
            assert all(token.logprobs is not None and [t for t, _ in token.logprobs.top] == [9, 7]
                       and dict(token.logprobs.top)[token.token_id] == token.logprobs.logprob
                       for token in done.tokens)  # fmt: skip
        elif params.allowed_token_ids:
            assert set(ids) <= set(EVEN)


@pytest.mark.parametrize(
    ("flags", "move"),
    [
        ({"overload": "recompute", "instances": 1}, "recomputed_tokens"),
        ({"overload": "swap", "instances": 1}, "swapped_in_blocks"),
        ({"overload": "migrate", "instances": 2, "migrate_threshold": 8, "migrate_period_ms": 1}, "migrations"),
        ({"overload": "migrate", "instances": 2, "migrate_threshold": 8, "migrate_period_ms": 1,
          "migration_kind": "tokens"}, "migrations_as_tokens"),
        ({"overload": "drop", "instances": 2}, "drops"),
    ],
)
def test_no_move_of_memory_changes_a_token(
    model_dir: Path, requests: Requests, alone: dict[str, Completion],
    flags: dict[str, object], move: str,
) -> None:
    done, moves = serve(model_dir, requests, 26, **flags)
    assert moves[move]
    for name, completion in done.items():
        assert completion.token_ids == alone[name].token_ids
        for token, other in zip(completion.tokens, alone[name].tokens, strict=True):
            mine, its = (dict(each.logprobs.top) if each.logprobs else {} for each in (token, other))
            assert mine == pytest.approx(its, abs=1e-9)

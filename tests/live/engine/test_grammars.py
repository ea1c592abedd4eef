"""A request with a grammar gets the tokens that it gets alone, wherever its memory goes, and they follow it."""

from __future__ import annotations

import json
import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from moved_answers import Requests, serve, served_alone

from jettison.config import EngineConfig
from jettison.device import grammars
from jettison.device.model.byte_tokenizer import TURN_START, TURN_START_ID
from jettison.device.step import pack_token_set
from jettison.live.engine.local_cluster import Completion, LocalCluster
from jettison.server.grammar_texts import grammar_text
from jettison.server.tokenizer import Tokenizer
from jettison.types import FinishReason, Grammar, SamplingParams

NUM_REQUESTS = 12
NUM_TOKENS = 56
SCHEMA: dict[str, Any] = {
    "type": "object", "required": ["a", "b"], "additionalProperties": False,
    "properties": {
        "a": {"type": "integer", "minimum": -20, "maximum": 4000},
        "b": {"type": "array", "items": {"enum": ["x", "yz", None]}, "maxItems": 6},
        "c": {"type": "string", "maxLength": 5},
    },
}  # fmt: skip
OPEN_SCHEMA: dict[str, Any] = {"type": "array", "items": {"type": "string"}}
GRAMMARS = {
    "closed": Grammar(grammar_text("json", json.dumps(SCHEMA), "", {})),
    "open": Grammar(grammar_text("json", json.dumps(OPEN_SCHEMA), None, {})),
    "later": Grammar(grammar_text("regex", "(ab|c){3,9}", None, {}), TURN_START),
}
KINDS = tuple(GRAMMARS)


@pytest.fixture(scope="module")
def requests() -> Requests:
    """Grammars of three kinds: one that ends soon, one that need not end, and one that begins behind a marker."""
    rng = random.Random(5)
    made: Requests = {}
    for i in range(NUM_REQUESTS):
        prompt = [rng.randrange(1, 200) for _ in range(rng.randint(4, 30))]
        # Enough weight on the marker that it comes soon.
        bias = ((TURN_START_ID, 8.0),) if KINDS[i % 3] == "later" else ()
        made[f"r{i}"] = prompt, SamplingParams(
            max_tokens=NUM_TOKENS, temperature=1.1 if i % 2 else 0.0, seed=i, grammar=GRAMMARS[KINDS[i % 3]],
            logit_bias=bias, ignore_eos=i % 4 == 1, min_tokens=NUM_TOKENS // 2 if i % 4 == 2 else 0,
        )
    return made


@pytest.fixture(scope="module")
def alone(model_dir: Path, requests: Requests) -> dict[str, Completion]:
    return served_alone(model_dir, requests)


def test_alone_it_is_what_was_asked(model_dir: Path, requests: Requests, alone: dict[str, Completion]) -> None:
    tokenizer, num_stopped, num_begun = Tokenizer.from_dir(model_dir), 0, 0
    for i, done in enumerate(alone.values()):
        ids, kind = done.token_ids, KINDS[i % 3]
        assert done.error is None
        stopped = done.finish_reason is FinishReason.STOP
        num_stopped += stopped
        assert len(ids) == NUM_TOKENS or (stopped and not done.params.ignore_eos), "a request ends by what it asked"
        if kind == "later":
            if TURN_START_ID not in ids:
                continue
            num_begun += 1
            text = tokenizer.decode(ids[ids.index(TURN_START_ID) + 1 :])
            assert set(text) <= set("abc")
        else:
            text = tokenizer.decode(ids)
            if stopped or kind == "closed":
                jsonschema.validate(json.loads(text), SCHEMA if kind == "closed" else OPEN_SCHEMA)
            else:
                assert text.strip().startswith("[") or not text.strip()
    assert num_stopped and num_begun


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
    model_dir: Path, requests: Requests, alone: dict[str, Completion], flags: dict[str, object], move: str,
) -> None:
    done, moves = serve(model_dir, requests, 26, **flags)
    assert moves[move]
    for name, completion in done.items():
        assert completion.error is None
        assert completion.token_ids == alone[name].token_ids


def test_a_grammar_that_cannot_go_on_ends_its_request_alone(model_dir: Path) -> None:
    """No vocabulary has a token for what it asks; the front end refuses such a grammar, this one came past it."""
    plain = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    broken = replace(plain, grammar=Grammar("start: <[99999]>"))
    done, _ = serve(model_dir, {"a": ([3, 4], plain), "b": ([3, 5], broken), "c": ([6], plain)}, 400)
    assert [done[name].finish_reason for name in "abc"] == [
        FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH]
    assert "grammar" in (done["b"].error or "")


def test_where_a_list_of_tokens_leaves_none_the_grammar_counts(model_dir: Path) -> None:
    params = SamplingParams(
        max_tokens=9, temperature=0.0, grammar=Grammar(grammar_text("choice", '["abc"]', None, {})),
        allowed_token_ids=pack_token_set([3, 4]))
    done, _ = serve(model_dir, {"a": ([3, 4], params)}, 400)
    assert done["a"].finish_reason is FinishReason.STOP
    assert Tokenizer.from_dir(model_dir).decode(done["a"].token_ids) == "abc"


def test_a_slow_grammar_keeps_no_other_request_waiting(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compiled until the other request has ended; its prompt fills its blocks."""
    plain_ended, seen = threading.Event(), []
    make = grammars.make_tokenizer

    def slow(*args: Any) -> Any:
        seen.append(plain_ended.wait(60))
        return make(*args)

    monkeypatch.setattr(grammars, "make_tokenizer", slow)
    settings: dict[str, object] = {
        "model": str(model_dir), "dtype": "float64", "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 48,
        "instances": 1, "memory": "64MiB",
    }  # fmt: skip
    plain = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    text = grammar_text("choice", '["abc"]', None, {})
    bound = SamplingParams(max_tokens=20, temperature=0.0, grammar=Grammar(text))
    with LocalCluster(EngineConfig.resolve(**settings), seed=1) as cluster:
        cluster.submit("bound", list(range(1, 9)), bound)
        cluster.submit("plain", list(range(20, 29)), plain)

        def watch() -> None:
            while cluster.completions["plain"].finish_reason is None:
                time.sleep(0.001)
            plain_ended.set()

        watching = threading.Thread(target=watch)
        watching.start()
        cluster.run()
        watching.join()
        cluster.core.check()
        done = cluster.completions
    assert seen == [True], "the other request ended first"
    assert done["bound"].finish_reason is FinishReason.STOP
    assert Tokenizer.from_dir(model_dir).decode(done["bound"].token_ids) == "abc"
    assert len(done["plain"].token_ids) == 20

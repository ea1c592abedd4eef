"""A trained model: greedy answers through a drop and a restore, and log-likelihoods, beside transformers.

Random models have logits that are far apart; those of a trained one, on texts that mean something, are what a kernel
may get wrong unseen. Skipped where the model cannot be fetched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from jettison.device.model.end_tokens import read_end_tokens
from jettison.device.reference import TransformersReference, transformers_available
from jettison.live.engine.local_cluster import LocalCluster
from jettison.live.verify.run import compare
from jettison.live.verify.scenarios import Outcome, Setting, drop, make_cluster, observed, produced, restore, submit
from jettison.server.chat_renderer import ChatRequest
from jettison.server.tokenizer import Tokenizer
from jettison.types import SamplingParams

pytestmark = [pytest.mark.live, pytest.mark.slow]

NUM_TOKENS = 12

QUESTIONS = (
    "Why do ships float?", "Name three colours.", "What is the capital of France?", "Write a haiku about rain.",
    "How many legs has a spider?", "What do bees make?", "Explain gravity to a child.", "What is 7 plus 5?",
    "Who wrote Hamlet?", "Give me a word that rhymes with sea.", "What is a lighthouse for?", "Say hello in Spanish.",
    "How do I boil an egg?", "What is the opposite of cold?", "Name a large river in Africa.",
    "Why is the sky blue?", "List two uses of salt.", "What does a baker do?", "Is the moon a planet?",
    "Tell me one thing about whales.",
)  # fmt: skip

TOKENS = {
    "Hello, we can use": [19556, 28, 392, 416, 722],
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
    "  multiple   spaces": [216, 2701, 256, 5600],
}
"""Texts and what the model's own tokenizer makes of them."""

ITEMS = (
    ("The sun rises in the", " east"), ("The sun rises in the", " kitchen"), ("Water freezes at zero", " degrees"),
    ("A week has seven", " days"), ("A week has seven", " elephants"), ("The captain of the ship gave the", " order"),
    ("She opened the door and went", " inside"), ("Two plus two is", " four"), ("Two plus two is", " nine"),
    ("The cat sat on the", " mat"), ("Bread is made from", " flour and water"), ("In winter it is often", " cold"),
    ("In winter it is often", " purple"), ("The opposite of left is", " right"), ("Fish live in the", " water"),
    ("He read the letter twice and then", " burned it"), ("Paris is a city in", " France"),
    ("Paris is a city in", " Peru"), ("The dog barked at the", " stranger"), ("A triangle has three", " sides"),
    ("We eat soup with a", " spoon"), ("We eat soup with a", " hammer"), ("Birds build nests in", " trees"),
    ("The train leaves the station at", " noon"), ("Rain falls from the", " clouds"), ("To be or not to", " be"),
    ("Honey is", " sweet"), ("Honey is", " made of iron and stone"), ("At night we can see the", " stars"),
    ("The harbour was full of", " boats"),
)  # fmt: skip
"""Beginnings and ends, likely and unlikely ones."""


@dataclass(frozen=True)
class Served:
    cluster: LocalCluster
    tokenizer: Tokenizer


@pytest.fixture(scope="module")
def served(smollm2: Path) -> Iterator[Served]:
    setting = Setting(smollm2, "float32", NUM_TOKENS, seed=0, max_model_len=256)
    with make_cluster(setting, num_blocks=600) as cluster:
        yield Served(cluster, Tokenizer.from_dir(smollm2))


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> TransformersReference:
    if not transformers_available():
        pytest.skip("transformers is not installed")
    return TransformersReference(smollm2, "float32")


def test_answers_through_a_drop_and_a_restore_are_transformers(
    served: Served, reference: TransformersReference
) -> None:
    cluster, tokenizer = served.cluster, served.tokenizer
    chats = [ChatRequest([{"role": "user", "content": text}]) for text in QUESTIONS]
    prompts = [tokenizer.encode(tokenizer.render_chat(chat)) for chat in chats]
    submit(cluster, prompts, NUM_TOKENS)
    cluster.run(produced(cluster, 40))
    drop(cluster)
    assert len(cluster.core.groups) == 1
    cluster.run(produced(cluster, 60))
    restore(cluster)
    assert len(cluster.core.groups) == 2
    cluster.run()
    row = compare("SmolLM2", "drop and restore", Outcome(observed(cluster, prompts), True, ""), reference)
    assert (row.mismatches, row.incomplete, row.tokens_compared) == (0, 0, len(QUESTIONS) * NUM_TOKENS)
    assert tokenizer.decode(cluster.completions["request-2"].token_ids).startswith("The capital of France is Paris.")


def test_log_likelihoods_are_transformers(served: Served, reference: TransformersReference) -> None:
    cluster, tokenizer = served.cluster, served.tokenizer
    params = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0)
    begins = [tokenizer.encode(begin) for begin, _ in ITEMS]
    wholes = [tokenizer.encode(begin + end) for begin, end in ITEMS]
    for i, ids in enumerate(wholes):
        cluster.submit(f"item-{i}", ids, params)
    cluster.run()
    for i, (begin, ids) in enumerate(zip(begins, wholes, strict=True)):
        assert ids[: len(begin)] == begin
        found = cluster.completions[f"item-{i}"].prompt_logprobs
        assert found is not None
        own = sum(at.logprob for at in found[len(begin) :] if at is not None)
        theirs = reference.logits(ids).double().log_softmax(-1)
        expected = sum(float(theirs[at - 1, ids[at]]) for at in range(len(begin), len(ids)))
        assert own == pytest.approx(expected, abs=1e-3)


def test_tokens_are_those_of_the_models_own_tokenizer(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_dir(smollm2)
    assert {text: tokenizer.encode(text) for text in TOKENS} == TOKENS
    assert read_end_tokens(smollm2, 49_152).ids == {0, 2}

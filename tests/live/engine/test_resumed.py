"""A request that a later controller goes on with gets the tokens that it gets undisturbed, wherever it was cut."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from jettison.config import EngineConfig
from jettison.core import ports
from jettison.device.model.create import create_model
from jettison.live.engine.assembly import assemble
from jettison.live.engine.local_cluster import Completion, LocalCluster
from jettison.server.grammar_texts import grammar_text
from jettison.types import FinishReason, Grammar, Request, SamplingParams, ServiceClass

NUM_TOKENS = 24
KINDS = {
    "greedy": SamplingParams(temperature=0.0, ignore_eos=True),
    "drawn": SamplingParams(temperature=1.2, seed=5, top_p=0.9, ignore_eos=True),
    "penalties": SamplingParams(
        temperature=0.7, seed=6, frequency_penalty=0.8, repetition_penalty=1.3, ignore_eos=True),
    "bad words": SamplingParams(temperature=0.0, bad_words=((7,), (3, 4)), ignore_eos=True),
    "logprobs": SamplingParams(temperature=0.0, logprobs=2, ignore_eos=True),
    "late end": SamplingParams(temperature=1.0, seed=8, min_tokens=NUM_TOKENS - 4),
    "grammar": SamplingParams(
        temperature=1.1, seed=9, grammar=Grammar(grammar_text("regex", "(ab|c){3,9}", None, {}))),
    "grammar without end": SamplingParams(
        temperature=0.0, ignore_eos=True, grammar=Grammar(grammar_text("json", '{"type": "array"}', None, {}))),
}


@pytest.fixture(scope="module")
def cluster_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "qwen3"
    create_model(
        folder, arch="qwen3", layers=4, hidden=32, heads=4, kv_heads=2, head_dim=16, seed=3, std=0.2,
        max_position_embeddings=512)

    def make(num_blocks, **flags):
        known = {"model": str(folder), "dtype": "float64", "block_size": 4, "max_num_seqs": 8,
                 "max_num_batched_tokens": 48, "instances": 2} | flags  # fmt: skip
        memory = assemble(EngineConfig.resolve(**known)).memory_for_blocks(num_blocks)
        return LocalCluster(EngineConfig.resolve(**known, memory=memory), seed=1, auto_restore=True)

    return make


def requests(service_class=ServiceClass.ONLINE):
    rng = random.Random(5)
    return {
        kind: Request(
            kind, tuple(rng.randrange(1, 200) for _ in range(rng.randint(4, 30))),
            replace(params, max_tokens=NUM_TOKENS), 0, service_class=service_class)
        for kind, params in KINDS.items()
    }


def answers(cluster, asked):
    with cluster:
        for request in asked:
            cluster.completions[request.request_id] = Completion(request.params)
            cluster._num_open += 1
            cluster._handle(ports.Arrived(request))
        cluster.run()
        cluster.core.check()
        return cluster.completions


@pytest.fixture(scope="module")
def whole(cluster_of):
    return answers(cluster_of(400), requests().values())


@pytest.mark.parametrize("flags", [{}, {"overload": "recompute", "instances": 1}], ids=["roomy", "short of memory"])
def test_what_follows_is_what_would_have_followed(cluster_of, whole, flags):
    """Cut behind the first token, before the last, and anywhere between; all of them beside each other."""
    rng = random.Random(3)
    for share in (0.0, rng.random(), 1.0):
        asked = []
        for kind, request in requests().items():
            tokens = whole[kind].token_ids
            num_told = max(1, min(len(tokens) - 1, round(share * len(tokens))))
            asked.append(replace(request, resumed=tuple(tokens[:num_told])))
        got = answers(cluster_of(400 if not flags else 24, **flags), asked)
        for request in asked:
            kind = request.request_id
            assert list(request.resumed) + got[kind].token_ids == whole[kind].token_ids, kind
            assert got[kind].finish_reason is whole[kind].finish_reason is not FinishReason.ERROR
            if kind == "logprobs":
                told = [token.logprobs for token in whole[kind].tokens[len(request.resumed):]]
                assert [token.logprobs for token in got[kind].tokens] == told

"""``jettison verify --alone`` in bfloat16: with native kernels a request's tokens are those that it has alone.

Near-ties are common with random weights, and rare in a few tokens. So the bits of logits are compared, too: each
log-probability is made of all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jettison.device.kernels import library
from jettison.device.model.create import create_model
from jettison.device.reference import Verdict
from jettison.live.engine.local_cluster import LocalCluster
from jettison.live.verify import run as verify
from jettison.live.verify.scenarios import Observed, Outcome, Setting, make_cluster
from jettison.live.verify.solo_reference import SoloReference
from jettison.types import Grammar, SamplingParams, TokenLogprobs

needs_native = pytest.mark.skipif(not library.supported_variants(), reason="torch rounds otherwise in other batches")

NUM_TOKENS = 24
PROMPTS = [[(7 * i + 13 * j) % 251 for j in range(length)] for i, length in enumerate((3, 8, 31, 64, 65, 71, 96, 130))]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its products have whole groups of outputs and outputs beyond, its heads are narrower than a register."""
    folder = tmp_path_factory.mktemp("model") / "qwen3"
    create_model(
        folder, arch="qwen3", layers=4, hidden=96, heads=6, kv_heads=2, head_dim=16, seed=3, std=0.2,
        max_position_embeddings=512,
    )
    return folder


@needs_native
@pytest.mark.parametrize(
    "event",
    [
        "batches of 1 to 64", "prompts cut at every position", "static pipeline", "preempt and recompute",
        "drop + exchange (transfer)", "migrate while decoding", "harvest: freed from checkpoints",
        "grammars: drop, restore",
    ],
)  # fmt: skip
def test_in_bfloat16_a_request_has_the_tokens_that_it_has_alone(event: str, model_dir: Path) -> None:
    setting = Setting(model_dir, "bfloat16", 64, seed=1, kernels="native")
    outcome = verify.SCENARIOS[event](setting)
    row = verify.compare("qwen3", event, outcome, SoloReference(model_dir, "bfloat16", kernels="native"))
    assert outcome.happened, outcome.evidence
    assert (row.mismatches, row.incomplete) == (0, 0)
    assert row.tokens_compared > 200


def submit_all(cluster: LocalCluster, names: list[str]) -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=2)
    for name in names:
        cluster.submit(name, PROMPTS[int(name)], params)


def logprobs(cluster: LocalCluster, name: str) -> list[TokenLogprobs | None]:
    return [token.logprobs for token in cluster.completions[name].tokens]


@needs_native
@pytest.mark.parametrize(
    "flags",
    [
        {}, {"max_num_batched_tokens": 7, "max_num_seqs": 7}, {"max_num_batched_tokens": 32}, {"num_threads": 2},
        {"instances": 2, "overload": "pipeline"},
    ],
)  # fmt: skip
def test_in_bfloat16_logits_have_the_same_bits_in_any_batch_chunk_stage_and_number_of_threads(
    flags: dict[str, Any], model_dir: Path
) -> None:
    setting = Setting(model_dir, "bfloat16", NUM_TOKENS, seed=1, kernels="native")
    names = [str(i) for i in range(len(PROMPTS))]
    with make_cluster(setting, num_blocks=400, **{"instances": 1} | flags) as cluster:
        submit_all(cluster, names)
        cluster.run()
        together = [logprobs(cluster, name) for name in names]
    for name, found in zip(names, together, strict=True):
        with make_cluster(setting, num_blocks=100, instances=1) as cluster:
            submit_all(cluster, [name])
            cluster.run()
            assert logprobs(cluster, name) == found, name
            assert len(found) == NUM_TOKENS


@needs_native
def test_only_attention_in_parts_may_differ_and_is_counted_apart(model_dir: Path) -> None:
    """Requests that ran live are told from those whose KV was there before their next step, in one exchange."""
    setting = Setting(model_dir, "bfloat16", 96, seed=4, kernels="native")
    reference = SoloReference(model_dir, "bfloat16", kernels="native")
    outcome = verify.SCENARIOS["drop + exchange (live)"](setting)
    assert 0 < sum(request.was_live for request in outcome.requests) < len(outcome.requests)
    assert verify.compare("qwen3", "live", outcome, reference, parts_apart=True).mismatches == 0


def test_a_difference_of_a_live_request_is_apart_only_where_it_is_asked_for() -> None:
    class Differs:
        def check(self, prompt: list[int], output: list[int], grammar: Grammar | None = None) -> Verdict:
            del prompt, output
            return Verdict(1, True, False)

    requests = [Observed([1], [2, 3], was_live=True), Observed([1], [2, 3])]
    outcome = Outcome(requests, True, "it happened")
    rows = [verify.compare("q", "drop", outcome, Differs(), parts_apart=apart) for apart in (False, True)]
    assert [(row.mismatches, row.in_parts) for row in rows] == [(2, 0), (1, 1)]
    assert all(row.is_failed for row in rows)

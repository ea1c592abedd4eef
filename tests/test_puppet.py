"""The puppet says what it was told to."""

from __future__ import annotations

import json

import pytest

from jettison.config import EngineConfig
from jettison.live.engine.local_cluster import LocalCluster
from jettison.types import SamplingParams
from puppet import ABSENT, DEFAULT, TURN_END_ID, chain_of, tokens_of, write_puppet


def test_a_puppet_says_its_chain(tmp_path):
    folder = write_puppet(tmp_path / "puppet", chain_of("\n", "Hi", TURN_END_ID, "User") | chain_of("!", 270, 271))
    config = EngineConfig.resolve(model=str(folder), memory="32MiB", num_threads=1)
    with LocalCluster(config) as cluster:
        for name, temperature in (("greedy", 0.0), ("drawn", 1.0)):
            params = SamplingParams(max_tokens=8, temperature=temperature, seed=7)
            cluster.submit(name, tokens_of("ask me\n"), params)
            cluster.submit(f"{name}, beyond the tokenizer", tokens_of("!"), params)
        cluster.run()
        done = {name: completion.token_ids for name, completion in cluster.completions.items()}
    for name in ("greedy", "drawn"):
        assert done[name] == [*tokens_of("Hi", TURN_END_ID, "User"), DEFAULT]
        assert done[f"{name}, beyond the tokenizer"] == [270, 271, *[DEFAULT] * 6]


def test_files_can_be_told_otherwise(tmp_path):
    folder = write_puppet(
        tmp_path / "puppet", {}, config={"eos_token_id": ABSENT}, generation={"top_k": 1},
        tokenizer_config={"eos_token": "<|im_end|>"})
    read = {name: json.loads((folder / f"{name}.json").read_text()) for name in (
        "config", "generation_config", "tokenizer_config")}  # fmt: skip
    assert "eos_token_id" not in read["config"]
    assert read["generation_config"] == {"eos_token_id": 257, "top_k": 1}
    assert read["tokenizer_config"]["eos_token"] == "<|im_end|>"


def test_a_chain_that_forks_is_refused():
    with pytest.raises(ValueError, match="token 97 is followed by 98 and by 99"):
        chain_of("abac")

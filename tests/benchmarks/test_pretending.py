"""Benchmarks whose workers or engine pretend still run: all else in them is the server's own, and changes."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.peers import front_ends, reach
from benchmarks.peers.pretending import Load
from benchmarks.shared import REPOSITORY
from jettison.device.model.create import create_model
from jettison.live.experiments.server_process import free_port

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretending") / "model"
    create_model(folder, arch="qwen3", layers=2, hidden=32, heads=2, kv_heads=1, seed=1)
    return folder


def test_a_controller_carries_workers_that_pretend(folder):
    row = reach.run(Load(
        instances=2, rows=4, step_s=0.005, prompt_tokens=8, output_tokens=16, seconds=1.0, settle_s=0.2,
        step_ahead="auto", temperature=1.0, model=str(folder)), REPOSITORY)  # fmt: skip
    assert row["tokens"] > row["requests"] > 0 and row["steps"] > 0
    assert row["us_a_token"] > 0 and row["gap_p99_ms"] >= row["gap_p50_ms"]


def test_front_ends_serve_an_engine_that_pretends(folder):
    port = free_port()
    process, pids = front_ends.server_of(folder, port, 1)
    try:
        row = asyncio.run(front_ends.measure(port, pids, 4, 10))
    finally:
        process.terminate()
        process.wait(20)
    assert len(pids) == 2 and row["tokens"] == 40 and row["us_a_token"] > 0


def test_a_ratio_is_of_the_same_round():
    rounds = [
        {"round": number, "fronts": fronts, "streams": 64, "controller_us_a_token": 1.0, "front_ends_us_a_token": 1.0,
         "us_a_token": cost, "itl_p50_ms": 20.0, "itl_p99_ms": 21.0}
        for number, fronts, cost in ((0, 0, 10.0), (0, 2, 11.0), (1, 0, 20.0), (1, 2, 26.0), (2, 0, 10.0), (2, 2, 12.0))
    ]  # fmt: skip
    assert [(row["fronts"], row["over_none"]) for row in front_ends.rows_of(rounds)] == [(0, 1.0), (2, 1.2)]

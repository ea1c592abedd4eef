"""Requests that are served with little memory, so that rungs move them, and one by one with plenty."""

from __future__ import annotations

from pathlib import Path

from jettison.config import EngineConfig
from jettison.core.totals import counters
from jettison.live.engine.assembly import assemble
from jettison.live.engine.local_cluster import Completion, LocalCluster
from jettison.types import SamplingParams

Requests = dict[str, tuple[list[int], SamplingParams]]


def serve(
    model_dir: Path, requests: Requests, num_blocks: int, **flags: object
) -> tuple[dict[str, Completion], dict[str, float]]:
    """Completions, and how often what happened."""
    settings: dict[str, object] = {
        "model": str(model_dir), "dtype": "float64", "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 48,
        "overload_trigger": "pressure", "overload_min_wait_ms": 1, "overload_check_interval_ms": 1,
    } | flags
    memory = assemble(EngineConfig.resolve(**settings)).memory_for_blocks(num_blocks)
    with LocalCluster(EngineConfig.resolve(**settings, memory=memory), seed=1, auto_restore=True) as cluster:
        for name, (prompt, params) in requests.items():
            cluster.submit(name, prompt, params)
        cluster.run()
        cluster.core.check()
        return cluster.completions, counters(cluster.core)


def served_alone(model_dir: Path, requests: Requests) -> dict[str, Completion]:
    """What each request gets where no other one is."""
    done: dict[str, Completion] = {}
    for name, request in requests.items():
        done |= serve(model_dir, {name: request}, 400)[0]
    return done

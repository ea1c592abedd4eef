"""Dynamo's mocker, offline: a Mooncake trace on vLLM-like workers in virtual time. Runs in Dynamo's environment.

Settings: ``trace`` (JSONL: timestamp in ms, input_length, output_length, hash_ids), ``profile`` (npz of step times),
``instances``, ``block_tokens``, ``num_blocks``, ``max_batch``, ``max_batch_tokens``, ``max_tokens`` of a request.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from simulator_child import Timed, main


def simulate(settings: dict[str, Any]) -> dict[str, Any]:
    """One replay, the trace's reading included."""
    from dynamo.replay import run_trace_replay

    engine = {
        "block_size": settings["block_tokens"],
        "num_gpu_blocks": settings["num_blocks"],
        "max_num_seqs": settings["max_batch"],
        "max_num_batched_tokens": settings["max_batch_tokens"],
        "max_model_len": settings["max_tokens"],
        "enable_prefix_caching": False,
        "timing_model": {
            "type": "external", "provider": "dynamo_profile", "config": {"path": settings["profile"]}
        },
    }  # fmt: skip
    with Timed() as timed:
        report = run_trace_replay(
            settings["trace"], extra_engine_args={"engine": engine}, num_workers=settings["instances"],
            trace_block_size=settings["block_tokens"], router_mode="round_robin",
        )  # fmt: skip
    summary = report.summary
    return {
        **timed.row,
        "version": version("ai-dynamo-runtime"),
        "completed": summary["completed_requests"],
        "virtual_s": summary["duration_ms"] / 1e3,
        "ttft_p99_s": summary["p99_ttft_ms"] / 1e3,
        "own_wall_s": summary["wall_time_ms"] / 1e3,
    }


if __name__ == "__main__":
    main(simulate)

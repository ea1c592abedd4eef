"""Vidur on a trace of its own format. Runs in Vidur's environment, in its checkout (it caches what it trains there).

Settings: ``checkout``, ``trace`` (CSV: arrived_at, num_prefill_tokens, num_decode_tokens), ``output`` (a folder for
what it writes), ``train`` (only train), ``instances``, ``num_kv_tokens`` of one, ``max_batch``, ``max_batch_tokens``,
``max_tokens`` of a request. Where the checkout has no attention table of the model (they are large files), one
is made up here, and the answer says so: the speed of a simulation hangs on how many steps there are, and only
through lengths of steps on this table.
"""

from __future__ import annotations

import atexit
import csv
import importlib.util
import os
import sys
import types
from itertools import product
from pathlib import Path
from typing import Any

from simulator_child import Timed, main

MODEL, NETWORK = "internlm/internlm-20b", "a100_dgx"
"""Of the models that it has tables for, the one nearest to Qwen2.5-14B: layers as wide, 60 for 48, no grouped heads."""
BLOCK_TOKENS = 16
"""What its attention tables were measured with."""
NUM_HEADS, HEAD_DIM = 40, 128
FLOPS, MEMORY_BYTES_PER_S = 312e12 * 0.5, 2.04e12 * 0.7


def stub_plots() -> None:
    """It imports what it would draw with and report to; neither is wanted, and either may be left uninstalled."""
    for name in ("wandb", "plotly_express"):
        if importlib.util.find_spec(name) is None:
            module = types.ModuleType(name)
            module.run = None  # type: ignore[attr-defined]
            sys.modules[name] = module


def make_attention_table(path: Path) -> None:
    """Milliseconds of one layer by arithmetic and bandwidth, in the columns that Vidur reads."""
    hidden = NUM_HEADS * HEAD_DIM
    sizes = [0, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
    shape = {"n_embd": hidden, "n_q_head": NUM_HEADS, "n_kv_head": NUM_HEADS, "block_size": BLOCK_TOKENS,
             "num_tensor_parallel_workers": 1}  # fmt: skip
    times = ("time_stats.attn_prefill.median", "time_stats.attn_decode.median")
    keys = ("batch_size", "prefill_chunk_size", "kv_cache_size")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*times, *keys, *shape])
        writer.writeheader()
        for batch, kv in product((1, 2, 4, 8, 16, 32, 64, 128, 256), sizes):
            ms = 0.01 + batch * (kv + 1) * 4 * hidden / MEMORY_BYTES_PER_S * 1e3
            writer.writerow({times[0]: 0.0, times[1]: ms, **dict(zip(keys, (batch, 0, kv), strict=True)), **shape})
        for chunk, kv in product(range(32, 2049, 32), sizes):
            ms = 0.02 + 4 * chunk * (kv + chunk / 2) * hidden / FLOPS * 1e3
            writer.writerow({times[0]: ms, times[1]: 0.0, **dict(zip(keys, (1, chunk, kv), strict=True)), **shape})


def configure(settings: dict[str, Any], attention: Path) -> Any:
    """Sarathi's chunked prefill, requests in turn, times of requests kept and nothing drawn."""
    from vidur import config as c

    predictor = c.RandomForrestExecutionTimePredictorConfig(
        attention_input_file=str(attention), k_fold_cv_splits=2, num_training_job_threads=1,
        # One point of the grid that is searched by default: 27 of them take hours of one core.
        num_estimators=[250], max_depth=[16], min_samples_split=[2],
        prediction_max_prefill_chunk_size=settings["max_batch_tokens"],
        prediction_max_batch_size=settings["max_batch"], prediction_max_tokens_per_request=settings["max_tokens"],
    )  # fmt: skip
    scheduler = c.SarathiSchedulerConfig(
        chunk_size=settings["max_batch_tokens"], batch_size_cap=settings["max_batch"], block_size=BLOCK_TOKENS,
        num_blocks=settings["num_kv_tokens"] // BLOCK_TOKENS,
    )  # fmt: skip
    replica = c.ReplicaConfig(model_name=MODEL, device="a100", network_device=NETWORK)
    cluster = c.ClusterConfig(settings["instances"], replica, c.RoundRobinGlobalSchedulerConfig(), scheduler)
    metrics = c.MetricsConfig(
        enable_chrome_trace=False, store_plots=False, store_batch_metrics=False, store_utilization_metrics=False,
        output_dir=settings["output"],
    )  # fmt: skip
    trace = c.TraceRequestGeneratorConfig(trace_file=settings["trace"], max_tokens=settings["max_tokens"])
    return c.SimulationConfig(
        cluster_config=cluster, request_generator_config=trace, execution_time_predictor_config=predictor,
        metrics_config=metrics,
    )  # fmt: skip


def predictor_of(config: Any) -> Any:
    """Fit, predict and cache, or read all that from the cache."""
    from vidur.execution_time_predictor import ExecutionTimePredictorRegistry

    return ExecutionTimePredictorRegistry.get(
        config.execution_time_predictor_config.get_type(),
        predictor_config=config.execution_time_predictor_config,
        replica_config=config.cluster_config.replica_config,
        replica_scheduler_config=config.cluster_config.replica_scheduler_config,
        metrics_config=config.metrics_config,
    )


def simulate(settings: dict[str, Any]) -> dict[str, Any]:
    """One run: the trace's reading included, its reports to disk left out, times of its operators in ``load_s``."""
    os.chdir(settings["checkout"])
    sys.path.insert(0, settings["checkout"])
    stub_plots()
    attention = Path(f"data/profiling/compute/a100/{MODEL}/attention.csv").absolute()
    notes = []
    if not attention.exists():
        attention = Path(settings["output"], "attention.csv")
        make_attention_table(attention)
        notes.append("attention table made up, the checkout has none")
    config = configure(settings, attention)
    with Timed() as loading:
        predictor = predictor_of(config)
    if settings["train"]:
        return loading.row
    from vidur.entities import Batch
    from vidur.execution_time_predictor import ExecutionTimePredictorRegistry
    from vidur.metrics.constants import RequestMetricsTimeDistributions
    from vidur.simulator import Simulator

    ExecutionTimePredictorRegistry.get = lambda *_, **__: predictor
    with Timed() as timed:
        simulator = Simulator(config)
        simulator.run()
    atexit.unregister(simulator._write_output)
    ttft = simulator.metric_store._request_metrics_time_distributions[RequestMetricsTimeDistributions.PREFILL_TIME_E2E]
    return {
        **timed.row, "completed": len(ttft), "virtual_s": simulator._time, "steps": Batch._id + 1,
        "load_s": loading.row["wall_s"],
        "ttft_p99_s": float(ttft._to_df().iloc[:, 1].quantile(0.99)), "notes": notes,
    }  # fmt: skip


if __name__ == "__main__":
    main(simulate)

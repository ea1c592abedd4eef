"""Figures by name, and how each is reproduced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jettison.config.values import did_you_mean
from jettison.errors import ConfigError
from jettison.simulate.reproduce.figures import (
    ablation,
    cost_model,
    end_to_end,
    extreme,
    long_run,
    parallelism,
    v1_ablation,
    v1_end_to_end,
    v1_exchange,
)
from jettison.simulate.reproduce.pool import Runs
from jettison.simulate.reproduce.rows import Outcome

Reproduce = Callable[[Runs], Outcome]


@dataclass(frozen=True, slots=True)
class Experiment:
    """One figure of a paper."""

    name: str
    title: str
    specs: tuple[str, ...]
    """In the tree; empty where nothing is served."""
    reproduce: Reproduce


_END_TO_END = tuple(end_to_end.WORKLOADS.values())

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "kunserve-fig2",
            "what overload does to recompute, swap and migrate (v3 section 2.2)",
            ("long-run",),
            long_run.reproduce_fig2,
        ),
        Experiment(
            "kunserve-fig5",
            "latency against the number of pipeline stages (v3 section 4.1)",
            ("parallelism",),
            parallelism.reproduce_fig5,
        ),
        Experiment(
            "kunserve-fig12",
            "memory, TTFT and throughput over time (v3 section 5.2)",
            _END_TO_END,
            end_to_end.reproduce_fig12,
        ),
        Experiment(
            "kunserve-fig13",
            "latency and SLO violations of all systems (v3 section 5.2)",
            _END_TO_END,
            end_to_end.reproduce_fig13,
        ),
        Experiment(
            "kunserve-fig14",
            "ablation: drop, coordinated exchange, lookahead (v3 section 5.3)",
            ("ablation",),
            ablation.reproduce_fig14,
        ),
        Experiment("kunserve-fig15", "accuracy of the cost model (v3 section 5.4)", (), cost_model.reproduce_fig15),
        Experiment(
            "kunserve-fig16",
            "with and without restoring, 640 s (v3 section 5.5)",
            ("long-run",),
            long_run.reproduce_fig16,
        ),
        Experiment("kunserve-fig17", "an extreme burst (v3 section 5.6)", ("extreme-burst",), extreme.reproduce_fig17),
        Experiment(
            "kunserve-v1-fig4",
            "parameter swap against KV swap (v1 section 2.3)",
            ("v1-swap",),
            v1_ablation.reproduce_v1_fig4,
        ),
        Experiment(
            "kunserve-v1-fig5",
            "replication against pipelines (v1 section 3)",
            ("parallelism",),
            parallelism.reproduce_v1_fig5,
        ),
        Experiment(
            "kunserve-v1-fig10",
            "three data sets over rates (v1 section 5.2)",
            ("v1-burst",),
            v1_end_to_end.reproduce_v1_fig10,
        ),
        Experiment(
            "kunserve-v1-fig11", "BurstGPT over time (v1 section 5.2)", ("v1-burst",), v1_end_to_end.reproduce_v1_fig11
        ),
        Experiment(
            "kunserve-v1-fig12", "Llama-3.1-70B (v1 section 5.2)", ("v1-burst-70b",), v1_end_to_end.reproduce_v1_fig12
        ),
        Experiment(
            "kunserve-v1-fig13", "Llama-3.2-90B (v1 section 5.2)", ("v1-burst-70b",), v1_end_to_end.reproduce_v1_fig13
        ),
        Experiment(
            "kunserve-v1-fig14",
            "live against blocking exchange, over bandwidths (v1 section 5.3)",
            ("v1-exchange",),
            v1_exchange.reproduce_v1_fig14,
        ),
        Experiment(
            "kunserve-v1-fig15",
            "with and without live restore (v1 section 5.3)",
            ("v1-restore",),
            v1_ablation.reproduce_v1_fig15,
        ),
        Experiment(
            "kunserve-v1-fig16",
            "grouping strategies against exhaustive search (v1 section 5.3)",
            ("v1-burst",),
            v1_ablation.reproduce_v1_fig16,
        ),
    )
}
"""By name, in the order of the page."""


def experiment(name: str) -> Experiment:
    """The experiment of this name. Raises ConfigError that lists the known ones."""
    if name not in EXPERIMENTS:
        hint = did_you_mean(name, tuple(EXPERIMENTS))
        raise ConfigError(f"unknown figure {name!r}{hint}; `jettison reproduce list` lists all")
    return EXPERIMENTS[name]

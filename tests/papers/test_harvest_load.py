"""How much chat there is beside a batch: both rules, on a machine that is a formula, and figures from spec to rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jettison.report.results import RunResult, Summary
from jettison.simulate.machines import cluster_setup
from papers import engine
from papers.figures import conserve
from papers.harvest_load import ONLINE_ONLY, find_harvest_load, holds, most_held, share_of
from papers.jobs import changed
from papers.pool import Runs
from papers.specs import read_spec
from papers.variants import Changes, Variant

MOST_TOKENS = 4000.0


def machine(variant: Variant, factor: float) -> RunResult:
    """800 tokens/s of chat at factor 1; beside a batch all that there is. First tokens are late from 3.3 times on."""
    online = min(800.0 * factor, MOST_TOKENS)
    offline = 0.0 if variant.settings["offline"] == "none" else MOST_TOKENS - online
    p99 = Summary(p99=1.0 if factor <= 3.3 else 2.0)
    tokens = {"online": online, "offline": offline}
    return RunResult(
        variant.name, ttft_s=p99, itl_s=Summary(p99=0.05), goodput={"slo_ttft_s": 1.5, "slo_tpot_s": 0.11},
        classes={key: {"tokens": {"total_per_s": value}} for key, value in tokens.items()},
    )  # fmt: skip


def test_a_share_of_what_is_done_at_most() -> None:
    factor = find_harvest_load(share_of(0.46), machine)
    assert 800.0 * factor / MOST_TOKENS == pytest.approx(0.46, rel=0.01)


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0, 9.0])
def test_the_most_that_is_held(scale: float) -> None:
    factor = find_harvest_load(most_held(), lambda variant, factor: machine(variant, factor * scale))
    assert factor * scale <= 3.3 and factor * scale == pytest.approx(3.3, rel=0.02)
    assert holds(machine(ONLINE_ONLY, 1.0)) and not holds(machine(ONLINE_ONLY, 4.0))


def test_the_link_to_the_host_is_what_a_variant_says() -> None:
    spec = read_spec("conserve-gamma")
    setup = cluster_setup(spec.machine, spec.parsed, spec.parsed.variants[2], 0)
    slow = changed(setup, spec.machine, Changes(host_link=0.25))
    assert slow.topology.host is not None and setup.topology.host is not None
    assert slow.topology.host.bytes_per_s == setup.topology.host.bytes_per_s / 4
    for of in (slow.profile, slow.params.profile):
        assert of is not None and of.host_copy_bytes_per_s == setup.profile.host_copy_bytes_per_s / 4, "decisions know"


def test_steps_of_the_baseline_by_priority_wait_for_what_is_swapped() -> None:
    spec = read_spec("conserve-gamma")
    setup = cluster_setup(spec.machine, spec.parsed, spec.parsed.variants[1], 0)
    waits = changed(setup, spec.machine, conserve.PRIORITY.changes)
    assert setup.topology.host is not None and waits.topology.host is None
    assert waits.params.swap.budget_blocks == spec.machine.kv_tokens, "all of it before one step"


@pytest.mark.parametrize("name", ["conserve-fig2", "conserve-fig6", "conserve-link"])
def test_a_figure_runs_from_its_spec_to_its_rows(name: str) -> None:
    (figure,) = [each for each in conserve.FIGURES if each.name == name]
    short: dict[str, Any] = {"seeds": [0], "workload": {"duration_s": 20.0, "rate_scale": 1.0}}
    parts = tuple(replace(part, changes=short, load=None) for part in figure.parts)
    outcome = engine.reproduce(replace(figure, parts=parts), Runs())
    assert len(outcome.pictures) == len(figure.plots)
    found = {(row.claim.metric, row.claim.system): row.ours for row in outcome.rows}
    assert all(found[key] is not None for key in found if key[0] in ("P99 TTFT", "offline tokens/s"))
    if name == "conserve-fig2":
        assert (found["P99 TTFT, times higher", "vLLM++"] or 0) > 1
        assert any("servegen" in value for _, value in outcome.conditions[figure.parts[0].workload])

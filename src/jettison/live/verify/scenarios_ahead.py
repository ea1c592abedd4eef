"""Scenarios of ``jettison verify`` with steps that are planned ahead (``core.serving.stepsahead``): one of its own, and
memory events of other modules once more."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from jettison.core.totals import counters
from jettison.live.verify.scenarios import (
    BLOCK_SIZE,
    SCENARIOS,
    Event,
    Outcome,
    Scenario,
    Setting,
    make_cluster,
    make_prompts,
    observed,
    submit,
)
from jettison.live.verify.scenarios_migration import MIGRATIONS
from jettison.live.verify.scenarios_steps import STEPS

LONGEST_PROMPT = 40


def steps_ahead(setting: Setting) -> Outcome:
    """Steps planned before the tokens are known that they begin with; now and then memory runs out, or a request comes
    or ends, and the next step is planned with all that is known."""
    need = -(-(LONGEST_PROMPT + setting.num_output_tokens) // BLOCK_SIZE)
    with make_cluster(setting, num_blocks=4 * need, instances=1, overload="recompute", step_ahead="on") as cluster:
        prompts = make_prompts(setting, cluster, 10, LONGEST_PROMPT)
        submit(cluster, prompts, setting.num_output_tokens)
        cluster.run()
        totals, (group,) = counters(cluster.core), cluster.core.groups.values()
        num_ahead, num_steps = totals["steps_ahead"], group.counters.num_steps
        num_preemptions = totals["num_preemptions"]
        evidence = f"{num_ahead:.0f} of {num_steps} steps planned ahead, {num_preemptions:.0f} preemptions"
        return Outcome(observed(cluster, prompts), 2 * num_ahead > num_steps and num_preemptions > 0, evidence)


def _ahead(scenario: Scenario, setting: Setting) -> Outcome:
    return scenario(replace(setting, step_ahead="on"))


AHEAD: dict[str, Event] = {"steps planned ahead": Event(steps_ahead)}
"""By name."""

AHEAD_TOO: dict[str, Event] = {
    f"{name}, steps ahead": Event(partial(_ahead, event.scenario), event.needs)
    for name, event in (STEPS | SCENARIOS | MIGRATIONS).items()
}
"""What the default table has without steps ahead."""

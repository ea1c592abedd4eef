"""A step planned ahead: when there is one, what it says, what becomes of it. ``test_any_schedule`` draws the rest."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import MS, FakeCluster, Faults, expected_run

from jettison.core import ports
from jettison.core.ports import RunStep, TokenSources
from jettison.memory.kvtransfers import MigrationKind
from jettison.types import FAILED_TOKEN_ID, SampledToken, ServiceClass


class Ahead(FakeCluster):
    """One instance that plans ahead, unless it is said otherwise; keeps the steps that it was told to run."""

    def __init__(self, **changes: Any) -> None:
        self.steps: list[RunStep] = []
        super().__init__(**{"num_workers": 1, "full_blocks": 60, "steps_ahead": 1, "policy": "recompute"} | changes)

    def _carry_out(self, action: ports.Action) -> None:
        if isinstance(action, RunStep):
            self.steps.append(action)
        super()._carry_out(action)

    def names(self) -> list[list[str]]:
        return [[row.state.request_id for row in step.rows] for step in self.steps]

    def expect_all(self) -> None:
        self.run()
        self.expect_outputs()
        self.expect_nothing_left()


def pair(**changes: Any) -> Ahead:
    """Two requests that decode for a while."""
    cluster = Ahead(**changes)
    cluster.submit("a", [1, 2, 3], 12, ignore_eos=True)
    cluster.submit("b", [4, 5, 6, 7, 8], 20, ignore_eos=True)
    return cluster


def test_a_step_names_the_tokens_that_it_was_planned_without() -> None:
    cluster = Ahead()
    cluster.submit("a", [1, 2, 3], 4, ignore_eos=True)
    cluster.run(until_ms=0.5)
    first, second = cluster.steps
    assert first.follows is None and second.follows == TokenSources(first.step_id, {0: 0})
    assert [(row.context_len, row.num_tokens, row.samples) for row in second.rows] == [(3, 1, True)]
    cluster.expect_all()
    assert len(cluster.steps) == 4, "an end by length is foreseen"


def test_prompts_and_newcomers_join_a_step_ahead_with_tokens_that_are_known() -> None:
    cluster = Ahead(max_tokens=16)
    cluster.submit("long", list(range(1, 41)), 6, ignore_eos=True)
    cluster.submit("new", [1, 2], 6, at_ms=0.1, ignore_eos=True)
    cluster.expect_all()
    before, mixed = cluster.steps[2:4]
    assert [(row.context_len, row.num_tokens) for row in mixed.rows] == [(40, 1), (2, 1)]
    assert mixed.follows == TokenSources(before.step_id, {0: 0, 1: 1})


def test_two_steps_are_under_way_and_no_more() -> None:
    cluster, most = pair(), list[int]()

    def look() -> bool:
        most.append(max(len(group.in_flight) for group in cluster.core.groups.values()))
        return False

    cluster.run(stop=look)
    assert max(most) == 2 and cluster.num_ahead > 10


def test_without_steps_ahead_there_are_none() -> None:
    cluster = pair(steps_ahead=0)
    cluster.expect_all()
    assert all(step.follows is None for step in cluster.steps) and cluster.num_ahead == 0


def test_a_row_behind_an_end_token_counts_for_nothing() -> None:
    cluster = Ahead()
    prompts = [[i, i + 1, 2 * i] for i in range(1, 30)]
    for i, prompt in enumerate(prompts):
        cluster.submit(f"r{i}", prompt, 40, stop_token_ids=(7, 11, 13, 17, 19, 23))
    cluster.expect_all()
    stopped = [name for name, ends in cluster.ends.items() if ends == ["stop"]]
    rows = [name for step in cluster.names() for name in step]
    wasted = [name for name in stopped if rows.count(name) == len(cluster.outputs[name]) + 1]
    assert stopped and wasted, "the point of this test"
    assert cluster.num_ahead > 0.9 * len(cluster.steps), "an end has no step wait for it"


@pytest.mark.parametrize("wish", [
    {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.5}, {"bad_words": ((61,),)},
    {"logprobs": 0}, {"prompt_logprobs": 0},
])  # fmt: skip
def test_a_request_that_needs_each_token_has_its_group_wait(wish: dict[str, Any]) -> None:
    cluster = Ahead()
    cluster.submit("waits", [1, 2, 3], 5, ignore_eos=True, **wish)
    cluster.submit("plain", [4, 5, 6], 9, ignore_eos=True)
    cluster.expect_all()
    with_it = [step for step in cluster.steps if "waits" in [row.state.request_id for row in step.rows]]
    assert len(with_it) == 5 and not any(step.follows for step in with_it)
    assert len(cluster.steps) == 10 and cluster.num_ahead > 0, "in every step but the first both get a token"


def test_offline_requests_give_way_between_two_steps_so_their_group_waits() -> None:
    cluster = Ahead()
    cluster.submit("a", [1, 2, 3], 6, ignore_eos=True, service_class=ServiceClass.OFFLINE)
    cluster.submit("b", [4, 5, 6], 6, ignore_eos=True)
    cluster.expect_all()
    assert cluster.num_ahead == 0


def test_a_suspect_is_tried_with_no_step_beside_its_own() -> None:
    cluster, tried = Ahead(), list[int]()
    cluster.submit("a", [1, 2, 3], 30, ignore_eos=True)
    cluster.submit("b", [4, 5, 6], 30, ignore_eos=True)
    cluster.poison["a"] = 2

    def look() -> bool:
        tried.extend(len(group.in_flight) for group in cluster.core.groups.values() if group.queues.suspects)
        return False

    cluster.run(stop=look)
    assert tried and max(tried) == 1 and cluster.num_ahead
    assert cluster.ends == {"a": ["error"], "b": ["length"]}


@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_memory_that_runs_out_is_decided_on_between_two_steps(policy: str) -> None:
    cluster = Ahead(full_blocks=20, policy=policy, prefix_caching=False)
    for i in range(6):
        cluster.submit(f"r{i}", [i + 1, i + 2, i + 3], 40, at_ms=i, ignore_eos=True)
    cluster.expect_all()
    group = cluster.core.groups[0]
    assert group.counters.num_preemptions if policy == "recompute" else cluster.swapped
    assert (cluster.num_ahead > 0) == (policy == "recompute")


@pytest.mark.parametrize(("event", "reason"), [
    (ports.CancelRequested("a"), "cancelled"), (ports.FinishRequested("a"), "stop"),
])  # fmt: skip
def test_an_end_from_outside_gives_blocks_back_when_both_steps_have_ended(event: ports.Event, reason: str) -> None:
    """A client that leaves, or a stop string that the front end has found."""
    cluster = pair()
    cluster.at(9 * MS, event)
    cluster.run()
    assert cluster.ends == {"a": [reason], "b": ["length"]}
    assert cluster.outputs["b"] == expected_run(cluster.requests["b"], 10_000)[0]
    cluster.expect_nothing_left()


def test_nothing_counts_that_follows_on_a_token_that_could_not_be_sampled() -> None:
    cluster = pair()

    def spoil(event: object) -> None:
        if isinstance(event, ports.StepCompleted) and event.step_id == 4:
            event.tokens[0] = SampledToken(FAILED_TOKEN_ID)

    note_ended = cluster._note_ended
    cluster._note_ended = lambda event: (spoil(event), note_ended(event))[1]  # type: ignore[method-assign]
    cluster.run()
    assert cluster.ends == {"a": ["error"], "b": ["length"]}
    assert cluster.outputs["b"] == expected_run(cluster.requests["b"], 10_000)[0]
    cluster.expect_nothing_left()


def test_a_failed_step_fails_the_one_behind_it_and_only_its_own_requests_end() -> None:
    cluster = Ahead(max_seqs=2)
    cluster.submit("a", [1, 2, 3], 3, ignore_eos=True)
    cluster.submit("b", [4, 5, 6], 12, ignore_eos=True)
    cluster.submit("c", [7, 8], 6, ignore_eos=True)
    cluster.run(stop=lambda: len(cluster.steps) == 2)
    cluster.faults = Faults(step=1.0, budget=1)
    cluster.run(stop=lambda: bool(cluster.gave_none))
    cluster.run()
    failed = [r.fields["step"] for r in cluster.records if r.kind == "step_failed"]
    assert len(failed) == 2 and failed[1] == failed[0] + 1
    assert cluster.ends == {"a": ["error"], "b": ["error"], "c": ["length"]}
    cluster.expect_nothing_left()


@pytest.mark.parametrize("killed_at", [2, 3, 5])
def test_a_worker_dies_between_a_step_and_the_one_behind_it(killed_at: int) -> None:
    cluster = pair(num_workers=2)
    cluster.poison["b"] = killed_at
    cluster.expect_all()
    assert cluster.num_deaths and cluster.num_ahead


@pytest.mark.parametrize("kind", list(MigrationKind))
def test_a_request_on_the_move_finds_the_moment_in_which_it_is_in_no_step(kind: MigrationKind) -> None:
    cluster = pair(num_workers=2, policy="drop", full_blocks=80)
    cluster.run(until_ms=12)
    state = cluster.core.state.requests["b"]
    other = next(i for i in cluster.core.groups if i != state.group_id)
    cluster.carry_out(cluster.core.request_migration("b", other, cluster.now, kind=kind, max_step_tokens=4))
    cluster.expect_all()
    assert cluster.core.state.counters.num_migrations == 1 and cluster.num_ahead


def test_groups_merge_and_split_again_around_steps_ahead() -> None:
    cluster = Ahead(num_workers=2, policy="drop", auto_restore=False)
    for i in range(6):
        cluster.submit(f"r{i}", [i + 1, i + 2, i + 3], 60, at_ms=2.0 * i, ignore_eos=True)
    cluster.order_at("drop", 30)
    cluster.order_at("restore", 100)
    cluster.expect_all()
    assert {"drop", "restore_done"} <= {r.kind for r in cluster.records}
    assert any(s.follows for s in cluster.steps if len(s.stages) == 1)
    assert not any(s.follows for s in cluster.steps if len(s.stages) > 1)

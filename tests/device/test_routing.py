"""Routing: as transformers has it (``test_architectures``), each row by itself; and what is told of it."""

from __future__ import annotations

import pytest
import torch

from jettison.device.model.arithmetic import Experts
from jettison.device.model.routing import SAMPLED, STEPS_TOGETHER, Routed, RoutingCounts, route

KINDS = [
    Experts(16, 4, 8), Experts(16, 4, 8, is_normed=True), Experts(16, 1, 8, score="softmax_of_chosen"),
    Experts(16, 5, 8, score="softmax_of_chosen"),
    Experts(16, 3, 8, score="sigmoid", is_normed=True, scale=2.5, num_groups=4, num_chosen_groups=2),
    Experts(16, 3, 8, score="sigmoid"),
]  # fmt: skip


@pytest.mark.parametrize("experts", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_depends_on_no_other(experts, dtype):
    drawn = torch.Generator().manual_seed(0)
    logits = torch.randn(70, 16, generator=drawn, dtype=dtype)
    correction = torch.randn(16, generator=drawn, dtype=dtype) if experts.score == "sigmoid" else None
    chosen, shares = route(experts, logits, correction)
    assert chosen.dtype == torch.int64 and shares.dtype == dtype and chosen.shape == (70, experts.num_chosen)
    for rows in (slice(0, 1), slice(5, 38), slice(69, 70)):
        alone = route(experts, logits[rows].clone(), correction)
        assert torch.equal(alone[0], chosen[rows]) and torch.equal(alone[1], shares[rows])


def test_groups_and_correction_count_for_the_choice_alone():
    experts = Experts(8, 2, 8, score="sigmoid", num_groups=4, num_chosen_groups=1)
    logits = torch.tensor([[4.0, -9.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]])
    chosen, shares = route(experts, logits, None)
    assert sorted(chosen[0].tolist()) == [2, 3], "the group with the two best together, not the best expert's"
    assert shares[0].tolist() == pytest.approx([torch.tensor(1.0).sigmoid().item()] * 2)
    correction = torch.tensor([0.0, 0.0, 0.0, 0.0, 9.0, 9.0, 0.0, 0.0])
    chosen, shares = route(experts, logits, correction)
    assert sorted(chosen[0].tolist()) == [4, 5] and shares[0].tolist() == [0.5, 0.5]


def test_what_experts_had_is_told_now_and_then():
    counts = RoutingCounts(3, Experts(4, 2, 8))
    for step in range(STEPS_TOGETHER - 1):
        counts.note(1, torch.tensor([[0, 1], [0, 2]]))
        if step == SAMPLED:
            counts.note(2, torch.tensor([[3, 1]]))
        assert counts.step_ended() == Routed(), step
    told, times = counts.step_ended(), STEPS_TOGETHER // SAMPLED
    assert told == Routed(4 * times + 2, 4 * (2 * times + 1))
    for _ in range(STEPS_TOGETHER):
        told = counts.step_ended()
    assert told == Routed(), "it was told"


def test_models_without_experts_tell_nothing():
    counts = RoutingCounts(3, None)
    assert all(counts.step_ended() == Routed() for _ in range(2 * STEPS_TOGETHER))

"""What forecasts are made from: some groups' requests and memory as ``policy.forecast`` sees them.

Nothing is decided here: rungs say which alternatives there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from jettison.core.load.monitor import TrafficMonitor
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.cost.stepwork import LONE_STEP, StepWork, last_stage_of, period_of, step_of
from jettison.policy.answerlengths import AnswerLengths, evenly
from jettison.policy.forecast import (
    FIRST_TOKEN,
    Arrangement,
    Arrivals,
    Load,
    Seen,
    StepTime,
    Timed,
    first_token_weight,
    turn_time,
)
from jettison.policy.slo import objectives
from jettison.types import WorkerId

NUM_LENGTHS = 64
"""Lengths of answers that arriving requests are given in turn."""


class Outlook:
    """The present requests and memory of groups, as values for forecasts; it keeps nothing."""

    def __init__(self, state: ClusterState, traffic: TrafficMonitor) -> None:
        self._state = state
        self._traffic = traffic
        shape, limits = state.shape, state.limits
        self.token_bytes = shape.num_layers * shape.block_bytes_per_layer(limits.block_size) / limits.block_size
        """Bytes of a token's KV in all layers."""

    def arrangement(self, lengths: Sequence[int], capacity_tokens: float, starts_s: float = 0.0) -> Arrangement | None:
        """Instances as groups of these numbers of stages, with so much KV together. None while step times are not
        known."""
        limits, members = self._state.limits, sum(lengths)
        parts: list[Timed] = []
        for num_stages in sorted(set(lengths)):
            part = self._timed(num_stages, num_stages * lengths.count(num_stages))
            if part is None:
                return None
            parts.append(part)
        return Arrangement(
            capacity_tokens, turn_time(parts), members * limits.max_num_batched_tokens, members * limits.max_num_seqs,
            starts_s,
        )

    def capacity_tokens(self, groups: Iterable[Group]) -> float:
        """KV of groups as they are."""
        return float(sum(g.blocks.capacity for g in groups) * self._state.limits.block_size)

    def apart_tokens(self, worker_ids: Iterable[WorkerId]) -> float:
        """KV of workers with all layers resident."""
        return float(sum(self._state.workers[w].full_blocks for w in worker_ids) * self._state.limits.block_size)

    def copies_tokens(self, num_copies: int) -> float:
        """KV that takes the place of so many copies of all parameters."""
        return num_copies * self._state.shape.parameter_bytes / self.token_bytes

    def _timed(self, num_stages: int, num_instances: int) -> Timed | None:
        """Step times of groups of a length. A pipeline's period is as seen, or as its last stage takes if that is known
        and longer: each stage has a step's fixed cost."""
        predictor = self._state.predictor
        step, seen = predictor.taking(step_of(num_stages)), predictor.taking(period_of(num_stages))
        stage, alone = predictor.taking(last_stage_of(num_stages)), predictor.taking(LONE_STEP)
        if step is None or seen is None or stage is None or alone is None:
            return None
        period = seen
        shorter = max((n for n in predictor.measured_pipelines if n <= num_stages), default=num_stages)
        if shorter != num_stages:
            shorter_s = predictor.taking(period_of(shorter))
            assert shorter_s is not None, "it has been seen"
            period = _longer(alone, shorter_s, shorter, num_stages)
        if predictor.knows_stages:
            period = _longest(period, stage)
        return Timed(num_instances, num_stages, step, period)

    def load(self, groups: Sequence[Group], share: float | None = None) -> Load:
        """The online requests of these groups, and those that are expected to come to them: ``share`` of all that come
        to the cluster, or None: by their instances. A request with its KV in a host pool waits for memory, as those do
        that have not been admitted."""
        held = chain.from_iterable((*g.queues.running.values(), *g.queues.moving.values()) for g in groups)
        present = sorted((s for s in held if not s.is_offline), key=_came)
        lengths = AnswerLengths(self._traffic.answers, [s.num_output for s in present])
        kept_out = chain.from_iterable((*g.queues.waiting, *g.queues.stored.values()) for g in groups)
        waiting = sorted((s for s in kept_out if not s.is_offline), key=_came)
        if share is None:
            share = sum(len(g.stages) for g in groups) / max(1, self._state.alive_workers()[0])
        arrivals = self._arrivals(share, lengths)
        return Load(
            [self._seen(s, lengths) for s in present], [self._seen(s, lengths) for s in waiting], arrivals,
            (self._state.limits.block_size - 1) / 2, self._first_token_weight(arrivals),
        )

    def _first_token_weight(self, arrivals: Arrivals) -> float:
        """By the objectives, where a flag names that of the first token: those that are worked out bind no operator."""
        slo = self._state.params.offline.slo
        if slo.ttft_s is None:
            return FIRST_TOKEN
        goals = objectives(slo, self._state.predictor)
        answers = arrivals.output_tokens
        return first_token_weight(goals.ttft_s, goals.tpot_s, sum(answers) / max(1, len(answers)))

    def _seen(self, state: RequestState, lengths: AnswerLengths) -> Seen:
        """A request as it is: it ends as answers do that got as long as it has."""
        return Seen(
            state.num_tokens, state.num_tokens - state.num_computed, self._left(state, lengths),
            state.first_token_ns is not None,
        )

    def _left(self, state: RequestState, lengths: AnswerLengths) -> float:
        """Tokens that a request is still expected to get. Requests are spread over all lengths that are possible, so
        that some end late: the last ones decide when memory is free."""
        got, most = state.num_output, state.request.params.max_tokens
        return max(1.0, min(lengths.at(evenly(state.order[-1]), got), most) - got)

    def _arrivals(self, share: float, lengths: AnswerLengths) -> Arrivals:
        """This share of what comes to the cluster."""
        lately, usually, lasted_s, prompt = self._traffic.rates()
        outputs = [lengths.at(evenly(index)) for index in range(NUM_LENGTHS)]
        return Arrivals(share * lately, share * usually, lasted_s, prompt, outputs)


def _longest(one: StepTime, other: StepTime) -> StepTime:
    return lambda work: max(one(work), other(work))


def _longer(alone: StepTime, shorter_s: StepTime, shorter: int, num_stages: int) -> StepTime:
    """The period of a pipeline that has not been seen: each stage takes as much beyond its share of a lone step as in
    the pipelines of ``shorter`` stages that have been."""

    def period(work: StepWork) -> float:
        alone_s = alone(work)
        return alone_s / num_stages + max(0.0, shorter_s(work) - alone_s / shorter)

    return period


def _came(state: RequestState) -> int:
    return state.order[-1]

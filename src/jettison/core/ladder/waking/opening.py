"""Sleepers as closed devices of the packing, with a time that opening one takes: what online requests will need by
then, and what is open.

MELL opens a device where no open one has room (section VI). A sleeper cannot take a request at once: so it is opened
when what is open will be full by the time that it serves, and an instance falls asleep only where the others will have
room for so long. What is open is taken as one here; where no packing of it has room for each request, the packing says
so (``Packer.outgrown``). The rung ``wake`` asks; nothing is decided here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from jettison.core.ladder.packing.growing import growth_rates
from jettison.core.ladder.rung import Means
from jettison.core.ladder.waking.duework import LOOK_S
from jettison.core.serving.group import Group
from jettison.core.serving.sharedsteps import held_by_online
from jettison.policy.forecast import Arrivals
from jettison.policy.onlineneed import arrived_tokens, most_growth_tokens
from jettison.policy.slo import LONE_DECODE
from jettison.types import NANOSECONDS


class Need(NamedTuple):
    """Blocks that online requests need until a sleeper could serve, and those of the serving instances, head-room
    included: it is what requests find while another instance is opened."""

    held_blocks: int
    growth_blocks: int
    open_blocks: int
    ahead_s: float

    @property
    def missing_blocks(self) -> int:
        """Blocks that will be missing; 0 or less: none."""
        return self.held_blocks + self.growth_blocks - self.open_blocks

    def as_fields(self) -> dict[str, object]:
        """For the event log."""
        return {
            "online_blocks": self.held_blocks, "growth_blocks": self.growth_blocks, "open_blocks": self.open_blocks,
            "ahead_s": self.ahead_s,
        }  # fmt: skip


class Spared(NamedTuple):
    """How many instances others can spare."""

    num: int
    need: Need | None
    """Of online requests, with what is open without them; None: requests are not packed, and nothing was foreseen."""


class Opening:
    """What online requests will need by the time at which a sleeper could serve."""

    def __init__(self, means: Means) -> None:
        self._means = means
        self._state = means.state
        self._due_ns = 0
        """From when on it is looked at again."""

    @property
    def is_asked(self) -> bool:
        """Whether devices are opened here: only where requests are packed."""
        return self._state.params.packing is not None

    def lacks(self, opening_s: float, now_ns: int) -> Need | None:
        """What is needed before a sleeper that is called now serves; None where all of it is open, or it was looked at
        less than ``LOOK_S`` ago."""
        if now_ns < self._due_ns:
            return None
        self._due_ns = now_ns + round(LOOK_S * NANOSECONDS)
        groups, ahead_s = self._means.moves.serving_groups(), opening_s + LOOK_S
        num_blocks = sum(group.blocks.capacity for group in groups)
        need = Need(*self._need_blocks(groups, ahead_s, num_blocks), num_blocks, ahead_s)
        return need if need.missing_blocks > 0 else None

    def spared(self, leaving: Sequence[Group], opening_s: float) -> Spared:
        """How many of these groups the others can spare: they will have room for what all requests need until a sleeper
        could serve again."""
        if not self.is_asked:
            return Spared(len(leaving), None)
        groups, each = self._means.moves.serving_groups(), [group.blocks.capacity for group in leaving]
        num_blocks = sum(group.blocks.capacity for group in groups)
        ahead_s = opening_s + 2.0 * LOOK_S  # past what the next look sees, which would open one of them again
        held, growth = self._need_blocks(groups, ahead_s, num_blocks - each[0])
        num = sum(blocks <= num_blocks - held - growth for blocks in accumulate(each))
        return Spared(num, Need(held, growth, num_blocks - sum(each[:num]), ahead_s))

    def _need_blocks(self, groups: Sequence[Group], ahead_s: float, enough: int) -> tuple[int, int]:
        """(blocks that online requests of these groups hold, most that they and arrivals take in ``ahead_s`` seconds).
        Where ``enough`` are there in any case, the second may be too high: no answer is taken to end."""
        self._state.catch_up_all()
        held = sum(held_by_online(group, group.blocks.capacity).held_blocks for group in groups)
        turns = self._turns_s(groups)
        if not turns:
            return held, 0
        size, loads = self._state.limits.block_size, self._means.loads
        num_waiting = sum(group.queues.queued_blocks() for group in groups)
        decoded = sum(
            (g.queues.num_served_online + len(g.queues.waiting)) * ahead_s / turn_s
            for g, turn_s in zip(groups, turns, strict=True)
        )
        lately, usually, lasts_s, prompt = loads.traffic.rates()
        answer = loads.traffic.mean_output_tokens
        arrivals = Arrivals(lately, usually, lasts_s, prompt, (answer,))
        most = num_waiting + math.ceil((decoded + arrived_tokens(arrivals, ahead_s, min(turns))) / size)
        if held + most <= enough:
            return held, most
        grown = sum(
            most_growth_tokens(loads.outlook.load([group]), turn_s, ahead_s)
            for group, turn_s in zip(groups, turns, strict=True)
        )
        return held, math.ceil(grown / size)

    def _turns_s(self, groups: Iterable[Group]) -> list[float]:
        """Seconds in which each decoding request of each group gets a token; empty while step times are not known."""
        lone_s, rate_of = self._state.predictor.predict_s(LONE_DECODE), growth_rates(self._state)
        if not lone_s:
            return []
        size = self._state.limits.block_size
        return [1.0 / (rate * size) if (rate := rate_of(group)) else lone_s for group in groups]

"""Moves that were refused because they cost more than they save: when they are asked about again. Pure.

A packing that is asked again wants the same moves, and pricing them takes time. So they are held until what the refusal
rested on has changed by as much as was missing: by proportion, cost has come down to what is saved. Then the packing
plans anew and prices exactly; if that is refused, too, it rests on what is there then.
"""

from __future__ import annotations

from typing import NamedTuple


class Grounds(NamedTuple):
    """What the cost of moves out of one device, and what they save, rest on."""

    num_blocks: int
    """Of the requests that are to leave."""
    num_requests: int
    """Requests that the device serves; at least 1."""
    stay_s: float
    """How long requests stay."""
    share: float
    """Share of the device that is saved; 0: nothing is saved, as it stays awake."""
    queued_bytes: float
    """What other transfers send through the ports of the moves."""


class Refused(NamedTuple):
    """Moves that were refused."""

    cost_s: float
    """Device-seconds that they cost."""
    waits_s: float
    """Of these, what other transfers wait."""
    takes_s: float
    """Seconds that the moves take."""
    grounds: Grounds

    def cost_by_now(self, now: Grounds) -> float:
        """Cost on other grounds, by proportion."""
        then = self.grounds
        size = now.num_blocks / max(1, then.num_blocks)
        queued = min(1.0, now.queued_bytes / then.queued_bytes) if then.queued_bytes else 0.0
        own_s = (self.cost_s - self.waits_s) * size + self.waits_s * queued
        return own_s * then.num_requests / max(1, now.num_requests)

    def is_due(self, now: Grounds) -> bool:
        """Whether the moves are asked about again."""
        takes_s = self.takes_s * now.num_blocks / max(1, self.grounds.num_blocks)
        return self.cost_by_now(now) <= now.share * max(0.0, now.stay_s - takes_s)

    def beside(self, other: Refused, both: Grounds) -> Refused:
        """One refusal of moves out of the same device that were refused one after the other: from now on they are
        weighed together. ``both``: the present grounds of all of them."""
        cost_s = self.cost_by_now(both._replace(num_blocks=max(0, both.num_blocks - other.grounds.num_blocks)))
        return Refused(
            cost_s + other.cost_s, self.waits_s + other.waits_s, self.takes_s + other.takes_s, both
        )

"""Does memory keep a group's queue out, and for how much longer? (design 5.1, KunServe v3 section 4.1)

Pure. Overload means: requests wait, and the head of the queue waits *for memory*; 95 % used without a queue is healthy.
Whether a drop is worth it is another question, which ``policy.forecast`` answers: near the limit of compute more memory
cures nothing, and the bubbles of a pipeline turn a short wait into a long one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Trigger(StrEnum):
    """When a group that memory keeps out drops, and when a merged one is restored."""

    FORECAST = "forecast"
    """Where the forecast says that requests get shorter waits and tokens in all (``policy.forecast``)."""
    PRESSURE = "pressure"
    """KunServe's own: a drop as soon as memory keeps a queue out, a restore once usage is below a threshold (v3
    section 4.4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadParams:
    """When a drop is considered."""

    trigger: Trigger = Trigger.FORECAST
    min_blocked_s: float = 0.05
    """Grace: a head blocked for less may be served by the next ending request."""
    horizon_s: float = 0.0
    """How far ahead memory is foreseen to run out (KunServe v1 section 4.3); 0: only a queue counts."""


class Pressure(NamedTuple):
    """How hard memory presses on a group."""

    load: float
    """Blocks that requests hold and that the head needs, over the capacity."""
    memory_wait_s: float
    """Until the whole queue has its memory, as things are."""
    refuses: str | None
    """Why a drop was declined a moment ago; None: none was."""

    def as_fields(self) -> dict[str, object]:
        """For the event log."""
        return {"load": self.load, "memory_wait_s": self.memory_wait_s}


def memory_wait_s(
    missing_blocks: int, freed_blocks_per_s: float | None, queued_blocks: int, admitted_blocks_per_s: float | None
) -> float:
    """Seconds until a whole queue has its memory.

    ``missing_blocks``: that are to come free; ``freed_blocks_per_s``: that do (None: not known yet). Where it has been
    seen what the queue got (``admitted_blocks_per_s``), that counts if it was less: while memory is full, running
    requests grow by as much as comes free.
    """
    if freed_blocks_per_s is None or freed_blocks_per_s <= 0.0:
        predicted_s = math.inf if missing_blocks > 0 else 0.0
    else:
        predicted_s = max(0, missing_blocks) / freed_blocks_per_s
    if admitted_blocks_per_s is None:
        return predicted_s
    return max(predicted_s, queued_blocks / admitted_blocks_per_s if admitted_blocks_per_s > 0.0 else math.inf)


def memory_binds(
    num_waiting: int, used_blocks: int, head_need_blocks: int, capacity_blocks: int, blocked_s: float | None,
    params: OverloadParams,
) -> bool:
    """Whether memory has kept the head of a queue out for long enough to count. ``blocked_s``: how long it has; None
    while it does not."""
    return (
        num_waiting > 0 and blocked_s is not None and blocked_s >= params.min_blocked_s
        and used_blocks + head_need_blocks > max(1, capacity_blocks)
    )  # fmt: skip


def memory_will_bind(
    used_blocks: int, demanded_blocks_per_s: float, released_blocks_per_s: float, capacity_blocks: int, horizon_s: float
) -> bool:
    """Whether memory runs out within ``horizon_s`` if demand (of arriving prompts and growing requests) and release go
    on as they do. High usage alone is no reason."""
    growth = demanded_blocks_per_s - released_blocks_per_s
    return growth > 0.0 and used_blocks + growth * horizon_s > capacity_blocks

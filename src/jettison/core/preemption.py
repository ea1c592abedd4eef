"""Why a request gives its blocks up before it has ended: one vocabulary for all that preempt (``Group.preempt``),
and for the deaths that take the blocks away (``core.moving.recovering``).

What is preempted during an event is told at the event's end (``ClusterCore.handle``), by group and reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from jettison.types import GroupId, RequestId


class Preemption(StrEnum):
    """Reasons, as they stand in the event log."""

    STEP = "a step of its group lacked blocks or places, and it was the next to give way"
    SWAP = "its group lacks blocks, and host memory keeps its KV until there are some"
    ONLINE_HEAD = "an online request lacked room, and a copy of its KV is in host memory"
    PAUSE = "the offline work of its group is paused"
    DEADLINE = "offline work with a nearer deadline took its place"
    SPREAD = "an instance that was woken for offline work has room for it"
    OUTGREW = "it outgrew its group, and is computed again in another"
    NO_SPARE = "requests change places in a circle, and no free group lets it pass"
    EXCHANGE = "its group has merged, and computing it again was better than sending its KV"
    SPLIT = "its group splits, and no part has room for it"
    SLEEP = "its instance falls asleep, and another computes it"
    TOO_LARGE = "it is too large for what its group has become"
    SLOW_LINK = "the link would take longer than computing it"
    COPY_FAILED = "a copy of its KV to or from host memory failed"
    WORKER_LOST = "a worker of its group is dead"
    HOST_LOST = "the worker whose host memory had its KV is dead"
    UNHOSTED = "host memory is used no more"
    KV_LOST = "a failed step or transfer left a gap in its KV"


class Preempted(NamedTuple):
    """One preemption."""

    group_id: GroupId
    why: Preemption
    request_id: RequestId
    num_tokens: int
    """To be computed again."""


def told(preempted: Iterable[Preempted]) -> list[dict[str, object]]:
    """What the event log has of them: for each group and reason, in order of the first preemption of each."""
    together: dict[tuple[GroupId, Preemption], list[Preempted]] = {}
    for one in preempted:
        together.setdefault((one.group_id, one.why), []).append(one)
    return [
        {
            "group": group_id, "reason": str(why), "request_ids": [one.request_id for one in found],
            "tokens": sum(one.num_tokens for one in found),
        }
        for (group_id, why), found in together.items()
    ]

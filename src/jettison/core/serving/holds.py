"""Holds: what keeps a group from going on as usual, by owner. No owner can lift another's hold.

A group is held by name: an owner is a rung (by its ``name``) or one of the moves below. Holds with an amount, that is,
reserved blocks and the cap of admission, are in ``core.serving.blocks``, by the same owners.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

Holder = str
"""The name of the rung or move that holds a group."""

DROP: Final = "drop"
"""The members of a merge are about to be remapped."""
RESTORE: Final = "restore"
"""A pipeline is about to be split."""
EXCHANGE: Final = "exchange"
"""KV of running requests is on its way between members of a merged group."""
LOST_PEER: Final = "lost peer"
"""A step failed because a member is lost, and its death is not known yet. The death dissolves the group, so nothing
releases this hold."""


class GroupHold(Enum):
    """What an owner may keep a group from."""

    STEPS = auto()
    """It begins no step (``Group.paused``)."""
    PREEMPTION = auto()
    """It recomputes no request (``Group.holds_preemption``)."""
    OFFLINE = auto()
    """It admits no offline request (``Queues.offline_holders``)."""

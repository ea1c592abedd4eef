"""What a rung is: a way to make supply meet demand, asked at fixed moments, which starts mechanisms and moves nothing.

The ladder (``core.ladder.climb``) asks its rungs from the cheapest to the dearest. A rung has four verbs. It *looks*:
where it wants something done, it makes an offer, which says which groups it is about and why. It is then told to
*begin* what it offered. A dearer rung that needs workers which it uses asks for way: it *gives way*, which means that
it stops, finishes or hands over what it has begun there, within one piece of a copy. And it *leaves* when its reason is
gone. What else a rung may do is in ``core.ladder.hooks``.

A rung for a policy of one's own is a subclass in any module: ``register`` makes its name known to ``--overload``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Set
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar

from jettison.config.rungs import OverloadWord, add_overload_word
from jettison.core.load.views import Loads
from jettison.core.moving.checkpoints import Checkpoints
from jettison.core.moving.hosted import Hosted
from jettison.core.moving.migrations import Migrations
from jettison.core.moving.moves import Moves
from jettison.core.moving.sleeping import Sleepers
from jettison.core.ports import Action, Record
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.errors import ConfigError
from jettison.policy.soonest import Way
from jettison.types import GroupId, WorkerId


class Moment(Enum):
    """When rungs are asked."""

    TICK = auto()
    """Time has passed (every 100 ms)."""
    STEP_ENDED = auto()
    """A step has been committed; the next one is planned after this: what can wait for the tick would be a bubble."""
    BEFORE_STEPS = auto()
    """At the end of every event, before touched groups plan their steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a rung would do now. Rungs add what they need to begin it."""

    groups: tuple[GroupId, ...]
    """That it is about."""
    why: str


@dataclass(frozen=True, slots=True)
class Means:
    """What rungs look at, and the mechanisms that they start."""

    state: ClusterState
    loads: Loads
    moves: Moves
    """Drops and restores."""
    hosted: Hosted
    """KV in host pools."""
    checkpoints: Checkpoints
    """Of what it is a copy, while that runs."""
    migrations: Migrations
    sleepers: Sleepers
    ways: Callable[[], Collection[Way]]
    """By which the rungs that there are let the head of a queue in."""
    ask_way: Callable[[Rung, Collection[WorkerId], str, int], list[Action]]
    """Have all rungs below one give way at these workers."""
    ask_room: Callable[[Rung, Group, str, int], list[Action]]
    """Have all rungs below one take offline KV out of a group."""
    tell_unmet: Callable[[GroupId, int, str, int], list[Action]]
    """A group lacks so many bytes that a rung had no way to get, and why: rungs above it may."""
    ask_closed: Callable[[], Set[GroupId] | None]
    """Groups that no online request needs; None where no rung says which those are."""


class Rung:
    """Does nothing. See the module."""

    name: ClassVar[str]
    rank: ClassVar[int]
    """Rungs are asked in this order: from free to dear."""
    forms_pipelines: ClassVar[bool] = False
    """It may merge groups: a request can have more memory than one instance's, and microbatches are planned ahead."""
    uses_host_pool: ClassVar[bool] = False
    spreads: ClassVar[bool] = False
    """It moves requests to where most is free: the opposite of packing."""
    moments: ClassVar[frozenset[Moment]] = frozenset(Moment)
    """When it looks."""
    way: ClassVar[Way | None] = None
    """By which it lets in the head of a queue that memory keeps out; None: that is not what it does."""
    is_word: ClassVar[bool] = True
    """Its name is a word of ``--overload``; others come with those."""

    def __init__(self, means: Means) -> None:
        self.means = means

    def look(self, moment: Moment, now_ns: int) -> Iterable[Offer | Record]:
        """What it would do now, or a record of why not. Each offer is begun before the next one is asked for."""
        return ()

    def begin(self, offer: Offer, now_ns: int) -> list[Action]:
        """Do what was offered."""
        raise AssertionError(f"{self.name} has made an offer that it cannot begin: {offer}")

    def give_way(self, worker_ids: Collection[WorkerId], by: Rung | None, why: str, now_ns: int) -> list[Action]:
        """A rung above needs these workers now, and why. ``by``: None where an administrator does.

        Copies to and from arenas whose layouts a move changes are broken off by the move (``Moves``), whichever rung
        has begun them.
        """
        return []

    def leave(self, now_ns: int) -> list[Action]:
        """On every tick: stop what has no reason any more. Rungs leave from the dearest to the cheapest."""
        return []


_RUNGS: dict[str, type[Rung]] = {}


def register(rung: type[Rung]) -> type[Rung]:
    """Make a rung known by its name. Raises ConfigError where another one has that name."""
    if _RUNGS.setdefault(rung.name, rung) is not rung:
        raise ConfigError(f"there are two rungs named {rung.name!r}")
    if rung.is_word:
        add_overload_word(rung.name, OverloadWord(rung.uses_host_pool))
    return rung


def rung_named(name: str) -> type[Rung]:
    """Raises ConfigError for a name that no rung has."""
    if name not in _RUNGS:
        raise ConfigError(f"there is no rung {name!r}; there are {', '.join(sorted(_RUNGS))}")
    return _RUNGS[name]


def rung_classes(names: Iterable[str], *, static_pipeline: bool) -> list[type[Rung]]:
    """Of these names, from free to dear.

    Raises ConfigError for a name that no rung has, and for rungs that merge groups beside static pipelines.
    """
    classes = sorted({rung_named(name) for name in names}, key=lambda rung: (rung.rank, rung.name))
    if static_pipeline and (merging := [rung.name for rung in classes if rung.forms_pipelines]):
        raise ConfigError(f"static pipelines stay as they are, so no rung may merge groups: {', '.join(merging)}")
    return classes

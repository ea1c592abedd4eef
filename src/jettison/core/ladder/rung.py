"""What a rung is: a way to make supply meet demand, asked at fixed moments, which starts mechanisms and moves nothing.

The ladder (``core.ladder.climb``) asks its rungs from the cheapest to the dearest. A rung that wants something done
makes an *offer*, which says which groups it is about and why, and is then told to begin it. A rung that needs workers
which cheaper ones use asks for way: those stop, finish or hand over what they have begun there, within one piece of a
copy.

A rung for a policy of one's own is a subclass in any module: ``register`` makes its name known to ``--overload``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar, NamedTuple

from jettison.config.rungs import OverloadWord, add_overload_word
from jettison.core.load.views import Loads
from jettison.core.moving.checkpoints import Checkpoints
from jettison.core.moving.hosted import Hosted
from jettison.core.moving.migrations import Migrations
from jettison.core.moving.moves import Moves
from jettison.core.moving.sleeping import Sleepers
from jettison.core.ports import Action, Record
from jettison.core.requests import RequestState
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


class Refusal(NamedTuple):
    """Why a request is not taken, and when to try again."""

    message: str
    retry_after_ms: int


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
    """Groups that no online request needs; None where no rung says who does."""


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

    # --- deciding ---------------------------------------------------------------------------------------------

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

    def give_room(self, group: Group, why: str, now_ns: int) -> list[Action]:
        """Offline KV in this group is all that keeps a rung above from what it would do with it, and why."""
        return []

    def on_unmet(self, group_id: GroupId, missing_bytes: int, why: str, now_ns: int) -> list[Action]:
        """A rung below could not get a group the memory that it needs."""
        return []

    def why_refuse(self, tenant: str, limit: int | None, num_coming: int, now_ns: int) -> Refusal | None:
        """Whether another online request of a tenant is taken. ``limit``: online ones that may wait; None: any number.
        ``num_coming``: accepted ones that the core has not been told of."""
        return None

    def place(self, state: RequestState) -> GroupId | None:
        """Which group a newcomer is queued in; None: whichever dispatch chooses."""
        return None

    def leave(self, now_ns: int) -> list[Action]:
        """On every tick: stop what has no reason any more. Rungs leave from the dearest to the cheapest."""
        return []

    def after_steps(self, now_ns: int) -> list[Action]:
        """Send what should follow the steps just issued in a worker's stream."""
        return []

    def go(self) -> None:
        """It is a rung no more: undo what it has set on groups."""

    # --- what the loop asks -----------------------------------------------------------------------------------

    @property
    def is_quiet(self) -> bool:
        """A step of one group is no reason for it to do something with another."""
        return True

    @property
    def awaits_tick(self) -> bool:
        """It may do something although nothing but time has passed."""
        return False

    @property
    def due_ns(self) -> int | None:
        """When it next looks at groups, whichever event comes first; None: only at those that an event is about."""
        return None

    @property
    def steps_ahead(self) -> int:
        """For how many steps of growth it wants to see room before it acts."""
        return 0

    @property
    def worker_ids(self) -> Collection[WorkerId]:
        """Workers that it uses, and that it would have to give way at."""
        return ()

    # --- what is read of it -----------------------------------------------------------------------------------

    @property
    def num_scale_outs(self) -> int:
        """Times that it has asked for more instances."""
        return 0

    @property
    def missing_bytes(self) -> int:
        """That it asks for from outside now."""
        return 0

    @property
    def wakes_s(self) -> tuple[float, ...]:
        """What waking each sleeper that it may wake would take, the soonest first."""
        return ()

    @property
    def lag_blocks(self) -> int:
        """Sealed blocks of its candidates for checkpoints that have not been copied."""
        return 0

    @property
    def closed(self) -> Set[GroupId] | None:
        """Groups where no online request lives, nor should; None: it does not say where they should."""
        return None

    @property
    def gauges(self) -> Mapping[str, float]:
        """What metrics show of it, by name."""
        return {}

    # --- what it is told --------------------------------------------------------------------------------------

    def note_grown(self, group: Group) -> None:
        """Requests of the group have taken blocks in steps that are told of late."""

    def note_touched(self, group_ids: Collection[GroupId]) -> None:
        """These groups are different (at the end of an event)."""

    def check(self) -> None:
        """Raise AssertionError on any broken invariant."""


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

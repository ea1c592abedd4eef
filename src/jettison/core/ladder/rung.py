"""Rungs: a rung is one way to make memory supply meet demand. It is asked at fixed moments, starts mechanisms of
``core.moving``, and moves nothing itself.

The ladder (``core.ladder.climb``) asks its rungs from the cheapest to the dearest. A rung has four verbs. It *looks*:
where it wants something done, it makes an offer, which names the groups that it is about and the reason. The ladder
then tells it to *begin* what it offered. Where a dearer rung needs workers, each cheaper rung is told to *give way*
there: it stops, finishes or hands over what it has begun at these workers, within one piece of a copy. And on every
tick a rung may *leave*: it stops what has no reason any more. What else a rung may do is in ``core.ladder.hooks``.

A rung for a policy of one's own is a subclass of ``Rung`` in any module: ``register`` makes its name known to
``--overload``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Set
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar, NamedTuple

from jettison.config.rungs import OverloadWord, add_overload_word
from jettison.core.ladder.outcomes import Outcomes
from jettison.core.ladder.turns import Turns
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
from jettison.types import GroupId, WorkerId


class Moment(Enum):
    """The moments at which the ladder asks its rungs to look."""

    TICK = auto()
    """Time has passed (every 100 ms)."""
    STEP_ENDED = auto()
    """A step has been committed, and its group has not planned the next one yet: what waited for the tick would be a
    bubble."""
    BEFORE_STEPS = auto()
    """The end of every event has come, and touched groups have not planned their steps yet."""


class Worth(NamedTuple):
    """What an offer is forecast to bring over staying as things are, in one currency."""

    saved_request_s: float
    """Request-seconds (``policy.forecast``)."""
    device_s: float = 0.0
    """Device-seconds that it takes beyond those of today. One counts as one request-second: a device that is kept for
    requests serves one at least."""

    @property
    def net_request_s(self) -> float:
        """Request-seconds saved, less what the devices count as."""
        return self.saved_request_s - self.device_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a rung would do now, for which groups, and why. A rung's own subclass adds what ``begin`` needs."""

    groups: tuple[GroupId, ...]
    """The groups that the offer is about; empty where it is about none in particular."""
    why: str
    worth: Worth | None = None
    """What it is forecast to bring. Of offers about the same group the ladder begins the one that brings most. None: it
    has no rival, or nothing is known of steps; it is begun at once."""


@dataclass(frozen=True, slots=True)
class Means:
    """What every rung is given: the state and loads that it looks at, the mechanisms that it starts, and ways to ask
    other rungs."""

    state: ClusterState
    loads: Loads
    moves: Moves
    """Starts merges (drops) and restores."""
    hosted: Hosted
    """Keeps requests' KV in host pools: swapped out and checkpointed."""
    checkpoints: Checkpoints
    """Copies of requests in host pools that are made while the requests run."""
    migrations: Migrations
    sleepers: Sleepers
    wakes_sleepers: Callable[[], bool]
    """Whether some rung wakes sleepers."""
    turns: Turns
    outcomes: Outcomes
    ask_way: Callable[[Rung, Collection[WorkerId], str, int], list[Action]]
    """Has every rung below the given one give way at these workers (reason, time); returns the actions of that."""
    ask_room: Callable[[Rung, Group, str, int], list[Action]]
    """Has every rung below the given one that can take offline KV out of a group (reason, time); returns the actions of
    that."""
    tell_unmet: Callable[[GroupId, int, str, int], list[Action]]
    """Tells every rung that may have more memory that a group lacks so many bytes (reason, time); returns their
    actions."""
    ask_closed: Callable[[], Set[GroupId] | None]
    """Returns the groups that no online request needs; None where no rung places requests."""
    ask_lacking: Callable[[float], int]
    """Returns the blocks that requests will lack where they should live by the time that a group which opens in so many
    seconds could take some, while none is left to take into use; 0 where no rung places requests."""


class Rung:
    """Base class of rungs: one that is asked to look, give way or leave does nothing. A subclass overrides what it
    does."""

    name: ClassVar[str]
    rank: ClassVar[int]
    """Place in the ladder: rungs are asked from the lowest rank (free) to the highest (dear)."""
    forms_pipelines: ClassVar[bool] = False
    """It may merge groups: then a request can have more memory than one instance's, and microbatches are planned
    ahead."""
    uses_host_pool: ClassVar[bool] = False
    acts_between_steps: ClassVar[bool] = False
    """It has to find running online requests in no step, so no group plans a step ahead while it is in the ladder
    (``core.serving.stepsahead``)."""
    spreads: ClassVar[bool] = False
    """It moves requests to where most memory is free: the opposite of packing."""
    moments: ClassVar[frozenset[Moment]] = frozenset(Moment)
    """The moments at which the ladder asks it to look."""
    relieves: ClassVar[bool] = False
    """Its offers let in a queue that memory keeps out: of such offers about one group at one moment, one is begun."""
    is_word: ClassVar[bool] = True
    """Its name is a word of ``--overload``; other rungs come with those words or with other options."""

    def __init__(self, means: Means) -> None:
        self.means = means

    def look(self, moment: Moment, now_ns: int) -> Iterable[Offer | Record]:
        """Iterate over what the rung would do at this moment: offers, and records of why it does not act; empty by
        default. The ladder begins each offer before it asks for the next one, but for those with a worth, which it
        begins when all rungs have looked."""
        return ()

    def begin(self, offer: Offer, now_ns: int) -> list[Action]:
        """Do what this rung offered, and return the actions. By default a rung makes no offers: raises
        AssertionError."""
        raise AssertionError(f"{self.name} has made an offer that it cannot begin: {offer}")

    def give_way(self, worker_ids: Collection[WorkerId], by: Rung | None, why: str, now_ns: int) -> list[Action]:
        """Stop, finish or hand over what this rung has begun at these workers, as a dearer rung ``by`` needs them for
        the reason ``why``; return the actions. ``by`` None: an administrator needs them. Does nothing by default.

        A rung need not stop copies to and from arenas whose layouts a move changes: the move breaks them off
        (``Moves``).
        """
        return []

    def leave(self, now_ns: int) -> list[Action]:
        """Stop what the rung has begun and what has no reason any more; return the actions, none by default. The ladder
        asks this on every tick, from the dearest rung to the cheapest."""
        return []


_RUNGS: dict[str, type[Rung]] = {}


def register(rung: type[Rung]) -> type[Rung]:
    """Class decorator: make a rung's class known by its name, and its name a word of ``--overload`` if the class says
    so. Returns the class. Raises ConfigError where another class has that name."""
    if _RUNGS.setdefault(rung.name, rung) is not rung:
        raise ConfigError(f"there are two rungs named {rung.name!r}")
    if rung.is_word:
        add_overload_word(rung.name, OverloadWord(rung.uses_host_pool))
    return rung


def rung_named(name: str) -> type[Rung]:
    """The class of the rung with this name. Raises ConfigError where no rung has it."""
    if name not in _RUNGS:
        raise ConfigError(f"there is no rung {name!r}; there are {', '.join(sorted(_RUNGS))}")
    return _RUNGS[name]


def rung_classes(names: Iterable[str], *, static_pipeline: bool) -> list[type[Rung]]:
    """The classes of the rungs with these names, each once, from free to dear.

    Raises ConfigError for a name that no rung has, and for a rung that merges groups where ``static_pipeline`` is set.
    """
    classes = sorted({rung_named(name) for name in names}, key=lambda rung: (rung.rank, rung.name))
    if static_pipeline and (merging := [rung.name for rung in classes if rung.forms_pipelines]):
        raise ConfigError(f"static pipelines stay as they are, so no rung may merge groups: {', '.join(merging)}")
    return classes

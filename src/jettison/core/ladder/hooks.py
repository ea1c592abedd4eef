"""What a rung may do beside its four verbs (``core.ladder.rung``): each of these is one thing that the ladder asks.

A rung that has the methods of a protocol is asked; one that has not does not mention it. The ladder sorts its rungs by
these protocols once, when it is made (``core.ladder.climb``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from jettison.core.moving.sleeping import Expected
from jettison.core.ports import Action
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.errors import ConfigError
from jettison.types import GroupId, WorkerId

if TYPE_CHECKING:
    from jettison.core.ladder.rung import Moment


class Refusal(NamedTuple):
    """Why a request is not taken, and when to try again."""

    message: str
    retry_after_ms: int


class Calm(NamedTuple):
    """How long a rung decides nothing, while nothing but ticks and decode steps happens."""

    until_ns: int | None
    """It may decide at the first of the moments in question from then on. 0: at any; None: at none."""
    num_steps: int = 0
    """Only while each group has room for so many steps more than it has taken."""


@runtime_checkable
class Admits(Protocol):
    """It may refuse requests on arrival."""

    def why_refuse(self, tenant: str, limit: int | None, num_coming: int, now_ns: int) -> Refusal | None:
        """Whether another online request of a tenant is taken. ``limit``: online ones that may wait; None: any number.
        ``num_coming``: accepted ones that the core has not been told of."""
        ...


@runtime_checkable
class Places(Protocol):
    """It says where requests live."""

    def place(self, state: RequestState) -> GroupId | None:
        """Which group a newcomer is queued in; None: whichever dispatch chooses."""
        ...

    def closed(self) -> Set[GroupId]:
        """Groups where no online request lives, nor should."""
        ...


@runtime_checkable
class GivesRoom(Protocol):
    """It can take offline KV out of a group."""

    def give_room(self, group: Group, why: str, now_ns: int) -> list[Action]:
        """Offline KV in this group is all that keeps a rung above from what it would do with it, and why."""
        ...


@runtime_checkable
class HearsUnmet(Protocol):
    """It may have memory where a rung below had none."""

    def on_unmet(self, group_id: GroupId, missing_bytes: int, why: str, now_ns: int) -> list[Action]:
        """A rung below could not get a group the memory that it needs."""
        ...


@runtime_checkable
class Scales(Protocol):
    """It asks for more instances."""

    def num_scale_outs(self) -> int:
        """Times that it has asked."""
        ...

    def missing_bytes(self) -> int:
        """That it asks for from outside now."""
        ...


@runtime_checkable
class SendsCopies(Protocol):
    """It copies KV to or from host memory."""

    def after_steps(self, now_ns: int) -> list[Action]:
        """Send what should follow the steps just issued in a worker's stream."""
        ...


@runtime_checkable
class Lags(Protocol):
    """It keeps copies of what runs."""

    def lag_blocks(self) -> int:
        """Sealed blocks of its candidates that have not been copied."""
        ...


@runtime_checkable
class Sleeps(Protocol):
    """It wakes sleepers."""

    def wakes_s(self) -> tuple[float, ...]:
        """What waking each sleeper that it may wake would take, the soonest first."""
        ...

    def expect(self, worker_id: WorkerId) -> Expected:
        """How long a wake will take that another part of the core orders."""
        ...


@runtime_checkable
class Gauges(Protocol):
    """Metrics show something of it."""

    def gauges(self) -> Mapping[str, float]:
        """By name."""
        ...


@runtime_checkable
class Occupies(Protocol):
    """It uses workers for longer than an event."""

    def worker_ids(self) -> Collection[WorkerId]:
        """Those that it would have to give way at."""
        ...


@runtime_checkable
class Ends(Protocol):
    """It sets something on groups."""

    def go(self) -> None:
        """It is a rung no more: undo what it has set."""
        ...


@runtime_checkable
class Notes(Protocol):
    """It remembers which groups are different since it looked."""

    def note_touched(self, group_ids: Collection[GroupId]) -> None:
        """These groups are (at the end of an event, and where steps are told of together)."""
        ...


@runtime_checkable
class Checks(Protocol):
    """It keeps books."""

    def check(self) -> None:
        """Raise AssertionError on any broken invariant."""
        ...


@runtime_checkable
class Ticks(Protocol):
    """It may decide something although nothing but ticks and decode steps happens. A driver in virtual time leaves out
    the others of those."""

    def decides_nothing_before(self, moment: Moment) -> Calm:
        """At ticks (``TICK``: whether the next one decides something is all that is asked), or at ends of steps and
        before them (the others): a step of one group may be a reason to do something with another."""
        ...


HOOKS = (
    Admits, Places, GivesRoom, HearsUnmet, Scales, SendsCopies, Lags, Sleeps, Gauges, Occupies, Ends, Notes, Checks,
    Ticks,
)


def check_hooks(rung: type) -> None:
    """A rung has all methods of a hook or none. Raises ConfigError for one that has some, or a property in the place of
    a method: the ladder would not ask it, or fail when it does."""
    for hook in HOOKS:
        names = [name for name in vars(hook) if not name.startswith("_")]
        present = [name for name in names if hasattr(rung, name)]
        if present and (missing := sorted(set(names).difference(present))):
            raise ConfigError(f"rung {rung.__name__} has {present[0]} without {missing[0]} (hooks.{hook.__name__})")
        for name in present:
            if not callable(getattr(rung, name)):
                raise ConfigError(f"rung {rung.__name__}: {name} has to be a method (hooks.{hook.__name__})")

"""Hooks: what a rung may do beside its four verbs (``core.ladder.rung``). Each protocol here is one thing that the
ladder asks.

A rung has a hook if it has all of its methods. The ladder sorts its rungs by these protocols once, when its list of
rungs is set (``core.ladder.climb``), and asks only rungs with the hook.
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
    """Why a request is not taken, and after how long its client may try again."""

    message: str
    retry_after_ms: int


class Calm(NamedTuple):
    """Until when a rung, or all rungs of a ladder, decide nothing, as long as nothing but ticks and decode steps
    happens and each group keeps free blocks for ``num_steps``."""

    until_ns: int | None
    """The time from which on the rung may decide something again. 0: it may at any moment; None: it never does."""
    num_steps: int = 0
    """The calm holds only while each group has room for this many steps more than it has taken."""


@runtime_checkable
class Admits(Protocol):
    """A rung with this hook may refuse online requests. The ladder asks it when a front end is about to accept one."""

    def why_refuse(self, tenant: str, limit: int | None, num_coming: int, now_ns: int) -> Refusal | None:
        """Why this tenant's next online request is refused; None: this rung takes it. ``limit``: how many online
        requests may wait; None: any number. ``num_coming``: accepted requests that the core has not been told of."""
        ...


@runtime_checkable
class Places(Protocol):
    """A rung with this hook chooses groups for new requests. The ladder asks it when a request is dispatched."""

    def place(self, state: RequestState) -> GroupId | None:
        """The group in which a new request is queued; None: dispatch chooses."""
        ...

    def closed(self) -> Set[GroupId]:
        """The groups where no online request lives or should live, so that they may sleep."""
        ...

    def lacking_blocks(self, opening_s: float) -> int:
        """Blocks that requests will lack in the groups where they should live by the time that another one, which opens
        in so many seconds, could take some, while all groups that serve are in use; 0: none."""
        ...


@runtime_checkable
class Opens(Protocol):
    """A rung with this hook takes empty groups into use for waiting requests by itself. The ladder asks it where
    waiting requests are shared out."""

    def shut(self) -> Set[GroupId]:
        """The empty groups that no waiting request is to be sent to, as the rung does that where it is needed."""
        ...


@runtime_checkable
class GivesRoom(Protocol):
    """A rung with this hook can take offline KV out of a group. The ladder asks it where a dearer rung wants that
    room."""

    def give_room(self, group: Group, why: str, now_ns: int) -> list[Action]:
        """Take offline KV out of this group, because it alone keeps a dearer rung from acting (``why``); return the
        actions."""
        ...


@runtime_checkable
class HearsUnmet(Protocol):
    """A rung with this hook may find memory where another rung found too little. The ladder tells it of each such
    lack."""

    def on_unmet(self, group_id: GroupId, missing_bytes: int, why: str, now_ns: int) -> list[Action]:
        """Take note that a group lacks ``missing_bytes`` which a rung could not get (``why``); return what this rung
        does."""
        ...


@runtime_checkable
class Scales(Protocol):
    """A rung with this hook asks for more instances from outside. Metrics read it."""

    def num_scale_outs(self) -> int:
        """How many times the rung has asked for more instances since it was made."""
        ...

    def missing_bytes(self) -> int:
        """Bytes that the rung asks for from outside now; 0: none."""
        ...


@runtime_checkable
class SendsCopies(Protocol):
    """A rung with this hook copies KV to or from host memory. The ladder calls it after steps have been issued."""

    def after_steps(self, now_ns: int) -> list[Action]:
        """The copies to send behind the steps just issued, in the workers' streams."""
        ...


@runtime_checkable
class Lags(Protocol):
    """A rung with this hook copies the KV of requests while they run. Metrics read how far the copies are behind."""

    def lag_blocks(self) -> int:
        """Sealed blocks of the requests to be copied that have no copy yet."""
        ...


@runtime_checkable
class Sleeps(Protocol):
    """A rung with this hook wakes sleepers. The ladder asks it how long its own wakes would take, and the core for the
    prediction of a wake that others order."""

    def wakes_s(self) -> tuple[float, ...]:
        """Seconds that waking takes, one number for each sleeper that the rung may wake, as it orders them; empty
        without any."""
        ...

    def expect(self, worker_id: WorkerId) -> Expected:
        """The prediction for a wake of this worker that an administrator or a request orders, and not the rung."""
        ...


@runtime_checkable
class Gauges(Protocol):
    """A rung with this hook has figures for metrics. The ladder collects them."""

    def gauges(self) -> Mapping[str, float]:
        """The rung's figures now, by their names in metrics; empty while it has none."""
        ...


@runtime_checkable
class Occupies(Protocol):
    """A rung with this hook uses workers for longer than one event. The ladder keeps such a rung while it uses any."""

    def worker_ids(self) -> Collection[WorkerId]:
        """The workers that the rung uses now, where it would have to give way."""
        ...


@runtime_checkable
class Ends(Protocol):
    """A rung with this hook sets something on groups or in the state. The ladder calls it when it removes the rung."""

    def go(self) -> None:
        """Undo what this rung has set (holds, reservations, caps), as it is about to be removed from the ladder."""
        ...


@runtime_checkable
class Notes(Protocol):
    """A rung with this hook remembers which groups have changed since it looked last. The ladder tells it of them."""

    def note_touched(self, group_ids: Collection[GroupId]) -> None:
        """Note that these groups have changed. Called at the end of an event, and where several steps are told of
        together."""
        ...


@runtime_checkable
class Checks(Protocol):
    """A rung with this hook can verify its own books. The ladder calls it where invariants are checked."""

    def check(self) -> None:
        """Compare the rung's books with the state. Raises AssertionError on any broken invariant."""
        ...


@runtime_checkable
class Ticks(Protocol):
    """A rung with this hook may decide something although nothing but ticks and decode steps happens. A driver in
    virtual time asks it which ticks and steps it may skip; rungs without the hook decide nothing then."""

    def decides_nothing_before(self, moment: Moment) -> Calm:
        """For how long the rung decides nothing. ``TICK`` asks whether the next tick may decide something; any other
        moment asks about ends of steps and the time before steps, as a step of one group may matter to another."""
        ...


HOOKS = (
    Admits, Places, Opens, GivesRoom, HearsUnmet, Scales, SendsCopies, Lags, Sleeps, Gauges, Occupies, Ends, Notes,
    Checks, Ticks,
)


def check_hooks(rung: type) -> None:
    """Check that a rung's class has all methods of each hook, or none. Raises ConfigError for one that has some, or a
    property in the place of a method: the ladder would not ask it, or fail when it does."""
    for hook in HOOKS:
        names = [name for name in vars(hook) if not name.startswith("_")]
        present = [name for name in names if hasattr(rung, name)]
        if present and (missing := sorted(set(names).difference(present))):
            raise ConfigError(f"rung {rung.__name__} has {present[0]} without {missing[0]} (hooks.{hook.__name__})")
        for name in present:
            if not callable(getattr(rung, name)):
                raise ConfigError(f"rung {rung.__name__}: {name} has to be a method (hooks.{hook.__name__})")

"""What mechanisms ask of those who decide: ``core.ladder.advising`` answers, ``core.cluster`` puts the two together.

The rung that begins a move hands in what is known then (groups, stages, pulls, a split). Here is what can only be
asked while the move is under way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, NamedTuple, Protocol

from jettison.memory.kvtransfers import ExchangeMode, KVTransferPlan, MigrationKind
from jettison.policy.movekinds import MAX_FINAL_BLOCKS
from jettison.types import RequestId, WorkerId

if TYPE_CHECKING:
    from jettison.core.pending import LinkEnds
    from jettison.core.requests import RequestState
    from jettison.core.serving.group import Group


class Stalled(NamedTuple):
    """A request of a merged group that stands still."""

    state: RequestState
    transfers: tuple[KVTransferPlan, ...]
    """What would have to travel."""
    num_given_up_tokens: int
    """Of those before it, to be computed again."""
    waited_s: float
    """Since the exchange began."""
    links: Set[LinkEnds]
    """On which something has been sent."""


class WantedMove(NamedTuple):
    """A running request that may move (``core.moving.migrations``), and where to."""

    state: RequestState
    destination: Group
    num_waited: int = 0
    """Epochs in which it was told to wait."""
    kinds: Collection[MigrationKind] = tuple(MigrationKind)
    """In which it may go."""


class Going(NamedTuple):
    """How it goes: what ``Migrations.start`` is told."""

    kind: MigrationKind
    max_step_tokens: int | None
    """As tokens; None: as many as steps have room for."""
    max_final_blocks: int = MAX_FINAL_BLOCKS
    """As KV: sent while it stands still."""
    may_change: Collection[MigrationKind] = ()
    """Kinds in which ``movekinds.reconsider`` may have it go on, at its pace; none: it goes on as it began."""


class Advice(Protocol):
    """Answers change nothing, and depend on nothing but the state of the cluster."""

    def run_again(self, group: Group, stalled: Stalled) -> ExchangeMode | None:
        """How a stalled request gets to run again; None: not known yet."""
        ...

    def give_up(self, stalled: Sequence[RequestState]) -> RequestState:
        """Who of these, in service order, is computed again where none of them can ever land."""
        ...

    def place(
        self, num_blocks: Mapping[RequestId, int], room_blocks: Mapping[int, int], headroom_blocks: int
    ) -> Mapping[RequestId, int] | None:
        """One home for each request; None if they do not fit with so much room left in each."""
        ...

    def choose_holder(
        self, holders: Collection[WorkerId], dst: WorkerId, members: Collection[WorkerId],
        num_asked: Mapping[WorkerId, int],
    ) -> WorkerId | None:
        """Who of those that have a shard is asked for it; None if no worker has it. ``members``: of the move that wants
        it; ``num_asked``: how often the move has asked each worker."""
        ...

    def choose_kinds(self, wanted: Iterable[WantedMove]) -> Mapping[RequestId, Going]:
        """Of those that begin now, within what links and destinations take; the others wait for the next epoch."""
        ...

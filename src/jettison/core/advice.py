"""Advice: the questions that mechanisms ask of policies. ``core.ladder.advising`` answers, ``core.cluster`` connects
the two.

The rung that begins a move hands in everything that is known then (groups, stages, pulls, a split). Here are the
questions that can only be asked while the move is under way.
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
    """The transfers that it would take."""
    num_given_up_tokens: int
    """Tokens of the requests before it that are computed again."""
    links: Set[LinkEnds]
    """Links that have carried something of this exchange."""


class WantedMove(NamedTuple):
    """A running request that may move (``core.moving.migrations``), and its destination."""

    state: RequestState
    destination: Group
    num_waited: int = 0
    """Epochs in which it was told to wait."""
    kinds: Collection[MigrationKind] = tuple(MigrationKind)
    """Kinds in which it may go."""


class Going(NamedTuple):
    """How a request goes: parameters of ``Migrations.start``."""

    kind: MigrationKind
    max_step_tokens: int | None
    """As tokens: most tokens a step; None: as many as steps have room for."""
    max_final_blocks: int = MAX_FINAL_BLOCKS
    """As KV: most blocks sent while the request stands still."""
    may_change: Collection[MigrationKind] = ()
    """Kinds to which ``movekinds.reconsider`` may change it on its way; none: it goes on as it began."""


class Advice(Protocol):
    """Answers change nothing, and depend on nothing but the state of the cluster."""

    def run_again(self, group: Group, stalled: Stalled) -> ExchangeMode | None:
        """How a stalled request gets to run again; None: not known yet."""
        ...

    def give_up(self, stalled: Sequence[RequestState]) -> RequestState:
        """The one of these, given in service order, that is computed again where none of them can ever land."""
        ...

    def place(
        self, num_blocks: Mapping[RequestId, int], room_blocks: Mapping[int, int], headroom_blocks: int
    ) -> Mapping[RequestId, int] | None:
        """One home for each request; None if they do not fit with ``headroom_blocks`` left in each home."""
        ...

    def choose_holder(
        self, holders: Collection[WorkerId], dst: WorkerId, members: Collection[WorkerId],
        num_asked: Mapping[WorkerId, int],
    ) -> WorkerId | None:
        """The worker, of ``holders`` of a shard, that is asked for it; None if no worker has it. ``members``: workers
        of the move that wants it; ``num_asked``: how often the move has asked each worker."""
        ...

    def choose_kinds(self, wanted: Iterable[WantedMove]) -> Mapping[RequestId, Going]:
        """How each request goes that begins now, within what links and destinations take; the others wait for the next
        epoch."""
        ...

"""The adviser: answers to the questions of ``core.advice`` that mechanisms ask while they are at work. It makes views
of the state here; policies decide."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from jettison.core.advice import Going, Stalled, WantedMove
from jettison.core.ladder.movekinds import choose_kinds
from jettison.core.load.distances import known_links
from jettison.core.load.views import Loads
from jettison.core.pending import KV_PURPOSES
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.memory.kvtransfers import ExchangeMode
from jettison.policy.exchange import ExchangeQueue, LinkId, StalledRequest, choose_exchange
from jettison.policy.links import NEAR
from jettison.policy.restore import PlacedRequest, place_requests
from jettison.types import RequestId, WorkerId


class Adviser:
    """Answers ``core.advice.Advice`` for the moves of ``core.moving``: how a stalled request runs on, which worker
    gives a shard, where requests live after a split. It reads the state and loads of the cluster, and changes
    nothing."""

    def __init__(self, state: ClusterState, loads: Loads) -> None:
        self._state = state
        self._loads = loads

    def run_again(self, group: Group, stalled: Stalled) -> ExchangeMode | None:
        """How a stalled request of a merged group gets to run again: it waits for its KV, runs live meanwhile, or is
        computed again. None: not known before a first transfer has measured the links."""
        state, moves = stalled.state, stalled.transfers
        size = self._state.limits.block_size
        num_full, num_blocks = state.num_computed // size, group.limits.blocks_for(state.num_computed)
        layer_bytes = self._state.shape.block_bytes_per_layer(size)
        load: dict[LinkId, int] = {}
        remote: dict[WorkerId, int] = {}
        for move in moves:
            link = (move.src, move.dst)
            load[link] = load.get(link, 0) + len(move.layers) * num_blocks * layer_bytes
            remote[move.dst] = remote.get(move.dst, 0) + len(move.layers)
        request = StalledRequest(
            state.num_computed, load, {k: v * (num_blocks - num_full) // num_blocks for k, v in load.items()},
            max(remote.values()), num_full > 0, self._num_kept_out(group, sum(load.values())),
        )
        costs, mode = self._loads.exchange_costs(group), self._state.params.exchange
        return choose_exchange(request, self._queue(group, stalled, load), costs, mode)

    def _num_kept_out(self, group: Group, num_bytes: int) -> float:
        """Waiting requests of the group that would have room if ``num_bytes`` of moving KV were not held at the old
        home: those that do not fit beside it share what all moving requests hold."""
        waiting, limits = group.queues.waiting, group.limits
        needed = sum(limits.blocks_for(state.num_tokens) for state in waiting)
        unfit = needed - max(0, group.blocks.num_free)
        if unfit <= 0:
            return 0.0
        num_unfit = len(waiting) * unfit / needed
        layer_bytes = self._state.shape.block_bytes_per_layer(limits.block_size)
        held_each = needed / len(waiting) * self._state.shape.num_layers * layer_bytes
        return min(num_bytes / held_each, num_unfit / max(1, len(group.queues.moving)))

    def _queue(self, group: Group, stalled: Stalled, load: Mapping[LinkId, int]) -> ExchangeQueue:
        """What decides beside the request itself: bytes on its links (the keys of ``load``) and on all links that the
        exchange has used, tokens that steps compute before it, and how many others run, stall or wait behind it."""
        ahead = group.queues.waiting.ahead_of(stalled.state)
        behind = len(group.queues.waiting) - len(ahead)
        num_others = len(group.queues.running) + len(group.queues.moving) + behind - 1
        book = self._state.book
        queued = {link: book.bytes_ahead(*link, *KV_PURPOSES) for link in stalled.links | load.keys()}
        num_tokens = sum(s.num_tokens for s in ahead) + stalled.num_given_up_tokens
        return ExchangeQueue(queued, num_tokens, max(0, num_others))

    def give_up(self, stalled: Sequence[RequestState]) -> RequestState:
        """The last of these requests, which are given in service order: it is computed again where none of them can
        ever land."""
        return stalled[-1]

    def place(
        self, num_blocks: Mapping[RequestId, int], room_blocks: Mapping[int, int], headroom_blocks: int
    ) -> Mapping[RequestId, int] | None:
        """One home for each request, by index: the largest requests first, each in the home with most room. None: they
        do not fit with ``headroom_blocks`` left in each home."""
        return place_requests([PlacedRequest(*item) for item in num_blocks.items()], room_blocks, headroom_blocks)

    def choose_holder(
        self, holders: Collection[WorkerId], dst: WorkerId, members: Collection[WorkerId],
        num_asked: Mapping[WorkerId, int],
    ) -> WorkerId | None:
        """The worker of ``holders`` that is asked for a shard that ``dst`` lacks: the nearest; of equally near ones a
        member of the move; then the worker that was asked least. None without holders."""
        links = known_links(self._state) if len(holders) > 1 else None

        def rank(holder: WorkerId) -> tuple[float, bool, int, WorkerId]:
            distance = NEAR if links is None else links.distance(holder, dst)
            return distance, holder not in members, num_asked.get(holder, 0), holder

        return min(holders, key=rank, default=None)

    def choose_kinds(self, wanted: Iterable[WantedMove]) -> Mapping[RequestId, Going]:
        """How each of these moves that may begin now goes, by request, as ``movekinds.choose_kinds`` says; a request
        that is left out waits for the next epoch."""
        return choose_kinds(self._state, wanted)

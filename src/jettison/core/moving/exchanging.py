"""The exchange after a merge: running requests' KV goes to where the new stages want it (KunServe v3 section 4.2).

Owns the transfers of one merge and the pages under KV that a member no longer runs. Nothing here changes queues of
other groups or drops parameters: that is ``core.moving.merging``, which drives it. ``core.advice`` says what happens to
each stalled request (transfer, recompute, live).

    plan(states)    before the drop: which requests will have to move, so that their KV is kept (``spec``)
    begin(group)    the merged group exists; its requests are resumed, stalled or recomputed
    advance(now)    transfers start in service order as landing space allows; foreign pages are given back

Ownership: until its last transfer has ended, a request's blocks stay reserved at both ends. Landing space comes first:
admission leaves free what the exchange still needs, so two members cannot fill each other's room and wait forever;
should no landing be possible at all, the youngest stalled request is recomputed instead.

Live (KunServe v1 section 4.2): the block that is not full goes first; as soon as it is there the request runs, and its
steps attend to the full blocks at the old home, for the layers that have not arrived. New KV is written by the new
stage only, so nothing that is still on its way can become stale. Layers arrive one after the other for *all* live
requests, because a layer that is local for all requests costs no round trip. A member keeps foreign pages until no step
in flight can ask for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from jettison.core.advice import Stalled
from jettison.core.moving.arriving import Arriving, ArrivingSet
from jettison.core.moving.landed import Landed, LandedBlocks
from jettison.core.moving.relayout import RETRY_NS, Relayout, RelayoutPhase
from jettison.core.pending import LinkEnds, Owner, PendingTransfer, TransferPurpose
from jettison.core.ports import Action, CancelTransfer, SendKV, TransferEnded
from jettison.core.preemption import Preemption
from jettison.core.requests import Phase, RemotePart, RequestState
from jettison.core.residence import changed, in_arenas
from jettison.core.serving.group import Group
from jettison.core.serving.holds import EXCHANGE
from jettison.core.state import ClusterState
from jettison.memory.kvtransfers import ExchangeMode, KVTransferPlan, by_layers, plan_kv_transfers, split_layers
from jettison.memory.layout import LayoutSpec, RetainedKV
from jettison.memory.stages import StagePlan
from jettison.types import NANOSECONDS, LayerRange, TransferId, WorkerId

COUNTS_PER_EXCHANGE = 16
"""Blocks still to be sent are counted again when 1 / ``COUNTS_PER_EXCHANGE`` of the transfers under way have ended:
counting reads all transfers, and pages are given back by the quarter."""

WAITED_FOR_ATTEMPTS = 8
"""Stalled requests wait for up to so many failed attempts in a row to give pages back, then no longer."""


class Exchange:
    """The transfers of KV in one merge into ``stages``, and the pages under KV that a member no longer runs."""

    def __init__(self, cluster: ClusterState, owner: Owner, stages: tuple[StagePlan, ...]) -> None:
        self._cluster = cluster
        self._owner = owner
        self._stages = {s.worker_id: s.layers for s in stages}
        self._stage_order = stages
        self.group: Group | None = None
        self.num_moved_bytes = 0
        self.in_place_ns: int | None = None
        """Since when no KV is on its way or has to be sent; None: before that."""
        self._relayouts: list[Relayout] = []
        self._landing: list[tuple[RequestState, tuple[KVTransferPlan, ...]]] = []
        """Stalled requests with transfers that have not started, in service order."""
        self._transfers: dict[TransferId, SendKV] = {}
        self._links: set[LinkEnds] = set()
        """Links that have carried something."""
        self._landed = LandedBlocks(cluster)
        """Blocks by where they land: shared prefixes travel once."""
        self._arriving = ArrivingSet()
        self.num_by_choice: Counter[ExchangeMode] = Counter()
        self._started_ns = 0
        self._num_foreign: dict[WorkerId, int] | None = None
        """Blocks of layers that a worker no longer runs and that must still be sent, by worker, each once for each of
        these layers; None = has to be counted again."""
        self._num_ended = 0
        """Transfers that have ended since that was counted."""
        self._awaits_rate = False
        """Whether the first stalled request waits for a rate of its link, which the first transfer there measures."""
        self._retry_ns = 0
        self._num_refused = 0
        """Attempts to give pages back that have failed since the last success."""

    @property
    def num_stalled(self) -> int:
        """How many stalled requests have transfers that have not started."""
        return len(self._landing)

    @property
    def is_over(self) -> bool:
        """Whether every request is in place and no member keeps KV of layers that it no longer runs. Raises
        AssertionError before ``begin``."""
        assert self.group is not None
        return not (
            self._landing or self._transfers or self._arriving or self._relayouts
            or self.group.queues.moving or self._kept()
        )

    @property
    def waits_for_time(self) -> bool:
        """Whether the next transfers depend on prices, or a failed attempt is to be repeated later."""
        return bool(self._landing) or self._retry_ns > 0

    # --- before the drop --------------------------------------------------------------------------------------

    def plan(self, states: Iterable[RequestState]) -> None:
        """Note which of these requests have KV that must survive the drop until it has been sent."""
        stalled = [
            (state, plan_kv_transfers(in_arenas(state.residences).places, self._stage_order))
            for state in states
            if state.ending is None and state.num_computed > 0
        ]
        self._landing = [entry for entry in stalled if entry[1]]

    def call_off(self) -> None:
        """Forget what was planned, as the drop did not happen: nothing will be sent."""
        self._landing = []

    def _foreign_blocks(self, worker_ids: Iterable[WorkerId]) -> dict[WorkerId, tuple[RetainedKV, ...]]:
        """For each of these members: KV of layers outside its new range that must still be sent, or may still be
        attended to; empty: none."""
        tables = {w: self._cluster.workers[w].ledger for w in worker_ids}
        foreign: dict[WorkerId, list[tuple[LayerRange, Sequence[int]]]] = {w: [] for w in tables}
        for state, transfers in self._landing:
            for transfer in transfers:
                if (ledger := tables.get(transfer.src)) is not None:
                    ids = ledger.table(state.request_id).ids[: -(-state.num_computed // ledger.block_size)]
                    foreign[transfer.src].append((transfer.layers, ids))
        for sent in self._transfers.values():
            if sent.src in tables:
                foreign[sent.src].append((sent.layers, sent.src_blocks))
        # Steps in flight name the same parts again and again.
        for request_id, part in {(s.request_id, part) for s, part in self._attended() if part.src in tables}:
            foreign[part.src].append((part.layers, tables[part.src].table(request_id).ids[: part.num_blocks]))
        return {w: tuple(RetainedKV(*kept) for kept in by_layers(found)) for w, found in foreign.items()}

    def _attended(self) -> Iterator[tuple[RequestState, RemotePart]]:
        """Iterate over KV that steps attend to, or will, at its old home, by request."""
        for entry in self._arriving.entries.values():
            yield from ((entry.state, part) for part in entry.remote)
        if self.group is not None:
            yield from self._in_flight()

    def _in_flight(self) -> Iterator[tuple[RequestState, RemotePart]]:
        """Iterate over remote KV that issued steps may still ask for, by request."""
        assert self.group is not None
        for flight in self.group.in_flight.values():
            for row in flight.step.rows:
                yield from ((row.state, part) for part in row.remote)

    def spec(self, worker_id: WorkerId) -> LayoutSpec:
        """The layout of a member: its stage, and KV of other layers for as long as it must still be sent or attended
        to."""
        layers = self._stages[worker_id]
        return LayoutSpec(self._cluster.shape.shards_for(layers), layers, self._foreign_blocks((worker_id,))[worker_id])

    # --- the merged group -------------------------------------------------------------------------------------

    def begin(self, group: Group, states: Iterable[RequestState], now_ns: int) -> None:
        """Put the requests of the old groups into the merged one: they are queued, stay stored, run on, stall until
        their KV comes, or are computed again. Requests that are ending are freed as soon as no step and no transfer
        touches them."""
        self.group = group
        self._started_ns = now_ns
        self._landing = []
        self._num_foreign = None
        for state in group.queues.in_order(states):
            if state.phase is Phase.WAITING:
                group.queues.enqueue(state)
                continue
            if state.phase is Phase.STORED:
                group.queues.keep_stored(state)
                self._cluster.counters.hosted_carried += 1
                continue
            state.resume()
            old = in_arenas(state.residences)
            transfers = plan_kv_transfers(old.places, self._stage_order)
            if not transfers and state.ending is None:
                group.queues.resume(state)
                continue
            state.phase = Phase.MOVING
            state.residences = changed(state.residences, old, old.at(state.num_computed))
            state.group_id = group.group_id
            group.queues.moving[state.request_id] = state
            if state.ending is not None:
                self._cluster.reap(state)
            elif state.num_computed == 0:
                self._recompute(state)
            else:
                self._landing.append((state, transfers))

    def advance(self, now_ns: int) -> list[Action]:
        """Start transfers that can be started, and reserve blocks against admission for those still to land; return the
        actions. Where nothing could make room, a stalled request is computed again."""
        assert self.group is not None
        actions = self._start_transfers(now_ns)
        while self._landing and not self._may_get_room(now_ns):
            # Nothing under way could make room: recompute one request.
            state = self._cluster.advice.give_up([s for s, _ in self._landing])
            self._landing = [entry for entry in self._landing if entry[0] is not state]
            self.num_by_choice[ExchangeMode.RECOMPUTE] += 1
            self._recompute(state)
            actions += self._start_transfers(now_ns)
        self._reserve_landing(self.group)
        if self.in_place_ns is None and not (self._landing or self._transfers):
            self.in_place_ns = now_ns
        return actions

    def _may_get_room(self, now_ns: int) -> bool:
        """Whether something under way, or a failed attempt that will be repeated, could make room for stalled
        requests."""
        repeats = now_ns < self._retry_ns and self._num_refused <= WAITED_FOR_ATTEMPTS
        assert self.group is not None
        leaves = any(s.recompute for s in self.group.queues.moving.values())
        is_under_way = bool(self._transfers or self._relayouts) or self._awaits_rate
        return is_under_way or repeats or leaves or any(self._in_flight())

    # --- events -----------------------------------------------------------------------------------------------

    def note_answers(self, now_ns: int) -> list[Action]:
        """Forget layout changes that are over. Where one has failed, no pages are given back for a while. Returns no
        actions."""
        for relayout in [r for r in self._relayouts if r.is_over]:
            self._relayouts.remove(relayout)
            failed = relayout.phase is RelayoutPhase.FAILED
            self._num_refused = self._num_refused + 1 if failed else 0
            if failed:
                self._retry_ns = now_ns + RETRY_NS
        return []

    def on_ended(self, pending: PendingTransfer, event: TransferEnded, now_ns: int) -> list[Action]:
        """Take the end of a transfer: requests that waited for it run if they can; those that it failed are computed
        again. Returns the actions."""
        transfer, state = self._transfers.pop(event.transfer_id), pending.request
        assert state is not None, pending
        self._cluster.touch(state)
        self._account(transfer, event)
        entries = self._arriving.ended(event.transfer_id)
        actions: list[Action] = []
        if not event.complete:
            self._landed.forget(state, transfer)
            # A request that counted on the prefix that this transfer carried has to start again, too.
            for entry in entries:
                actions += self.cancel(entry.state)
                self._cluster.distrust(entry.state)
        if state.ending is not None:
            self._cluster.reap(state)
        for entry in entries:
            self._try_resume(entry, now_ns)
        return actions

    def _account(self, transfer: SendKV, event: TransferEnded) -> None:
        """Count the bytes that a transfer has carried, and have its link's rate learn from them. From time to time the
        blocks still to be sent are to be counted again."""
        self.num_moved_bytes += event.num_bytes
        self._cluster.counters.exchanged_bytes += event.num_bytes
        link = LinkEnds(transfer.src, transfer.dst)
        self._cluster.link_rate(link).observe(event.num_bytes, event.duration_ns / NANOSECONDS)
        self._num_ended += 1
        if self._num_ended * COUNTS_PER_EXCHANGE > len(self._transfers):
            self._num_foreign = None

    def cancel(self, state: RequestState) -> list[Action]:
        """Stop the transfers of a request that is ending or starts again, unless another request needs their blocks;
        return the actions."""
        if any(s is state for s, _ in self._landing):
            self._landing = [entry for entry in self._landing if entry[0] is not state]
            self._num_foreign = None
        self._arriving.forget(state.request_id)
        cancelled = [
            self._transfers[m]
            for m in sorted(state.transfers)
            if m in self._transfers and not self._arriving.others_need(m, state.request_id)
        ]
        for transfer in cancelled:
            # No request may count on blocks that perhaps never arrive.
            self._landed.forget(state, transfer)
        return [CancelTransfer(transfer.src, transfer.transfer_id) for transfer in cancelled]

    # --- transfers --------------------------------------------------------------------------------------------

    def _start_transfers(self, now_ns: int) -> list[Action]:
        """Start the transfers of stalled requests, in service order, until one has no room to land; return the
        actions."""
        assert self.group is not None
        urgent: list[Action] = []
        bulk: list[tuple[int, Action]] = []
        begun: list[Arriving] = []
        given_up: list[RequestState] = []
        for state, transfers in self._landing:
            # The choice counts those given up before it: they are computed again first, and take steps' time.
            choice = self._choose(self.group, state, transfers, given_up)
            self._awaits_rate = choice is None
            if choice is ExchangeMode.RECOMPUTE:
                given_up.append(state)
                self.num_by_choice[choice] += 1
                continue
            entry = None if choice is None else self._start(state, transfers, choice is ExchangeMode.LIVE, urgent, bulk)
            if choice is None or entry is None:
                break  # in service order: a later, smaller request would take the room that this one waits for
            begun.append(entry)
            self.num_by_choice[choice] += 1
        # Both kinds leave the list together: what is done below may ask what is still to land.
        done = {e.state.request_id for e in begun} | {s.request_id for s in given_up}
        if done:
            self._landing = [entry for entry in self._landing if entry[0].request_id not in done]
            self._num_foreign = None
        # Only now: a request that starts again is queued, and the choices above went by the queue as it was.
        for state in given_up:
            self._recompute(state)
        for entry in begun:
            self._try_resume(entry, now_ns)
        # Layer by layer over all live requests, since a step needs the first layers first; what stalls a request goes
        # before all of that (part -1).
        actions = urgent + [action for _, action in sorted(bulk, key=lambda item: item[0])]
        return actions + self._give_back_foreign(bool(self._landing or self.group.queues.has_waiting), now_ns)

    def _choose(
        self, group: Group, state: RequestState, transfers: tuple[KVTransferPlan, ...], given_up: list[RequestState]
    ) -> ExchangeMode | None:
        """How a stalled request gets to run again, given all requests before it; None: not known yet."""
        num_given_up = sum(s.num_computed for s in given_up)
        return self._cluster.advice.run_again(group, Stalled(state, transfers, num_given_up, self._links))

    def _start(
        self, state: RequestState, transfers: tuple[KVTransferPlan, ...], live: bool,
        urgent: list[Action], bulk: list[tuple[int, Action]],
    ) -> Arriving | None:
        """Reserve landing blocks and start all transfers of a request; return what it waits for, None if a destination
        lacks room."""
        # A stalled request waits for its own transfers and for those of others that carry its shared prefix. A live one
        # waits only for its open block; its full blocks follow in parts of layers, each attended to remotely until it
        # arrives.
        prefixes = self._reserve(state, transfers)
        if prefixes is None:
            return None
        assert self.group is not None
        state.residences = changed(state.residences, None, self.group.residence.at(0))
        num_full, num_sent = self._num_full(state), -(-state.num_computed // self._cluster.limits.block_size)
        entry = Arriving(state)
        for transfer in transfers:
            prefix = prefixes.get(transfer.dst, [])
            if not live:
                entry.first |= self._carriers(prefix, transfer)
                action = self._send(state, transfer, len(prefix), num_sent)
                entry.first.add(action.transfer_id)
                bulk.append((-1, action))
                continue
            if num_sent > num_full:
                action = self._send(state, transfer, num_full, num_sent, urgent=True)
                entry.first.add(action.transfer_id)
                urgent.append(action)
            for index, layers in enumerate(split_layers(transfer.layers)):
                part = transfer._replace(layers=layers)
                waits = self._carriers(prefix, part)
                if num_full > len(prefix):
                    action = self._send(state, part, len(prefix), num_full)
                    waits.add(action.transfer_id)
                    bulk.append((index, action))
                entry.parts[RemotePart(transfer.src, transfer.dst, layers, num_full)] = waits
        self._arriving.add(entry)
        return entry

    def _reserve(
        self, state: RequestState, transfers: tuple[KVTransferPlan, ...]
    ) -> dict[WorkerId, list[Landed]] | None:
        """Take landing blocks for a request at every destination. Returns the shared ones of each; None if a
        destination lacks room."""
        workers = self._cluster.workers
        table_len = max(workers[m.src].ledger.num_blocks_of(state.request_id) for m in transfers)
        new_here = [dst for dst in sorted({m.dst for m in transfers}) if not workers[dst].ledger.has(state.request_id)]
        shared = {dst: self._shared_prefix(state, transfers, dst) for dst in new_here}
        if any(not workers[dst].ledger.can_allocate(table_len - len(shared[dst])) for dst in new_here):
            return None
        for dst in new_here:
            ledger = workers[dst].ledger
            ledger.adopt_prefix(state.request_id, [landed.block for landed in shared[dst]])
            ledger.allocate(state.request_id, table_len - len(shared[dst]))
        for src, dst in sorted({(m.src, m.dst) for m in transfers}):
            self._landed.note(state, src, dst)
        return shared

    def _num_full(self, state: RequestState) -> int:
        """Full blocks of the request."""
        return state.num_computed // self._cluster.limits.block_size

    def _send(
        self, state: RequestState, transfer: KVTransferPlan, first: int, end: int, *, urgent: bool = False
    ) -> SendKV:
        """Issue a transfer of blocks ``first`` to ``end`` of a request's table; return it."""
        workers = self._cluster.workers
        there = workers[transfer.src].ledger.table(state.request_id).ids[first:end]
        here = workers[transfer.dst].ledger.table(state.request_id).ids[first:end]
        action = SendKV(
            self._cluster.book.next_transfer_id, transfer.src, transfer.dst, transfer.layers, tuple(there), tuple(here),
            urgent, is_settled=True,
        )
        self._cluster.send_kv(state, action, owner=self._owner, waiter=self, purpose=TransferPurpose.EXCHANGE)
        self._transfers[action.transfer_id] = action
        self._links.add(LinkEnds(transfer.src, transfer.dst))
        return action

    def _shared_prefix(self, state: RequestState, transfers: tuple[KVTransferPlan, ...], dst: WorkerId) -> list[Landed]:
        """The blocks at ``dst`` that already hold (or will hold) this request's leading blocks; empty: none."""
        sources = {m.src for m in transfers if m.dst == dst}
        return self._landed.prefix(state, sources.pop(), dst) if len(sources) == 1 else []

    def _carriers(self, prefix: list[Landed], transfer: KVTransferPlan) -> set[TransferId]:
        """The unfinished transfers that carry blocks of a shared prefix between the ends of ``transfer``, in its
        layers."""
        theirs = {m for owner in {p.owner for p in prefix} for m in self._cluster.requests[owner].transfers}
        blocks = {p.block for p in prefix}
        return {
            m
            for m in theirs & self._transfers.keys()
            if (sent := self._transfers[m]).src == transfer.src and sent.dst == transfer.dst
            and sent.layers.lo < transfer.layers.hi and transfer.layers.lo < sent.layers.hi
            and not blocks.isdisjoint(sent.dst_blocks)
        }

    def _try_resume(self, entry: Arriving, now_ns: int) -> None:
        """Run the request if the transfers that it cannot run without have ended; note which KV is still at its old
        home. Once none is, its sealed blocks are registered in the prefix cache. Nothing for a request that is ending
        or starts again."""
        group, state = self.group, entry.state
        if group is None or state.ending is not None or state.recompute or entry.first:
            return
        if state.phase is Phase.MOVING:
            group.queues.resume(state)
            self._cluster.counters.note_stall(now_ns - self._started_ns)
        state.attend_at(entry.remote)
        self._cluster.touch(state)
        if not entry.is_complete:
            return
        self._arriving.forget(state.request_id)
        if group.blocks.seals:
            for ledger in group.blocks.ledgers:
                for index in range(state.num_sealed):
                    ledger.seal(state.request_id, index, state.hashes[index])

    def _recompute(self, state: RequestState) -> None:
        """Have a request start again from its tokens, once nothing copies from its blocks, in place of transferring its
        KV."""
        assert self.group is not None
        self._num_foreign = None
        if state.transfers:  # it has just turned back from the host, and pieces are still under way
            self._cluster.distrust(state, Preemption.EXCHANGE)
        else:
            self.group.preempt(state, Preemption.EXCHANGE)

    def _reserve_landing(self, group: Group) -> None:
        """Have admission leave free the blocks that transfers which have not started will take."""
        blocks: dict[WorkerId, int] = {}
        for state, transfers in self._landing:
            length = max(self._cluster.workers[m.src].ledger.num_blocks_of(state.request_id) for m in transfers)
            for dst in {m.dst for m in transfers}:
                if not self._cluster.workers[dst].ledger.has(state.request_id):
                    blocks[dst] = blocks.get(dst, 0) + length
        group.blocks.reserve(EXCHANGE, blocks)

    def _kept(self) -> bool:
        """Whether some member still has pages under KV of layers that it no longer runs."""
        return any(self._cluster.workers[w].layout.retained for w in self._stages)

    def _give_back_foreign(self, pressed: bool, now_ns: int) -> list[Action]:
        """Begin to free pages of foreign layers; return the actions. A member frees them all at once when it has sent
        everything, some earlier where requests wait (``pressed``)."""
        if now_ns < self._retry_ns or not self._kept():
            return []
        if self._num_foreign is None or not self._transfers:
            # Without a transfer it waits for the last steps that may ask for foreign KV.
            self._num_ended = 0
            found = self._foreign_blocks(self._stages)
            self._num_foreign = {w: sum(k.num_parts for k in kept) for w, kept in found.items()}
        actions: list[Action] = []
        for worker_id, needed in self._num_foreign.items():
            worker = self._cluster.workers[worker_id]
            kept = sum(r.num_parts for r in worker.layout.retained)
            if not kept or worker.num_relayouts_open:
                continue
            if needed and not (pressed and 4 * needed <= 3 * kept):
                continue
            spec = self.spec(worker_id)
            relayout = Relayout(self._cluster, self._owner, worker, spec, shrinks=False, gives_back=True)
            self._relayouts.append(relayout)
            actions += relayout.start()
        return actions

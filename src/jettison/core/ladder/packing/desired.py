"""The desired placement: the group in which each online request should live, kept from epoch to epoch, and which
requests live elsewhere. Devices of a packing are groups, pools are groups of like memory. Offline requests are not
packed.

``policy.packing`` decides. Here groups and requests become its devices and operations: what has come, grown, gone, or
changed its group without being asked since the last look. Which requests a pass has to look at for that is
``core.ladder.packing.seats``'; it costs nothing for the others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from jettison.core.ladder.packing.growing import Growths, growing, growth_rates, held_blocks, size_of
from jettison.core.ladder.packing.newcomers import Late, Newcomers
from jettison.core.ladder.packing.packable import Packable
from jettison.core.ladder.packing.places import Places
from jettison.core.ladder.packing.pools import Pools
from jettison.core.ladder.packing.seats import Pool, Seat, Seats, arrival, arrival_again
from jettison.core.ladder.prompts import num_for_arrivals
from jettison.core.load.views import Loads
from jettison.core.moving.migrations import Migrations, may_go
from jettison.core.moving.moves import Moves
from jettison.core.requests import Phase, RequestState
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.policy.packing.closing import CLOSES_EVERY, plan_closing
from jettison.policy.packing.lost import devices_lost
from jettison.policy.packing.mell import Packing
from jettison.policy.packing.params import Gather, PackParams, devices_needed
from jettison.policy.packing.reserve import ReserveParams, plan_resizes
from jettison.policy.packing.types import Depart, Grip
from jettison.types import NANOSECONDS, GroupId, RequestId

MOST_ASKED = 64
"""Most groups asked for their rate of prompts where the mean is wanted: each asks the predictor for a search."""


class Owed(NamedTuple):
    """A request that lives in the group ``source`` and should live in ``destination``."""

    state: RequestState
    source: Group
    destination: Group


class Desired:
    """The desired placement of one cluster's online requests: a packing for each pool of groups with like memory."""

    def __init__(self, cluster: ClusterState, loads: Loads, moves: Moves, migrations: Migrations) -> None:
        self._cluster = cluster
        self._loads = loads
        self._moves = moves
        self._migrations = migrations
        cluster.changes.stirred = set()
        self._seats = Seats()
        self._growths = Growths(self._seats)
        self._packable = Packable(cluster, moves)
        self.places = Places(cluster, self._packable, Newcomers(cluster, loads))
        self._pools = Pools(cluster, loads, self._packable, self._seats, self._growths)
        self._stale: set[GroupId] = set()
        """Groups in which requests may have ended since the last pass."""
        self.num_reshaped: int | None = None
        """``Changes.reshaped`` at the last pass; None: there was none, or groups were moving then."""
        self._closes_ns = 0
        """From when on groups are looked for that can be emptied, where nothing else is gathered."""

    @property
    def _params(self) -> PackParams:
        """The settings of packing. Raises AssertionError where nothing is packed."""
        params = self._cluster.params.packing
        assert params is not None, "nothing is packed"
        return params

    # --- reading ----------------------------------------------------------------------------------------------

    def devices(self) -> set[GroupId]:
        """Ids of the groups that are packed, of all pools."""
        return {device for pool in self._pools.by_size.values() for device in pool.devices}

    def active(self) -> set[GroupId]:
        """Ids of the groups in which some request should live."""
        return {device for pool in self._pools.by_size.values() for device in pool.packer.active}

    def closed(self) -> frozenset[GroupId]:
        """Ids of the packed groups where no online request should live, and none lives or waits."""
        groups = self._cluster.groups
        empty = (self.devices() - self.active()) & groups.keys()
        return frozenset(g for g in empty if not groups[g].queues.serves_online and not groups[g].queues.waiting)

    def spares(self) -> list[GroupId]:
        """Ids of the packed groups where no online request should live, those first where some do."""
        groups = self._cluster.groups
        empty = (self.devices() - self.active()) & groups.keys()
        return sorted(empty, key=lambda g: (not groups[g].queues.serves_online, g))

    def num_needed(self) -> int:
        """Groups that the packings and requests kept out of them take, at least as many as arriving prompts take."""
        cluster, num_active = self._cluster, sum(len(pool.packer.active) for pool in self._pools.by_size.values())
        out = [s for g in self._loads.kept_out if g in cluster.groups for s in cluster.groups[g].queues.waiting]
        waiting = [s for s in (*out, *cluster.unplaced_online()) if s.request_id not in self._seats.by_id]
        num_blocks = sum(cluster.limits.blocks_for(s.num_tokens) for s in waiting)
        largest = max((pool.capacity for pool in self._pools.by_size.values()), default=0)
        num_packed = devices_needed(num_active, num_blocks, largest) if largest else num_active
        some = islice(cluster.groups.values(), 0, None, -(-len(cluster.groups) // MOST_ASKED) or 1)
        return max(num_packed, num_for_arrivals(cluster, self._loads, some))

    def lacking_blocks(self, ahead_s: float) -> int:
        """Blocks by which requests will have outgrown the groups where they should live in ``ahead_s`` seconds, while
        no other group can be opened for them; 0: none."""
        outgrown = [(pool, device) for pool in self._pools.by_size.values() for device in pool.packer.outgrown]
        if not outgrown:
            return 0
        self._cluster.catch_up_all()
        num, limits, requests = 0, self._cluster.limits, self._cluster.requests
        for pool, device in outgrown:
            sizes = pool.packer.requests_on(device)
            held = sum(held_blocks(limits, requests[r]) for r in sizes if r in requests)
            growth = math.ceil(len(sizes) * self._growths.rates.get(device, 0.0) * ahead_s)
            num += max(0, min(held + growth, sum(sizes.values())) - pool.capacity)
        return num

    def refuses(self) -> bool:
        """Whether some request is held where it is, because its move costs more than it saves."""
        return bool(self._seats.held)

    def num_lost(self) -> int:
        """Groups in use, of pools with a held request, beyond those that a new MELL packing of the same requests takes
        without shared prefixes: at least 0 for each pool, and too few where prefixes are shared."""
        held = {seat.pool.full: seat.pool for seat in self._seats.in_order(self._seats.held)}
        return sum(
            devices_lost([pool.packer.requests_on(d) for d in pool.packer.active], pool.capacity)
            for pool in held.values()
        )

    def used(self) -> tuple[int, float]:
        """(number of packed groups where online requests live, share of their blocks that all requests there hold,
        offline ones included); (0, 0.0) where there is none."""
        groups, num, num_held, num_blocks = self._cluster.groups, 0, 0, 0
        for pool in self._pools.by_size.values():
            for device in pool.devices:
                group = groups.get(device)
                if group is not None and group.queues.serves_online:
                    num, num_held, num_blocks = num + 1, num_held + group.blocks.num_used, num_blocks + pool.full
        return num, num_held / max(1, num_blocks)

    def owed(self) -> Iterator[Owed]:
        """Yield the requests that live elsewhere than they should, in the order in which they came to the packing."""
        groups, astray, home = self._cluster.groups, self._seats.astray, list[RequestId]()
        for seat in self._seats.in_order(astray | self._stirred):
            state = self._cluster.requests.get(seat.request_id)
            if state is None or state.ending is not None or state.group_id not in seat.pool.devices:
                continue
            device = seat.pool.packer.device_of(seat.request_id)
            if device == state.group_id:
                home.append(seat.request_id)
            elif device in groups and state.group_id in groups:
                astray.add(seat.request_id)
                yield Owed(state, groups[state.group_id], groups[device])
        if home:  # a set anew: one goes over all places of a set, which were many where many were astray once
            self._seats.astray = astray.difference(home)

    def capacities(self) -> dict[GroupId, int]:
        """Blocks of each packed group that may be filled: all but head-room."""
        return {device: pool.capacity for pool in self._pools.by_size.values() for device in pool.devices}

    def growth_blocks(self, group_id: GroupId) -> int:
        """Blocks by which one request of the group grows while its reserve looks ahead; 0: rate not known."""
        return math.ceil(self._growths.rates.get(group_id, 0.0) * self._params.reserve.ahead_s)

    def pool_of(self, group_id: GroupId) -> Pool:
        """The pool of a packed group. Raises StopIteration for any other group."""
        return next(pool for pool in self._pools.by_size.values() if group_id in pool.devices)

    def may_relieve(self, group: Group) -> bool:
        """Whether the group is packed now, by a packer that moves running requests."""
        pool = self._pools.by_size.get(group.blocks.capacity)
        if pool is None or group.group_id not in pool.devices or not self._packable.is_packed(group):
            return False
        return self.pool_of(group.group_id).migrates

    def empties(self, group_id: GroupId) -> bool:
        """Whether no request should live in the group."""
        return group_id not in self.active()

    # --- an epoch ---------------------------------------------------------------------------------------------

    def note_touched(self, group_ids: Iterable[GroupId]) -> None:
        """Note that requests may have ended in these groups."""
        self._stale.update(group_ids)

    @property
    def _stirred(self) -> set[RequestId]:
        """Ids of requests that have changed since the last pass. Raises AssertionError where changes go unnoted."""
        stirred = self._cluster.changes.stirred
        assert stirred is not None, "what is different is not noted"
        return stirred

    def refresh(self, now_ns: int) -> None:
        """Bring the desired placement up to date with all that has happened since, in one plan for each pool."""
        # Groups may have come, gone or changed their memory: those that are gone give their requests up, which are then
        # stirred, so this comes before anything is looked at.
        self.num_reshaped = None if self._moves.moving_workers() else self._cluster.changes.reshaped
        self._pools.update(self._stirred)
        moving = {m.state.request_id for m in self._migrations.under_way}
        looked_at, gone = self._look_at(self._stirred | self._seats.restless | moving)
        # From here on changes are for the next pass. A request that ended is among the stirred ones, and so among gone.
        self._stirred.clear()
        self._cluster.changes.ended.clear()
        fresh: list[tuple[Seat, RequestState]] = []
        grown: list[tuple[Pool, Group, list[RequestState]]] = []
        rate_of, reserve, groups = growth_rates(self._cluster), self._params.reserve, self._cluster.groups
        for pool in self._pools.by_size.values():
            due = self._growths.look([groups[device] for device in pool.devices], rate_of, reserve.epoch_s)
            pool.fastest_per_s = None  # growth has just been measured anew
            # In order of groups: the packer's decisions depend on the order of its operations.
            for device in sorted(due.keys() | looked_at.keys() & pool.devices):
                group, kept = groups[device], list[RequestState]()
                for state in looked_at.get(device, ()):
                    seat = self._seat_of(state, pool, group)
                    if seat is None:
                        # It takes its seat where it is. What keeps it there is set below, when the packer knows it.
                        fresh.append((self._take_seat(state, pool, group), state))
                        continue
                    # Before its size changes: the packer must not move for it what cannot be moved now.
                    self._set_grip(seat, state, moving)
                    kept.append(state)
                grown.append((pool, group, self._growing(due.get(device, ()), kept, pool, group, gone)))
        # Departures before growth: what they leave is room for it, and fewer requests have to move.
        for seat in self._seats.in_order(gone):
            self._seats.leave(seat.request_id)
        for pool, group, states in grown:
            self._resize(pool, group, states, reserve)
        # One plan for all of it: arrivals, departures and growth of a pass are a batch to the packer.
        for pool in self._pools.by_size.values():
            self._seats.apply(pool)
            pool.is_saturated = pool.gathers and -(-pool.num_reserved // pool.capacity) >= len(pool.devices)
        for seat, state in fresh:
            self._set_grip(seat, state, moving)
            self._growths.arm([seat], [state], self._cluster.groups[seat.group_id])
        self._stale.clear()
        if now_ns >= self._closes_ns and self._params.gather is Gather.CLOSE:
            self._closes_ns = now_ns + round(CLOSES_EVERY * self._params.epoch_s * NANOSECONDS)
            for pool in self._pools.by_size.values():
                self._close_some(pool)

    def _close_some(self, pool: Pool) -> None:
        """Have groups of a pool be emptied, for as long as the requests of one fit elsewhere as they stand. None while
        some have outgrown their group: the packer would take an emptied one into use again for these."""
        while pool.closes and not pool.is_saturated and not pool.packer.outgrown:
            placed = {device: pool.packer.requests_on(device) for device in pool.packer.active}
            pinned = {r for sizes in placed.values() for r in sizes if self._seats.by_id[r].grip is Grip.PINNED}
            work = pool.packer.book.work if isinstance(pool.packer, Packing) else None
            moves = plan_closing(placed, pool.capacity, pinned, work)
            for move in moves:
                seat = self._seats.by_id[move.request_id]
                pool.batch += [Depart(move.request_id), arrival_again(seat, move.destination)]
            self._seats.apply(pool)
            if len(pool.packer.active) >= len(placed):
                return

    def _look_at(
        self, request_ids: Iterable[RequestId]
    ) -> tuple[dict[GroupId, list[RequestState]], list[RequestId]]:
        """(those of these requests that are packed where they are, by group; ids of the others with a seat)."""
        cluster = self._cluster
        pool_of = {device: pool for pool in self._pools.by_size.values() for device in pool.devices}
        found: defaultdict[GroupId, list[RequestState]] = defaultdict(list)
        gone: list[RequestId] = []
        for request_id in request_ids:
            state, seat = cluster.requests.get(request_id), self._seats.get(request_id)
            if seat is not None:
                seat.armed = 0  # it is looked at now
            if state is not None and self._belongs(state, pool_of.get(state.group_id)):
                found[state.group_id].append(state)
            elif seat is not None:
                gone.append(request_id)
        return {
            device: self._in_turn(pool_of[device], cluster.groups[device], states) for device, states in found.items()
        }, gone

    def _belongs(self, state: RequestState, pool: Pool | None) -> bool:
        """Whether an online request is to be packed where it is; ``pool``: its group's; None: not in any."""
        if pool is None or state.is_offline or state.ending is not None or state.request_id in self._cluster.unplaced:
            return False
        return held_blocks(self._cluster.limits, state) <= pool.full

    def _in_turn(
        self, pool: Pool, group: Group, states: list[RequestState], growth: int = 0
    ) -> list[RequestState]:
        """These requests of a group, in the group's order if the packing would notice another one: of new ones, and of
        those of class S or above once grown by ``growth`` blocks; packers other than MELL's notice it of all."""
        if len(states) < 2 or (type(pool.packer) is Packing and self._num_big(pool, group, states, growth) < 2):
            return states
        wanted = {state.request_id for state in states}
        return [state for state in group.queues.online_requests() if state.request_id in wanted]

    def _num_big(self, pool: Pool, group: Group, states: Sequence[RequestState], growth: int) -> int:
        """How many of these requests are, or will be, of class S or above; all of them if one is new."""
        seats, limits, most, num = self._seats.by_id, self._cluster.limits, pool.capacity // 4, 0
        for state in states:
            seat = seats.get(state.request_id)
            if seat is None or not self._is_at(seat, pool, group):
                return len(states)
            num += seat.num_blocks > most or held_blocks(limits, state) + growth > most
        return num

    def _is_at(self, seat: Seat, pool: Pool, group: Group) -> bool:
        """Whether a seat is in this pool, and the group is where its request was seen last or should live."""
        group_id = group.group_id
        return seat.pool is pool and (seat.group_id == group_id or pool.packer.device_of(seat.request_id) == group_id)

    def _growing(
        self, due: Sequence[Seat], kept: Sequence[RequestState], pool: Pool, group: Group, gone: list[RequestId]
    ) -> list[RequestState]:
        """A group's requests that may outgrow their reserves, and ``kept``; those packed no more go to ``gone``."""
        states, requests = list(kept), self._cluster.requests
        for seat in due:
            state = requests[seat.request_id]
            if self._belongs(state, pool):
                states.append(state)
            else:
                gone.append(seat.request_id)
        return self._in_turn(pool, group, states, self.growth_blocks(group.group_id))

    def _resize(self, pool: Pool, group: Group, states: Sequence[RequestState], params: ReserveParams) -> None:
        """Give these requests larger sizes in the next plan where they will outgrow theirs, and arm all seats."""
        limits, rate, by_id = self._cluster.limits, self._growths.rates[group.group_id], self._seats.by_id
        seats = [by_id[state.request_id] for state in states]
        rows = [growing(limits, seat, state, rate) for seat, state in zip(seats, states, strict=True)]
        resizes = plan_resizes(rows, pool.capacity, params)
        for resize in resizes:
            self._seats.resize(by_id[resize.request_id], resize)
        pool.batch += resizes
        self._growths.arm(seats, states, group)

    def note_moved(self, request_id: RequestId, group_id: GroupId) -> None:
        """Note that a request with a seat lives in this group now, or is on its way there, as it was told to."""
        if (seat := self._seats.get(request_id)) is not None:
            self._seats.note_here(seat, group_id)

    def send(self, request_id: RequestId, group_id: GroupId) -> None:
        """Have a request live in this group, whatever the packing says; nothing without a seat in its pool."""
        seat = self._seats.get(request_id)
        if seat is not None and group_id in seat.pool.devices:
            self._seats.grip(seat, Grip.PINNED)
            seat.pool.batch += [Depart(request_id), arrival_again(seat, group_id)]
            self._seats.apply(seat.pool)

    def hold(self, request_ids: Iterable[RequestId]) -> None:
        """Keep requests with seats where they are until ``release``, unless their group overflows: their moves do not
        pay."""
        for seat in [self._seats.by_id[request_id] for request_id in request_ids]:
            self._seats.grip(seat, Grip.HELD)
            seat.held_at = seat.group_id
            seat.pool.batch += [Depart(seat.request_id), arrival_again(seat, seat.group_id)]
        for pool in self._pools.by_size.values():
            self._seats.apply(pool)

    def release(self, request_ids: Iterable[RequestId]) -> None:
        """Have the next pass free requests that were held."""
        for request_id in request_ids:
            if (seat := self._seats.get(request_id)) is not None:
                seat.held_at = None

    # --- seats ------------------------------------------------------------------------------------------------

    def _seat_of(self, state: RequestState, pool: Pool, group: Group) -> Seat | None:
        """The request's seat in this pool, noted to be in this group; None if the request has none, or had one for
        elsewhere, which it gives up."""
        seat = self._seats.get(state.request_id)
        if seat is None:
            return None
        if not self._is_at(seat, pool, group):
            self._seats.leave(state.request_id)
            return None
        self._seats.note_here(seat, group.group_id)
        return seat

    def _take_seat(self, state: RequestState, pool: Pool, group: Group) -> Seat:
        """Give the request a new seat in the group where it is; the packer learns of it with the next plan."""
        held, rate = held_blocks(self._cluster.limits, state), self._growths.rates[group.group_id]
        size = size_of(self._cluster, state, pool.capacity, held, rate)
        self._join(state, pool, group)
        arrive = arrival(pool, size, group.group_id)
        pool.batch.append(arrive)
        return self._seats.take(arrive, pool, group.group_id)

    def _join(self, state: RequestState, pool: Pool, group: Group) -> None:
        """Take the request into the prefixes of its pool (``group``: any of it), before its arrival. Another request
        that shares a prefix only since now arrives again: the packer plans what its pool has waiting."""
        joined = pool.prefixes.join(state.request_id, group.blocks.prompt_names(state))
        if joined.also is not None and (seat := self._seats.get(joined.also)) is not None and seat.pool is pool:
            # The planner knows a prefix from the arrival on. In a batch of its own: in the next it may leave.
            self._seats.apply(pool)
            device = pool.packer.device_of(joined.also)
            pool.batch += [Depart(joined.also), arrival_again(seat, device)]
            self._seats.apply(pool)

    def _set_grip(self, seat: Seat, state: RequestState, moving: set[RequestId]) -> None:
        """Set whether the packing may move a request: not one that prefills, moves or is stored; hardly a held one."""
        if state.request_id in moving or (state.phase is not Phase.WAITING and not may_go(state)):
            grip, lasts = Grip.PINNED, False
        elif seat.held_at == seat.group_id:
            grip, lasts = Grip.HELD, False
        else:
            lasts = seat.pool.closes
            grip = Grip.HELD if lasts else Grip.FREE
        is_new = grip is not seat.grip
        if is_new or lasts:
            self._seats.grip(seat, grip, lasts=lasts)
        if is_new:
            seat.pool.packer.pin(state.request_id, grip)

    # --- arrivals ---------------------------------------------------------------------------------------------

    def place(self, state: RequestState, *, only_in_use: bool = False) -> GroupId | None:
        """The group that the packing chooses for a newcomer by memory, or another where its prompt costs less
        (``Newcomers``). ``only_in_use``: one in use that gives it its first token in time. None: no packed group takes
        it, or packing could empty none."""
        self._leave_ended()
        if not self._pools.by_size:
            self._pools.update(self._stirred)
        if self._seats.get(state.request_id) is not None:
            self._seats.leave(state.request_id)
        if all(pool.is_saturated for pool in self._pools.by_size.values()):  # no placement empties a group
            return None
        blocks = self._cluster.limits.blocks_for(state.num_tokens)
        for _, pool in sorted(self._pools.by_size.items(), reverse=True):
            if blocks > pool.full:
                continue
            if pool.fastest_per_s is None:
                pool.fastest_per_s = self._growths.fastest_per_s(pool.packer.active)
            size = size_of(self._cluster, state, pool.capacity, blocks, pool.fastest_per_s)
            group = next((g for d in pool.devices if (g := self._cluster.groups.get(d)) is not None), None)
            if group is None:
                continue
            self._join(state, pool, group)
            arrive = arrival(pool, size)
            pool.batch.append(arrive)
            if state.request_id in self._seats.apply(pool):
                pool.prefixes.leave(state.request_id)
                continue
            wanted = pool.packer.device_of(state.request_id)
            device = self.places.choose(state, pool, wanted, only_in_use=only_in_use)
            if device != wanted:
                pool.batch.append(Depart(state.request_id))
                self._seats.apply(pool)
                if device is None:
                    pool.prefixes.leave(state.request_id)
                    continue
                # For now: the packing must not take it back before it is there.
                arrive = arrive._replace(device=device, grip=Grip.PINNED)
                pool.batch.append(arrive)
                self._seats.apply(pool)
            self._seats.grip(self._seats.take(arrive, pool, device), arrive.grip)
            pool.packer.live_at(state.request_id, device)
            return device
        return None

    def late(self) -> Iterator[tuple[Late, Group]]:
        """Yield the requests that wait for their first step and would better be served by a group without online
        requests, with such a group for each. The caller moves each before it asks for the next."""
        for pool in self._pools.by_size.values():
            found = self.places.late(pool)
            yield from ((late, group) for late, group in found if late.state.request_id in self._seats.by_id)

    def _leave_ended(self) -> None:
        """Take the seats of requests that have ended in touched groups away."""
        ended = self._cluster.changes.ended
        left = [seat for seat in self._seats.in_order(ended) if seat.group_id in self._stale]
        for seat in sorted(left, key=lambda seat: seat.group_id):
            self._seats.leave(seat.request_id)
        ended.difference_update([r for r in ended if r not in self._seats.by_id])
        self._stale.clear()

    def check(self) -> None:
        """Every seat is in its pool's packing, no other request is, and sums agree. Raises AssertionError otherwise."""
        for pool in self._pools.by_size.values():
            packed = {r for d in pool.packer.active for r in pool.packer.requests_on(d)}
            left = {o.request_id for o in pool.batch if isinstance(o, Depart)}
            seats = {r: seat for r, seat in self._seats.by_id.items() if seat.pool is pool}
            assert packed - left == seats.keys(), "seats and packing"
            assert pool.num_reserved == sum(seat.num_blocks for seat in seats.values()), "what seats reserve"
            assert pool.fastest_per_s in (None, self._growths.fastest_per_s(pool.packer.active)), "the fastest group"
        self._seats.check()
        self._packable.check()
        self._growths.check()

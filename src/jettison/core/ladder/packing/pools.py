"""The pools of a packing: groups of like memory, each with a packer of its own, kept up to date as groups come, go and
change their memory. Where requests should live is ``core.ladder.packing.desired``'s."""

from __future__ import annotations

from jettison.core.ladder.packing.growing import Growths
from jettison.core.ladder.packing.packable import Packable
from jettison.core.ladder.packing.seats import Pool, Seats
from jettison.core.ladder.packing.working import work_of
from jettison.core.load.distances import machine_distance
from jettison.core.load.views import Loads
from jettison.core.state import ClusterState
from jettison.policy.packing.mell import Packing
from jettison.policy.packing.named import PACKERS
from jettison.policy.packing.params import Gather, PackParams, head_room_blocks
from jettison.policy.packing.types import Packer, PackingParams
from jettison.policy.slo import objectives
from jettison.types import RequestId


class Pools:
    """The pools of one cluster's packing, by the number of blocks of their groups."""

    def __init__(
        self, cluster: ClusterState, loads: Loads, packable: Packable, seats: Seats, growths: Growths
    ) -> None:
        self._cluster, self._loads = cluster, loads
        self._packable, self._seats, self._growths = packable, seats, growths
        self.by_size: dict[int, Pool] = {}
        self._packer_name: str | None = None

    def update(self, stirred: set[RequestId]) -> None:
        """Bring the pools up to date, one for each size of groups that may be packed now; packers take in what is
        pending. Requests of a pool that is dropped or made anew (no groups, another packer or head-room), and of groups
        that left, lose their seats; they, and online requests of groups that came, are added to ``stirred`` for the
        next look. Raises AssertionError where nothing is packed."""
        params, cluster = self._cluster.params.packing, self._cluster
        assert params is not None, "nothing is packed"
        if self._packer_name != params.packer:
            self._packer_name = params.packer
            for full in list(self.by_size):
                self._forget(full, stirred)
        found = self._packable.by_size()
        for full in self.by_size.keys() - found.keys():
            self._forget(full, stirred)
        for full in sorted(found, reverse=True):
            pool = self._with_room(full, params, stirred)
            self._bound_work(pool)
            if found[full] is pool.devices:
                self._seats.apply(pool)
                continue
            for device in sorted(found[full] - pool.devices):
                pool.packer.set_taking(device, True)
                online = cluster.groups[device].queues.online_requests()
                stirred.update(state.request_id for state in online)
            self._seats.apply(pool)  # a request that has left is on no device
            for device in sorted(pool.devices - found[full]):
                stirred.update(self._seats.here[device])
                for request_id in pool.packer.requests_on(device):
                    stirred.add(request_id)
                    self._seats.leave(request_id)
                pool.packer.set_taking(device, False)
                self._growths.forget(device)
                self._seats.here.pop(device, None)
            pool.devices = found[full]

    def _with_room(self, full: int, params: PackParams, stirred: set[RequestId]) -> Pool:
        """The pool of groups with ``full`` blocks; a new and empty one if there is none or its head-room changes."""
        pool, traffic = self.by_size.get(full), self._loads.traffic.traffic()
        tokens_per_s = 0.0 if traffic is None else traffic.requests_per_s * traffic.prompt_tokens
        ttft_s = objectives(self._cluster.params.offline.slo, self._cluster.predictor).ttft_s
        head_room = head_room_blocks(
            params, full, None if pool is None else pool.head_room,
            tokens_per_s / self._cluster.limits.block_size, ttft_s,
        )
        if pool is None or pool.head_room != head_room:
            if pool is not None:
                self._forget(full, stirred)
            packing = PackingParams(
                capacity=max(1, full - head_room), priorities=params.priorities, fill=params.fill
            )
            packer = self._packer(params.packer, packing)
            closes = params.gather is Gather.CLOSE and isinstance(packer, Packing)
            pool = self.by_size[full] = Pool(packer, full, head_room, closes)
        return pool

    def _packer(self, name: str, params: PackingParams) -> Packer:
        """A packer without devices. Only MELL's asks for the machines of groups."""
        make = PACKERS[name]
        if make is not Packing:
            return make(params, ())
        return Packing(params, (), self._packable.machine_of, machine_distance(self._cluster))

    def _bound_work(self, pool: Pool) -> None:
        """Tell a packer that minds compute how much work a step of the pool's groups may have."""
        if isinstance(pool.packer, Packing):
            work = work_of(self._cluster, pool.full)
            if work is None or not work.is_about(pool.packer.book.work):
                pool.packer.bound_work(work)

    def _forget(self, full: int, stirred: set[RequestId]) -> None:
        """Drop the pool of groups with ``full`` blocks; its requests lose their seats, and are stirred."""
        pool = self.by_size.pop(full)
        for request_id in [r for r, seat in self._seats.by_id.items() if seat.pool is pool]:
            stirred.add(request_id)
            self._seats.leave(request_id)
        for device in pool.devices:
            self._growths.forget(device)

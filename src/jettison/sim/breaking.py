"""Carrying out faults (``sim.faults``): workers die, are cut off, slow down, or report late or twice.

Peers see a death at once (their links close); the core gets the event when it is detected. No report of the dead worker
is delivered after that, as ``core.ports`` promises. A cut link stays cut until one of its ends starts a new life; a
stage that loses a peer by it makes that peer a suspect, which is then declared lost (``live.engine.engine``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Protocol

from jettison.core import ports
from jettison.core.cluster import ClusterCore
from jettison.core.controlstream import LINK_GRACE_S
from jettison.core.load.bubbles import BubbleMeter
from jettison.sim.eventlog import EventLog
from jettison.sim.faults import Crash, Cut, Delay, Duplicate, Fault, Slow
from jettison.sim.links import host_of
from jettison.sim.loop import FAULT, EventLoop
from jettison.sim.network import Network
from jettison.sim.transfers import Transfers
from jettison.sim.worker import SimWorker
from jettison.types import NANOSECONDS, WorkerId

DECLARED_RESTART_S = 1.0
"""Seconds from then to its next life."""


class Breakable(Protocol):
    """The cluster, as faults use it (``sim.cluster.SimulatedCluster``)."""

    core: ClusterCore
    loop: EventLoop
    log: EventLog
    bubbles: BubbleMeter
    network: Network
    transfers: Transfers

    @property
    def workers(self) -> Mapping[WorkerId, SimWorker]:
        """All workers."""
        ...

    def worker(self, worker_id: WorkerId) -> SimWorker:
        """A worker by its id."""
        ...

    def is_linked(self, a: WorkerId, b: WorkerId) -> bool:
        """Both workers live, and the link between them is not cut."""
        ...

    def handle(self, event: ports.Event) -> None:
        """Let the core handle an event and carry out its actions."""
        ...

    def report(self, worker_id: WorkerId, event: ports.Event, at_ns: int) -> object:
        """A worker sends an event to the controller."""
        ...

    def start_ticks(self) -> None:
        """See that the next tick comes."""
        ...

    def stop_fast_forwards(self, *, including_now: bool = True) -> None:
        """Settle all groups, and go on step by step: something is about to change."""
        ...


class Breaking:
    """Present and planned faults of one cluster."""

    def __init__(self, cluster: Breakable) -> None:
        self.num_ahead = 0
        """Planned faults, and consequences of faults that are still to come."""
        self._cluster = cluster
        self._lasting: dict[WorkerId, list[Slow | Delay | Duplicate]] = {}
        """Faults under way by worker, in the order of their beginning. Each has its own effect, whatever other faults
        there are."""
        self._copies_after_ns: dict[WorkerId, tuple[int, ...]] = {}
        self._cut: set[tuple[WorkerId, WorkerId]] = set()
        """Pairs of live workers with a broken link, smaller id first."""
        self._told_dead: dict[WorkerId, int] = {}
        """Worker -> first life that is not over, as far as the core knows."""

    def plan(self, faults: Iterable[Fault]) -> None:
        """Plan these faults at their times."""
        for fault in faults:
            self.num_ahead += 1
            self._cluster.loop.at(round(fault.at_s * NANOSECONDS), partial(self._strike, fault), FAULT)

    def is_cut(self, a: WorkerId, b: WorkerId) -> bool:
        """Whether the link between two live workers is broken."""
        return bool(self._cut) and (min(a, b), max(a, b)) in self._cut

    def copies_after_ns(self, worker_id: WorkerId) -> tuple[int, ...]:
        """Delays of further copies of a report that this worker sends now: one for each fault that makes it repeat
        itself."""
        return self._copies_after_ns.get(worker_id, ())

    def is_told_dead(self, worker_id: WorkerId, life: int) -> bool:
        """The core knows that this life is over."""
        return life < self._told_dead.get(worker_id, 0)

    def suspect(self, worker_id: WorkerId) -> None:
        """A stage has lost this worker: if it still lives a moment later, a broken link has made it useless."""
        worker, life = self._cluster.worker(worker_id), self._cluster.worker(worker_id).life
        if worker.alive and any(worker_id in pair for pair in self._cut):
            self._cluster.loop.after(
                round(LINK_GRACE_S * NANOSECONDS),
                lambda: self._kill(worker_id, 0.0, DECLARED_RESTART_S) if worker.life == life else None,
            )

    def close_link(self, survivor: SimWorker, lost: WorkerId) -> None:
        """A fence: the survivor closes its link to the lost life; the next life may be linked already."""
        if not self._cluster.is_linked(survivor.worker_id, lost):
            survivor.lose_link(lost)

    # --- striking ---------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        self.num_ahead -= 1
        cluster = self._cluster
        cluster.stop_fast_forwards(including_now=False)
        cluster.log.note(cluster.loop.now_ns, "fault", repr(fault))
        match fault:
            case Crash():
                self._kill(fault.worker_id, fault.detect_s, fault.restart_after_s)
            case Cut():
                self._cut_link(fault.a, fault.b)
            case Slow() | Delay() | Duplicate():
                self._lasting.setdefault(fault.worker_id, []).append(fault)
                self._note_lasting(fault.worker_id)
                self._later(fault.for_s, lambda: self._end(fault))

    def _end(self, fault: Slow | Delay | Duplicate) -> None:
        self._lasting[fault.worker_id].remove(fault)
        self._note_lasting(fault.worker_id)

    def _note_lasting(self, worker_id: WorkerId) -> None:
        """Set a worker's rates from its faults: factors multiply and delays add up, so each fault has its own
        effect."""
        worker, lasting = self._cluster.worker(worker_id), self._lasting[worker_id]
        worker.slowness = math.prod((f.factor for f in lasting if isinstance(f, Slow)), start=1.0)
        worker.extra_hop_ns = sum(round(f.delay_s * NANOSECONDS) for f in lasting if isinstance(f, Delay))
        repeating = [f for f in lasting if isinstance(f, Duplicate)]
        self._copies_after_ns[worker_id] = tuple(round(f.delay_s * NANOSECONDS) for f in repeating)

    def _later(self, delay_s: float, act: Callable[[], object]) -> None:
        def run() -> None:
            self._cluster.stop_fast_forwards(including_now=False)
            act()

        self._cluster.loop.after(round(delay_s * NANOSECONDS), run, FAULT)

    # --- deaths -----------------------------------------------------------------------------------------------

    def _kill(self, worker_id: WorkerId, detect_s: float, restart_after_s: float | None) -> None:
        cluster, worker = self._cluster, self._cluster.worker(worker_id)
        if not worker.alive:
            return
        cluster.stop_fast_forwards()
        for peer in cluster.workers:
            if peer != worker_id and cluster.is_linked(worker_id, peer):
                self._break_link(worker_id, peer, dead=worker_id)
        self._drop_swaps(worker_id)
        worker.die()
        life = worker.life
        self.num_ahead += 1
        self._later(detect_s, lambda: self._lost(worker_id, life, restart_after_s))

    def retire(self, worker_id: WorkerId) -> None:
        """End a worker that the core has given back: what it still says is not delivered, and its end is not told."""
        worker = self._cluster.worker(worker_id)
        worker.die()
        self._told_dead[worker_id] = worker.life

    def _lost(self, worker_id: WorkerId, life: int, restart_after_s: float | None) -> None:
        if self._cluster.worker(worker_id).life != life:  # it was given back before its death was seen
            self.num_ahead -= 1
            return
        self._told_dead[worker_id] = life
        self._cluster.handle(ports.WorkerLost(worker_id))
        self._cluster.bubbles.keep_groups(self._cluster.core.groups)
        if restart_after_s is None:
            self.num_ahead -= 1
            self._cluster.handle(ports.WorkerGone(worker_id))
        else:
            self._later(restart_after_s, lambda: self._rise(worker_id))

    def _rise(self, worker_id: WorkerId) -> None:
        self.num_ahead -= 1
        worker = self._cluster.worker(worker_id)
        self._cut = {pair for pair in self._cut if worker_id not in pair}
        worker.rise()
        self._cluster.handle(ports.WorkerJoined(worker_id, worker.memory.capacity_blocks, worker.life))
        self._cluster.start_ticks()

    # --- links ------------------------------------------------------------------------------------------------

    def _cut_link(self, a: WorkerId, b: WorkerId) -> None:
        if self._cluster.is_linked(a, b):
            self._break_link(a, b, dead=None)
            self._cut.add((min(a, b), max(a, b)))
            for us, them in ((a, b), (b, a)):
                self._cluster.worker(us).lose_link(them)
                self._tell_lost(us, them)

    def _tell_lost(self, us: WorkerId, them: WorkerId) -> None:
        """A live worker reports the end of a link, behind the ends of all that has arrived over it."""
        cluster = self._cluster
        worker, life = cluster.worker(us), cluster.worker(us).life
        lost = ports.LinkLost(us, them, cluster.worker(them).life)

        def tell() -> None:
            if worker.alive and worker.life == life:
                cluster.report(us, lost, cluster.loop.now_ns)

        cluster.loop.after(cluster.network.latency_ns(us, them), tell)

    def _break_link(self, a: WorkerId, b: WorkerId, *, dead: WorkerId | None) -> None:
        """End the transfers between the two. A live end reports: the destination for transfers that have begun, else
        the source (rule 8). A cut link takes a first piece along, and what says before it that a transfer begins: of
        that one neither end tells."""
        cluster = self._cluster
        for src, dst in ((a, b), (b, a)):
            for transfer in cluster.transfers.drop(src, dst):
                has_begun = transfer.begun_ns is not None
                is_unheard = dead is None and has_begun and transfer.sent_bytes < cluster.transfers.piece_bytes
                teller = dst if has_begun else src
                if teller != dead and not is_unheard:
                    ended = ports.TransferEnded(transfer.transfer_id, False, transfer.sent_bytes, 0)
                    cluster.report(teller, ended, cluster.loop.now_ns)
        if dead is not None:
            survivor = cluster.worker(b if a == dead else a)
            life = survivor.life
            latency_ns = cluster.network.latency_ns(a, b)
            cluster.loop.after(latency_ns, lambda: survivor.lose_link(dead) if survivor.life == life else None)

    def _drop_swaps(self, worker_id: WorkerId) -> None:
        """The host memory of a dead worker is gone as well: its copies stop, and no end is left to report them."""
        host = host_of(worker_id)
        for src, dst in ((worker_id, host), (host, worker_id)):
            self._cluster.transfers.drop(src, dst)

"""Workers with a process and without: asking for a process, and giving one back. Whether and when is the rungs' matter.

    no process --wake--> starting --WorkerJoined--> its layers are filled, as after a death --> it serves
     (asleep)  <-given up-'  '-- StartFailed: the driver tries again by its restart rules, and it is told once
        ^
        '---- released: it sleeps, and no block, copy, call or transfer is left at it ---- asleep

A worker without a process is one that sleeps: it is in no group, home or plan, and its memory counts for no request.
Waking it takes as much longer as a process takes to start, which is measured each time.
"""

from __future__ import annotations

from collections.abc import Sequence

from jettison.core.ports import Action, AskInstance, Record, ReleaseInstance
from jettison.core.state import ClusterState, WorkerState
from jettison.types import NANOSECONDS, WorkerId


class Provisioning:
    """Which workers have a process, which are being started, and how long starts take."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self.starting: dict[WorkerId, int] = {}
        """Workers whose process was asked for and is not there yet: since when (ns)."""
        self.waits: dict[WorkerId, str] = {}
        """Those of them that could not be started or placed yet: why, the last time."""
        self.start_s = cluster.params.provision.start_s
        """Seconds that a start takes: as the last ones took, the newest with half of the weight. None: not known."""

    @property
    def num_provisioned(self) -> int:
        """How many workers have a process, dead ones that are started again included; none that is gone for good."""
        return sum(w.is_provisioned and not w.is_gone for w in self._cluster.workers.values())

    @property
    def num_wanted(self) -> int:
        """How many are to have one: those that are being started, too."""
        return self.num_provisioned + len(self.starting)

    @property
    def least(self) -> int:
        """How many keep theirs."""
        least = self._cluster.params.provision.min_instances
        return len(self._cluster.workers) if least is None else least

    # --- starts -----------------------------------------------------------------------------------------------

    def ask(self, worker: WorkerState, now_ns: int) -> list[Action]:
        """Ask for a process for a worker that has none; return the record and the action."""
        self.starting[worker.worker_id] = now_ns
        fields: dict[str, object] = {"worker": worker.worker_id}
        if self.start_s is not None:
            fields["predicted_s"] = self.start_s
        return [Record("instance_asked", now_ns, fields), AskInstance(worker.worker_id)]

    def joined(self, worker: WorkerState, now_ns: int) -> int:
        """Note that a process that was asked for is there, and how long its start took (ns, returned)."""
        took_ns = now_ns - self.starting.pop(worker.worker_id)
        self.waits.pop(worker.worker_id, None)
        worker.is_provisioned = True
        newest_s = took_ns / NANOSECONDS
        self.start_s = newest_s if self.start_s is None else (self.start_s + newest_s) / 2
        self._cluster.counters.num_starts += 1
        self._cluster.counters.start_ns += took_ns
        return took_ns

    def failed(self, worker_id: WorkerId, reason: str, now_ns: int) -> list[Action]:
        """Take note that a start has failed, or waits for a place; return the record of that, once for each start."""
        if worker_id not in self.starting:
            return []
        is_news = worker_id not in self.waits
        self.waits[worker_id] = reason
        if not is_news:
            return []
        waits_s = (now_ns - self.starting[worker_id]) / NANOSECONDS
        return [Record("instance_waits", now_ns, {"worker": worker_id, "reason": reason, "waits_s": waits_s})]

    def give_up(self, worker_id: WorkerId, reason: str, now_ns: int) -> list[Action]:
        """Give a start up; return the record and the action. The caller notes that the worker sleeps."""
        since_ns = self.starting.pop(worker_id)
        self.waits.pop(worker_id, None)
        fields = {"worker": worker_id, "reason": reason, "after_s": (now_ns - since_ns) / NANOSECONDS}
        return [Record("instance_given_up", now_ns, fields), ReleaseInstance(worker_id)]

    # --- releases ---------------------------------------------------------------------------------------------

    def why_held(self, worker: WorkerState) -> str | None:
        """What is left at a worker that sleeps, in words; None: nothing."""
        book = self._cluster.book
        if worker.pool.num_free < worker.pool.num_slots or worker.copying:
            return "host memory keeps KV there"
        if worker.ledger.num_held or worker.ghosts:
            return "blocks are held there"
        if any(worker.worker_id in pending.ends for pending in book.transfers.values()):
            return "a transfer is under way there"
        if any(pending.call.worker_id == worker.worker_id for pending in book.calls.values()):
            return "a call is under way there"
        return None

    def release(self, worker: WorkerState, fences: Sequence[Action], reason: str, now_ns: int) -> list[Action]:
        """End the process of a worker that holds nothing; return the record and the actions. ``fences``: what tells its
        peers, before it ends."""
        worker.is_provisioned = False
        self._cluster.counters.num_releases += 1
        fields = {"worker": worker.worker_id, "reason": reason, "left": self.num_provisioned}
        return [Record("instance_released", now_ns, fields), *fences, ReleaseInstance(worker.worker_id)]

    def check(self) -> None:
        """Check that no worker without a process lives or is taken to serve. Raises AssertionError."""
        for worker in self._cluster.workers.values():
            if not worker.is_provisioned:
                assert not worker.alive, f"{worker} has no process, and lives"
                assert worker.is_asleep != (worker.worker_id in self.starting), worker
            else:
                assert worker.worker_id not in self.starting, worker
        assert self.waits.keys() <= self.starting.keys()

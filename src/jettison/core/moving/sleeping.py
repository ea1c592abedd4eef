"""Sleepers: workers that sleep are alive, with an empty layout, in no group, no home and no plan, until they are woken.

    serves --sleep--> LEAVING (``core.moving.leaving``) --nothing is left--> its layout is emptied --> asleep
      ^                  |  wake: it serves on             (tried again until it is)                      |
      '------------------'--------------- as after a death: MAP, FILL (``core.moving.recovery``) <----wake--'

A worker may give its parameters up only while another complete copy is in memory. Either each shard is at some worker
that is awake and is to stay so (a group has one copy together, so any of its members counts); or the machine has a host
copy, which level 1 makes. The disk does not count. Peers may die while a worker sleeps: then the host copy fills it or,
without one, the model folder.

A worker that dies while it sleeps, or is about to, comes back asleep: its new process gives up what it has mapped. One
that sleeps may give its process up, too (``core.moving.provisioning``): to wake it is to ask for another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from jettison.core.changes import WaitsFor
from jettison.core.moving.checkpoints import Checkpoints
from jettison.core.moving.leaving import Leaving, LeavingPhase
from jettison.core.moving.migrations import Migrations
from jettison.core.moving.moves import Moves
from jettison.core.moving.provisioning import Provisioning
from jettison.core.moving.recovering import Recoveries
from jettison.core.moving.relayout import RETRY_NS, Relayout
from jettison.core.ports import Action, Record
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState, WorkerState
from jettison.memory.layout import LayoutSpec
from jettison.types import NANOSECONDS, LayerRange, ShardId, WorkerId

EMPTY = LayoutSpec(frozenset(), LayerRange(0, 0))

LEVELS = (1, 2)
"""1: the machine keeps a copy of the parameters in host memory. 2: only peers have them."""


class SleepState(StrEnum):
    """A worker's state between serving and sleep, as shown to users."""

    AWAKE = "awake"
    LEAVING = "leaving"
    EMPTYING = "emptying"
    ASLEEP = "asleep"
    WAKING = "waking"
    UNPROVISIONED = "unprovisioned"
    """It has no process."""
    STARTING = "starting"
    """A process was asked for, and is not there yet."""


class Expected(NamedTuple):
    """The prediction of one wake: how long it takes, and where the parameters come from."""

    seconds: float | None
    """Seconds from the order until it serves; None: not known."""
    source: str
    """The source of its parameters."""
    is_loaded: bool
    """Parameters come from the machine's copy or the model folder, though peers may have them."""


class Foresight(NamedTuple):
    """What is foreseen of wakes."""

    predict: Callable[[WorkerId], Expected | None]
    """How long a wake will take, where its order does not say; None: not known."""
    left_s: Callable[[float, float | None], float | None]
    """Seconds that are left of a wake ordered so many seconds ago and predicted to take so many (None: not known);
    None: it is overdue."""


@dataclass(frozen=True, slots=True)
class Woken:
    """One wake that is over, and how long it took."""

    worker_id: WorkerId
    took_ns: int
    start_ns: int = 0
    """Of that until its process was there; 0: it had one."""


class Sleepers:
    """All workers of a cluster that sleep or are about to. It carries out orders to sleep and to wake."""

    def __init__(
        self, cluster: ClusterState, moves: Moves, recoveries: Recoveries, migrations: Migrations,
        checkpoints: Checkpoints, why_needed: Callable[[Collection[WorkerId]], str | None],
        foresight: Foresight, note_room: Callable[[], None],
    ) -> None:
        """``why_needed``: why some request could not be held without these workers; None: there is no such request.
        ``note_room``: called when memory has gone that requests could count on."""
        self._cluster = cluster
        self._moves = moves
        self._recoveries = recoveries
        self._migrations = migrations
        self._checkpoints = checkpoints
        self._why_needed = why_needed
        self._left_s = foresight.left_s
        self._note_room = note_room
        self.provisioning = Provisioning(cluster)
        self.asleep: set[WorkerId] = {w.worker_id for w in cluster.workers.values() if w.is_asleep}
        """Sleeping workers, including dead ones, ones without a process and ones that are still emptying their
        layout."""
        self.slept_ns: dict[WorkerId, int] = {}
        """Since when each sleeper's layout has been empty."""
        self._emptying: dict[WorkerId, Relayout] = {}
        self.waits_for: WaitsFor = (self._emptying,)
        self._to_wake: set[WorkerId] = set()
        """Sleeping workers that are to be woken once their layout is empty."""
        self._since_ns: dict[WorkerId, int] = {}
        """When each was ordered to sleep, until it does."""
        self._retry_ns = 0
        self.host_copies: dict[str, set[ShardId]] = {}
        """Shards that each copy of the parameters in a host's memory has, by name (``_copy_of``)."""
        self.predict = foresight.predict
        self._asked: dict[WorkerId, tuple[int, Expected | None]] = {}
        """Workers that are being woken: since when, and the prediction."""
        self._start_ns: dict[WorkerId, int] = {}
        """Of those, how long the start of the process took that was asked for."""
        self.woken: deque[Woken] = deque(maxlen=64)
        """Wakes that are over; the reader that learns from them takes them out."""

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no layout is being emptied."""
        return not self._emptying

    @property
    def leaving(self) -> list[WorkerId]:
        """The workers on their way to sleep, which can still be called back at once; empty: none."""
        return [leaving.worker.worker_id for leaving in self._moves.leavings]

    @property
    def out(self) -> set[WorkerId]:
        """The workers that sleep or are about to, are not being woken and can be: their memory does not count. Those
        that are gone for good are none of them."""
        resting = (self.asleep | set(self.leaving)) - self._to_wake
        return {w for w in resting if not self._cluster.workers[w].is_gone} if resting else resting

    @property
    def can_wake(self) -> list[WorkerId]:
        """The workers that can be woken: first those on their way to sleep, which serve on at once, then those that
        live, dead ones, and last those without a process."""
        workers = self._cluster.workers
        sleepers = [w for w in self.asleep - self._to_wake if not workers[w].is_gone]
        return self.leaving + sorted(sleepers, key=lambda w: (not workers[w].is_provisioned, not workers[w].alive, w))

    @property
    def is_waking(self) -> bool:
        """Whether a worker that is still emptying its layout is to be woken; others that are being woken are in
        recovery."""
        return bool(self._to_wake)

    @property
    def waking(self) -> list[WorkerId]:
        """The workers that are being woken, in order, those whose process is being started included; empty: none."""
        filled = {w for w, r in self._recoveries.by_worker.items() if r.end == "woken"}
        return sorted(self._to_wake | filled | self.provisioning.starting.keys())

    def coming_s(self, now_ns: int) -> dict[WorkerId, float]:
        """Seconds until each worker that is being woken is predicted to serve, in order; those that are overdue are
        left out, as what cannot map its layers, or finds no place, may never serve."""
        asked = {w: self._asked.get(w, (now_ns, None)) for w in self.waking}
        left = {
            w: self._left_s((now_ns - asked_ns) / NANOSECONDS, None if expected is None else expected.seconds)
            for w, (asked_ns, expected) in asked.items()
        }
        return {w: seconds for w, seconds in left.items() if seconds is not None}

    def num_ordered(self, now_ns: int) -> int:
        """How many of the workers that are being woken were ordered to at this time."""
        return sum(asked_ns == now_ns for asked_ns, _ in self._asked.values())

    def absent(self, now_ns: int) -> set[WorkerId]:
        """The workers whose memory no request may count on now: those that are ``out``, and those whose wake is
        overdue."""
        return self.out.union(self.waking) - self.coming_s(now_ns).keys()

    def host_copy(self, worker_id: WorkerId) -> frozenset[ShardId]:
        """The shards that the host copy of a worker's machine has, or its own; empty: there is none."""
        return frozenset(self.host_copies.get(self._copy_of(worker_id), ()))

    def state_of(self, worker_id: WorkerId) -> SleepState:
        """A worker's state between serving and sleep."""
        if worker_id in self.provisioning.starting:
            return SleepState.STARTING
        if not self._cluster.workers[worker_id].is_provisioned:
            return SleepState.UNPROVISIONED
        if worker_id in self.asleep:
            return SleepState.EMPTYING if worker_id in self._emptying else SleepState.ASLEEP
        if worker_id in self.leaving:
            return SleepState.LEAVING
        recovery = self._recoveries.by_worker.get(worker_id)
        return SleepState.WAKING if recovery is not None and recovery.end == "woken" else SleepState.AWAKE

    def num_awake(self) -> int:
        """How many workers serve, or will without a new order to wake them."""
        workers = self._cluster.workers.values()
        return sum(not (w.is_asleep and w.is_gone) for w in workers) - len(self.out)

    def _copy_of(self, worker_id: WorkerId) -> str:
        """The name of the host copy that a worker writes and reads: its machine's, of which there is one where no
        machines are configured, or its own."""
        names, own = self._cluster.params.machine_of, f"worker {worker_id}"
        if not self._cluster.params.shares_copies:
            return own
        return str(names.get(worker_id, own)) if names else ""

    def _forget_own_copy(self, worker_id: WorkerId) -> None:
        """The process of a worker has ended, and may have taken the worker's own host copy with it."""
        if not self._cluster.params.shares_copies:
            self.host_copies.pop(self._copy_of(worker_id), None)

    def kept(self, worker_id: WorkerId) -> set[ShardId]:
        """The shards of a worker's host copy, for a leaving to add to."""
        return self.host_copies.setdefault(self._copy_of(worker_id), set())

    def being_kept(self, worker_id: WorkerId) -> set[ShardId]:
        """The shards that workers on their way to sleep are writing to the host copy of this worker."""
        copy, leavings = self._copy_of(worker_id), self._moves.leavings
        return {m.keeps for m in leavings if m.keeps is not None and self._copy_of(m.worker.worker_id) == copy}

    def why_not(self, worker_ids: Sequence[WorkerId], level: int) -> str | None:
        """Why these workers cannot be put to sleep now, in words; None: they can. Each must serve by itself, with no
        change of layers under way; no accepted request may need them, unless all workers are to sleep: then requests
        end first."""
        for worker_id in worker_ids:
            worker, groups = self._cluster.workers[worker_id], self._cluster.groups_of[worker_id]
            if worker.is_asleep or worker_id in self.leaving:
                return f"worker {worker_id} is asleep already, or about to be"
            if worker_id in self.provisioning.starting:
                return f"the process of worker {worker_id} is still being started"
            if not worker.alive:
                return f"worker {worker_id} is dead"
            if worker_id in self._moves.moving_workers():
                return f"layers of worker {worker_id} are changing"
            if len(groups) != 1 or groups[0].worker_ids != (worker_id,):
                return f"worker {worker_id} does not serve by itself"
        for worker_id in worker_ids:
            if (why := self._why_no_copy(worker_id, level, {*worker_ids, *self.leaving})) is not None:
                return why
        if self._awake() <= set(worker_ids):
            return None
        return self._why_needed([*worker_ids, *self.leaving])

    def _awake(self) -> set[WorkerId]:
        """The workers that can serve and are not on their way to sleep."""
        return {w.worker_id for w in self._cluster.workers.values() if w.can_serve} - set(self.leaving)

    def _why_no_copy(self, worker_id: WorkerId, level: int, without: Collection[WorkerId]) -> str | None:
        """Why no complete copy of the parameters would be in memory without these workers; None: there would be one, or
        level 1 makes one."""
        everything = self._cluster.shape.all_shards
        if level == 1 or self.kept(worker_id) >= everything:
            return None
        elsewhere: set[ShardId] = set()
        for worker in self._cluster.workers.values():
            if worker.can_serve and worker.worker_id not in without:
                elsewhere |= worker.layout.shards - worker.unfilled
                if elsewhere >= everything:
                    return None
        return (
            f"no other worker that is awake has {min(everything - elsewhere)}, and the machine of worker {worker_id} "
            "has no host copy: level 1 makes one"
        )

    # --- orders -----------------------------------------------------------------------------------------------

    def sleep(
        self, worker_ids: Sequence[WorkerId], level: int, now_ns: int, reason: str = "requested",
        told: Mapping[str, object] | None = None,
    ) -> list[Action]:
        """Begin to put workers to sleep, for ``reason`` and for what else is ``told`` in the log; return the records
        and actions. Raises ValueError, with nothing begun, where ``why_not`` says so or there is no such level."""
        if level not in LEVELS:
            raise ValueError(f"there is no level {level} of sleep: 1 keeps a host copy, 2 does not")
        if (why := self.why_not(worker_ids, level)) is not None:
            raise ValueError(why)
        actions: list[Action] = []
        for worker_id in worker_ids:
            group = self._cluster.groups_of[worker_id][0]
            num_requests = len(list(group.queues.all_requests()))
            fields = {"worker": worker_id, "level": level, "requests": num_requests, "reason": reason, **(told or {})}
            actions.append(Record("falling_asleep", now_ns, fields))
            self._since_ns[worker_id] = now_ns
            worker = self._cluster.workers[worker_id]
            actions += self._moves.leave(Leaving(
                self._cluster, self._migrations, self._checkpoints, worker, group, level, now_ns, self
            ))
        return actions

    def wake(self, worker_id: WorkerId, now_ns: int, expected: Expected | None = None) -> list[Action]:
        """Have a worker serve again, at once where it has not left yet, else with a process that is asked for where it
        has none; return the actions. ``expected``: the prediction that the order is based on. Raises ValueError for a
        worker that does not sleep."""
        worker = self._cluster.workers[worker_id]
        for leaving in self._moves.leavings:
            if leaving.worker is worker:
                leaving.call_off("it is wanted")
                return self._moves.end_leaving(leaving, now_ns)
        if not worker.is_asleep:
            raise ValueError(f"worker {worker_id} is not asleep")
        expected = expected or self.predict(worker_id)
        self._asked[worker_id] = now_ns, expected
        if worker_id in self._emptying:
            self._to_wake.add(worker_id)
            return []
        return self._wake(worker_id, now_ns)

    def _wake(self, worker_id: WorkerId, now_ns: int) -> list[Action]:
        """Begin to wake a worker with an empty layout; return the record. A dead one is only no sleeper any more, and
        one without a process is filled when it has one (``joined``)."""
        worker = self._cluster.workers[worker_id]
        self._note(worker, is_asleep=False)
        if not worker.is_provisioned:
            return self.provisioning.ask(worker, now_ns)
        _, expected = self._asked.get(worker_id, (now_ns, None))
        if worker.alive:  # a dead worker's home is formed when it is back
            is_loaded = expected is not None and expected.is_loaded
            self._recoveries.wake(worker_id, now_ns, is_loaded=is_loaded, on_end=self._served)
        else:
            self._asked.pop(worker_id, None)
        fields: dict[str, object] = {"worker": worker_id}
        if expected is not None:
            fields |= {"source": expected.source, "predicted_s": expected.seconds}
        return [Record("waking", now_ns, fields)]

    def joined(self, worker_id: WorkerId, now_ns: int) -> list[Action]:
        """Go on with a worker that has come back: one that slept empties its layout, one whose process was asked for is
        filled as any that is woken. Returns the actions."""
        worker = self._cluster.workers[worker_id]
        if worker_id in self.provisioning.starting:
            self._start_ns[worker_id] = self.provisioning.joined(worker, now_ns)
            _, expected = self._asked.get(worker_id, (now_ns, None))
            is_loaded = expected is not None and expected.is_loaded
            self._recoveries.fill_woken(worker_id, is_loaded=is_loaded, on_end=self._served)
            return []
        return self._empty(worker_id) if worker.is_asleep else []

    def _served(self, worker_id: WorkerId, now_ns: int) -> dict[str, object]:
        """Note that a wake is over, for the reader that learns from it; return fields for the record."""
        asked_ns, expected = self._asked.pop(worker_id, (now_ns, None))
        start_ns = self._start_ns.pop(worker_id, 0)
        self.woken.append(Woken(worker_id, now_ns - asked_ns, start_ns))
        fields: dict[str, object] = {"since_order_ms": (now_ns - asked_ns) / 1e6}
        if start_ns:
            fields["start_ms"] = start_ns / 1e6
        if expected is not None and expected.seconds is not None:
            fields["predicted_ms"] = 1e3 * expected.seconds
        return fields

    def _note(self, worker: WorkerState, *, is_asleep: bool) -> None:
        """Note whether a worker sleeps, and that other workers may serve than before."""
        worker.is_asleep = is_asleep
        self.slept_ns.pop(worker.worker_id, None)
        self._cluster.num_roster_changes += 1
        (self.asleep.add if is_asleep else self.asleep.discard)(worker.worker_id)

    # --- leaving ----------------------------------------------------------------------------------------------

    def open_groups(self) -> list[Group]:
        """The groups that take requests: not paused, in no move."""
        groups = self._cluster.groups.values()
        return [g for g in groups if not self._moves.is_moving(g) and not g.paused]

    def why_stay(self, leaving: Leaving) -> str | None:
        """Why a leaving worker can no longer sleep: no other complete copy of the parameters is left. None: it can."""
        return self._why_no_copy(leaving.worker.worker_id, leaving.level, self.leaving)

    def may_go(self, leaving: Leaving) -> bool:
        """Whether neither a recovery nor a request needs the leaving worker now."""
        if self._recoveries.by_worker.get(leaving.worker.worker_id) is not None:
            return False  # its recovery has not ended
        return not self._awake() or self._why_needed(self.leaving) is None

    def left(self, leaving: Leaving, now_ns: int) -> list[Action]:
        """End a leaving: the worker stays awake, or its group is dissolved and its layout emptied. Returns the
        actions."""
        worker = leaving.worker
        if leaving.phase is LeavingPhase.STAYS:
            self._since_ns.pop(worker.worker_id, None)
            leaving.group.touch()  # open again to newcomers
            return [Record("stays_awake", now_ns, {"worker": worker.worker_id, "reason": leaving.why})]
        self._cluster.dissolve(leaving.group)
        self._note(worker, is_asleep=True)
        return self._empty(worker.worker_id)

    # --- without a process ------------------------------------------------------------------------------------

    def why_not_release(self, worker_id: WorkerId) -> str | None:
        """Why a worker's process cannot be ended now, in words; None: it can. It must sleep for good, with nothing left
        at it, and no accepted request may need its memory."""
        worker = self._cluster.workers[worker_id]
        if self.state_of(worker_id) is not SleepState.ASLEEP or worker_id in self._to_wake:
            return f"worker {worker_id} does not sleep"
        if not worker.alive:
            return f"worker {worker_id} is dead"
        if worker_id in self._recoveries.by_worker:
            return f"worker {worker_id} is in recovery"
        return self.provisioning.why_held(worker) or self._why_needed([worker_id])

    def release(self, worker_id: WorkerId, now_ns: int, reason: str) -> list[Action]:
        """End the process of a worker that sleeps, or give up the start of one; return the record and the actions.
        Raises ValueError where ``why_not_release`` says so."""
        worker = self._cluster.workers[worker_id]
        if worker_id in self.provisioning.starting:
            self._note(worker, is_asleep=True)
            self._asked.pop(worker_id, None)
            return self.provisioning.give_up(worker_id, reason, now_ns)
        if (why := self.why_not_release(worker_id)) is not None:
            raise ValueError(why)
        self.slept_ns.pop(worker_id, None)
        self._forget_own_copy(worker_id)
        actions = self.provisioning.release(worker, self._recoveries.retire(worker_id), reason, now_ns)
        self._note_room()
        return actions

    # --- deaths -----------------------------------------------------------------------------------------------

    def lost(self, worker_id: WorkerId, *, was_leaving: bool) -> None:
        """Note that a worker is dead. One that was on its way to sleep has nothing left to leave, and sleeps."""
        self._emptying.pop(worker_id, None)
        self._asked.pop(worker_id, None)
        self._start_ns.pop(worker_id, None)
        self._since_ns.pop(worker_id, None)
        self._forget_own_copy(worker_id)
        worker = self._cluster.workers[worker_id]
        self._note(worker, is_asleep=(worker.is_asleep or was_leaving) and worker_id not in self._to_wake)
        self._to_wake.discard(worker_id)

    # --- progress ---------------------------------------------------------------------------------------------

    def _empty(self, worker_id: WorkerId) -> list[Action]:
        """Begin to empty a worker's layout; return the actions."""
        worker = self._cluster.workers[worker_id]
        worker.ledger.forget_cached()
        relayout = self._emptying[worker_id] = Relayout(self._cluster, self, worker, EMPTY, shrinks=True)
        return relayout.start()

    def go_on(self, now_ns: int) -> list[Action]:
        """Go on after a layout call has been answered: a worker with an empty layout sleeps, or is woken; a refusal is
        tried again later. Returns the actions."""
        actions: list[Action] = []
        for worker_id, relayout in list(self._emptying.items()):
            if not relayout.is_over:
                continue
            if relayout.failure is not None and worker_id not in self._to_wake:
                self._retry_ns = now_ns + RETRY_NS
                continue
            del self._emptying[worker_id]
            actions += self._emptied(worker_id, now_ns)
        return actions

    def _emptied(self, worker_id: WorkerId, now_ns: int) -> list[Action]:
        """Count a worker that has fallen asleep, and wake it if it is wanted again; return the record and the
        actions."""
        actions: list[Action] = []
        if self._cluster.workers[worker_id].layout == EMPTY:
            self.slept_ns[worker_id] = now_ns
            took_ns = now_ns - self._since_ns.pop(worker_id, now_ns)
            self._cluster.counters.num_sleeps += 1
            self._cluster.counters.sleep_ns += took_ns
            actions.append(Record("asleep", now_ns, {"worker": worker_id, "ms": took_ns / 1e6}))
        if worker_id in self._to_wake:
            self._to_wake.remove(worker_id)
            actions += self._wake(worker_id, now_ns)
        return actions

    def advance(self, now_ns: int) -> list[Action]:
        """Try again to empty layouts where that was refused, after a pause; return the actions."""
        if now_ns < self._retry_ns:
            return []
        refused = [worker_id for worker_id, relayout in self._emptying.items() if relayout.is_over]
        return [action for worker_id in refused for action in self._empty(worker_id)]

    def check(self) -> None:
        """Check that no group and no recovery has a worker that sleeps. Raises AssertionError."""
        for worker in self._cluster.workers.values():
            assert worker.is_asleep == (worker.worker_id in self.asleep)
            if worker.is_asleep:
                assert not self._cluster.groups_of[worker.worker_id], f"{worker} sleeps, and is in a group"
                assert worker.worker_id not in self._recoveries.by_worker
        assert self._to_wake <= self._emptying.keys()
        self.provisioning.check()

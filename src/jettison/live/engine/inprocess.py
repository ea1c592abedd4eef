"""Several workers in this process: the same loops and transfers as with real processes, minus the processes.

Deterministic. With a seed, ticks of the workers are interleaved at random but reproducibly, so that a test or
``jettison verify`` sees orders of events that real processes would produce. No sockets, no threads, no clock
but the one that is given.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Collection, Mapping

from jettison.errors import RemoteAttentionError
from jettison.live.wire import codec
from jettison.live.wire import messages as m
from jettison.live.wire.stepflag import StepFlag
from jettison.live.worker.device_port import Device
from jettison.live.worker.loop import WorkerLoop
from jettison.live.worker.transfers import bulk_frame_bytes
from jettison.transport.inproc import InProcessLink
from jettison.transport.link import Link
from jettison.types import WorkerId

MOST_LOOKS = 4
"""At the word of a step, until it is seen."""


class LateFlag(StepFlag):
    """A word that is seen at a later look in turn: a step runs within one tick here, and a word that is set between two
    would always be seen at the first. Where the step has no such look, it has come too late; the first look, which
    every step has, is among the turns, and is the first of them."""

    def __init__(self) -> None:
        super().__init__()
        self._num_named = 0
        self._looks_left = 0

    def name(self, step_id: int) -> None:
        """See ``StepFlag``."""
        super().name(step_id)
        self._looks_left = 1 + self._num_named % MOST_LOOKS
        self._num_named += 1

    def names(self, step_id: int) -> bool:
        """See ``StepFlag``."""
        if not super().names(step_id):
            return False
        self._looks_left -= 1
        return self._looks_left <= 0


class InProcessCluster:
    """Worker loops over given devices, all pairs linked. Owns the links, and the devices' start and close."""

    def __init__(
        self,
        devices: Mapping[WorkerId, Device],
        on_event: Callable[[WorkerId, m.Event], None],
        *,
        piece_bytes: int = 1 << 20,
        activation_bytes: int = 1 << 20,
        seed: int | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.on_event = on_event
        self._devices = dict(devices)
        self._piece_bytes = piece_bytes
        self._activation_bytes = activation_bytes
        self._random = None if seed is None else random.Random(seed)
        self._clock_ns = clock_ns
        self._loops: dict[WorkerId, WorkerLoop] = {}
        self._links: dict[WorkerId, dict[WorkerId, InProcessLink]] = {}
        self.flags = {
            worker: StepFlag() if seed is None else LateFlag() for worker in devices
        }
        """By which steps are given up."""

    def start(self) -> list[m.WorkerReady]:
        """Start every device; raises what a device raises. A second call changes nothing."""
        if not self._loops:
            for device in self._devices.values():
                device.start()
            self._connect()
        return [
            m.WorkerReady(worker, os.getpid(), device.capacity_blocks, device.layout_version, device.kernels_name,
                          device.memory_report(), device.weights_identity, *device.reading_ns, device.own_products)
            for worker, device in self._devices.items()
        ]

    @property
    def workers(self) -> list[WorkerId]:
        """Ids, in the order the devices were given."""
        return list(self._devices)

    def link(self, worker: WorkerId, peer: WorkerId) -> Link:
        """The end of the link that ``worker`` holds."""
        return self._links[worker][peer]

    def send(self, worker_id: WorkerId, command: m.Command) -> None:
        """Deliver a command; it runs in a later ``pump``. It goes through its wire form, as it would for real."""
        self._loops[worker_id].deliver(codec.decode_command(codec.encode(command)))

    def abandon(self, worker_id: WorkerId, step_id: int) -> None:
        """Have a worker give a step up at its next safepoint."""
        self.flags[worker_id].name(step_id)

    def pump(self, max_ticks: int | None = None) -> int:
        """Tick until no worker has anything to do, or ``max_ticks`` ticks did something; returns how many did.

        Events reach ``on_event`` on the way; it may call ``send``.
        """
        num_done = 0
        idle: set[WorkerId] = set()
        while len(idle) < len(self._loops) and (max_ticks is None or num_done < max_ticks):
            for worker in self._next_workers():
                loop = self._loops.get(worker)
                if loop is not None and loop.tick():
                    num_done += 1
                    idle.clear()
                else:
                    idle.add(worker)
        return num_done

    def hold(self, *, steps_of: Collection[WorkerId] = (), bulk: bool = False) -> None:
        """From now on these workers, and no others, begin no step, and, if ``bulk``, no link takes KV or parameters."""
        for worker, loop in self._loops.items():
            loop.hold_steps(worker in steps_of)
        for links in self._links.values():
            for link in links.values():
                link.holds_bulk = bulk

    def close(self) -> None:
        """Stop the loops and close the devices. Idempotent."""
        for loop in self._loops.values():
            loop.close()
        self._loops.clear()
        for device in self._devices.values():
            device.close()

    def _next_workers(self) -> list[WorkerId]:
        """The workers that have the next turns: each once, or one drawn by lot."""
        workers = list(self._loops)
        return workers if self._random is None else [self._random.choice(workers)]

    def _connect(self) -> None:
        workers = list(self._devices)
        largest_unit = max(device.kv_block_bytes for device in self._devices.values())
        self._links = {worker: {} for worker in workers}
        for i, a in enumerate(workers):
            for b in workers[i + 1 :]:
                self._links[a][b], self._links[b][a] = InProcessLink.pair(
                    a, b, activation_bytes=self._activation_bytes,
                    bulk_bytes=bulk_frame_bytes(self._piece_bytes, largest_unit),
                )
        for worker in workers:
            self._loops[worker] = WorkerLoop(
                worker, self._devices[worker], self._links[worker], self._emitter(worker), self._piece_bytes,
                clock_ns=self._clock_ns, wait=self._waiter(worker), flag=self.flags[worker],
            )

    def _waiter(self, worker: WorkerId) -> Callable[[], None]:
        """What a step does that waits for attention: the others answer now, or never."""

        def wait() -> None:
            served = [loop.serve() for other, loop in self._loops.items() if other != worker]
            if not any(served):
                raise RemoteAttentionError("no worker answers")

        return wait

    def _emitter(self, worker: WorkerId) -> Callable[[m.Event], None]:
        def emit(event: m.Event) -> None:
            self.on_event(worker, codec.decode_event(codec.encode(event)))

        return emit

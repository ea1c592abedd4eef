"""What a packing epoch's pass costs the controller: desired placement, who is owed, gauges. Table and JSON.

    python -m benchmarks packing epoch [--devices 125 1000 8000] [--requests 100] [--json OUT]

A core's own books with so many instances and requests on each, driven by hand: a second is 40 decode steps of 25 ms,
arrivals are placed by the packing, and requests that should live elsewhere are there in the next epoch. Each holds one
block only, as a pass does not look at tables. Processor time of the thread, which does nothing else.

    still       nothing has happened since the last pass
    decoding    every request has got 4 tokens, and what is reserved for it suffices: of 24 passes in a row those that
                resize none; the median, and the most
    epoch       every request has got 40 tokens and one in ``--stay-s`` of them has ended, for which another has come; a
                reserve (four epochs ahead) lasts for three, so about a third are resized

``apply``: of an epoch's pass, what ``Packing.apply`` takes (``time.py`` measures that alone).
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable

from benchmarks.servers import greedy
from benchmarks.shared import DECIDING, Row, keep, parse, print_block
from jettison.core.cluster import ClusterCore
from jettison.core.ladder.lists import parse_overload, with_packing
from jettison.core.ladder.packing.pack import PackRung
from jettison.core.params import ClusterParams
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group, SchedulerLimits
from jettison.cost.stepwork import StepWork
from jettison.policy.packing.mell import Packing
from jettison.policy.packing.params import PackParams
from jettison.policy.packing.types import Resize
from jettison.types import EMBED_SHARD, HEAD_SHARD, ModelShape, Request, layer_shard

S = 1_000_000_000
STEP_NS, STEPS = 25_000_000, 40
BLOCK_SIZE = 16
BLOCKS = 15_000
"""Of an instance: 100 requests of 107 on average, with their reserves, leave some instances empty."""
MODEL = ModelShape(
    4, 5120, 40, 8, 128, 13824, 152064, 2, False,
    {layer_shard(i): 1 << 20 for i in range(4)} | {EMBED_SHARD: 1 << 20, HEAD_SHARD: 1 << 20},
)  # fmt: skip


def clock_ms() -> float:
    """Of asking for the thread's time once, which is slow where a sandbox answers."""
    readings = [time.thread_time() for _ in range(201)]
    return 1e3 * statistics.median(b - a for a, b in itertools.pairwise(readings))


CLOCK_MS = clock_ms()


class Books:
    """A core whose requests decode, come and go as they are told."""

    def __init__(self, num_devices: int, num_each: int, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        limits = SchedulerLimits(BLOCK_SIZE, 1 << 20, 4 * num_each, 1 << 20, enable_prefix_caching=False)
        params = ClusterParams(
            rungs=with_packing(parse_overload("recompute").rungs), packing=PackParams(head_room=0.05)
        )
        self.core = ClusterCore(MODEL, limits, params, dict.fromkeys(range(num_devices), BLOCKS), b"secret")
        rung = self.core.ladder.rung("pack")
        assert isinstance(rung, PackRung)
        self.rung, self.now_ns, self._next = rung, S, 0
        self.prompts: dict[int, tuple[int, ...]] = {}
        for at in range(30):
            work = StepWork.decodes(num_each, 20 * BLOCK_SIZE * num_each)
            self.core.state.predictor.observe(work, (at * STEP_NS, (at + 1) * STEP_NS))

    @property
    def states(self) -> dict[str, RequestState]:
        return self.core.state.requests

    def arrive(self) -> None:
        """A request comes, goes where the packing wants it, and has its first token."""
        state, blocks = self.core.state, max(4, min(BLOCKS // 2, round(self.rng.lognormvariate(4.2, 0.95))))
        prompt = self.prompts.setdefault(blocks, (1,) * (blocks * BLOCK_SIZE - 1))
        request = Request(f"r{self._next}", prompt, greedy(100_000), self.now_ns)
        self._next += 1
        new = RequestState(request, state.next_order)
        state.next_order += 1
        state.requests[request.request_id] = new
        device = self.rung.desired.place(new)
        if device is None:
            device = max(state.groups.values(), key=lambda g: g.blocks.num_free).group_id
        group = state.groups[device]
        group.queues.enqueue(new)
        group.queues.take_waiting([request.request_id], lambda _: False)
        new.first_scheduled_ns = self.now_ns
        group.blocks.ledgers[0].allocate(request.request_id, 1)
        group.queues.resume(new)
        new.num_computed = new.num_tokens
        new.add_token(7)
        group.queues.note_tokens([new])

    def end(self, name: str) -> None:
        """One is over."""
        state = self.states[name]
        group = self.core.groups[state.group_id]
        group.queues.take_out(state)
        group.release_blocks(state)
        self.core.state.forget(state)
        self.rung.note_touched([group.group_id])

    def decode(self, share: float = 1.0, num_steps: int = STEPS) -> None:
        """So many steps; this share of the requests get the tokens of all of them, the others none."""
        self.now_ns += num_steps * STEP_NS
        for group in self.core.groups.values():
            group.counters.num_steps += num_steps
            for state in group.queues.running.values():
                if share < 1.0 and self.rng.random() > share:
                    continue
                state.num_computed += num_steps
                state.num_tokens += num_steps  # what they are is of no interest
        self.rung.note_touched(list(self.core.groups))

    def settle(self) -> int:
        """Requests that should live elsewhere are there; how many that were."""
        owed = list(self.rung.desired.owed())
        for state, source, destination in owed:
            self._move(state, source, destination)
        return len(owed)

    def _move(self, state: RequestState, source: Group, destination: Group) -> None:
        source.queues.take_out(state)
        source.release_blocks(state)
        destination.blocks.ledgers[0].allocate(state.request_id, 1)
        destination.queues.resume(state)
        self.rung.desired.note_moved(state.request_id, destination.group_id)

    def look(self) -> float:
        """Milliseconds of one pass."""
        begun = time.thread_time()
        self.rung.desired.refresh(self.now_ns)
        for _ in range(2):  # before offers are made, and after
            list(self.rung.desired.owed())
        assert self.rung.gauges()["devices_used"]
        return 1e3 * (time.thread_time() - begun) - CLOCK_MS


def timed_apply() -> Callable[[], tuple[float, int]]:
    """Milliseconds in ``Packing.apply`` since this was asked last, and requests that it has resized."""
    spent, resized, apply = [0.0], [0], Packing.apply

    def measured(self, batch):  # type: ignore[no-untyped-def]
        begun = time.thread_time()
        plan = apply(self, batch)
        spent[0] += 1e3 * (time.thread_time() - begun) - CLOCK_MS
        resized[0] += sum(isinstance(operation, Resize) for operation in batch)
        return plan

    Packing.apply = measured  # type: ignore[method-assign]

    def take() -> tuple[float, int]:
        took = spent[0], resized[0]
        spent[0], resized[0] = 0.0, 0
        return took

    return take


def measure(
    num_devices: int, num_each: int, stay_s: float, num_epochs: int, applied_of: Callable[[], tuple[float, int]]
) -> Row:
    """One size."""
    books, num = Books(num_devices, num_each), num_devices * num_each
    for _ in range(num):
        books.arrive()
    for _ in range(4):
        books.look()
        books.settle()
    still = [books.look() for _ in range(5)]
    decoding = list[float]()
    for _ in range(24):
        books.decode(num_steps=4)
        applied_of()
        took_ms = books.look()
        if not applied_of()[1]:
            decoding.append(took_ms)
        books.settle()
    for _ in range(8):  # a reserve lasts for four seconds, and most are used up in the same pass
        books.decode()
        books.look()
        books.settle()
    for _ in range(4):  # from here on they do not use it up all at once
        books.decode(0.6)
        books.look()
        books.settle()
    epochs, applied, moves = list[float](), list[float](), 0
    for _ in range(num_epochs):
        books.decode()
        names = books.rng.sample(list(books.states), round(num / stay_s))
        for name in names:
            books.end(name)
            books.arrive()
        applied_of()
        epochs.append(books.look())
        applied.append(applied_of()[0])
        moves += books.settle()
        books.look()
    return {
        "devices": num_devices, "used": books.rung.desired.used()[0], "requests": len(books.states),
        "still_ms": statistics.median(still), "decoding_ms": statistics.median(decoding),
        "decoding_max_ms": max(decoding), "decoding_passes": len(decoding),
        "epoch_median_ms": statistics.median(epochs), "epoch_max_ms": max(epochs),
        "apply_median_ms": statistics.median(applied),
        "come_and_gone": round(num / stay_s), "moves_per_epoch": moves / num_epochs,
    }  # fmt: skip


def main() -> None:
    args = parse(
        __doc__, devices=([125, 1000, 8000], {"nargs": "*", "type": int}), requests=(100, "on each"), stay_s=60.0,
        epochs=5,
    )  # fmt: skip
    applied_of = timed_apply()
    rows = [measure(num, args.requests, args.stay_s, args.epochs, applied_of) for num in args.devices]
    print_block("epoch_pass", {"rows": rows})
    keep(args.json, {"stay_s": args.stay_s, "rows": rows}, *DECIDING)

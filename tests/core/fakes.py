"""Workers that hold pretend KV: every token's KV in every layer is (token, position), and every step checks that what
it attends to is exactly what the request's tokens say. A wrong block, a late copy or a lost layer fails the step."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

from jettison.config.offline import harvest_parts
from jettison.core import ports
from jettison.core.cluster import ClusterCore, ClusterParams
from jettison.core.driving.safepoints import has_place
from jettison.core.founding import initial_groups
from jettison.core.ladder.lists import parse_overload, with_offline, with_packing, with_wake
from jettison.core.load.monitor import MAX_DOUBLINGS
from jettison.core.params import AwakeParams, ProvisionParams
from jettison.core.pending import TransferPurpose
from jettison.core.serving.group import SchedulerLimits
from jettison.cost.hardware import HardwareProfile
from jettison.memory.kvtransfers import ExchangeMode, MigrationKind
from jettison.memory.layout import LayoutOffer, LayoutResult, LayoutSpec
from jettison.policy.migration import MigrationParams
from jettison.policy.offline import OfflineParams
from jettison.policy.order import SchedulingPolicy
from jettison.policy.overload import OverloadParams, Trigger
from jettison.policy.packing.params import PackParams
from jettison.policy.restore import RestoreParams
from jettison.policy.swapping import SwapParams
from jettison.types import (
    EMBED_SHARD,
    HEAD_SHARD,
    FinishReason,
    LayerRange,
    ModelShape,
    Request,
    SampledToken,
    SamplingParams,
    ServiceClass,
    TokenLogprobs,
    layer_shard,
)
from longrun import LONG

BLOCK_SIZE = 4
SHARD_BYTES = 64 * 1024
"""Of one layer. One block of one layer is 256 bytes: a dropped layer gives room for everything; pass ``shard_bytes``
of a few hundred for a cluster whose drops free little."""
EOS = 0
WRONG_TOKEN = 63
"""No undisturbed run has it (``next_token``): what is computed over KV that is not there."""
MS = 1_000_000
FEW_REQUESTS = 1 << 20 if LONG else 1
"""Of so many the books are checked after each event; of twice as many after every other one, and so on. What is wrong
in them mostly stays wrong, and hundreds of schedules meet what does not."""


class MissingKV(AssertionError):
    """A step attends to KV that is not what its request's tokens say."""


def make_shape(num_layers: int = 4, shard_bytes: int = SHARD_BYTES) -> ModelShape:
    shards = {layer_shard(i): shard_bytes for i in range(num_layers)}
    shards |= {EMBED_SHARD: shard_bytes // 2, HEAD_SHARD: shard_bytes // 2}
    return ModelShape(num_layers, 16, 2, 1, 8, 32, 64, 4, False, shards)


@dataclass
class Faults:
    """Probabilities of things that go wrong, and how many of them at most (then everything works again)."""

    apply: float = 0.0
    """A layout is refused; the worker is as before."""
    offer: float = 0.0
    load: float = 0.0
    """A shard cannot be read from the model folder."""
    move: float = 0.0
    """A transfer ends incomplete though nobody called it off."""
    step: float = 0.0
    swap: float = 0.0
    """A piece of a swap cannot be copied."""
    remote: float = 0.0
    """A peer does not answer a step that needs its attention."""
    abandon: float = 0.0
    """A step that may be given up is, whether somebody has asked or not: no fault, and not counted as one."""
    budget: int = 12


def expected_run(request: Request, max_model_len: int) -> tuple[list[int], FinishReason]:
    """What an undisturbed engine produces for a request."""
    tokens, params = list(request.prompt_token_ids), request.params
    output: list[int] = []
    if params.max_tokens == 0:
        return output, FinishReason.LENGTH
    while True:
        token = next_token(tokens)
        tokens.append(token)
        output.append(token)
        if len(output) >= params.min_tokens and (
            token in params.stop_token_ids or (token == EOS and not params.ignore_eos)
        ):
            return output, FinishReason.STOP
        if len(output) >= params.max_tokens or len(tokens) >= max_model_len:
            return output, FinishReason.LENGTH


def tokens(seed: int | str, num: int) -> list[int]:
    """A prompt that no other seed has."""
    rng = random.Random(seed)
    return [rng.randrange(1, 60) for _ in range(num)]


def next_token(tokens: list[int]) -> int:
    """A 'model': depends on the whole history, never on the batch."""
    value = 7
    for token in tokens[-5:]:
        value = (value * 31 + token + len(tokens)) % 61
    return value + 1


def block_contents(history: list[int], start: int = 0) -> list[dict[int, tuple[int, int]]]:
    """What the blocks of a request hold in every layer, from position ``start`` on: slot -> (token, position)."""
    return [_contents(at, *history[at : at + BLOCK_SIZE]) for at in range(start, len(history), BLOCK_SIZE)]


@lru_cache(1 << 16)
def _contents(start: int, *tokens: int) -> dict[int, tuple[int, int]]:
    """Of one block, made once: every step asks for whole histories, which only grow. Nobody changes what is given."""
    return {slot: (token, start + slot) for slot, token in enumerate(tokens)}


def _written(
    held: dict[int, tuple[int, int]] | None, wanted: dict[int, tuple[int, int]], first_slot: int
) -> dict[int, tuple[int, int]]:
    """What a block holds once a step has written the slots of ``wanted`` from ``first_slot`` on."""
    if not first_slot and len(wanted) == BLOCK_SIZE:
        return wanted
    holds = (held or {}) | {slot: wanted[slot] for slot in range(first_slot, len(wanted))}
    return wanted if holds == wanted else holds


@dataclass
class FakeWorker:
    """Memory of one worker: KV per layer and block, shards, a capacity that follows from the layout."""

    worker_id: int
    shape: ModelShape
    full_blocks: int
    spec: LayoutSpec
    capacity: int = 0
    version: int = 0
    kv: list[dict[int, dict[int, tuple[int, int]]]] = field(default_factory=list)
    """Of each layer, by block. What a block holds is replaced, never changed: copies of it share it, and it is compared
    at a glance."""
    host: dict[tuple[int, int], dict[int, tuple[int, int]]] = field(default_factory=dict)
    """(layer, slot) of the host pool."""
    filled: set[str] = field(default_factory=set)
    lent: set[str] = field(default_factory=set)
    """Shards that were complete when they were dropped."""
    spoilt: Callable[[], bool] = lambda: True
    """Whether a shard that is mapped again has been overwritten meanwhile."""
    num_drops: Counter[str] = field(default_factory=Counter)
    """How often each shard was dropped: a transfer that was under way then ends incomplete."""
    fail_applies: int = 0
    life: int = 0
    """Grows when it dies; what an older life was about to do does not happen."""
    alive: bool = True
    kept: tuple[int, int] | None = None
    """The step whose rows it keeps, and the layers that these have behind them."""
    fenced_lives: dict[int, int] = field(default_factory=dict)
    """Peer -> newest life of it from which nothing is taken any more."""

    def __post_init__(self) -> None:
        self.capacity = self.full_blocks
        self.filled = set(self.spec.shards)
        self.kv = [{} for _ in range(self.shape.num_layers)]

    def capacity_for(self, spec: LayoutSpec) -> int:
        block = self.shape.block_bytes_per_layer(BLOCK_SIZE)
        total = self.full_blocks * self.shape.num_layers * block + self.shape.parameter_bytes
        total -= sum(self.shape.shard_bytes[s] for s in spec.shards)
        total -= sum(len(r.layers) * len(r.block_ids) * block for r in spec.retained)
        return total // (len(spec.kv_layers) * block) if spec.kv_layers else 0

    def copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        for src, dst in copies:
            for blocks in self.kv:
                blocks[dst] = blocks.get(src, {})

    def apply(self, spec: LayoutSpec, copies: tuple[tuple[int, int], ...]) -> LayoutResult:
        self.copy_blocks(copies)
        keep = {(layer, b) for r in spec.retained for layer in r.layers.layers() for b in r.block_ids}
        capacity = self.capacity_for(spec)
        self.kv = [
            {
                block: content
                for block, content in blocks.items()
                if (layer, block) in keep or (spec.kv_layers.lo <= layer < spec.kv_layers.hi and block < capacity)
            }
            for layer, blocks in enumerate(self.kv)
        ]
        new = spec.shards - self.spec.shards
        intact = frozenset(s for s in sorted(new & self.lent) if not self.spoilt())
        self.num_drops.update(self.spec.shards - spec.shards)
        self.lent = (self.lent | (self.filled - spec.shards)) - spec.shards
        self.filled = (self.filled & spec.shards) | intact
        self.spec, self.capacity = spec, capacity
        self.version += 1
        return LayoutResult(self.version, capacity, 0, 1, 1, intact, frozenset(new - intact))


@dataclass
class _Part:
    """A stage's part of a step that has been issued and not computed."""

    worker_id: int
    life: int
    rows: list[tuple[list[int], int, dict[int, int]]]
    """Blocks of each, from which on they are written, and by layer how many of the first ones a peer attends to."""


class FakeCluster:
    """Drives a ClusterCore in virtual time with seeded delays."""

    def __init__(
        self, *, num_workers: int = 2, full_blocks: int = 24, num_layers: int = 4, seed: int = 0,
        policy: str = "drop", auto_restore: bool = True, max_seqs: int = 16, max_tokens: int = 32,
        prefix_caching: bool = True, shard_bytes: int = SHARD_BYTES, max_model_len: int = 10_000,
        faults: Faults | None = None, eager: bool = False, host_slots: int = 64, swap_budget: int | None = 4,
        migrate_threshold: float = 3.0, exchange: str = "auto", trigger: Trigger = Trigger.PRESSURE,
        prefill_first: bool = False, scheduling_policy: SchedulingPolicy = "fcfs",
        profile: HardwareProfile | None = None, offline: str | OfflineParams | None = None,
        checkpoint_free: float = 0.5, migration_kind: str = "kv", migration_step_tokens: int | None = None,
        awake: AwakeParams | None = None, provision: ProvisionParams | None = None, start_ms: float = 50.0,
        packing: PackParams | None = None, steps_ahead: int = 0, sheds_rows: bool = False,
    ) -> None:
        """``awake``: the rung that wakes sleepers is there; None: they sleep until they are told. ``start_ms``: that a
        process takes which is asked for."""
        self.start_ms = start_ms
        self.starts: dict[int, object] = {}
        """Processes that are being started, by worker."""
        self.rng = random.Random(seed)
        self.shape = make_shape(num_layers, shard_bytes)
        self.shard_bytes = shard_bytes
        self.faults = faults or Faults()
        self.fault_rng = random.Random(seed + 1)
        limits = SchedulerLimits(
            BLOCK_SIZE, max_tokens, max_seqs, max_model_len, 0.01, frozenset({EOS}), prefix_caching,
            prefill_first=prefill_first, scheduling_policy=scheduling_policy, steps_ahead=steps_ahead,
            sheds_rows=sheds_rows,
        )
        ladder, parts = parse_overload(policy), harvest_parts(offline) if isinstance(offline, str) else ()
        if offline is None:
            offline = OfflineParams(checkpoints=False, prefetches=False)
        elif isinstance(offline, str):
            offline = OfflineParams(
                slo_aware="scheduler" in parts, checkpoints="checkpoint" in parts, prefetches="prefetch" in parts,
                checkpoint_below_free=checkpoint_free,
            )
        rungs = with_offline(ladder.rungs, parts)
        if packing is not None:
            rungs = with_packing(rungs)
        params = ClusterParams(
            rungs=rungs if awake is None else with_wake(rungs, ladder.static_pipeline), awake=awake or AwakeParams(),
            packing=packing, provision=provision or ProvisionParams(),
            static_pipeline=ladder.static_pipeline, auto_restore=auto_restore,
            swap=SwapParams(num_host_slots=host_slots, budget_blocks=swap_budget),
            migration=MigrationParams(
                threshold_blocks=migrate_threshold, period_s=0.01,
                kind=None if migration_kind == "adaptive" else MigrationKind(migration_kind),
                max_step_tokens=migration_step_tokens,
            ),
            exchange=ExchangeMode(exchange), overload=OverloadParams(trigger=trigger),
            profile=profile, offline=offline,
        )
        if eager:  # moves follow each other closely: more of them in a short run
            params = replace(
                params, drop_dwell_s=0.05, restore=RestoreParams(usage_threshold=0.5, min_settled_s=0.1),
                overload=OverloadParams(trigger=trigger, min_blocked_s=0.01),
            )
        self.workers = {
            s.worker_id: FakeWorker(
                s.worker_id, self.shape, full_blocks, LayoutSpec(self.shape.shards_for(s.layers), s.layers)
            )
            for stages in initial_groups(
                range(num_workers), self.shape, static_pipeline=params.static_pipeline
            )
            for s in stages
        }
        self.start_specs = {w: worker.spec for w, worker in self.workers.items()}
        for worker in self.workers.values():
            worker.capacity = worker.capacity_for(worker.spec)
        capacity = {w: worker.capacity for w, worker in self.workers.items()}
        self.abandon_rng = random.Random(seed + 2)
        self.sampled_in: dict[int, list[int]] = {}
        """Step -> the tokens that it samples, if it does."""
        self.gave_none: set[int] = set()
        """Steps that have failed, or were given up."""
        self.num_shed = 0
        """Steps that have kept rows."""
        self.num_ahead = 0
        """Steps with a token that was not known when they were planned."""
        self.asked_to_abandon: set[int] = set()
        self.give_ups: dict[int, Callable[[], object]] = {}
        """Of steps under way on single instances: what ends them at a safepoint, if they were asked to be given up."""
        """Steps."""
        self.core = ClusterCore(self.shape, limits, params, capacity, b"secret")
        for worker_id, state in self.core.state.workers.items():
            self.workers[worker_id].alive = state.is_provisioned
        self.host_slots = host_slots
        self.swapped: list[ports.SendKV] = []
        self.under_way: dict[int, ports.SendKV | ports.SendShard] = {}
        """Transfers that the core has asked for and cannot know to be over."""
        self.lost_life_transfers: dict[int, set[int]] = {}
        """By worker that was lost: what it was sending then. A peer's fence ends what came to it."""
        self.fence_calls: dict[int, int] = {}
        for worker in self.workers.values():
            worker.spoilt = lambda: self.fault_rng.random() < 0.7
        self.now = 0
        self.heap: list[tuple[int, int, ports.Event | object]] = []
        self.sequence = 0
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, list[str]] = {}
        self.errors: dict[str, str | None] = {}
        self.records: list[ports.Record] = []
        self.cancelled_transfers: set[int] = set()
        self.parts: dict[tuple[int, int], _Part] = {}
        """By step and worker."""
        self.moves_under_way: dict[int, tuple[ports.SendKV, int, int]] = {}
        """Transfers of KV whose pieces may be read and written, with the lives of both ends."""
        self.requests: dict[str, Request] = {}
        self.worker_free_at = dict.fromkeys(range(num_workers), 0)
        self.beside_until = dict.fromkeys(range(num_workers), 0)
        self.layout_applied_at = dict.fromkeys(range(num_workers), 0)
        self.histories: dict[str, tuple[list[int], list[dict[int, tuple[int, int]]]]] = {}
        """Tokens of each request's last step, and what its blocks hold then."""
        self.log: list[tuple[int, str]] = []
        self.check_every_event = True
        """But for crowds: a look at all requests after each event would take longer than all else."""
        self.num_unchecked = 0
        self.num_steps = 0
        self.num_remote_rows = 0
        """Rows of steps that attended to KV elsewhere."""
        self.num_faults = 0
        self.num_deaths = 0
        self.num_stale_layouts = 0
        self.held_up: dict[int, set[str]] = {}
        """Step that a peer's silence held up, or that was given up -> its requests: from that stage on their KV of the
        step is not there."""
        self.num_spoilt_rows = 0
        """Rows that followed such a step, and read what it should have written: what comes of them is wrong."""
        self.poison: dict[str, int] = {}
        """Request -> its how many-eth sampling step in a worker's life kills that worker."""
        self.poison_steps: dict[tuple[str, int, int], int] = {}
        self.fails_move: Callable[[ports.SendKV], bool] = lambda _: False
        """Picks transfers of KV that end incomplete."""
        self.fails_shard: Callable[[ports.SendShard], bool] = lambda _: False
        """Picks transfers of shards that end incomplete."""
        self.fetched: list[ports.SendShard | ports.LoadShard] = []
        self.kept: list[ports.KeepShard] = []
        self.sent: list[ports.SendKV] = []
        self.prompt_logprobs: dict[str, list[TokenLogprobs | None] | None] = {}
        self.recording: list[tuple[object, int, list[object]]] | None = None
        """Set to a list: every event and order with the actions that followed, as plain values."""
        self.at(100 * MS, ports.Tick())

    # --- scheduling

    def at(self, time_ns: int, event: object) -> None:
        self.sequence += 1
        heapq.heappush(self.heap, (time_ns, self.sequence, event))

    def delay(self, low_ms: float, high_ms: float) -> int:
        return int(self.rng.uniform(low_ms, high_ms) * MS)

    def submit(
        self, request_id: str, prompt: list[int], max_tokens: int, at_ms: float = 0.0, *, priority: int = 0,
        salt: str = "", has_default_length: bool = False, tenant: str = "",
        service_class: ServiceClass = ServiceClass.ONLINE, deadline_ns: int | None = None, **params: object,
    ) -> None:
        when = int(at_ms * MS)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, **params)  # type: ignore[arg-type]
        request = Request(
            request_id, tuple(prompt), sampling, when, priority, salt, has_default_length, tenant, service_class,
            deadline_ns,
        )
        self.requests[request_id] = request
        self.at(when, ports.Arrived(request))

    def cancel(self, request_id: str, at_ms: float) -> None:
        self.at(int(at_ms * MS), ports.CancelRequested(request_id))

    def run(
        self, until_ms: float = 1e9, max_events: int = 200_000, stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Until nothing is left but ticks (and no transition is under way), or time is over, or ``stop`` says so."""
        num_idle_ticks = 0
        for _ in range(max_events):
            if not self.heap or self.heap[0][0] > until_ms * MS or stop():
                return
            busy = len(self.heap) > 1 or not isinstance(self.heap[0][2], ports.Tick)
            if not busy and self.core.state.is_idle() and not self.core.in_transition and self._settled():
                return
            num_idle_ticks = 0 if busy else num_idle_ticks + 1
            assert num_idle_ticks < self._patience(), f"stuck: {self._describe()}"
            self.now, _, event = heapq.heappop(self.heap)
            self._process(event)
        raise AssertionError(f"did not come to rest: {self._describe()}")

    def _patience(self) -> float:
        """Ticks: a request that waits or a move that hangs while nothing but ticks come has 10 s, beside the pause that
        a restore takes after as many failures as there were."""
        doublings = min(self.num_faults + self.num_deaths, MAX_DOUBLINGS)
        return 100 + 10 * self.core.params.restore.min_settled_s * 2**doublings

    def _describe(self) -> str:
        core = self.core
        queues = {g.group_id: g.queues for g in core.groups.values()}
        groups = {
            i: [*q.waiting, *q.waiting_offline, *q.running.values(), *q.moving.values()] for i, q in queues.items()
        }
        moves = [(type(m).__name__, str(m.phase)) for m in (*core.merges, *core.restores)]
        blocks = [(w.ledger.num_held, w.ledger.capacity) for w in core.state.workers.values()]
        return f"groups {groups}, moves {moves}, blocks held of capacity {blocks}"

    def _settled(self) -> bool:
        restores = self.core.params.auto_restore and "restore" in self.core.params.rungs
        return not restores or all(len(g.stages) == 1 for g in self.core.groups.values())

    def _process(self, event: object) -> None:
        if callable(event):
            event = event()
            if event is None:
                return
        if isinstance(event, ports.Tick):
            self.at(self.now + 100 * MS, ports.Tick())
        self.log.append((self.now, type(event).__name__))
        self._note_ended(event)
        actions = self.core.handle(event, self.now)  # type: ignore[arg-type]
        if self.recording is not None:
            self.recording.append((event, self.now, [describe(a) for a in actions]))
        self.carry_out(actions)
        self.num_unchecked += 1
        if self.check_every_event and self.num_unchecked * FEW_REQUESTS >= len(self.core.state.requests):
            self.num_unchecked = 0
            self.core.check()
            self.check_links()

    def carry_out(self, actions: list[ports.Action]) -> None:
        for action in actions:
            if isinstance(action, ports.SendKV | ports.SendShard):
                self.under_way[action.transfer_id] = action
            self._carry_out(action)

    def _note_ended(self, event: object) -> None:
        """What the core can know of transfers that are over, counted without the core's book."""
        match event:
            case ports.TransferEnded():
                self.under_way.pop(event.transfer_id, None)
            case ports.WorkerLost():
                self.lost_life_transfers[event.worker_id] = {
                    i for i, sent in self.under_way.items() if sent.src == event.worker_id
                } | self.lost_life_transfers.get(event.worker_id, set())
                self.under_way = {i: sent for i, sent in self.under_way.items() if sent.dst != event.worker_id}
            case ports.WorkerFenced():
                lost = self.fence_calls.pop(event.call_id)
                for transfer_id in self.lost_life_transfers.get(lost, ()):
                    if transfer_id in self.under_way and self.under_way[transfer_id].dst == event.worker_id:
                        del self.under_way[transfer_id]

    def check_links(self) -> None:
        """The core's book has the bytes of each link that are under way."""
        num_bytes: dict[tuple[int, int], int] = {}
        for sent in self.under_way.values():
            if isinstance(sent, ports.SendShard):
                size = self.shape.shard_bytes[sent.shard]
            else:
                size = len(sent.layers) * len(sent.src_blocks) * self.shape.block_bytes_per_layer(BLOCK_SIZE)
            num_bytes[sent.src, sent.dst] = num_bytes.get((sent.src, sent.dst), 0) + size
        book, workers = self.core.state.book, self.core.state.workers
        queued = {(src, dst): book.bytes_between(src, dst) for src in workers for dst in workers}
        assert {link: n for link, n in queued.items() if n} == {link: n for link, n in num_bytes.items() if n}

    def order(self, what: str) -> None:
        """An administrator's "drop" or "restore", now."""
        act = self.core.request_drop if what == "drop" else self.core.request_restore
        actions = act(self.now)
        if self.recording is not None:
            self.recording.append((what, self.now, [describe(a) for a in actions]))
        self.carry_out(actions)
        self.core.check()

    def order_at(self, what: str, at_ms: float) -> None:
        """The same at a time to come."""
        self.at(int(at_ms * MS), lambda: self.order(what))

    def _strikes(self, probability: float) -> bool:
        """Whether a fault happens here."""
        if not probability or self.faults.budget <= 0 or self.fault_rng.random() >= probability:
            return False
        self.faults.budget -= 1
        self.num_faults += 1
        return True

    # --- deaths

    def kill(self, worker_id: int) -> None:
        """kill -9, now: what it was doing does not happen, and the core hears of it a little later."""
        worker = self.workers[worker_id]
        if not worker.alive:
            return
        self.num_deaths += 1
        worker.alive = False
        worker.life += 1
        life, lost = worker.life, ports.WorkerLost(worker_id)
        self.at(self.now + self.delay(0.1, 30), lambda: lost if self.workers[worker_id].life == life else None)

    def kill_at(self, worker_id: int, at_ms: float) -> None:
        self.at(int(at_ms * MS), lambda: self.kill(worker_id))

    def restart_at(self, worker_id: int, at_ms: float) -> None:
        """A new process, if the old one is dead and known to be (else nothing)."""

        def restart() -> ports.Event | None:
            state = self.core.state.workers[worker_id]
            if self.workers[worker_id].alive or state.alive or not state.is_provisioned:
                return None
            return self._rise(worker_id)

        self.at(int(at_ms * MS), restart)

    def _rise(self, worker_id: int) -> ports.WorkerJoined:
        worker = self.workers[worker_id]
        fresh = FakeWorker(
            worker_id, self.shape, worker.full_blocks, self.start_specs[worker_id],
            life=worker.life + 1, spoilt=worker.spoilt,
        )
        fresh.capacity = fresh.capacity_for(fresh.spec)
        fresh.filled = set()
        self.workers[worker_id] = fresh
        self.worker_free_at[worker_id] = self.now
        return ports.WorkerJoined(worker_id, fresh.capacity, fresh.life)

    def _ask_instance(self, worker_id: int) -> None:
        """A process comes later, unless it is given back before."""
        assert not self.workers[worker_id].alive and worker_id not in self.starts
        start = self.starts[worker_id] = object()

        def come() -> ports.Event | None:
            if self.starts.get(worker_id) is not start:
                return None
            del self.starts[worker_id]
            return self._rise(worker_id)

        self.at(self.now + int(self.start_ms * MS), come)

    def _release_instance(self, worker_id: int) -> None:
        """It ends at once; what it held would be lost."""
        worker = self.workers[worker_id]
        assert not (worker.alive and worker_id in self.starts), "it is there, or is being started"
        assert not worker.alive or not worker.spec.shards, "it has given everything up"
        self.starts.pop(worker_id, None)
        worker.alive = False
        worker.life += 1

    def _while_alive(self, worker_id: int, what: object) -> object:
        """The same, unless the worker has died before it gets there."""
        worker = self.workers[worker_id]
        life = worker.life

        def maybe() -> object:
            if self.workers[worker_id].life != life:
                return None
            return what() if callable(what) else what

        return maybe if worker.alive else lambda: None

    def _fence(self, action: ports.FenceWorker) -> ports.Event:
        fenced = self.workers[action.worker_id].fenced_lives
        fenced[action.lost] = max(fenced.get(action.lost, -1), action.lost_life)
        return ports.WorkerFenced(action.worker_id, action.call_id)

    # --- actions

    def _carry_out(self, action: ports.Action) -> None:
        match action:
            case ports.RunStep():
                self._run_step(action)
            case ports.AskInstance():
                self._ask_instance(action.worker_id)
            case ports.ReleaseInstance():
                self._release_instance(action.worker_id)
            case ports.AbandonStep():
                self.asked_to_abandon.add(action.step_id)
                self.at(self.now + self.abandon_rng.randrange(MS), self.give_ups.get(action.step_id, lambda: None))
            case ports.OfferLayout():
                worker = self.workers[action.worker_id]
                capacity = worker.capacity_for(action.spec)
                shrink = min(capacity, worker.capacity)
                line = max(shrink if shrink < worker.capacity else worker.capacity, 0)
                if self._strikes(self.faults.offer):
                    self._in_order(action.worker_id, 0.1, lambda: ports.CallFailed(
                        action.worker_id, action.call_id, "MappingError: injected"))
                    return
                self._in_order(action.worker_id, 0.1, lambda: ports.LayoutOffered(
                    action.worker_id, action.call_id, LayoutOffer(worker.version, line, capacity)))
            case ports.ApplyLayout() if action.gives_back:  # behind no step: at any moment (rule 3)
                end = max(self.now, self.layout_applied_at[action.worker_id]) + self.delay(0.01, 3)
                self.layout_applied_at[action.worker_id] = end
                self.at(end, self._while_alive(action.worker_id, lambda: self._apply(action)))
            case ports.ApplyLayout():
                free_at = max(self.worker_free_at[action.worker_id], self.beside_until[action.worker_id])
                self.worker_free_at[action.worker_id] = free_at
                self._in_order(action.worker_id, 1.0, lambda: self._apply(action))
                self.layout_applied_at[action.worker_id] = self.worker_free_at[action.worker_id]
            case ports.SendKV() if action.src == action.dst:
                self.swapped.append(action)
                if action.beside_steps:
                    self._copy_beside(action)
                    return
                self._in_order(action.src, 0.05 * len(action.src_blocks), lambda: self._copy_here(action))
            case ports.SendKV() if action.is_settled:
                self.sent.append(action)
                self.at(self.now + self.delay(0.01, 2), self._while_alive(action.src, lambda: self._begin_kv(action)))
            case ports.SendKV():
                self.sent.append(action)
                self._in_order(action.src, 0.0, lambda: self._begin_kv(action))
            case ports.SendShard():
                self.fetched.append(action)
                num_drops = self.workers[action.src].num_drops[action.shard]
                arrives = self._transfer(
                    action.src, action.dst, action.transfer_id, lambda: self._shard_arrives(action, num_drops)
                )
                self.at(self.now + self.delay(1, 40), arrives)
            case ports.FenceWorker():
                self.fence_calls[action.call_id] = action.lost
                self._in_order(action.worker_id, 0.1, lambda: self._fence(action))
            case ports.LoadShard():
                self.fetched.append(action)
                if self._strikes(self.faults.load):
                    self.at(self.now + self.delay(1, 5), self._while_alive(action.worker_id, ports.CallFailed(
                        action.worker_id, action.call_id, "ModelError: injected")))
                    return
                self.workers[action.worker_id].filled.add(action.shard)
                self.at(self.now + self.delay(1, 5), self._while_alive(
                    action.worker_id, ports.ShardLoaded(action.worker_id, action.call_id)))
            case ports.KeepShard():
                worker = self.workers[action.worker_id]
                assert action.shard in worker.filled, f"worker {action.worker_id} has no {action.shard} to keep"
                self.kept.append(action)
                answer = ports.CallFailed if self._strikes(self.faults.load) else ports.ShardLoaded
                told = (action.worker_id, action.call_id, *(["injected"] if answer is ports.CallFailed else []))
                self.at(self.now + self.delay(1, 5), self._while_alive(action.worker_id, answer(*told)))
            case ports.CancelTransfer():
                self.cancelled_transfers.add(action.transfer_id)
            case ports.EmitTokens():
                for state, token in zip(action.states, action.tokens, strict=True):
                    self.outputs.setdefault(state.request_id, []).append(token.token_id)
            case ports.Emit():
                self.outputs.setdefault(action.request_id, []).extend(t.token_id for t in action.tokens)
                if action.finish_reason is not None:
                    self.ends.setdefault(action.request_id, []).append(str(action.finish_reason))
                    self.errors[action.request_id] = action.error
                    assert action.state is not None
                    self.prompt_logprobs[action.request_id] = action.state.prompt_logprobs
            case ports.Record():
                # In an event log a record's fields stand beside these two.
                assert not {"t", "kind"} & action.fields.keys(), action
                self.records.append(action)

    def _in_order(self, worker_id: int, cost_ms: float, what: object) -> None:
        """Commands of one worker run one after the other, after the steps issued before."""
        start = max(self.now, self.worker_free_at[worker_id])
        end = start + int(cost_ms * MS) + self.delay(0.01, 0.2)
        self.worker_free_at[worker_id] = end
        self.at(end, self._while_alive(worker_id, what))

    def _copy_beside(self, piece: ports.SendKV) -> None:
        """At some moment while steps run: all that it touches has to be its own until it ends. Layouts wait for it."""
        end = max(self.now, self.layout_applied_at[piece.src]) + self.delay(0.05, 4)
        self.beside_until[piece.src] = max(self.beside_until[piece.src], end)
        self.at(end, self._while_alive(piece.src, lambda: self._copy_here(piece)))

    def _apply(self, action: ports.ApplyLayout) -> ports.Event:
        worker = self.workers[action.worker_id]
        if action.version != worker.version:
            self.num_stale_layouts += 1
            return ports.CallFailed(action.worker_id, action.call_id, "StalePlanError: the page map has changed")
        if worker.fail_applies > 0 or self._strikes(self.faults.apply):
            worker.fail_applies = max(0, worker.fail_applies - 1)
            if self.fault_rng.random() < 0.5:
                worker.copy_blocks(action.copies)  # the failure came after the copies
            return ports.CallFailed(action.worker_id, action.call_id, "MappingError: injected")
        return ports.LayoutApplied(action.worker_id, action.call_id, worker.apply(action.spec, action.copies))

    def _run_step(self, step: ports.RunStep) -> None:
        self.num_steps += 1
        when = self.now
        tables = [
            [list(self.core.state.workers[s.worker_id].ledger.table(r.state.request_id).ids) for r in step.rows]
            for s in step.stages
        ]
        tokens = [list(r.state.tokens[: r.context_len + r.num_tokens]) for r in step.rows]
        for i, place in step.follows.places.items() if step.follows else ():
            tokens[i].append(self.sampled_in[step.follows.step_id][place])
        assert [len(t) for t in tokens] == [r.context_len + r.num_tokens for r in step.rows]
        contents = [self._contents_of(r, history) for r, history in zip(step.rows, tokens, strict=True)]
        num_tokens = sum(r.num_tokens for r in step.rows)
        sources = [self._remote_tables(r) for r in step.rows]
        far_parts = [part for r in step.rows for part in r.remote]
        far_lives = {part.src: self.workers[part.src].life for part in far_parts}
        followed = self._followed(step)
        spoilt: set[str] = set()
        unanswered = bool(far_parts) and self._strikes(self.faults.remote)
        self.num_remote_rows += sum(bool(r.remote) for r in step.rows)
        lost: list[int] = []
        """Workers that died, or did not answer, before a part was done: later parts find no input."""
        given_up: list[bool] = []
        shed: list[int] = []
        """Layers after which the first stage has kept rows."""
        gives_up = step.safepoint_layers > 0 and self.abandon_rng.random() < self.faults.abandon
        fails = self._strikes(self.faults.step)
        for stage in step.stages:
            if not self.workers[stage.worker_id].alive:
                lost.append(stage.worker_id)

        def attend(worker: FakeWorker, ran: LayerRange, ids, history, row: ports.StepRow, *rest: object) -> None:
            try:
                self._attend(worker, ran, ids, history, row.context_len, *rest)
            except MissingKV:
                request_id = row.state.request_id
                if not any(request_id in self.held_up.get(i, ()) for i in followed):
                    raise
                spoilt.add(request_id)
                self.num_spoilt_rows += 1

        self._begin_parts(step, tables, sources)
        for stage, stage_tables in zip(step.stages, tables, strict=True):
            start = max(when, self.worker_free_at[stage.worker_id])
            when = start + self.delay(1, 2) + num_tokens * MS // 20
            self.worker_free_at[stage.worker_id] = when

            def compute(stage=stage, stage_tables=stage_tables, life=self.workers[stage.worker_id].life) -> None:
                self.parts.pop((step.step_id, stage.worker_id), None)
                worker = self.workers[stage.worker_id]
                if worker.life != life:
                    lost.append(stage.worker_id)
                if lost or given_up or self._lacks_tokens(step) or (shed and stage is step.stages[0]):
                    return
                layers, is_first = stage.layers, stage is step.stages[0]
                kept = {r.state for r in step.rows[step.sheds_from :]} if step.resumes and is_first else set()
                if is_first and step.resumes is not None:
                    assert worker.kept == step.resumes[:2], f"{worker.kept} is kept, {step.resumes} was to go on"
                    layers = LayerRange(layers.lo + step.resumes.num_layers, layers.hi)
                stops = is_first and bool(step.safepoint_layers) and (
                    step.step_id in self.asked_to_abandon or (gives_up and self._may_shed(step))
                )
                if is_first and step.sheds_from is not None and (stop := self._stop(step, layers, stops)) is not None:
                    shed.append(stop - stage.layers.lo)
                    worker.kept = step.step_id, shed[0]
                    self.held_up[step.step_id] = {r.state.request_id for r in step.rows[step.sheds_from :]}
                    for index in range(step.sheds_from, len(step.rows)):
                        row, ids, far = step.rows[index], stage_tables[index], sources[index]
                        attend(worker, LayerRange(layers.lo, stop), ids, tokens[index], row, far, contents[index])
                    if not step.sheds_from and not shed[0]:
                        given_up.append(True)
                        return
                elif stops and step.sheds_from is None:
                    given_up.append(True)
                    self.held_up[step.step_id] = {r.state.request_id for r in step.rows}
                    self._write_in_part(worker, stage.layers, step.rows, stage_tables)
                    return
                rows = step.rows[: step.sheds_from if shed else None]
                if any(r.samples and self._kills(r.state.request_id, worker) for r in rows):
                    self.kill(stage.worker_id)
                    self.restart_at(stage.worker_id, self.now / MS + 100)
                    lost.append(stage.worker_id)
                    return
                asked = sorted({part.src for part in far_parts if part.dst == stage.worker_id})
                silent = [w for w in asked if self.workers[w].life != far_lives[w] or not self.workers[w].alive]
                if unanswered or step.group_id not in self.core.groups:
                    silent = silent or asked  # a group without a member has no steps, and what they ask for may be gone
                if silent:
                    lost.append(silent[0])
                    self.held_up[step.step_id] = {r.state.request_id for r in step.rows}
                    return
                assert self.shape.shards_for(stage.layers) <= worker.filled, "stage runs without its parameters"
                for row, ids, history, far, content in list(zip(
                    step.rows, stage_tables, tokens, sources, contents, strict=True
                ))[: step.sheds_from if shed else None]:
                    ran = layers if row.state in kept else stage.layers
                    attend(worker, ran, ids, history, row, far, content)

            self.at(when, compute)
        sampled = [(r.state.request_id, next_token(t)) for r, t in zip(step.rows, tokens, strict=True) if r.samples]
        self.sampled_in[step.step_id] = [token for _, token in sampled]
        self.num_ahead += step.follows is not None
        if unanswered:
            self.at(when, ports.StepFailed(step.step_id, "injected", recompute=True))
            return
        last = step.stages[-1].worker_id
        if fails:
            self.gave_none.add(step.step_id)
            self.at(when, self._while_alive(last, ports.StepFailed(step.step_id, "injected")))
            return
        prompt = {i: entries for i, r in enumerate(step.rows) if (entries := fake_prompt_logprobs(r))}

        def end() -> ports.Event:
            if lost or given_up or self._lacks_tokens(step):
                self.gave_none.add(step.step_id)
            if self._lacks_tokens(step):
                return ports.StepFailed(step.step_id, "the step before it sampled nothing", recompute=True)
            if lost:
                return ports.StepFailed(step.step_id, "the stage before is gone", lost[0])
            if given_up:
                return ports.StepAbandoned(step.step_id)
            drawn = [SampledToken(WRONG_TOKEN if request_id in spoilt else token) for request_id, token in sampled]
            if not shed:
                return ports.StepCompleted(step.step_id, drawn, prompt, 1)
            self.num_shed += 1
            drawn = drawn[: sum(r.samples for r in step.rows[: step.sheds_from])]
            told = {i: entries for i, entries in prompt.items() if i < (step.sheds_from or 0)}
            return ports.StepCompleted(step.step_id, drawn, told, 1, shed[0])

        if len(step.stages) > 1 or not step.safepoint_layers:  # a pipeline's later stages hear of it in their turn
            self.at(when, self._while_alive(last, end))
            return
        ended: list[bool] = []

        def end_once() -> ports.Event | None:
            return None if ended else (ended.append(True), end())[1]

        def give_up() -> object:
            if not ended and self.workers[last].alive:
                compute()
                self.worker_free_at[last] = self.now
            return self._while_alive(last, end_once)()

        self.give_ups[step.step_id] = give_up
        self.at(when, self._while_alive(last, end_once))

    def _contents_of(self, row: ports.StepRow, history: list[int]) -> list[dict[int, tuple[int, int]]]:
        """``block_contents``, of which a step asks anew only what the request's steps before it have not."""
        known, contents = self.histories.get(row.state.request_id, ([], []))
        num_known = len(known) if history[: len(known)] == known else 0
        contents = contents[: num_known // BLOCK_SIZE]
        contents += block_contents(history, len(contents) * BLOCK_SIZE)
        self.histories[row.state.request_id] = history, contents
        return contents

    def _may_shed(self, step: ports.RunStep) -> bool:
        """Whether a step that nobody has asked may act as if: the core then takes it for asked, as a stage has one
        place for rows."""
        group = self.core.groups.get(step.group_id)
        if step.sheds_from is None or group is None:
            return True
        may = has_place(group, step)
        if may:
            group.abandoning = step.step_id
        return may

    def _stop(self, step: ports.RunStep, layers: LayerRange, stops: bool) -> int | None:
        """The layer before which a first stage keeps the rows that it may shed; None: it computes them to their end."""
        if stops:
            return self.abandon_rng.randrange(layers.lo, layers.hi)
        most = None if step.resumes is None else step.resumes.most_layers
        return None if most is None or layers.lo + most >= layers.hi else layers.lo + most

    def _begin_parts(
        self, step: ports.RunStep, tables: list[list[list[int]]], sources: list[dict[int, tuple[int, int, list[int]]]]
    ) -> None:
        """Each stage's part of a step may be computed from now on."""
        for stage, stage_tables in zip(step.stages, tables, strict=True):
            part = _Part(stage.worker_id, self.workers[stage.worker_id].life, [])
            for row, ids, far in zip(step.rows, stage_tables, sources, strict=True):
                end, written_from = -(-(row.context_len + row.num_tokens) // BLOCK_SIZE), row.context_len // BLOCK_SIZE
                num_far = {layer: far[layer][1] // BLOCK_SIZE if layer in far else 0 for layer in stage.layers.layers()}
                part.rows.append((ids[:end], written_from, num_far))
            self.parts[step.step_id, stage.worker_id] = part
            for move in self.moves_under_way.values():
                self._check_apart(part, *move)

    def _check_apart(self, part: _Part, move: ports.SendKV, src_life: int, dst_life: int) -> None:
        """Pieces of a transfer may be written and read while a step is computed (rule 5 of the worker's loop): so what
        is written belongs to no step under way, and what is read is not written by one. Only a prefix that requests
        share, and whose first one has come already, may come again as it is there."""
        is_written = (part.worker_id, part.life) == (move.dst, dst_life) and not move.to_host
        is_read = (part.worker_id, part.life) == (move.src, src_life) and not move.from_host
        if is_written and self.workers[move.dst].fenced_lives.get(move.src, -1) >= src_life:
            return
        written = set(move.dst_blocks) if is_written else set()
        read = set(move.src_blocks) if is_read and move.transfer_id not in self.cancelled_transfers else set()
        for ids, written_from, num_far in part.rows if written or read else ():
            for layer in move.layers.layers():
                if layer not in num_far:
                    continue
                assert not read & set(ids[written_from:]), f"{move} reads what a step under way writes"
                for block in written & set(ids[num_far[layer] :]):
                    comes = self.workers[move.src].kv[layer].get(move.src_blocks[move.dst_blocks.index(block)])
                    is_there = self.workers[move.dst].kv[layer].get(block) == comes
                    assert block not in ids[written_from:] and is_there, f"{move} writes what a step under way reads"

    def _lacks_tokens(self, step: ports.RunStep) -> bool:
        """It was planned with tokens that the step before it has not sampled after all."""
        return step.follows is not None and step.follows.step_id in self.gave_none

    def _write_in_part(
        self, worker: FakeWorker, layers: LayerRange, rows: tuple[ports.StepRow, ...], tables: list[list[int]]
    ) -> None:
        """What a step leaves that was given up on its way: something in the places of its tokens, in some layers."""
        for layer in range(layers.lo, self.abandon_rng.randint(layers.lo, layers.hi)):
            for row, ids in zip(rows, tables, strict=True):
                for position in range(row.context_len, row.context_len + row.num_tokens):
                    blocks, block = worker.kv[layer], ids[position // BLOCK_SIZE]
                    blocks[block] = blocks.get(block, {}) | {position % BLOCK_SIZE: (WRONG_TOKEN, position)}

    def _followed(self, step: ports.RunStep) -> list[int]:
        """Steps of the same group that, for all the core knew, were under way when this one was planned."""
        group = self.core.groups.get(step.group_id)
        return [] if group is None else [i for i in group.in_flight if i < step.step_id]

    def _kills(self, request_id: str, worker: FakeWorker) -> bool:
        """Count a sampling step of a poisonous request."""
        key = (request_id, worker.worker_id, worker.life)
        self.poison_steps[key] = self.poison_steps.get(key, 0) + 1
        return self.poison_steps[key] == self.poison.get(request_id)

    def _remote_tables(self, row: ports.StepRow) -> dict[int, tuple[int, int, list[int]]]:
        """Layer -> (who attends to it instead, leading positions that are meant, their blocks there)."""
        tables: dict[int, tuple[int, int, list[int]]] = {}
        for part in row.remote:
            ids = self.core.state.workers[part.src].ledger.table(row.state.request_id).ids[: part.num_blocks]
            for layer in part.layers.layers():
                assert layer not in tables, "a layer of a row lies at two places"
                tables[layer] = (part.src, part.num_blocks * BLOCK_SIZE, list(ids))
        return tables

    def _attend(
        self, worker: FakeWorker, layers: object, ids: list[int], history: list[int], context: int,
        far: dict[int, tuple[int, int, list[int]]], contents: list[dict[int, tuple[int, int]]],
    ) -> None:
        first_written = context // BLOCK_SIZE
        written = [
            (ids[i], contents[i], max(0, context - i * BLOCK_SIZE)) for i in range(first_written, len(contents))
        ]
        assert all(block < worker.capacity for block, _, _ in written)
        for layer in layers.layers():  # type: ignore[attr-defined]
            src, num_far, far_ids = far.get(layer, (worker.worker_id, 0, ids))
            assert num_far <= context
            kv = worker.kv[layer]
            for block, wanted, first_slot in written:
                kv[block] = _written(kv.get(block), wanted, first_slot)
            num_there = num_far // BLOCK_SIZE  # both parts begin at a block's start: what is far is whole blocks
            have = [
                *map(self.workers[src].kv[layer].get, far_ids[:num_there]), *map(kv.get, ids[num_there : len(contents)])
            ]
            if have == contents:
                continue
            first = len(contents) - 1 if have[:-1] == contents[:-1] else 0
            for found, wanted in zip(have[first:], contents[first:], strict=True):
                if not wanted.items() <= (found or {}).items():  # what is behind the last token does not count
                    raise MissingKV(f"layer {layer}: {found}, not {wanted}")

    # --- moves

    def _begin_kv(self, move: ports.SendKV) -> None:
        src = self.workers[move.src]
        content: dict[tuple[int, int], dict[int, object]] = {}
        if move.transfer_id in self.cancelled_transfers:  # nothing of it is read; something else may be there by now
            move = move._replace(layers=LayerRange(0, 0))
        for layer in move.layers.layers():
            for there, here in zip(move.src_blocks, move.dst_blocks, strict=True):
                kept = src.host.get((layer, there)) if move.from_host else src.kv[layer].get(there)
                assert kept is not None, f"{move.transfer_id}: layer {layer} block {there} is not at {move.src}"
                content[layer, here] = kept

        fails = self._strikes(self.faults.move) or self.fails_move(move)
        lives = src.life, self.workers[move.dst].life
        self.moves_under_way[move.transfer_id] = move, *lives
        for part in self.parts.values():
            self._check_apart(part, move, *lives)

        def arrive() -> ports.Event:
            complete = move.transfer_id not in self.cancelled_transfers and not fails
            if complete:
                worker = self.workers[move.dst]
                for (layer, block), value in content.items():
                    if move.to_host:
                        worker.host[layer, block] = value
                        continue
                    if not (worker.spec.kv_layers.lo <= layer < worker.spec.kv_layers.hi and block < worker.capacity):
                        # As a worker refuses it; only what gave way to a change of layouts may come so late.
                        purpose = self.core.state.book.transfers[move.transfer_id].purpose
                        assert purpose in (TransferPurpose.HOST, TransferPurpose.MIGRATION), purpose
                        complete = False
                        continue
                    worker.kv[layer][block] = value
            num_bytes = len(content) * self.shape.block_bytes_per_layer(BLOCK_SIZE)
            return ports.TransferEnded(move.transfer_id, complete, num_bytes, took_ns)

        def arrive_in_part() -> None:
            worker = self.workers[move.dst]
            for (layer, block), value in content.items():
                inside = worker.spec.kv_layers.lo <= layer < worker.spec.kv_layers.hi and block < worker.capacity
                if inside and self.fault_rng.random() < 0.5:
                    worker.kv[layer][block] = value

        arrives = self._transfer(move.src, move.dst, move.transfer_id, arrive, arrive_in_part)
        took_ns = self.delay(0.5, 15)

        def end() -> object:
            del self.moves_under_way[move.transfer_id]
            return arrives()

        self.at(self.now + took_ns, end)

    def _transfer(
        self, src: int, dst: int, transfer_id: int, arrive: Callable[[], ports.Event],
        arrive_in_part: Callable[[], None] = lambda: None,
    ) -> Callable[[], object]:
        """What comes of a transfer if one of its ends dies on the way."""
        lives = self.workers[src].life, self.workers[dst].life
        both_alive = self.workers[src].alive and self.workers[dst].alive

        def maybe() -> object:
            from_life, to_life = self.workers[src].life, self.workers[dst].life
            lost = ports.TransferEnded(transfer_id, False, 0, 1)
            if to_life != lives[1]:
                # Only a source that had not begun speaks for it.
                return lost if from_life == lives[0] and self.fault_rng.random() < 0.5 else None
            if both_alive and from_life == lives[0]:
                return arrive()
            if self.workers[dst].fenced_lives.get(src, -1) >= lives[0] or not both_alive:
                return None
            # What had left the source before its death: all of it, a part, or not even the beginning.
            fate = self.fault_rng.randrange(3)
            if fate == 0:
                return arrive()
            arrive_in_part()
            return lost if fate == 1 else None

        return maybe

    def _copy_here(self, piece: ports.SendKV) -> ports.Event:
        worker = self.workers[piece.src]
        if self._strikes(self.faults.swap):
            return ports.TransferEnded(piece.transfer_id, False, 0, 1)
        for layer in piece.layers.layers():
            for source, target in zip(piece.src_blocks, piece.dst_blocks, strict=True):
                block, slot = (source, target) if piece.to_host else (target, source)
                assert 0 <= slot < self.host_slots and block < worker.capacity
                if piece.to_host:
                    worker.host[layer, slot] = worker.kv[layer][block]
                else:
                    worker.kv[layer][block] = worker.host[layer, slot]
        return ports.TransferEnded(piece.transfer_id, True, 100, 1)

    def _shard_arrives(self, move: ports.SendShard, num_drops: int) -> ports.Event:
        was_dropped = self.workers[move.src].num_drops[move.shard] != num_drops
        complete = move.transfer_id not in self.cancelled_transfers and not self._strikes(self.faults.move)
        complete = complete and not was_dropped and not self.fails_shard(move)
        if complete:
            assert move.shard in self.workers[move.src].filled
            assert move.shard in self.workers[move.dst].spec.shards
            self.workers[move.dst].filled.add(move.shard)
        return ports.TransferEnded(move.transfer_id, complete, self.shard_bytes, 1)

    # --- verdicts

    def expect_outputs(self) -> None:
        """Every request has one end, and its tokens are those of an undisturbed run (a prefix, if it ended early)."""
        # An injected failure of a step ends its requests, and so do three deaths; nothing else does.
        may_fail = self.num_faults or self.num_deaths >= self.core.params.faults.max_deaths_per_request
        early = {FinishReason.CANCELLED, FinishReason.ERROR} if may_fail else {FinishReason.CANCELLED}
        for request_id, request in self.requests.items():
            ends = self.ends.get(request_id, [])
            assert len(ends) == 1, f"{request_id}: ends {ends}"
            expected, reason = expected_run(request, self.core.state.limits.max_model_len)
            got = self.outputs.get(request_id, [])
            if ends[0] in early:
                assert got == expected[: len(got)], request_id
                continue
            assert (got, ends[0]) == (expected, reason), request_id
            if request.params.prompt_logprobs is not None:
                have = self.prompt_logprobs[request_id]
                assert have is not None and have[0] is None
                assert [e.token_id for e in have[1:] if e] == list(request.prompt_token_ids[1:]), request_id

    def expect_nothing_left(self) -> None:
        """All blocks free or cached, no request, no move, everybody alone again (with auto restore)."""
        self.core.check()
        assert self.core.state.is_idle() and not self.core.in_transition
        assert not self.core.state.book._link_bytes
        for worker in self.core.state.workers.values():
            assert worker.ledger.num_held == 0
            assert worker.num_relayouts_open == 0 and not worker.ledger_locked and not worker.ghosts
            if not worker.alive:
                assert worker.ledger.capacity == 0
                continue
            assert worker.ledger.capacity == self.workers[worker.worker_id].capacity
            assert not worker.copying and worker.pool.num_free == worker.pool.num_slots
        assert self.core.hosted.is_idle
        for group in self.core.groups.values():
            assert group.queues.queued_blocks() == 0 and not group.blocks.landing and not group.paused


def expect_all_well(cluster: FakeCluster) -> None:
    """Every request has its output, and nothing of it is left."""
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def fake_prompt_logprobs(row: ports.StepRow) -> list[TokenLogprobs]:
    """What the sampler reports: entry i belongs to prompt position context_len + 1 + i."""
    state = row.state
    if state.request.params.prompt_logprobs is None:
        return []
    end = min(row.context_len + row.num_tokens + 1, state.num_prompt)
    return [TokenLogprobs(state.tokens[p], -1.0, 1, ()) for p in range(row.context_len + 1, end)]


def describe(action: ports.Action) -> object:
    """An action as a value that can be compared across cores: request states by what a worker would be told."""
    match action:
        case ports.RunStep():
            rows = [
                (r.state.request_id, r.context_len, r.num_tokens, r.samples, tuple(r.state.tokens[r.context_len :]))
                for r in action.rows
            ]
            step = (
                action.step_id, action.group_id, action.epoch, action.stages, action.safepoint_layers, action.follows
            )
            return ("step", *step, rows)
        case ports.Record():
            return ("record", action.kind, action.time_ns, repr(sorted(action.fields.items())))
        case ports.EmitTokens():
            return ("emit tokens", *((s.request_id, token) for s, token in zip(*action, strict=True)))
        case ports.Emit():
            return ("emit", action.request_id, action.tokens, action.finish_reason, action.stop_token_id, action.error)
    return action

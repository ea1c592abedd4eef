"""A device made of numpy, small enough to reason about, that checks what it is told."""

from __future__ import annotations

import hashlib
import threading
from types import SimpleNamespace

import numpy as np

from jettison.core import ports
from jettison.device.model.identity import digest_of
from jettison.device.step import Ended, StepInput, StepOutput
from jettison.errors import StalePlanError, TokensLostError
from jettison.live.wire import messages as m
from jettison.memory.layout import LayoutOffer, LayoutResult, LayoutSpec
from jettison.types import LayerRange, SampledToken

HIDDEN = 24


def fresh_bytes(seed: object, num_bytes: int) -> np.ndarray:
    digest = int.from_bytes(hashlib.sha256(repr(seed).encode()).digest()[:8], "little")
    return np.random.default_rng(digest).integers(0, 256, num_bytes, dtype=np.uint8)


class FakeCopy:
    """A block of a layer is a piece. ``device.copy_gate`` is called in each, and may wait or raise."""

    def __init__(self, device, layers, blocks, slots, to_host, skip_bytes):
        self._device, self._to_host = device, to_host
        self._units = [(layer, b, s) for layer in layers.layers() for b, s in zip(blocks, slots, strict=True)]
        self.copied_bytes = skip_bytes
        self.stopped = threading.Event()

    @property
    def is_complete(self):
        return self.copied_bytes == len(self._units) * self._device.kv_block_bytes

    def stop(self):
        self.stopped.set()

    def run(self, most_bytes=None):
        device, unit = self._device, self._device.kv_block_bytes
        until = len(self._units) * unit if most_bytes is None else self.copied_bytes + most_bytes
        while not self.is_complete and self.copied_bytes < until and not self.stopped.is_set():
            device.copying = True
            device.copy_gate(self)
            layer, block, slot = self._units[self.copied_bytes // unit]
            assert device.kv_layers.lo <= layer < device.kv_layers.hi and block < device.capacity_blocks, "unmapped"
            if self._to_host:
                device.host[layer, slot] = device.kv[layer, block]
            else:
                device.kv[layer, block] = device.host[layer, slot]
            self.copied_bytes += unit
            device.copying = False


class FakeRunning:
    """A step of a device that computes by itself: under way for some polls, of which the first launches it, and as long
    as one before it is."""

    has_prepared = False

    def __init__(self, device, step, *more):
        self._device, self._step, self._more = device, step, more
        self._polls_left = 2 + step.step_id % 5
        self.is_launched = False
        device.under_way.append(self)
        assert len(device.under_way) <= 2
        self._before = self._blocks()

    def _blocks(self):
        return self._device.kv[self._step.layer_lo : self._step.layer_hi, np.unique(self._step.block_tables)].copy()

    def poll(self):
        self._polls_left -= 1
        self.is_launched, under_way = True, self._device.under_way
        if self._polls_left <= 0 and under_way and under_way[0] is self:
            assert (self._blocks() == self._before).all(), "what a step reads was written"
            del under_way[0]
        return self not in under_way

    @property
    def may_be_followed(self):
        return self.is_launched and self in self._device.under_way

    def wait(self, most_s):
        pass

    def result(self):
        while not self.poll():
            pass
        return self._device.run_step(self._step, *self._more)


class FakeDevice:
    """``num_layers`` arenas of ``capacity_blocks`` blocks of ``kv_block_bytes``; shards of ``shard_num_bytes``."""

    pin = None
    computes_by_itself = False

    def __init__(self, worker_id=0, num_layers=4, capacity_blocks=16, kv_block_bytes=40, shard_num_bytes=1000):
        self.worker_id = worker_id
        self.under_way: list[FakeRunning] = []
        """Steps, where it computes by itself."""
        self.ahead = SimpleNamespace(turn=lambda: False)
        self.num_layers = num_layers
        self.capacity_blocks = capacity_blocks
        self.layout_version = 0
        self.kernels_name = "fake"
        self.own_products = ()
        self.kv_block_bytes = kv_block_bytes
        self.kv = fresh_bytes(("kv", worker_id), num_layers * capacity_blocks * kv_block_bytes).reshape(
            num_layers, capacity_blocks, kv_block_bytes
        )
        self.shards = {
            f"layer:{i}": fresh_bytes(("shard", worker_id, i), shard_num_bytes) for i in range(num_layers)
        }
        self.host = np.zeros((num_layers, 8, kv_block_bytes), dtype=np.uint8)
        """The host pool: 8 slots."""
        self.filled: list[str] = []
        self.log: list[tuple] = []
        self.poisoned: set[int] = set()
        """Step ids that raise."""
        self.sampled: dict[int, list[int]] = {}
        """What the last step has sampled, by its id."""
        self.running = False
        self.kv_layers = LayerRange(0, num_layers)
        self.copying = False
        """A piece of a copy beside steps is being copied."""
        self.copy_gate = lambda copy: None

    def start(self):
        self.running = True

    def close(self):
        self.running = False

    def start_step(self, *arguments):
        return FakeRunning(self, *arguments) if self.computes_by_itself else Ended(self.run_step(*arguments))

    def run_step(self, step: StepInput, hidden, port=None, gives_up=None):
        self.log.append(("step", step.step_id))
        sampled, self.sampled = self.sampled, {}
        if step.step_id in self.poisoned:
            raise RuntimeError(f"poisoned step {step.step_id}")
        if step.follows_step is not None:
            if step.follows_step not in sampled:
                raise TokensLostError(f"step {step.step_id} has lost its tokens")
            known = sampled[step.follows_step]
            step.token_ids[:] = [known[-1 - token] if token < 0 else token for token in step.token_ids]
        if step.prev_worker is None:
            if gives_up is not None and any(gives_up() for _ in range(0, step.layer_hi, step.safepoint_layers)):
                self.log.append(("abandoned", step.step_id))
                return None
            hidden = np.repeat(step.token_ids.astype(np.int64)[:, None], HIDDEN, axis=1)
        assert hidden.shape == (step.num_tokens, HIDDEN)
        hidden = hidden * 3 + (step.layer_hi - step.layer_lo)
        if step.next_worker is not None:
            return hidden
        assert (hidden == hidden[:, :1]).all(), "hidden bytes were mixed up"
        last = np.cumsum(step.query_lens) - 1
        tokens = [SampledToken(int(hidden[last[row], 0])) for row in step.sample_rows]
        self.sampled[step.step_id] = [token.token_id for token in tokens]
        return StepOutput(step.step_id, tokens)

    def hidden_from_bytes(self, data, num_tokens):
        return data.view(np.int64).reshape(num_tokens, HIDDEN)

    def hidden_to_bytes(self, hidden):
        return hidden.reshape(-1).view(np.uint8)

    def offer_layout(self, spec: LayoutSpec, live_blocks):
        self.log.append(("offer", live_blocks))
        return LayoutOffer(self.layout_version, live_blocks, self.capacity_blocks)

    def apply_layout(self, spec: LayoutSpec, live_blocks, version, copies):
        self.log.append(("apply", live_blocks))
        if version != self.layout_version:
            raise StalePlanError(f"layout {version} asked, {self.layout_version} in force")
        assert not self.copying and not self.under_way, "pages change under a copy, or a step"
        self.layout_version += 1
        self.kv_layers = spec.kv_layers
        for source, target in copies:
            self.kv[:, target] = self.kv[:, source]
        return LayoutResult(self.layout_version, self.capacity_blocks, 0, 0, 0, frozenset(), frozenset())

    @property
    def num_host_slots(self):
        return self.host.shape[1]

    def kv_gather(self, layers: LayerRange, block_ids, out, *, from_host=False):
        rows = (self.host if from_host else self.kv)[layers.lo : layers.hi][:, np.asarray(block_ids)]
        out[:] = rows.reshape(-1)
        return rows.size

    def kv_scatter(self, layers: LayerRange, block_ids, data, *, to_host=False):
        assert layers.hi <= self.num_layers
        (self.host if to_host else self.kv)[layers.lo : layers.hi, np.asarray(block_ids)] = data.reshape(
            len(layers), len(block_ids), self.kv_block_bytes
        )

    def copy_to_host(self, layers: LayerRange, block_ids, slots):
        self.log.append(("copy_to_host", list(block_ids)))
        self.host[layers.lo : layers.hi, slots] = self.kv[layers.lo : layers.hi, block_ids]
        return len(layers) * len(block_ids) * self.kv_block_bytes

    def copy_from_host(self, layers: LayerRange, block_ids, slots):
        self.log.append(("copy_from_host", list(block_ids)))
        self.kv[layers.lo : layers.hi, block_ids] = self.host[layers.lo : layers.hi, slots]
        return len(layers) * len(block_ids) * self.kv_block_bytes

    def copy_beside(self, layers: LayerRange, block_ids, slots, *, to_host, skip_bytes=0):
        if max(slots, default=0) >= self.num_host_slots:
            raise IndexError(f"slots {slots}")
        return FakeCopy(self, layers, list(block_ids), list(slots), to_host, skip_bytes)

    def shard_num_bytes(self, shard):
        return len(self.shards[shard])

    def read_shard(self, shard, offset, out):
        piece = self.shards[shard][offset : offset + len(out)]
        assert len(piece) == len(out)
        out[:] = piece

    def write_shard(self, shard, offset, data):
        if offset + len(data) > len(self.shards[shard]):
            raise ValueError(f"shard {shard} has {len(self.shards[shard])} bytes here, more came")
        self.shards[shard][offset : offset + len(data)] = data

    weights_identity = None
    reading_ns = (0, 0)

    def adopt_weights(self, identity):
        self.adopted = self.weights_identity = identity

    def start_over(self):
        self.layout_version += 1
        self.kv_layers = LayerRange(0, self.num_layers)
        return frozenset(self.shards)

    def mark_shard_filled(self, shard, digest=None):
        assert digest in (None, digest_of(self.shards[shard])), "the digest is of other bytes"
        self.filled.append(shard)

    def loading_shard_from_disk(self, shard):
        """In pieces of a quarter."""
        self.log.append(("load", shard))
        if shard not in self.shards:
            raise StalePlanError(f"shard {shard} is not mapped")
        data = fresh_bytes(("disk", shard), len(self.shards[shard]))
        for piece in np.array_split(np.arange(len(data)), 4):
            assert not self.under_way, "a load goes on between two entries"
            self.shards[shard][piece] = data[piece]
            self.log.append(("piece", shard))
            yield

    def keeping_shard(self, shard):
        """In pieces of a half."""
        self.log.append(("keep", shard))
        yield
        self.log.append(("piece", shard))
        yield

    def memory_report(self):
        return {"kv": self.kv.nbytes}


def make_step(
    step_id, tokens, layers=(0, 4), prev=None, next_=None, group_id=0, epoch=0, safepoint_layers=0, follows_step=None
):
    """A step of one row; later stages get no token ids."""
    token_ids = np.array(tokens if prev is None else [], dtype=np.int32)
    return StepInput(
        step_id=step_id, layer_lo=layers[0], layer_hi=layers[1], prev_worker=prev, next_worker=next_,
        token_ids=token_ids, query_lens=np.array([len(tokens)], dtype=np.int32),
        context_lens=np.zeros(1, dtype=np.int32), block_tables=np.zeros((1, 2), dtype=np.int32),
        sample_rows=np.zeros(1, dtype=np.int32), group_id=group_id, epoch=epoch,
        safepoint_layers=0 if prev is not None else safepoint_layers, follows_step=follows_step,
    )


def step_done(worker, step_id, token_id):
    """What the last stage tells of a step of one row, by a clock that stands still."""
    return m.StepDone(worker, ports.StepCompleted(step_id, [SampledToken(token_id)], {}, 0))


def tokens_of(done):
    """Ids of what a step sampled."""
    return [token.token_id for token in done.completed.tokens]


def expected_token(tokens, stages):
    """What ``FakeDevice`` samples for ``make_step`` through ``stages`` (layer ranges)."""
    value = tokens[-1]
    for lo, hi in stages:
        value = value * 3 + (hi - lo)
    return value

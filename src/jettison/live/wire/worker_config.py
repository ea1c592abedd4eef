"""What a worker process is told before anything else: its device, its sockets, the cluster's secret.

Travels once, as JSON on a socket of two ends: the command line is visible to every user of the machine, the socket to
no other process.
"""

from __future__ import annotations

import hashlib

import msgspec

from jettison.device.model.hf_config import DecoderConfig
from jettison.device.spec import FILES, HOST
from jettison.types import WorkerId


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker's device. Bytes and tokens as integers; ``dtype`` and ``kernels`` by name, as the controller has
    resolved them."""

    worker_id: WorkerId
    model_dir: str
    model: DecoderConfig
    """What the controller has read of ``config.json``: every life of every worker has the same."""
    dtype: str
    memory_bytes: int
    block_size: int
    page_bytes: int
    max_num_tokens: int
    max_num_seqs: int
    back_end: str = HOST
    """What the device is (``device.choice``)."""
    environment: dict[str, str] = {}
    """Variables that the process sets before it loads any library: the card that it may see."""
    kernels: str = "auto"
    load_format: str = FILES
    """Where every life's weights come from."""
    tokenizer_dir: str | None = None
    """Folder of the tokenizer; None = the model's."""
    num_threads: int = 1
    piece_bytes: int = 1 << 20
    """The most a bulk piece has (one block of one layer is always allowed)."""
    adapt_pieces: bool = False
    """Make pieces smaller where the link would take longer for one than a stage takes."""
    coordinate: bool = True
    """False for comparison only: bulk is neither cut to size nor does it yield to activations."""
    host_bytes: int = 0
    """Host memory for copies of KV blocks, beside the budget."""
    shared_copy_fd: int | None = None
    """Inherited memory file: the machine's copy of the parameters, for workers that sleep."""
    layers: tuple[int, int] | None = None
    """Decoder layers (from, to) to map at the start, and to load; None = all."""
    drop_layers: list[tuple[int, int]] = []
    """Layers (from, to) that drops are likely to leave: their pages are mapped ahead where the device can."""
    starts_empty: bool = False
    """Load nothing: a later life's shards are fetched by its recovery, from peers first, and compared with what is
    being served. The folder may hold other weights by now. A first life does so where its host has no folder."""


def digest_of(spec: WorkerSpec) -> str:
    """Equal for lives of one device: whatever a life begins with, they have the same memory and model."""
    same = msgspec.structs.replace(spec, starts_empty=False, shared_copy_fd=None)
    read = msgspec.json.decode(msgspec.json.encode(same), type=WorkerSpec)  # a whole number may be a float by then
    return hashlib.sha256(msgspec.json.encode(read, order="deterministic")).hexdigest()


class WorkerStart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One life of a worker, as the controller wants it."""

    spec: WorkerSpec
    secret_hex: str
    epoch: int
    """Which life of this worker id it is."""
    control_address: str
    beat_interval_s: float
    log_level: str = "WARNING"
    token_hex: str | None = None
    """What the controller signs one certificate for; None: no peer is on another host."""
    authority_pem: str | None = None
    """Whose certificate the controller shows where its address is on a network; no secret."""
    shares_clock: bool = True
    """All workers run on one machine: times of one may be compared with another's."""
    orphan_timeout_s: float = 0.0
    """How long it lives without a controller; 0: it ends with its own."""
    controller_epoch: int = 0
    """Of the controller that starts it: another one must have a higher epoch (``worker.orphan``)."""
    parent_key_hex: str = ""
    """Whose signature that one must have."""

    @property
    def secret(self) -> bytes:
        """The cluster's shared secret."""
        return bytes.fromhex(self.secret_hex)


class WorkerConfig(WorkerStart, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker process: its life, and what it has from its keeper."""

    listen_fds: list[int]
    """Inherited sockets, bound and listening: peers may connect before this worker has loaded its model. A Unix socket
    is for links through shared memory, a TCP one for links over a network."""
    beat_fd: int
    """An inherited pipe for heartbeats (``live.wire.heartbeat``)."""
    flag_fd: int
    """Inherited shared memory: the step that is to be given up (``live.wire.stepflag``)."""
    link_bytes_per_s: float | None = None
    """What is sent over each link to another host at most (``transport.pacing``); None: no limit."""

"""What the controller and a keeper on another host tell each other: one JSON message behind its length, over TLS.

What starts a keeper (``engine.spawn_far.Placer``) brings it a ``KeeperPost`` and its certificate, and brings its
signing request back; nothing of that is a secret that opens a connection: the certificate is nothing without its key,
which stays in the keeper's process, and the token nothing without the certificate. The cluster's secret comes in the
orders themselves.
"""

from __future__ import annotations

import msgspec

from jettison.live.wire.worker_config import WorkerStart
from jettison.transport.handshake import Identity
from jettison.transport.tls import keeper_identity

MAX_MESSAGE_BYTES = 1 << 20
MAX_WORD_BYTES = 1 << 16
"""Of what a keeper says: names and numbers of one worker. Far less than a line to the controller may hold."""


class KeeperPost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One life of a keeper, as what places it is told."""

    number: int
    life: int
    address: str
    """Where the controller takes keepers, ``tcp:<host>:<port>``."""
    token_hex: str
    """Of this life."""
    authority_pem: str
    """Whose certificate the controller shows."""
    lease_s: float
    log_level: str = "WARNING"
    worker_command: tuple[str, ...] | None = None
    """The program that forks workers; None: the product's (tests have another)."""

    @property
    def identity(self) -> Identity:
        """The keeper's."""
        return keeper_identity(self.number, self.life)


class Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The second word to a keeper: where it is, and its certificate."""

    host: str
    """The host's name: keepers of one name share a machine."""
    ip: str
    """The address at which its workers take links."""
    certificate_pem: str


# --- controller to keeper


class Spawn(msgspec.Struct, frozen=True, tag="spawn", forbid_unknown_fields=True):
    """Start one life of a worker. Answered by Spawned and Forked, or by Ended; and by Ended at its end."""

    order: int
    start: WorkerStart


class Kill(msgspec.Struct, frozen=True, tag="kill", forbid_unknown_fields=True):
    """End it at once."""

    order: int


class Abandon(msgspec.Struct, frozen=True, tag="abandon", forbid_unknown_fields=True):
    """Have it give a step up (``wire.stepflag``)."""

    order: int
    step_id: int


class BeginBeats(msgspec.Struct, frozen=True, tag="begin", forbid_unknown_fields=True):
    """Its silence counts from now on."""

    order: int


class EmptyCopy(msgspec.Struct, frozen=True, tag="empty", forbid_unknown_fields=True):
    """Nothing is left in the host's copy of the parameters (tests)."""


class Granted(msgspec.Struct, frozen=True, tag="granted", forbid_unknown_fields=True):
    """This beat has been received."""

    number: int


HostCommand = Spawn | Kill | Abandon | BeginBeats | EmptyCopy | Granted


# --- keeper to controller


class Joined(msgspec.Struct, frozen=True, tag="joined", forbid_unknown_fields=True):
    """The first word."""

    host: str
    processes: str
    """Names the table of process ids: a controller with the same one can see the keeper's processes."""
    ip: str
    """As ``Place`` has it."""


class Spawned(msgspec.Struct, frozen=True, tag="spawned", forbid_unknown_fields=True):
    """Where peers will reach it. Its process is being forked."""

    order: int
    near: str
    far: str | None


class Forked(msgspec.Struct, frozen=True, tag="forked", forbid_unknown_fields=True):
    """The process is there."""

    order: int
    pid: int


class Ended(msgspec.Struct, frozen=True, tag="ended", forbid_unknown_fields=True):
    """The process has ended, or there was none."""

    order: int
    returncode: int


class HeartAges(msgspec.Struct, frozen=True, array_like=True):
    """Of one worker, as of the beat: seconds since it has been heard, and since its unit of work began."""

    order: int
    silent_s: float
    unit_s: float


class Beat(msgspec.Struct, frozen=True, tag="beat", forbid_unknown_fields=True):
    """The keeper lives. ``hearts``: of the workers for which it has carried out ``BeginBeats``."""

    number: int
    hearts: list[HeartAges]


HostEvent = Joined | Spawned | Forked | Ended | Beat


class Lost(msgspec.Struct, frozen=True, tag="lost", forbid_unknown_fields=True):
    """The last that is told of one life of a keeper."""

    why: str


# --- between the controller and the process that takes keepers (``engine.host_server``)


class Succession(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a later controller finds the process that takes keepers, and what it proves itself with
    (``transport.succession``)."""

    path: str
    """Of a Unix socket in the parent's folder."""
    epoch: int
    """Of the present controller."""
    secret_hex: str
    public_key_hex: str
    parent_pid: int
    timeout_s: float
    """How long keepers live without a controller."""


class OpenDoor(msgspec.Struct, frozen=True, kw_only=True, tag="open", forbid_unknown_fields=True):
    """The first word."""

    address: str
    lease_s: float
    key_pem: str
    """The controller's own, with its certificate."""
    certificate_pem: str
    authority_pem: str
    succession: Succession | None = None
    """None: the process ends with its controller."""


class TakeDoor(msgspec.Struct, frozen=True, tag="take", forbid_unknown_fields=True):
    """A later controller's first word."""

    epoch: int
    signature: bytes
    """Of the parent."""


class CloseDoor(msgspec.Struct, frozen=True, tag="close", forbid_unknown_fields=True):
    """The controller ends in order: every keeper ends, and the process."""


class Expect(msgspec.Struct, frozen=True, tag="expect", forbid_unknown_fields=True):
    """Let this life of a keeper in, once."""

    post: KeeperPost


class Order(msgspec.Struct, frozen=True, tag="order", forbid_unknown_fields=True):
    """To a keeper."""

    keeper: Identity
    command: HostCommand


class Dismiss(msgspec.Struct, frozen=True, tag="dismiss", forbid_unknown_fields=True):
    """Hang up on a keeper, and let it in no more."""

    keeper: Identity


DoorCommand = Expect | Order | Dismiss | CloseDoor


class KeptWorker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One life of a worker that has outlived its controller, or whose start was ordered."""

    order: int
    life: int
    spec_digest: str
    """``worker_config.digest_of`` its device."""
    near: str = ""
    far: str | None = None
    """As ``Spawned`` has said."""
    pid: int = 0
    """As ``Forked`` has said; 0: it has not."""


class KeptKeeper(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A keeper that has outlived its controller."""

    number: int
    life: int
    joined: Joined
    workers: list[KeptWorker]


class DoorTaken(msgspec.Struct, frozen=True, tag="taken", forbid_unknown_fields=True):
    """The answer to TakeDoor."""

    address: str
    """At which keepers are taken."""
    keepers: list[KeptKeeper]
    lives: dict[int, int]
    """The last life of each keeper, by number."""


class DoorOpened(msgspec.Struct, frozen=True, tag="opened", forbid_unknown_fields=True):
    """The answer to OpenDoor."""

    address: str
    why_not: str | None = None


class Said(msgspec.Struct, frozen=True, tag="said", forbid_unknown_fields=True):
    """A keeper has said this, or is lost."""

    keeper: Identity
    word: HostEvent | Lost


DoorWord = DoorOpened | DoorTaken | Said

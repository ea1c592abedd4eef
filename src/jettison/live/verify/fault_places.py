"""Phases of moves at which a worker may die, as the controller sees them: no worker knows that what it sends is a
request's last blocks.

After each event a ``Watch`` looks at which of these phases a worker has entered, and kills it when it has entered the
one that it waits for. What a worker itself can tell (a piece, a layout, a shard) is a failpoint of
``live.worker.failpoints``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from enum import StrEnum

from jettison.core.cluster import ClusterCore
from jettison.core.moving.passage import Passage, RelocationPhase
from jettison.core.moving.recovery import RecoveryPhase
from jettison.core.moving.relocate import Relocation
from jettison.core.moving.sleeping import SleepState
from jettison.memory.kvtransfers import MigrationKind
from jettison.types import WorkerId


class Role(StrEnum):
    """What the worker that dies is in the move."""

    SOURCE = "source"
    DESTINATION = "destination"
    SLEEPER = "sleeper"
    """On its way to sleep, or asleep."""
    WAKER = "waker"
    """On its way back."""
    SENDER = "sender"
    """It has the parameters of one that is woken."""


MOVE_PHASES = (
    "kv_cached",  # it begins: blocks that the destination has in its prefix cache are taken from there
    "kv_begin", "kv_round",  # a first round travels; a later one
    "kv_stop", "kv_last",  # the request stands still for its step in flight; its last blocks travel
    "kv_back",  # it is called off with blocks under way
    "kv_arrived",  # the destination has just become its owner
    "tokens_cached", "tokens_begin", "tokens_round", "tokens_stop", "tokens_arrived",
)  # fmt: skip
SLEEP_PHASES = ("leaving", "emptying", "asleep")
WAKE_PHASES = ("mapping", "filling", "first_step")

PHASES = {
    Role.SOURCE: MOVE_PHASES, Role.DESTINATION: MOVE_PHASES, Role.SLEEPER: SLEEP_PHASES, Role.WAKER: WAKE_PHASES,
    Role.SENDER: (),
}  # fmt: skip


class Watch:
    """Calls ``on_entered`` once: when a worker in this role has entered the phase for the ``count``-th time."""

    def __init__(
        self, core: ClusterCore, worker_id: WorkerId, role: Role, phase: str, count: int, on_entered: Callable[[], None]
    ) -> None:
        """Raises ValueError for a phase that the role does not have."""
        if phase not in PHASES[role]:
            raise ValueError(f"{phase} is no phase of a {role}")
        self._core = core
        self._worker_id = worker_id
        self._role = role
        self._phase = phase
        self._left = count
        self._on_entered = on_entered
        self._passages: list[Passage] = []
        """Under way when this looked last."""
        self._was_woken = False
        self._inside: set[Hashable] = set()
        """Visits of the phase that last."""

    def look(self) -> None:
        """An event is over."""
        inside = set(self._visits())
        new, self._inside = inside - self._inside, inside
        for _ in new:
            self._left -= 1
            if self._left == 0:
                self._on_entered()

    def _visits(self) -> Iterator[Hashable]:
        """One for each of what is in the phase now."""
        if self._role in (Role.SOURCE, Role.DESTINATION):
            before, self._passages = self._passages, list(self._core.migrations.under_way)
            for passage in {*before, *self._passages}:
                end = passage.source if self._role is Role.SOURCE else passage.destination
                if self._worker_id in end.worker_ids and self._phase in _phases(passage):
                    yield passage
        elif self._phase == self._phase_of_layout():
            yield self._worker_id

    def _phase_of_layout(self) -> str:
        """Between serving and sleep, and back."""
        core, worker_id = self._core, self._worker_id
        state, was_woken = core.sleepers.state_of(worker_id), self._was_woken
        steps = any(group.in_flight for group in core.state.groups_of[worker_id])
        self._was_woken = state is SleepState.WAKING or (was_woken and not steps)
        if state is SleepState.WAKING:
            is_mapping = core.recoveries.by_worker[worker_id].phase is RecoveryPhase.MAP
            return "mapping" if is_mapping else "filling"
        return "first_step" if state is SleepState.AWAKE and was_woken and steps else str(state)


def _phases(passage: Passage) -> Iterator[str]:
    """Where a request on its way is, by the names of ``MOVE_PHASES``."""
    kind = "tokens" if passage.kind is MigrationKind.TOKENS else "kv"
    match passage.phase:
        case RelocationPhase.COPY:
            if passage.num_cached_blocks:
                yield f"{kind}_cached"
            # Rounds are counted when they begin where blocks are sent, and when they end where tokens are computed.
            yield f"{kind}_round" if passage.num_rounds > (kind == "kv") else f"{kind}_begin"
        case RelocationPhase.FINAL:
            is_last = isinstance(passage, Relocation) and passage.is_landing
            yield "kv_last" if is_last else f"{kind}_stop"
        case RelocationPhase.FALLING_BACK:
            yield f"{kind}_back"
        case RelocationPhase.DONE:
            yield f"{kind}_arrived"
        case RelocationPhase.FAILED:
            return

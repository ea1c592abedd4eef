"""What a running engine can be told to do, whatever the load: by an administrator, in experiments and in tests.

Each order is carried out between two events. Not here: what clients ask for (``live.engine.api``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from jettison.core import ports
from jettison.core.cluster import ClusterCore
from jettison.live.engine.crew import Crew
from jettison.live.engine.driver import CoreDriver
from jettison.memory.kvtransfers import MigrationKind
from jettison.memory.stages import Pull, StagePlan
from jettison.types import GroupId, RequestId


class Orders:
    """Given to one engine; see ``Engine.orders``."""

    def __init__(self, driver: CoreDriver, crew: Crew) -> None:
        self._driver = driver
        self._crew = crew

    def order(self, order: Callable[[ClusterCore, int], list[ports.Action]]) -> None:
        """Have the core do something, at this time. Raises what the order does."""
        now_ns = time.monotonic_ns()
        self._driver.carry_out(order(self._driver.core, now_ns), now_ns)

    def request_drop(self) -> None:
        """Merge groups now."""
        self.order(lambda core, now_ns: core.request_drop(now_ns))

    def request_restore(self) -> None:
        """Restore merged groups now."""
        self.order(lambda core, now_ns: core.request_restore(now_ns))

    def request_merge(self, sources: Sequence[GroupId], stages: tuple[StagePlan, ...], pulls: tuple[Pull, ...]) -> None:
        """Merge these groups in this way: idle ones, ``pulls`` all that the stages lack."""
        self.order(lambda core, now_ns: core.moves.merge([core.groups[g] for g in sources], stages, now_ns, pulls))

    def request_migration(
        self, request_id: RequestId, destination: GroupId, kind: MigrationKind, max_step_tokens: int | None = None
    ) -> None:
        """Have a request go to another group, if it can go there now."""
        self.order(lambda core, now_ns: core.request_migration(
            request_id, destination, now_ns, kind=kind, max_step_tokens=max_step_tokens
        ))

    def request_migrations(
        self, destinations: Mapping[RequestId, GroupId], kinds: Collection[MigrationKind] = tuple(MigrationKind)
    ) -> None:
        """Have requests go to other groups, each in the best of these ways; a request that has to wait must be asked
        for again."""
        self.order(lambda core, now_ns: core.request_migrations(destinations, now_ns, kinds))

    def watch(self, look: Callable[[], None] | None) -> None:
        """Have this called after each event and order (faults that meet phases of moves); None: nothing any more."""
        self._driver.after_event = look

    def lose_host_copies(self) -> None:
        """Empty the hosts' copies of the parameters, which workers that sleep may count on."""
        self._crew.empty_shared_copies()
        for kept in self._driver.core.sleepers.host_copies.values():
            kept.clear()

    def keep_hung_workers(self, keep: bool) -> None:
        """Whether processes of workers that are given up live on (tests wake them up); else they are killed."""
        self._crew.kill_hung = not keep

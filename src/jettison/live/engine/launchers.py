"""The spawner that a configuration names."""

from __future__ import annotations

from collections.abc import Sequence

from jettison.config import HostsConfig
from jettison.live.engine.spawn_local import LocalSpawner
from jettison.live.engine.spawner import Spawner
from jettison.live.host.heritage import Heritage
from jettison.live.wire.worker_config import WorkerSpec


def spawner_of(
    hosts: HostsConfig, specs: Sequence[WorkerSpec], num_at_start: int, num_kept: int | None,
    heritage: Heritage | None = None,
) -> Spawner:
    """For these workers, of which the first ``num_at_start`` begin at once, and at least ``num_kept`` (None: those)
    keep a process. ``heritage``: what outlives this process on its host. Raises UserError where what it needs is not
    installed."""
    if hosts.launcher == "local":
        return LocalSpawner(heritage=heritage)
    from jettison.live.engine.spawn_ray import ray_spawner  # brings cryptography and asks for Ray

    return ray_spawner(
        specs, address=hosts.ray_address, strategy=hosts.ray_placement, lease_s=hosts.lease_s,
        num_at_start=num_at_start, num_kept=num_kept, heritage=heritage,
    )

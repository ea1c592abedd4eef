"""What the core of a later controller is told of the workers that it has taken over.

The rule is the simplest that is exact: parameters count by their digests, no KV counts, every open request is computed
again. So a move that was half done at the death needs no thought. A worker without all shards of its home comes back as
one that was lost and has kept some: its recovery fetches the others, from peers first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jettison.core import ports
from jettison.device.model.identity import WeightsIdentity, agreed_identity
from jettison.errors import ModelError
from jettison.live.engine.driver import CoreDriver
from jettison.live.wire import messages as m
from jettison.live.wire.worker_config import WorkerSpec
from jettison.types import ShardId, WorkerId


def agree_on_weights(
    ready: Sequence[m.WorkerReady], model_dir: Path, must_serve: str | None,
    send: Callable[[WorkerId, m.Command], None],
) -> WeightsIdentity:
    """The weights that are served; each worker is told the whole of them. Raises ModelError where workers have read
    different ones, or others than ``must_serve`` (a digest), with which clients' streams have begun."""
    weights = agreed_identity(model_dir, [r.weights for r in ready if r.weights is not None])
    if must_serve not in (None, weights.summary):
        raise ModelError(f"{model_dir} has other weights than those that are being served")
    for event in ready:
        send(event.worker_id, m.AdoptWeights(weights))
    return weights


def missing_of(ready: Sequence[m.WorkerReady], specs: Sequence[WorkerSpec], num_at_start: int) -> list[WorkerId]:
    """Workers that should be there and have not outlived an earlier controller: the first ones that are not ready."""
    there = {event.worker_id for event in ready}
    others = [spec.worker_id for spec in specs if spec.worker_id not in there]
    return others[: max(0, num_at_start - len(there))]


def fill_kept(
    ready: Sequence[m.WorkerReady], missing: Sequence[WorkerId], driver: CoreDriver,
    life_of: Callable[[WorkerId], int], handle: Callable[[ports.Event], None], restart: Callable[[WorkerId, str], None],
) -> None:
    """Note each worker's life. Where some are taken over, tell the driver of them all, and have ``handle`` hear of
    those that lack shards, and of the ``missing``, which are dead to the core and brought back by ``restart``; where
    all have begun with this controller it knows (``CoreDriver.on_start``)."""
    core = driver.core
    for event in ready:
        core.state.workers[event.worker_id].life = life_of(event.worker_id)
    if all(event.kept is None for event in ready):
        return
    for event in ready:
        driver.on_worker_event(event, time.monotonic_ns())
    lacking: list[tuple[m.WorkerReady, frozenset[ShardId]]] = []
    for event in ready:
        kept = frozenset(event.kept or ())
        if not core.state.workers[event.worker_id].layout.shards <= kept:
            lacking.append((event, kept))
    for event, _ in lacking:  # its peers are to fence off lives before this one: this one fills itself from them
        core.state.workers[event.worker_id].life -= 1
    for worker in [*missing, *(event.worker_id for event, _ in lacking)]:  # first: none is asked for what it lacks
        handle(ports.WorkerLost(worker))
    for event, kept in lacking:
        handle(ports.WorkerJoined(event.worker_id, event.capacity_blocks, life_of(event.worker_id), kept))
    for worker in missing:
        restart(worker, "it has not outlived the controller before this one")

"""What each instance's memory is used for, and which rungs of the ladder are at work, from one snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jettison.live.engine.api import EngineSnapshot, GroupSnapshot, WorkerSnapshot
from jettison.server.console.words import Told, amount, counted, listed


def instances(snapshot: EngineSnapshot) -> list[dict[str, Any]]:
    """One entry for each instance, in bytes. ``uses`` add up to its budget; KV is split by the shares of its group, as
    a block has a part in every stage."""
    group_of = {worker_id: group for group in snapshot.groups for worker_id in group.worker_ids}
    return [_instance(worker, group_of.get(worker.worker_id)) for worker in snapshot.workers]


def _instance(worker: WorkerSnapshot, group: GroupSnapshot | None) -> dict[str, Any]:
    foreign = min(worker.foreign_bytes, worker.kv_bytes)
    own = worker.kv_bytes - foreign
    total = 0 if group is None else group.kv_blocks_total
    online = offline = cached = 0
    if group is not None and total:
        num_offline = min(group.offline.offline_blocks, group.kv_blocks_used)
        offline = own * num_offline // total
        online = own * (group.kv_blocks_used - num_offline) // total
        cached = own * min(group.kv_blocks_cached, total - group.kv_blocks_used) // total
    return {
        "id": worker.worker_id, "group": None if group is None else group.group_id,
        "state": worker.sleep if worker.alive or not worker.is_provisioned else "dead", "budget": worker.budget_bytes,
        "uses": {
            "parameters": worker.parameter_bytes, "online": online, "offline": offline, "foreign": foreign,
            "cached": cached, "room": own - online - offline - cached, "workspace": worker.workspace_bytes,
            "free": worker.free_bytes,
        },
        "dropped": worker.dropped_parameter_bytes, "host": [worker.host_used_bytes, worker.host_bytes],
    }


def groups(snapshot: EngineSnapshot) -> list[dict[str, Any]]:
    """One entry for each group that serves."""
    return [
        {
            "id": group.group_id, "instances": group.worker_ids, "layers": group.layer_ranges,
            "running": group.num_running, "waiting": group.num_waiting, "moving": group.num_moving,
            "blocks": [group.kv_blocks_used, group.kv_blocks_cached, group.kv_blocks_total],
            "batch": [group.offline.offline_running, group.offline.offline_waiting, group.offline.offline_hosted],
        }
        for group in snapshot.groups
    ]


def at_work(snapshot: EngineSnapshot, reasons: Mapping[str, str]) -> list[Told]:
    """The rungs that are at work now. ``reasons``: mechanism -> why it was last set to work."""
    found: list[Told] = []
    for group in snapshot.groups:
        if len(group.worker_ids) > 1:
            found.append(_pipeline(snapshot, group, reasons.get("drop", "")))
    for states, what in ((("asleep",), "asleep: memory given back"), (("leaving", "emptying"), "on the way to sleep"),
                         (("waking",), "being woken")):
        if ids := [w.worker_id for w in snapshot.workers if w.alive and w.sleep in states]:
            told = f"{listed('instance', ids).capitalize()} {_are(ids)} {what}."
            found.append(Told("sleep", told, reasons.get("sleep", "")))
    if starting := [w.worker_id for w in snapshot.workers if w.sleep == "starting"]:
        told = f"{listed('instance', starting).capitalize()} {_are(starting)} being started."
        waits = "; ".join(snapshot.waits[w] for w in starting if w in snapshot.waits)
        found.append(Told("scale", told, waits or reasons.get("scale", "")))
    if dead := [w.worker_id for w in snapshot.workers if not w.alive and w.is_provisioned]:
        why = "; ".join(snapshot.troubles)
        found.append(Told("recover", f"{listed('instance', dead).capitalize()} {_are(dead)} down.", why))
    if moving := sum(group.num_moving for group in snapshot.groups):
        found.append(Told("migrate", f"KV cache of {counted(moving, 'request')} is on the move.", ""))
    batch = sum(group.offline.offline_running for group in snapshot.groups)
    if batch:
        runs = "runs" if batch == 1 else "run"
        what = f"{counted(batch, 'request')} of batches {runs} in what the chat leaves of steps."
        found.append(Told("harvest", what))
    if hosted := sum(group.offline.offline_hosted for group in snapshot.groups):
        found.append(Told("harvest", f"{counted(hosted, 'request')} of batches wait with their KV in host memory.",
                          reasons.get("harvest", "")))
    return found


def _pipeline(snapshot: EngineSnapshot, group: GroupSnapshot, why: str) -> Told:
    members = set(group.worker_ids)
    dropped = sum(w.dropped_parameter_bytes for w in snapshot.workers if w.worker_id in members)
    stages = "; ".join(
        f"layers {lo} to {hi - 1} on {worker}"
        for worker, (lo, hi) in zip(group.worker_ids[:8], group.layer_ranges[:8], strict=False)
    )
    names = listed("instance", group.worker_ids).capitalize()
    what = f"{names} run as one pipeline ({stages}): {amount(dropped)} of the model were dropped for requests."
    return Told("drop", what, why)


def _are(ids: list[int]) -> str:
    return "is" if len(ids) == 1 else "are"

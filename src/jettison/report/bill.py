"""The devices that a recorded run used, and the devices that it would have needed: ``jettison bill``.

Each packing policy places the run's own requests anew, with their recorded times and lengths (``report.placement``), on
as many devices of the run's KV capacity as it needs. Offline requests do not count: what they are worth, prices say.
Draws nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from jettison.errors import UserError
from jettison.policy.packing.bounds import optimum
from jettison.policy.packing.named import PACKERS
from jettison.report.memory import KV_BLOCKS
from jettison.report.placement import Counts, Demand, Floats, Life, Placed, demand_of, packer_for, place
from jettison.report.results import RunResult
from jettison.report.terminal import print_line, print_whole

BLOCK_SIZE = 16
"""Tokens of a block, for a run that does not record it."""

MOST_REQUESTS = 24
"""Most requests in one integer program."""

MOST_PROGRAMS = 200
"""Most integer programs for one run; further epochs get the bound."""

PROGRAM_S = 2.0
"""Time limit for one number of devices in one program."""

HOUR_S = 3600.0

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class BillOptions:
    """The options of a bill."""

    policies: tuple[str, ...] = tuple(PACKERS)
    capacity_tokens: int | None = None
    """KV tokens of a device; None: the run's own capacity."""
    epoch_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Used:
    """Devices of a run over time, as samples that hold until the next one."""

    times_s: Floats
    devices: Counts

    def device_s(self, until_s: float) -> float:
        """Device-seconds from the first sample to a time."""
        ends = np.minimum(np.append(self.times_s[1:], until_s), until_s)
        return float(np.sum(np.clip(ends - self.times_s, 0.0, None) * self.devices))


@dataclass(frozen=True, slots=True)
class Bill:
    """The bill of one run."""

    run: str
    capacity_tokens: int
    block_size: int
    num_requests: int
    demand: Demand
    awake: Used | None
    """Instances that were not asleep; None where the run does not record their number."""
    holding: Used | None
    """The awake instances with KV of some request; None where KV was not recorded by group."""
    placed: dict[str, Placed]
    """Placements by policy."""
    least: Counts
    """Fewest devices in each epoch: the optimum, or Martello and Toth's bound where the optimum is not known."""
    is_exact: Flags

    @property
    def duration_s(self) -> float:
        """The billed time, in whole epochs."""
        return len(self.demand.batches) * self.demand.epoch_s


def bill_of(run: RunResult, options: BillOptions) -> Bill:
    """The bill. Raises UserError for a run without requests, lengths or a capacity, and for unknown policies."""
    unknown = [name for name in options.policies if name not in PACKERS]
    if unknown:
        raise UserError(f"unknown packing {unknown[0]!r}; known: {', '.join(PACKERS)}")
    lives = lives_of(run)
    block_size = _block_size(run)
    capacity = options.capacity_tokens or _capacity_tokens(run)
    if capacity is None:
        raise UserError(f"the run {run.name!r} does not say how many tokens an instance holds: give --capacity-tokens")
    if capacity < block_size:
        raise UserError(f"a device of {capacity} tokens holds no block of {block_size}")
    demand = demand_of(lives, capacity, block_size=block_size, epoch_s=options.epoch_s)
    placed = {name: place(demand, packer_for(demand, name)) for name in options.policies}
    least, is_exact = _least(demand, list(placed.values()))
    return Bill(
        run.name, capacity, block_size, len(lives), demand, awake_of(run), holding_kv(run), placed, least, is_exact
    )


def lives_of(run: RunResult) -> list[Life]:
    """The requests that got a first token, from their arrival on. Raises UserError where the run has not kept them."""
    rows = run.requests_detail
    if not rows:
        raise UserError(f"the run {run.name!r} has kept no requests one by one: nothing can be billed")
    if any(not isinstance(row.get(key), int) for row in rows for key in ("input_tokens", "output_tokens")):
        raise UserError(f"the run {run.name!r} does not say how long its requests were: nothing can be billed")
    lives = []
    for row in rows:
        if row["ttft_s"] is not None and row["e2e_s"] is not None:
            at_s = row["scheduled_s"]
            first_s, end_s = at_s + row["ttft_s"], at_s + row["e2e_s"]
            lengths = row["input_tokens"], row["output_tokens"], row.get("wanted_tokens")
            lives.append(Life(at_s, first_s, end_s, *lengths))
    if not lives:
        raise UserError(f"in the run {run.name!r} no request was answered: nothing can be billed")
    return lives


def _num_instances(run: RunResult) -> int | None:
    """The number of instances, which live and simulated runs record in different places."""
    for section, key in (("cluster", "instances"), ("deployment", "num_instances")):
        found = run.config.get(section)
        if isinstance(found, Mapping) and isinstance(found.get(key), int) and found[key] > 0:
            return int(found[key])
    return None


def _block_size(run: RunResult) -> int:
    deployment = run.config.get("deployment") or {}
    for found in (run.config.get("cluster"), deployment.get("settings")):
        if isinstance(found, Mapping) and isinstance(found.get("block_size"), int) and found["block_size"] > 0:
            return int(found["block_size"])
    return BLOCK_SIZE


def _capacity_tokens(run: RunResult) -> int | None:
    total, num = (run.config.get("fairness") or {}).get("kv_capacity_tokens"), _num_instances(run)
    return None if not total or num is None else int(total / num)


def awake_of(run: RunResult) -> Used | None:
    """Instances over time, less the ones that the log shows asleep; an instance that is being woken has its memory
    already and counts, one whose process is being started does not. None where the run does not record the number of
    instances at its start."""
    num = _num_instances(run)
    if num is None:
        return None
    times_s, devices, awake = [0.0], [num], set(range(num))
    asked = set[int]()
    for event in run.log("asleep", "waking", "woken", "instance_asked", "worker_joined"):
        kind, worker = event["kind"], event["worker"]
        if kind == "asleep":
            awake.discard(worker)
        elif kind == "instance_asked":
            asked.add(worker)
        elif kind != "worker_joined":
            awake.add(worker)
        elif worker in asked:  # else it has died awake or asleep, and is as it was
            asked.discard(worker)
            awake.add(worker)
        times_s.append(event["t"])
        devices.append(len(awake))
    return Used(np.array(times_s), np.array(devices, dtype=np.int64))


def holding_kv(run: RunResult) -> Used | None:
    """Instances with KV of some request, from the samples by group; all instances of a merged group with KV count. None
    where KV was not recorded by group."""
    at: dict[float, int] = {}
    for key, points in run.series.items():
        name, _, group = key.partition("/")
        if name != KV_BLOCKS or not group:
            continue
        sizes = dict(run.series.get(f"group_size/{group}", ()))
        for t, blocks in points:
            at[t] = at.get(t, 0) + (int(sizes.get(t, 1)) if blocks > 0 else 0)
    return Used(np.array(sorted(at)), np.array([at[t] for t in sorted(at)], dtype=np.int64)) if at else None


def _least(demand: Demand, placed: Sequence[Placed]) -> tuple[Counts, Flags]:
    """The fewest devices of each epoch, and whether each is the optimum. A placement that meets the bound is the
    optimum; else integer programming finds it, where the epoch is small."""
    least = demand.l2()
    most = np.array([demand.repacked(), *(found.devices for found in placed if not found.num_overfull)]).min(axis=0)
    is_exact = least >= most
    programs = 0
    for epoch in np.flatnonzero(~is_exact):
        if len(demand.sizes[epoch]) <= MOST_REQUESTS and programs < MOST_PROGRAMS:
            programs += 1
            found = optimum(demand.sizes[epoch], demand.capacity, PROGRAM_S)
            if found is not None:
                least[epoch], is_exact[epoch] = found, True
    return least, is_exact


def rows_of(bill: Bill) -> list[dict[str, Any]]:
    """The rows of the table, for programs: devices, device-hours, savings against the awake instances."""
    paid = None if bill.awake is None else bill.awake.device_s(bill.duration_s)
    rows = []
    for what, used in (("run, awake", bill.awake), ("run, holding KV", bill.holding)):
        if used is not None:
            spent = used.device_s(bill.duration_s)
            rows.append(_row(what, spent / bill.duration_s, int(used.devices.max()), spent, paid))
    for name, placed in bill.placed.items():
        row = _row(name, placed.mean_devices, placed.peak_devices, placed.device_s, paid)
        rows.append(row | {
            "utilisation": placed.utilisation, "moves_per_s": placed.moves_per_s,
            "recomputed": placed.num_recomputed, "overfull_device_epochs": placed.num_overfull,
        })  # fmt: skip
    for what, devices in (("least", bill.least), ("volume bound", bill.demand.volume())):
        spent = float(devices.sum()) * bill.demand.epoch_s
        rows.append(_row(what, float(devices.mean()), int(devices.max()), spent, paid))
    return rows


def _row(what: str, mean: float, peak: int, device_s: float, paid_s: float | None) -> dict[str, Any]:
    return {
        "what": what, "mean_devices": mean, "peak_devices": peak, "device_hours": device_s / HOUR_S,
        "saved_device_hours": None if paid_s is None else (paid_s - device_s) / HOUR_S,
    }  # fmt: skip


def bill_document(bill: Bill) -> dict[str, Any]:
    """The whole bill as JSON's own types, with the devices of each epoch."""
    return {
        "run": bill.run, "requests": bill.num_requests, "cut_requests": bill.demand.num_cut,
        "capacity_tokens": bill.capacity_tokens, "block_size": bill.block_size, "epoch_s": bill.demand.epoch_s,
        "duration_s": bill.duration_s, "exact_share": float(bill.is_exact.mean()), "rows": rows_of(bill),
        "devices": {name: placed.devices.tolist() for name, placed in bill.placed.items()}
        | {"least": bill.least.tolist()},
    }  # fmt: skip


def print_bill(bill: Bill, console: Console) -> None:
    """Print the table, and below it its conditions."""
    console.rule(bill.run, align="left")
    table = Table(header_style="bold", show_edge=False, pad_edge=False)
    table.add_column("")
    for header in ("devices, mean", "peak", "device-hours", "saved", "KV in use", "moves/s", "computed again"):
        table.add_column(header, justify="right")
    for row in rows_of(bill):
        saved, used, moves = row["saved_device_hours"], row.get("utilisation"), row.get("moves_per_s")
        table.add_row(
            row["what"], f"{row['mean_devices']:.2f}", str(row["peak_devices"]), f"{row['device_hours']:.3g}",
            "-" if saved is None else f"{saved:.3g}", "-" if used is None else f"{used:.0%}",
            "-" if moves is None else f"{moves:.3g}", str(row.get("recomputed", "-")),
        )  # fmt: skip
    print_whole(table, console)
    cut = f", {bill.demand.num_cut} of them larger than a device and counted as one that fills it"
    print_line(
        f"{bill.num_requests} requests{cut if bill.demand.num_cut else ''}; devices of {bill.capacity_tokens:,} "
        f"tokens; epochs of {bill.demand.epoch_s:g} s; least: exact in {bill.is_exact.mean():.0%} of the epochs, else "
        "Martello and Toth's bound; times and lengths as recorded, moves take no time", console, "dim",
    )  # fmt: skip

"""MELL (2025): Figs. 11, 12 and 14 once more, through the whole simulator: what packing costs in service is in them."""

from __future__ import annotations

from jettison.report.bill import holding_kv
from jettison.report.results import RunResult
from papers import measures
from papers.claims import change, own, share
from papers.figure import Claim, Part, Stated
from papers.measures import ttft
from papers.specs import read_spec
from papers.variants import Variant

PARTS = {"13B on A100-40G, simulated": "mell-a100", "7B on RTX 4090, simulated": "mell-4090"}
"""Workload -> spec."""
MELL, FEW, MOST = "mell", "mell, few moves", "mell, most moves"
OURS = "our goal"
BASELINES = ("load-balance", "best-fit", "worst-fit")


def _until_s(run: RunResult) -> float:
    """The last arrival: a tail of a few requests does not count."""
    return float(max(row["scheduled_s"] for row in run.requests_detail or []))


def mean_devices(run: RunResult) -> float | None:
    """With KV of some request, while requests arrive."""
    used = holding_kv(run)
    return None if used is None else used.device_s(_until_s(run)) / _until_s(run)


def peak_devices(run: RunResult) -> float | None:
    """The most at one sample."""
    used = holding_kv(run)
    return None if used is None else float(used.devices.max())


def utilisation(run: RunResult) -> float | None:
    """Part of the KV memory of devices that hold KV which requests hold, while requests arrive."""
    used, until_s = holding_kv(run), _until_s(run)
    if used is None:
        return None
    num = int(run.config["cluster"]["instances"])
    total = dict(run.series["kv_blocks_total"])
    held = dict(run.series["kv_blocks_used"])
    at = [(t, devices) for t, devices in zip(used.times_s, used.devices) if t <= until_s]
    blocks = float(sum(devices * total[t] / num for t, devices in at))
    return sum(held[t] for t, _ in at) / blocks if blocks else None


def wanted_devices(run: RunResult) -> float:
    """That the packing would do with, were every move made at once: the rest of those that hold KV is moves under way,
    at both ends of which it is held, and owed ones."""
    until_s = _until_s(run)
    plans = [(e["t"], e["needed"]) for e in run.events["log"] if e["kind"] == "packed" and e["t"] < until_s]
    ends = [t for t, _ in plans[1:]] + [until_s]
    return float(sum(needed * (end - t) for (t, needed), end in zip(plans, ends, strict=True)) / until_s)


def moves_per_s(run: RunResult) -> float:
    """Migrations of running requests that the packing began, by the time in which requests arrive."""
    return float(run.events["packing_migrations"]) / _until_s(run)


def computed_again(run: RunResult) -> float:
    """Requests that lost their KV, whatever took it, over all."""
    return float(run.events["preemptions"]) / run.requests.submitted


def _part(workload: str, claims: list[Claim]) -> Part:
    variants = [Variant(v.name, v.policy, dict(v.settings)) for v in read_spec(PARTS[workload]).parsed.variants]
    return Part(workload, tuple(claims), spec=PARTS[workload], systems=tuple(variants), conditions=MELL)


def devices_part(workload: str, bands: dict[str, Stated]) -> Part:
    """Devices, and what they cost: P99 TTFT and requests that are computed again."""
    claims = []
    for baseline in BASELINES:
        paper = (-15.0, None) if baseline == "load-balance" else (None, -20.0)
        claims.append(change("devices, mean", mean_devices, MELL, baseline).stated(paper, bands[baseline]))
        claims.append(change("devices, peak", peak_devices, MELL, baseline).stated(None, (None, 0.0), OURS))
        claims.append(change("devices, mean", mean_devices, FEW, baseline))
        claims.append(change("P99 TTFT", ttft(99), MELL, baseline))
    for name in (MELL, FEW, MOST, *BASELINES):
        claims.append(own("devices, time-mean", mean_devices, name))
        claims.append(own("devices, peak", peak_devices, name))
        claims.append(own("devices wanted by the packing, time-mean", wanted_devices, name))
        claims.append(own("computed again, a request", computed_again, name))
        claims.append(own("P99 TTFT", ttft(99), name, "s"))
        claims.append(own("P99 TPOT", measures.tpot(99), name, "s"))
    return _part(workload, claims)


def moves_part(workload: str) -> Part:
    """Migrations a second."""
    claims = [change("migrations a second", moves_per_s, MELL, "load-balance").stated((None, 0), (None, 0))]
    claims.append(change("migrations a second", moves_per_s, FEW, "load-balance").stated((None, 0), (None, 0)))
    claims += [own("migrations a second", moves_per_s, name) for name in (MELL, FEW, MOST, "load-balance")]
    claims.append(share("migrations as tokens", _as_tokens, MELL))
    return _part(workload, claims)


def _as_tokens(run: RunResult) -> float | None:
    return measures.ratio(run.events["migrations_as_tokens"], run.events["migrations"])


def utilisation_part(workload: str) -> Part:
    """KV memory in use."""
    claims = [share("KV memory in use", utilisation, MELL).stated((88, None), (85, None))]
    claims += [share("KV memory in use", utilisation, name).stated((65, 80)) for name in BASELINES]
    return _part(workload, claims)

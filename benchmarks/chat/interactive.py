"""A chat alone, and with a batch on the same replica: Jettison and real vLLM, the same weights, a compute thread each.

    python -m benchmarks chat interactive --vllm-python VLLM_ENV/bin/python   # made as docs/performance.md says

After llm-d's experiment. Interactive requests (Poisson, short prompts) stream over HTTP; the batch is as many requests
with long prompts as ``--unfinished`` says, always, sent by the same client. Arms:

- ``jettison alone`` (``--offline none``), ``jettison harvest`` and ``jettison priority``: the batch as
  ``service_tier: flex``, all three with the same objectives: TPOT 9 times the decode step of one request, TTFT 14
  times that (the paper's proportions).
- ``vllm alone`` and ``vllm batch``: ``--scheduling-policy priority``, the batch as requests of a lower priority, and
  vLLM's default step budget (``max_num_batched_tokens``); ``vllm-equal alone`` and ``vllm-equal batch``: with the
  budget at which its batch gets as many tokens a second as harvesting's.

A plan goes before, and is kept in the result file: capacities (chat requests a second when many come at once), the rate
at which both have the same absolute load (``--share`` of the slower one's capacity), the objectives, and the equal
budget. Then rounds by number, each beginning with another arm; an engine whose own capacity is larger meets its own
share of that, too. A later run with the same file adds rounds, or puts them in the place of old ones. Never do two
engines run at once: servers of vLLM are held still while others work. Offline tokens a second are prompt and output
tokens that the client saw for the first time inside the arrival window, of each engine alike.

Judged, on medians over rounds of what the batch adds to the P99 TTFT of the same arrivals alone: harvesting adds at
most one TPOT objective, and less than vLLM at equal offline tokens a second.
"""

from __future__ import annotations

import contextlib
import json
import statistics
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.engines.vllm_server import VllmServer, VllmSettings
from benchmarks.engines.weights import QWEN3_02M, QWEN3_110M, make_folder
from benchmarks.evidence import LIVE
from benchmarks.servers import ServerProcess, awake, metrics, profiled, replayed
from benchmarks.shared import (
    Row,
    absolute,
    in_turn,
    keep,
    machine,
    parse,
    percentiles_ms,
    print_block,
    print_rows,
    say,
    work_folder,
)
from jettison.live.experiments.overload import ExperimentSetup
from jettison.policy.offline import TPOT_OVER_LONE_STEP, TTFT_OVER_TPOT
from jettison.report.results import RunResult, percentile
from jettison.workload.lengths import Lengths, LogNormalPair
from jettison.workload.pool import OfflinePool
from jettison.workload.synthetic import SyntheticSpec, generate
from jettison.workload.traces import TraceRow


class Arm(NamedTuple):
    """A server, and whether the batch is there. Of Jettison ``server`` is the mode of ``--offline``."""

    name: str
    server: str
    alone: str | None = None
    """The arm without the batch that it is compared with."""

    @property
    def engine(self) -> str:
        return self.name.partition("-")[0].partition(" ")[0]


ARMS = (
    Arm("jettison alone", "none"), Arm("jettison harvest", "harvest", "jettison alone"), Arm("vllm alone", "vllm"),
    Arm("vllm batch", "vllm", "vllm alone"), Arm("jettison priority", "priority", "jettison alone"),
    Arm("vllm-equal alone", "vllm-equal"), Arm("vllm-equal batch", "vllm-equal", "vllm-equal alone"),
)  # fmt: skip
OURS, EQUAL = ARMS[1], ARMS[-1]
SHAPES = {"110m": QWEN3_110M, "0.2m": QWEN3_02M}
CHAT = {"prompt": Lengths(48, 0.6, 192, floor=8), "output": Lengths(24, 0.5, 64, floor=4)}
BATCH = LogNormalPair(Lengths(600, 0.3, 900), Lengths(24, 0.3, 64))
CONTEXT = 1024
BLOCK_SIZE = 32
"""The smallest that vLLM's CPU attention is made for."""
KV_TOKENS = 12 * 1024
"""The batch holds most of it, so that its KV is copied to host memory."""
MAX_NUM_SEQS = 32
VLLM_BUDGET = 2048
"""``max_num_batched_tokens`` of vLLM's server on a CPU where it is told nothing."""
FLOOD_REQUESTS = 48
NUM_TRIES = 2
"""Budgets of vLLM that the plan measures beside the default."""
CLOSE = 0.1
"""Offline tokens a second that differ by so much are equal."""
ALIKE = 0.05
"""Capacities that differ by so much are one."""
COUNTERS = (
    "steps_shed", "steps_abandoned", "checkpointed_blocks", "checkpoint_frees", "prefetched_blocks", "offline_pauses",
)

WARM_UP = [TraceRow(0.0, 48, 16)] * 8 + [TraceRow(0.0, 900, 4)]
"""What is made at first use is made."""
Document = dict[str, Any]


def main() -> None:
    names = [arm.name for arm in ARMS]
    args = parse(
        __doc__, vllm_python=(Path, "without it only Jettison is measured"), rounds=([0, 1], "by number"),
        replan=(False, "begin the file anew"), arms=(names, {"choices": names}),
        seconds=(18.0, "of arrivals, each arm"), share=(0.4, "of a capacity that the chat asks for"),
        ttft_tpots=(float(TTFT_OVER_TPOT), "TTFT objective, in TPOT objectives"),
        unfinished=(16, "requests of the batch that are there at any time"),
        model=("110m", {"choices": sorted(SHAPES)}), core=(0, "of vLLM's model; each engine computes with one thread"),
        json=Path("interactive_beside_batch.json"), work=Path,
    )  # fmt: skip
    if args.vllm_python is None:
        args.arms = [name for name in args.arms if name.startswith("jettison")]
    args.work = work_folder(args.work, "beside-batch")
    found: Document = json.loads(args.json.read_text()) if args.json.exists() else {}
    with Bench(args).open() as bench:
        if "plan" not in found or args.replan:
            found = {"plan": make_plan(bench), "rows": []}
            save(args, found)
        for number in args.rounds:
            for arm, rate in turns(found["plan"], args.arms, number):
                row = bench.measure(arm, rate, number, found["plan"])
                found["rows"] = [*(r for r in found["rows"] if key_of(r) != key_of(row)), row]
                save(args, found)
                say(f"round {number}, {rate:.2f}/s, {arm.name}: P99 TTFT {row['ttft_p99_ms']:.0f} ms")
    print_block("interactive_beside_batch", found)
    print_rows([{"round": r["round"], "arm": r["arm"]} | {name: r.get(name, 0) for name in COUNTERS}
                for r in found["rows"] if r["arm"] in (OURS.name, "jettison priority")])  # fmt: skip
    print_rows(verdicts(found))


def turns(plan: Document, names: Sequence[str], number: int) -> list[tuple[Arm, float]]:
    """Arms of one round with their rates: all at the common one, and those of the faster engine at its own."""
    arms = in_turn([arm for arm in ARMS if arm.name in names], 2 * number)
    common, own = plan["common_rate"], plan["own_rate"]
    return [(arm, common) for arm in arms] + [(arm, own[arm.engine]) for arm in arms if own[arm.engine] > common]


def key_of(row: Row) -> tuple[object, ...]:
    """Which measurement it is: one of the same round takes its place."""
    return row["round"], row["arm"], row["rate_per_s"]


def save(args: Namespace, found: Document) -> None:
    """Plan, rows and verdicts."""
    options = {"seconds": args.seconds, "share": args.share, "unfinished": args.unfinished, "model": args.model,
               "ttft_tpots": args.ttft_tpots}  # fmt: skip
    setting = {"setting": options | {"machine": machine()}, "verdicts": verdicts(found)}
    keep(args.json, found | setting, *LIVE)


# --- servers


class Bench:
    """Servers by arm. Those of vLLM take a minute to come up: they stay, and stand still while another is measured."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.model_dir = make_folder(args.work, SHAPES[args.model])
        self.setup = ExperimentSetup(
            self.model_dir, args.work, KV_TOKENS, instances=1, dtype="bfloat16", block_size=BLOCK_SIZE,
            max_num_batched_tokens=512, max_num_seqs=MAX_NUM_SEQS, extra_flags={
                "num_threads": 1, "enable_prefix_caching": False, "max_model_len": CONTEXT, "host_memory": "1GiB"},
        )  # fmt: skip
        self._vllm: dict[int, VllmServer] = {}

    @contextlib.contextmanager
    def open(self) -> Iterator[Bench]:
        try:
            yield self
        finally:
            for budget in list(self._vllm):
                self.close_vllm(budget)

    @contextlib.contextmanager
    def serving(self, server: str, plan: Document) -> Iterator[str]:
        """URL of the server of an arm, warm."""
        budgets = {"vllm": VLLM_BUDGET, "vllm-equal": plan.get("equal_budget", VLLM_BUDGET)}
        of_vllm = server in budgets
        with self.vllm(budgets[server]) if of_vllm else self.jettison(server, plan["objectives_ms"]) as url:
            yield url

    @contextlib.contextmanager
    def jettison(self, mode: str, objectives_ms: Mapping[str, float]) -> Iterator[str]:
        """A fresh server with this mode of ``--offline``."""
        flags = self.setup.flags() | {"offline": mode} | objectives_ms
        with ServerProcess(self.model_dir, flags, self.args.work / f"jettison-{mode}.log") as server:
            replayed(server.url, WARM_UP)
            yield server.url

    @contextlib.contextmanager
    def vllm(self, budget: int) -> Iterator[str]:
        """The server with this step budget, which runs inside and stands still outside."""
        if budget not in self._vllm:
            self._vllm[budget] = self._launch(budget)
        server = self._vllm[budget]
        with awake(server):
            yield server.url

    def close_vllm(self, budget: int) -> None:
        """It is not needed any more."""
        self._vllm.pop(budget).close()

    def _launch(self, budget: int) -> VllmServer:
        settings = VllmSettings(
            absolute(self.args.vllm_python) or Path(), self.model_dir, "bfloat16", BLOCK_SIZE,
            KV_TOKENS // BLOCK_SIZE, CONTEXT, MAX_NUM_SEQS, budget, ("--scheduling-policy", "priority"),
        )
        server = VllmServer(settings, self.args.core, self.args.work / f"vllm-{budget}.log")
        server.launch()
        server.wait_ready()
        replayed(server.url, WARM_UP)
        return server

    # --- measuring

    def measure(self, arm: Arm, rate: float, number: int, plan: Document) -> Row:
        """One arm of a round, as it is stored."""
        with self.serving(arm.server, plan) as url:
            before = metrics(url, *(f"jettison:{name}_total" for name in COUNTERS))
            run = self.beside(url, arm, rate, number)
            after = metrics(url, *before)
        row = {"round": number, "arm": arm.name, "rate_per_s": rate, "num_requests": run.ttft_s.count}
        grown = {name[len("jettison:") : -len("_total")]: after[name] - before[name] for name in after}
        return row | figures(run) | grown

    def beside(self, url: str, arm: Arm, rate: float, seed: int) -> RunResult:
        """The chat's arrivals of one seed, with the batch where the arm has one."""
        load = generate(SyntheticSpec("chat", rate, self.args.seconds, **CHAT), seed)
        pool = None if arm.alone is None else OfflinePool(BATCH, self.args.unfinished, seed=seed)
        fields = {"priority": 1} if arm.engine == "vllm" else {"service_tier": "flex"}
        return replayed(url, load, seed, name=arm.name, pool=pool, offline_fields=fields)


def figures(run: RunResult) -> Row:
    """What is shown of a run."""
    assert run.requests_detail is not None
    ttfts = [1e3 * row["ttft_s"] for row in run.requests_detail if row["ttft_s"] is not None]
    found: Row = {f"ttft_p{q}_ms": percentile(ttfts, q) for q in (50, 95, 99)}
    found |= percentiles_ms(run.itl_s, "itl", 50, 99)
    offline = (run.classes or {}).get("offline", {}).get("tokens", {"total_per_s": 0.0, "output_per_s": 0.0})
    found |= {f"offline_{name}": offline[name] for name in ("total_per_s", "output_per_s")}
    return found | {"client_lag_p99_ms": 1e3 * run.client["lag_s"]["p99"]}


# --- before the rounds


def make_plan(bench: Bench) -> Document:
    """Capacities, rates, objectives, and vLLM's budget at which its batch gets on as fast as harvesting's."""
    args = bench.args
    profiled(bench.setup)
    capacity: dict[str, float] = {}
    with bench.jettison("none", {}) as url:
        lone = replayed(url, [TraceRow(0.0, 16, 100)])
        capacity["jettison"] = flood(url)
    if args.vllm_python is not None:
        with bench.vllm(VLLM_BUDGET) as url:
            capacity["vllm"] = flood(url)
    tpot_ms = TPOT_OVER_LONE_STEP * 1e3 * float(lone.itl_s.p50 or 0.0)
    least = min(capacity.values())
    alike = {engine: least if rate <= (1.0 + ALIKE) * least else rate for engine, rate in capacity.items()}
    plan: Document = {
        "capacity_per_s": capacity, "own_rate": {engine: args.share * rate for engine, rate in alike.items()},
        "common_rate": args.share * least,
        "objectives_ms": {"slo_tpot_ms": tpot_ms, "slo_ttft_ms": args.ttft_tpots * tpot_ms},
    }  # fmt: skip
    if args.vllm_python is not None:
        plan |= equal_budget(bench, plan)
    print(plan)
    return plan


def flood(url: str) -> float:
    """Chat requests a second when many come at once."""
    load = generate(SyntheticSpec("chat", float(FLOOD_REQUESTS), 2.0, **CHAT), 0)
    rows = [row._replace(arrival_s=0.0) for row in load.rows[:FLOOD_REQUESTS]]
    return len(rows) / replayed(url, load.with_rows(rows, "all at once")).duration_s


def equal_budget(bench: Bench, plan: Document) -> Document:
    """Measures harvesting's batch at the common rate, then vLLM's with one budget after another.

    Raises RuntimeError where no prompt of the batch ended meanwhile: nothing can be as fast.
    """

    def rate_of(arm: Arm, url: str) -> float:
        return float(figures(bench.beside(url, arm, plan["common_rate"], 1_000))["offline_total_per_s"])

    with bench.jettison("harvest", plan["objectives_ms"]) as url:
        wanted = rate_of(OURS, url)
    if not wanted:
        raise RuntimeError(f"harvesting ended no prompt of the batch in {bench.args.seconds:g} s: give more --seconds")
    with bench.vllm(VLLM_BUDGET) as url:
        measured = {VLLM_BUDGET: rate_of(EQUAL, url)}
    for _ in range(NUM_TRIES):
        budget = next_budget(measured, wanted)
        if budget in measured:
            break
        with bench.vllm(budget) as url:
            measured[budget] = rate_of(EQUAL, url)
    best = closest(measured, wanted)
    for budget in set(measured) - {best, VLLM_BUDGET}:
        bench.close_vllm(budget)
    return {"offline_per_s_wanted": wanted, "offline_per_s_by_budget": measured, "equal_budget": best}


def closest(measured: Mapping[int, float], wanted: float) -> int:
    """The budget whose offline tokens a second are nearest."""
    return min(measured, key=lambda budget: abs(measured[budget] - wanted))


def next_budget(measured: Mapping[int, float], wanted: float) -> int:
    """The budget to measure next: between the two that enclose what is wanted, or a quarter of the smallest. One that
    is measured already where it is close enough, where the largest gets less than is wanted, or where none is left."""
    best = closest(measured, wanted)
    if abs(measured[best] - wanted) <= CLOSE * wanted or measured[max(measured)] < wanted:
        return best
    above = min(budget for budget in measured if measured[budget] >= wanted)
    below = max((budget for budget in measured if measured[budget] < wanted and budget < above), default=None)
    if below is None:
        return max(MAX_NUM_SEQS, above // 4)  # vLLM takes no budget below its number of requests
    share = (wanted - measured[below]) / (measured[above] - measured[below])
    return min(above, max(below + 16, round((below + share * (above - below)) / 16) * 16))


# --- judging


def paired(found: Document, arm: str, against: str, rate: float, figure: str) -> list[float]:
    """Of each round that has both at this rate: the figure of one less that of the other."""
    rows = {(row["round"], row["arm"]): row[figure] for row in found["rows"] if row["rate_per_s"] == rate}
    rounds = sorted(number for number, name in rows if name == arm and (number, against) in rows)
    return [rows[number, arm] - rows[number, against] for number in rounds]


def added(found: Document, arm: Arm, rate: float) -> float | None:
    """Median over rounds of what the batch adds to the P99 TTFT."""
    assert arm.alone is not None
    values = paired(found, arm.name, arm.alone, rate, "ttft_p99_ms")
    return statistics.median(values) if values else None


def verdicts(found: Document) -> list[Row]:
    """The judged lines, at the common rate and at the own ones; none while a figure is missing."""
    plan = found["plan"]
    common, own = plan["common_rate"], plan["own_rate"]
    loads = {"equal absolute load": (common, common), "equal shares": (own["jettison"], own.get("vllm"))}
    lines: list[Row] = []
    for name, (ours_rate, theirs_rate) in loads.items():
        ours, slo = added(found, OURS, ours_rate), plan["objectives_ms"]["slo_tpot_ms"]
        if ours is None:
            continue
        judged = {"at most one TPOT objective": slo}
        theirs = None if theirs_rate is None else added(found, EQUAL, theirs_rate)
        if theirs is not None:
            judged["less than vLLM at equal offline tokens/s"] = theirs
        lines += [
            {"load": name, "line": line, "added_ms": ours, "bound_ms": bound, "holds": ours <= bound,
             "offline_ratio": offline_ratio(found, ours_rate, theirs_rate)}
            for line, bound in judged.items()
        ]
    return lines


def offline_ratio(found: Document, ours_rate: float, theirs_rate: float | None) -> float | None:
    """Harvesting's offline tokens a second over those of vLLM that is to have as many, medians over rounds."""
    of = {
        arm.name: [r["offline_total_per_s"] for r in found["rows"] if (r["arm"], r["rate_per_s"]) == (arm.name, rate)]
        for arm, rate in ((OURS, ours_rate), (EQUAL, theirs_rate))
    }
    if not all(any(values) for values in of.values()):
        return None
    return statistics.median(of[OURS.name]) / statistics.median(of[EQUAL.name])

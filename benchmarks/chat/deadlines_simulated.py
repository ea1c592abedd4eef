"""Batches with completion windows beside a chat while instances sleep, in virtual time.

    python -m benchmarks chat deadlines_simulated --seeds 3 --json deadlines_simulated.json

Random batches come beside a chat with bursts. Once with all instances awake, each due long after it: that says how
long each takes then. Then each is given a window at least 1.15 times that, and instances sleep unless something needs
them (``--sleep auto``). Told are lines that were late, and seconds of instances that were awake, beside those of all.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from benchmarks.shared import VIRTUAL, Row, keep, parse, print_rows
from jettison.report.results import RunResult
from jettison.simulate.cases import cases_of, run_case

LONG_S = 1e6
"""A window that nothing misses."""
LEAST_FACTOR, MOST_FACTOR = 1.15, 4.0
"""Of windows, over what all awake need."""


@dataclass(frozen=True)
class Scene:
    """Which instances, which chat, and of what size batches are. Lengths are medians."""

    cluster: Mapping[str, Any] = field(default_factory=lambda: {"preset": "mell-4090", "instances": 4})
    settings: Mapping[str, Any] = field(default_factory=lambda: {"max_num_batched_tokens": 2048, "max_num_seqs": 64})
    sleep_after_s: float = 20.0
    chat_s: float = 1800.0
    rate_per_s: float = 0.2
    chat_lengths: tuple[int, int] = (200, 120)
    num_batches: int = 20
    num_tenants: int = 1
    lines: tuple[int, int] = (20, 300)
    prompts: tuple[int, int] = (50, 600)
    answers: tuple[int, int] = (50, 300)
    longest: int = 1000
    most_factor: float = MOST_FACTOR


def batches(scene: Scene, seed: int) -> list[Row]:
    """Each of other lengths, at random times while there is a chat."""
    rng = random.Random(f"batches {seed}")
    return [
        {
            "start_s": round(rng.uniform(0.01, 0.8) * scene.chat_s, 1), "num_requests": rng.randint(*scene.lines),
            "unfinished": 256, "tenant": f"batch {rng.randrange(scene.num_tenants)}", "completion_window_s": LONG_S,
            "lengths": {
                "input": {"median": rng.randint(*scene.prompts), "sigma": 0.6, "cap": 2 * scene.longest},
                "output": {"median": rng.randint(*scene.answers), "sigma": 0.6, "cap": scene.longest},
            },
        }
        for _ in range(scene.num_batches)
    ]  # fmt: skip


def spec(scene: Scene, seed: int, due: Sequence[Mapping[str, Any]], *, sleeps: bool) -> Row:
    """A chat with a burst, and these batches."""
    prompt, answer = scene.chat_lengths
    settings: Row = {
        "enable_prefix_caching": False, "offline": "harvest", "sleep": "auto" if sleeps else "never",
        "sleep_after_s": scene.sleep_after_s, "min_awake": 1, **scene.settings,
    }  # fmt: skip
    chat = {
        "process": "gamma", "rate_per_s": scene.rate_per_s, "cv": 2.0, "duration_s": scene.chat_s,
        "bursts": [{"start_s": 0.3 * scene.chat_s, "duration_s": 0.1 * scene.chat_s, "multiplier": 3.0}],
    }  # fmt: skip
    lengths = {
        "input": {"median": prompt, "sigma": 0.8, "cap": 10 * prompt},
        "output": {"median": answer, "sigma": 0.6, "cap": 4 * answer},
    }  # fmt: skip
    return {
        "name": "deadlines", "cluster": dict(scene.cluster), "settings": settings, "seeds": [seed],
        "workload": {"arrivals": chat, "lengths": lengths, "batches": list(due)},
        "variants": [{"name": "sleepy" if sleeps else "awake", "policy": "recompute"}],
    }  # fmt: skip


def run(raw: Mapping[str, Any]) -> RunResult:
    """Its one case."""
    (case,) = cases_of(raw, "deadlines")
    return run_case(case)


def with_windows(scene: Scene, due: Sequence[Mapping[str, Any]], awake: RunResult, seed: int) -> list[Row]:
    """Windows over what each batch took with all awake; every fourth has the least."""
    rng = random.Random(f"windows {seed}")
    found: list[Row] = []
    for number, (batch, came) in enumerate(zip(due, awake.config["batches"], strict=True)):
        factor = LEAST_FACTOR if number % 4 == 0 else rng.uniform(LEAST_FACTOR, scene.most_factor)
        found.append({**batch, "completion_window_s": factor * (came["ended_s"] - came["start_s"])})
    return found


def awake_s(result: RunResult, until_s: float) -> float:
    """Seconds of instances that were not asleep, up to a time."""
    num = result.config["cluster"]["instances"]
    since: dict[int, float] = {}
    slept_s = 0.0
    for event in result.events["log"]:
        if event["kind"] == "asleep":
            since[event["worker"]] = min(event["t"], until_s)
        elif event["kind"] == "waking" and event["worker"] in since:
            slept_s += min(event["t"], until_s) - since.pop(event["worker"])
    return num * until_s - slept_s - sum(until_s - at_s for at_s in since.values())


def row_of(seed: int, awake: RunResult, sleepy: RunResult) -> Row:
    """What one seed came to."""
    came = sleepy.config["batches"]
    end_s = max(awake.config["workload"]["duration_s"], *(batch["ended_s"] for batch in came))
    log = sleepy.events["log"]
    return {
        "seed": seed, "batches": len(came), "lines": sum(batch["requests"] for batch in came),
        "late_lines": sum(batch["late"] for batch in came),
        "late_batches": [batch["name"] for batch in came if batch["late"]],
        "wakes_for_deadlines": sum(e["kind"] == "wake_decided" and "deadline" in e for e in log),
        "wakes": sum(e["kind"] == "woken" for e in log),
        "awake_instance_s": awake_s(sleepy, end_s), "all_awake_instance_s": awake_s(awake, end_s),
        "p99_ttft_s": {"all_awake": awake.classes["online"]["ttft_s"]["p99"] if awake.classes else None,
                       "sleep": sleepy.classes["online"]["ttft_s"]["p99"] if sleepy.classes else None},
    }  # fmt: skip


def one_seed(scene: Scene, seed: int) -> tuple[RunResult, RunResult]:
    """With all awake, and asleep where nothing is needed, with windows by the first."""
    due = batches(scene, seed)
    awake = run(spec(scene, seed, due, sleeps=False))
    return awake, run(spec(scene, seed, with_windows(scene, due, awake, seed), sleeps=True))


def main() -> None:
    args = parse(
        __doc__, seeds=3, first_seed=0, rate=(Scene.rate_per_s, "of the chat, requests a second"), instances=4,
        tenants=1, packing="none", most_factor=MOST_FACTOR,
    )  # fmt: skip
    scene = Scene()
    scene = replace(
        scene, cluster={**scene.cluster, "instances": args.instances}, rate_per_s=args.rate, num_tenants=args.tenants,
        settings={**scene.settings, "packing": args.packing}, most_factor=args.most_factor,
    )
    rows = []
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        rows.append(row_of(seed, *one_seed(scene, seed)))
        print_rows(rows[-1:])
    keep(args.json, {"least_factor": LEAST_FACTOR, "scene": asdict(scene), "rows": rows}, *VIRTUAL)

"""Batches with completion windows beside a chat while instances sleep, in virtual time.

    python benchmarks/deadlines_simulated.py --seeds 3 --json deadlines_simulated.json

Random batches come beside a chat with bursts. Once with all instances awake, each due long after it: that says how long
each takes then. Then each is given a window at least 1.15 times that, and instances sleep unless something needs them
(``--sleep auto``). Told are lines that were late, and seconds of instances that were awake, beside those with all awake.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evidence import VIRTUAL, write_result

from jettison.report.results import RunResult
from jettison.simulate.cases import cases_of, run_case

CHAT_S = 900.0
LONG_S = 1e6
"""A window that nothing misses."""
LEAST_FACTOR, MOST_FACTOR = 1.15, 4.0
"""Of windows, over what all awake need."""


def batches(seed: int, number: int = 20, num_tenants: int = 1) -> list[dict[str, Any]]:
    """So many, each of other lengths, at random times while there is a chat."""
    rng = random.Random(f"batches {seed}")
    return [
        {
            "start_s": round(rng.uniform(5.0, 0.8 * CHAT_S), 1), "num_requests": rng.randint(5, 120),
            "unfinished": 256, "tenant": f"batch {rng.randrange(num_tenants)}", "completion_window_s": LONG_S,
            "lengths": {
                "input": {"median": rng.randint(50, 600), "sigma": 0.6, "cap": 2000},
                "output": {"median": rng.randint(10, 150), "sigma": 0.6, "cap": 500},
            },
        }
        for _ in range(number)
    ]  # fmt: skip


def spec(
    seed: int, due: Sequence[Mapping[str, Any]], *, sleeps: bool, rate: float = 0.3, num_instances: int = 4,
    packing: str = "none",
) -> dict[str, Any]:
    """A day of so many instances."""
    settings: dict[str, Any] = {
        "enable_prefix_caching": False, "max_num_batched_tokens": 2048, "max_num_seqs": 64, "offline": "harvest",
        "sleep": "auto" if sleeps else "never", "sleep_after_s": 10, "min_awake": 1, "packing": packing,
    }  # fmt: skip
    return {
        "name": "deadlines", "cluster": {"preset": "mell-4090", "instances": num_instances},
        "workload": {
            "arrivals": {"process": "gamma", "rate_per_s": rate, "cv": 2.0, "duration_s": CHAT_S,
                         "bursts": [{"start_s": 0.3 * CHAT_S, "duration_s": 0.1 * CHAT_S, "multiplier": 3.0}]},
            "lengths": {"input": {"median": 200, "sigma": 0.8, "cap": 2000},
                        "output": {"median": 120, "sigma": 0.6, "cap": 500}},
            "batches": list(due),
        },
        "settings": settings, "variants": [{"name": "sleepy" if sleeps else "awake", "policy": "recompute"}],
        "seeds": [seed],
    }  # fmt: skip


def run(raw: Mapping[str, Any]) -> RunResult:
    """Its one case."""
    (case,) = cases_of(raw, "deadlines")
    return run_case(case)


def with_windows(
    due: Sequence[Mapping[str, Any]], awake: RunResult, seed: int, most_factor: float = MOST_FACTOR
) -> list[dict[str, Any]]:
    """Windows over what each batch took with all awake; every fourth has the least."""
    rng = random.Random(f"windows {seed}")
    found: list[dict[str, Any]] = []
    for number, (batch, came) in enumerate(zip(due, awake.config["batches"], strict=True)):
        factor = LEAST_FACTOR if number % 4 == 0 else rng.uniform(LEAST_FACTOR, most_factor)
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


def row_of(seed: int, awake: RunResult, sleepy: RunResult) -> dict[str, Any]:
    """What one seed came to."""
    came = sleepy.config["batches"]
    end_s = max(CHAT_S, *(batch["ended_s"] for batch in came))
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


def one_seed(seed: int, **options: Any) -> tuple[RunResult, RunResult]:
    """With all awake, and asleep where nothing is needed, with windows by the first."""
    due = batches(seed, options.pop("number", 20), options.pop("num_tenants", 1))
    most_factor = options.pop("most_factor", MOST_FACTOR)
    awake = run(spec(seed, due, sleeps=False, **options))
    return awake, run(spec(seed, with_windows(due, awake, seed, most_factor), sleeps=True, **options))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=0.3, help="of the chat, requests a second")
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument("--tenants", type=int, default=1)
    parser.add_argument("--packing", default="none")
    parser.add_argument("--most-factor", type=float, default=MOST_FACTOR)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        awake, sleepy = one_seed(
            seed, rate=args.rate, num_instances=args.instances, num_tenants=args.tenants, packing=args.packing,
            most_factor=args.most_factor,
        )
        row = row_of(seed, awake, sleepy)
        rows.append(row)
        print(f"seed {seed}: {row['late_lines']} of {row['lines']} lines late {row['late_batches']}, "
              f"{row['wakes_for_deadlines']} of {row['wakes']} wakes for deadlines, awake "
              f"{row['awake_instance_s']:.0f} of {row['all_awake_instance_s']:.0f} instance-seconds", flush=True)
    if args.json:
        write_result(args.json, {"least_factor": LEAST_FACTOR, "rate_per_s": args.rate, "rows": rows}, *VIRTUAL)


if __name__ == "__main__":
    main()

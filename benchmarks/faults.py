"""Seeded deaths over live processes, as many as one likes: ``python benchmarks/faults.py --schedules 200 --json OUT``.

Each schedule kills (or stops) one worker at one named safepoint, with a drop and a restore under way; see
``jettison.live.fault_schedules`` for what is checked. Exit code 1 if anything was lost, repeated, wrong or leaked.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import logging
import tempfile
import time
from pathlib import Path

from jettison.device.model.create import create_model
from jettison.live.fault_schedules import FaultRounds, RoundReport, Schedule


async def run(first_seed: int, num_schedules: int, model_dir: Path, max_s: float) -> list[RoundReport]:
    """All rounds on one engine, until the time is over."""
    reports: list[RoundReport] = []
    started = time.monotonic()
    async with FaultRounds.running(model_dir) as rounds:
        for seed in range(first_seed, first_seed + num_schedules):
            if time.monotonic() - started > max_s:
                break
            before = time.monotonic()
            report = await rounds.run(Schedule.draw(seed))
            reports.append(report)
            s = report.schedule
            verdict = "; ".join(report.problems) or "ok"
            print(
                f"{seed:5d} worker {s.victim} {s.signal.name} {s.name}:{s.count} reached={report.reached} "
                f"pause {report.longest_pause_ms:.0f} ms, {time.monotonic() - before:.1f} s: {verdict}",
                flush=True,
            )
            if report.problems:
                break
    return reports


def main() -> int:
    """Run and report; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-seconds", type=float, default=float("inf"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.basicConfig(level="CRITICAL")
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = Path(scratch) / "model"
        create_model(
            model_dir, arch="qwen2", layers=4, hidden=32, heads=4, kv_heads=2, seed=5, max_position_embeddings=512,
            std=0.2,
        )
        reports = asyncio.run(run(args.seed, args.schedules, model_dir, args.max_seconds))
    reached = collections.Counter(r.schedule.name for r in reports if r.reached)
    document = {
        "schedules": len(reports),
        "reached_safepoint": sum(reached.values()),
        "reached_by_name": dict(sorted(reached.items())),
        "stopped_not_killed": sum(r.schedule.signal.name == "SIGSTOP" for r in reports),
        "tokens_compared": sum(r.num_tokens for r in reports),
        "longest_pause_ms": max((r.longest_pause_ms for r in reports), default=0.0),
        "problems": [p for r in reports for p in r.problems],
    }
    print(json.dumps(document, indent=2))
    if args.json is not None:
        args.json.write_text(json.dumps(document, indent=2) + "\n")
    return 1 if document["problems"] else 0


if __name__ == "__main__":
    raise SystemExit(main())

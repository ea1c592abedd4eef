"""Seeded deaths over live processes, as many as one likes: ``python -m benchmarks moves deaths --schedules 200``.

Each schedule kills (or stops) one worker at one named failpoint, with drops and restores under way; see
``live.verify.fault_rounds`` for what is checked. ``--rows FILE`` keeps one line a schedule and adds to those
that are there, so that many schedules can be run in several parts; the summary is always of the whole file. ``--names``
has only these places in turn, ``--moves`` those of migrations, of going to sleep and of waking, at both ends, and
``--offline`` those of offline work (checkpoints, what comes back, steps given up), which the others do not have. Exit
code 1 if anything was lost, repeated, wrong or leaked.
"""

from __future__ import annotations

import asyncio
import collections
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.shared import REPOSITORY, SERVING, Row, keep, parse, print_block
from jettison.device.model.create import create_model
from jettison.live.verify.fault_rounds import FaultRounds, RoundReport
from jettison.live.verify.fault_schedules import MOVES, PLACES
from jettison.live.worker.failpoints import OFFLINE_NAMES

sys.path.insert(0, str(REPOSITORY / "tests" / "live" / "verify"))

from drawn_schedules import drawn_schedule


async def run(
    seeds: Iterable[int], instances: int, model_dir: Path, max_s: float, note: Callable[[Row], None],
    names: Sequence[str] = (),
) -> None:
    """All rounds on one engine, until the time is over or something is wrong. ``note`` is given each row at once."""
    started = time.monotonic()
    async with FaultRounds.running(model_dir, instances=instances) as rounds:
        for seed in seeds:
            before = time.monotonic()
            if before - started > max_s:
                break
            report = await rounds.run(drawn_schedule(seed, instances, names))
            note(as_row(report, instances))
            print(f"{report.schedule} {time.monotonic() - before:.1f} s: {report.problems or 'ok'}", flush=True)
            if report.problems:
                break


def as_row(report: RoundReport, instances: int) -> Row:
    """What is kept of a round."""
    s = report.schedule
    return {
        "seed": s.seed, "instances": instances, "victim": s.victim, "name": s.name, "count": s.count,
        "signal": s.signal.name, "wake": str(s.wake), "mode": str(s.mode), "pulls": s.pulls, "source": str(s.source),
        "reached": report.reached, "phases": list(report.phases), "tokens": report.num_tokens,
        "requests": len(report.requests), "offline_work": report.offline_work,
        "pause_ms": round(report.longest_pause_ms, 1), "problems": report.problems,
    }  # fmt: skip


def summary(rows: Sequence[Row]) -> dict[str, object]:
    """Counts over all rows; pauses of kills and of stops apart (those wait for the heartbeat's timeout)."""
    counts = collections.Counter(f"{r['name']}" for r in rows)
    reached = collections.Counter(f"{r['name']}" for r in rows if r["reached"])
    phases = collections.Counter(phase for r in rows for phase in r["phases"])  # type: ignore[attr-defined]
    offline_work: collections.Counter[str] = collections.Counter()
    for row in rows:
        offline_work.update(row.get("offline_work", {}))  # type: ignore[call-overload]
    pauses = {
        "kill": [r["pause_ms"] for r in rows if r["signal"] == "SIGKILL"],
        "stop": [r["pause_ms"] for r in rows if r["signal"] == "SIGSTOP" and r["wake"] != "soon"],
        "short_stop": [r["pause_ms"] for r in rows if r["wake"] == "soon"],
    }
    return {
        "schedules": len(rows),
        "seeds": [min(r["seed"] for r in rows), max(r["seed"] for r in rows)] if rows else [],  # type: ignore[type-var]
        "by_instances": dict(collections.Counter(f"{r['instances']}" for r in rows)),
        "reached_failpoint": sum(reached.values()),
        "reached_by_name": {name: f"{reached[name]} of {num}" for name, num in sorted(counts.items())},
        "phases_of_moves_at_death": dict(sorted(phases.items())),
        "stopped": dict(collections.Counter(f"woken {r['wake']}" for r in rows if r["signal"] == "SIGSTOP")),
        "by_exchange_mode": dict(collections.Counter(f"{r['mode']}" for r in rows)),
        "with_pulls": sum(bool(r["pulls"]) for r in rows),
        "offline_work": dict(offline_work),
        "requests": sum(r["requests"] for r in rows),  # type: ignore[misc]
        "tokens_compared": sum(r["tokens"] for r in rows),  # type: ignore[misc]
        "pause_ms_median_max": {
            kind: [statistics.median(values), max(values)] for kind, values in pauses.items() if values  # type: ignore[type-var]
        },
        "problems": [p for r in rows for p in r["problems"]],  # type: ignore[attr-defined]
    }


def main() -> int:
    args = parse(
        __doc__, schedules=20, seed=0, instances=2, names=(None, {"default": (), "nargs": "+", "choices": PLACES}),
        moves=(None, {"action": "store_const", "dest": "names", "const": MOVES}),
        offline=(None, {"action": "store_const", "dest": "names", "const": OFFLINE_NAMES}),
        max_seconds=(float("inf"), {"type": float}), rows=Path,
    )  # fmt: skip
    logging.basicConfig(level="CRITICAL")
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = Path(scratch) / "model"
        create_model(
            model_dir, arch="qwen2", layers=4, hidden=32, heads=4, kv_heads=2, seed=5, max_position_embeddings=512,
            std=0.2,
        )
        seeds = range(args.seed, args.seed + args.schedules)
        kept = args.rows or Path(scratch) / "rows"
        with kept.open("a", buffering=1) as file:
            def note(row: Row) -> None:
                print(json.dumps(row), file=file)

            asyncio.run(run(seeds, args.instances, model_dir, args.max_seconds, note, args.names))
        document = summary([json.loads(line) for line in kept.read_text().splitlines()])
    print_block("faults", document)
    print(json.dumps(document, indent=2))
    keep(args.json, document, *SERVING)
    return 1 if document["problems"] else 0

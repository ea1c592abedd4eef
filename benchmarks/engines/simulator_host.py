"""The parent's side of a comparison of simulators: the same requests in each one's format, processes in turn, one core.

A simulator is a command that prints one JSON object (``simulator_child.py``, or ``simulator.py --here``).
"""

from __future__ import annotations

import csv
import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jettison.cost.model import CostModel
from jettison.workload.traces import TraceRow

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Simulator:
    """How to run one size of one simulator."""

    name: str
    command: Sequence[str]
    models: str
    """What is in it, in a phrase."""
    own_packages: bool = False
    """It runs in another environment: our PYTHONPATH is not for it."""


@dataclass
class Outcome:
    """All rounds of one simulator at one size."""

    answers: list[dict[str, Any]] = field(default_factory=list)
    stopped: str | None = None
    """Why there is no time: it was too slow, or its own last words."""

    def row(self, simulator: Simulator, instances: int, requests: int) -> dict[str, Any]:
        """Median of the wall times, peak over the rounds, and whatever else the last answer holds."""
        row: dict[str, Any] = {"simulator": simulator.name, "instances": instances, "requests": requests}
        if not self.answers:
            return {**row, "wall_s": None, "stopped": self.stopped, "models": simulator.models}
        walls = [answer["wall_s"] for answer in self.answers]
        last = {key: value for key, value in self.answers[-1].items() if key not in ("wall_s", "peak_mib")}
        wall_s = statistics.median(walls)
        peak_mib = max(answer["peak_mib"] for answer in self.answers)
        return {**row, "wall_s": wall_s, "walls_s": walls, "requests_per_s": requests / wall_s, "peak_mib": peak_mib,
                **last, "stopped": self.stopped, "models": simulator.models}  # fmt: skip


def run(command: Sequence[str], core: int, limit_s: float, own_packages: bool = False) -> dict[str, Any]:
    """The JSON object that it prints. Raises TimeoutError (it was ended), RuntimeError with its last line of error."""
    environ = {name: value for name, value in os.environ.items() if not (own_packages and name == "PYTHONPATH")}
    pinned = ["taskset", "-c", str(core), *command]
    try:
        done = subprocess.run(pinned, capture_output=True, text=True, timeout=limit_s, env=environ)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"ended after {limit_s:.0f} s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise RuntimeError(said[-1][:300])
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def run_rounds(simulators: Sequence[Simulator], num_rounds: int, core: int, limit_s: float) -> dict[str, Outcome]:
    """In turn, A B A B. One that took more than its part of ``limit_s``, or failed, is not run again."""
    outcomes = {simulator.name: Outcome() for simulator in simulators}
    for _ in range(num_rounds):
        for simulator in simulators:
            outcome = outcomes[simulator.name]
            slow = outcome.answers and outcome.answers[0]["wall_s"] * num_rounds > limit_s
            if outcome.stopped or slow:
                continue
            try:
                outcome.answers.append(run(simulator.command, core, limit_s, simulator.own_packages))
            except (TimeoutError, RuntimeError) as error:
                outcome.stopped = str(error)
    return outcomes


def adapter(python: str, script: str, settings: dict[str, Any]) -> list[str]:
    """The command of an adapter beside this file."""
    return [python, str(HERE / script), json.dumps(settings)]


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """As Markdown."""
    print(
        "| simulator | instances | requests | wall, s | requests/s | processor, s | peak MiB | P99 TTFT, s | models |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        told = "; ".join([row["models"], *row.get("notes", ())])
        if row["wall_s"] is None:
            figures = f"{row['stopped']} | | | | "
        else:
            figures = f"{row['wall_s']:.2f} | {row['requests_per_s']:,.0f} | {row['processor_s']:.2f} | "
            figures += f"{row['peak_mib']:,} | {row['ttft_p99_s']:.3f}"
        print(f"| {row['simulator']} | {row['instances']:,} | {row['requests']:,} | {figures} | {told} |", flush=True)


# --- the requests and the step times, for others ---------------------------------------------------------------


def write_mooncake(path: Path, rows: Sequence[TraceRow], block_tokens: int) -> None:
    """JSON lines of Mooncake's traces: milliseconds, and one hash a block of the prompt. No two prompts share any."""
    first = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            beyond = first + -(-row.input_tokens // block_tokens)
            line = {"timestamp": row.arrival_s * 1e3, "input_length": row.input_tokens,
                    "output_length": row.output_tokens, "hash_ids": list(range(first, beyond))}  # fmt: skip
            file.write(json.dumps(line) + "\n")
            first = beyond


def write_vidur(path: Path, rows: Sequence[TraceRow]) -> None:
    """Vidur's trace-replay CSV: seconds and tokens."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("arrived_at", "num_prefill_tokens", "num_decode_tokens"))
        writer.writerows((row.arrival_s, row.input_tokens, row.output_tokens) for row in rows)


def write_profile(path: Path, cost: CostModel, max_batch_tokens: int, num_kv_tokens: int, max_context: int) -> None:
    """Our cost model as the mocker's table of step times, ms: prompts by tokens; decodes by all KV and mean context."""
    prompts = np.linspace(1, max_batch_tokens, 129)
    kv, contexts = np.linspace(0, num_kv_tokens, 101), np.linspace(1, max_context, 129)

    def decode_ms(num_kv: float, context: float) -> float:
        batch = max(1, round(num_kv / context))
        return 1e3 * cost.totals_cost_s(batch, num_kv, round(num_kv), num_samples=batch)

    np.savez(
        path, prefill_isl=prompts, prefill_ttft_ms=[1e3 * cost.recompute_cost_s(round(n)) for n in prompts],
        decode_active_kv_tokens=kv, decode_context_length=contexts,
        decode_itl=np.array([[decode_ms(num_kv, context) for context in contexts] for num_kv in kv]),
    )  # fmt: skip

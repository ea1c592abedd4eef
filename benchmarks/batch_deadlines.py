"""Live batches with completion windows beside a chat, while an instance sleeps until a deadline needs it.

    python benchmarks/batch_deadlines.py --seconds 20 --json batch_deadlines.json

Two instances of a small model. First three batches are computed one after the other with both awake, each sized to take
``--seconds`` or so: that says what all awake need. Then a server with ``--sleep auto`` gets the same batches, each once
only one instance is awake, with windows of 1.15, 1.4 and 2 times that. Judged: every batch is completed, none of its
lines expired. The margin is thin where others use the machine, who are not the same for both.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
from engines.weights import Shape, make_folder
from evidence import LIVE, write_result
from interactive_beside_batch import CHAT
from peers import machine

from jettison.live.experiments.server_process import ServerProcess
from jettison.workload.client import ReplayOptions, replay_sync
from jettison.workload.prompts import PromptMaker
from jettison.workload.synthetic import SyntheticSpec, generate

SMALL = Shape("qwen3-small", 6, 256, 4, 2, 64, 768, 512)
FACTORS = (1.15, 1.4, 2.0)
SIZES = ((120, 60), (300, 40), (60, 120))
"""Tokens of prompts and answers of each batch."""
POLL_S = 0.2
LONGEST_S = 120.0


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="that a batch takes with all awake, about")
    parser.add_argument("--rate", type=float, default=0.3, help="chat requests a second")
    parser.add_argument("--json", type=Path, default=Path("batch_deadlines.json"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="jettison-deadlines-") as name:
        rows = measure(Path(name), args)
    for row in rows:
        print(f"{row['lines']} lines: all awake {row['all_awake_s']:.1f} s, window {row['window_s']} s "
              f"({row['factor']:.2f}), {row['status']} after {row['took_s']:.1f} s, {row['late_lines']} late, "
              f"{row['wakes']} wakes, {row['awake_mean']:.2f} awake on average", flush=True)
    late = sum(row["late_lines"] for row in rows)
    print("none late" if not late else f"{late} LINES LATE")
    setting = {name: value for name, value in vars(args).items() if name != "json"} | {"machine": machine()}
    document = {"benchmark": "batch_deadlines", "setting": setting, "rows": rows, "holds": not late}
    write_result(args.json, document, *LIVE)


def measure(folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All batches, with all awake and then not."""
    model_dir = make_folder(folder, SMALL, "float32")
    flags: dict[str, object] = {
        "instances": 2, "num_threads": 1, "memory": "256MiB", "max_num_seqs": 8, "max_model_len": 1024,
    }  # fmt: skip
    awake = flags | {"batch_dir": folder / "awake"}
    with ServerProcess(model_dir, awake, folder / "awake.log") as server, chat(server.url, args.rate):
        rows = [all_awake(server, model_dir.name, size, args.seconds) for size in SIZES]
    for row, factor in zip(rows, FACTORS, strict=True):
        sleepy = flags | {
            "batch_dir": folder / f"sleepy-{factor}", "sleep": "auto", "sleep_after_s": 2, "min_awake": 1,
        }  # fmt: skip
        with ServerProcess(model_dir, sleepy, folder / "sleepy.log") as server, chat(server.url, args.rate):
            run_batch(server, model_dir.name, (row["prompt_tokens"], row["answer_tokens"]), 8, "24h")
            meet(server, model_dir.name, row, factor)
    return rows


@contextmanager
def chat(url: str, rate: float) -> Iterator[None]:
    """Someone asks now and then, until the end."""
    is_over = threading.Event()

    def ask() -> None:
        seed = 0
        while not is_over.is_set():
            load = generate(SyntheticSpec("chat", rate, 10.0, **CHAT), seed)
            if load.rows:
                replay_sync(url, load, ReplayOptions(seed=seed, prompts=PromptMaker(seed=seed), observe=False))
            seed += 1

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    try:
        yield
    finally:
        is_over.set()
        asking.join(timeout=60.0)


def all_awake(server: ServerProcess, model: str, size: tuple[int, int], seconds: float) -> dict[str, Any]:
    """How many lines take about so long, and how long they really do."""
    few = run_batch(server, model, size, 48, "24h")
    num_lines = max(48, round(48 * seconds / few["took_s"]))
    came = run_batch(server, model, size, num_lines, "24h")
    return {"prompt_tokens": size[0], "answer_tokens": size[1], "lines": num_lines, "all_awake_s": came["took_s"]}


def meet(server: ServerProcess, model: str, row: dict[str, Any], factor: float) -> None:
    """The same batch once only one is awake, with so many times as long."""
    until_s = time.monotonic() + 60.0
    while metric(server, "jettison:devices_awake") > 1.0 and time.monotonic() < until_s:
        time.sleep(POLL_S)
    row |= {"factor": factor, "window_s": math.ceil(factor * row["all_awake_s"]),
            "awake_before": metric(server, "jettison:devices_awake")}  # fmt: skip
    size = row["prompt_tokens"], row["answer_tokens"]
    before = metric(server, "jettison:wakes_total")
    row |= run_batch(server, model, size, row["lines"], f"{row['window_s']}s")
    row["wakes"] = metric(server, "jettison:wakes_total") - before


def run_batch(
    server: ServerProcess, model: str, size: tuple[int, int], num_lines: int, window: str
) -> dict[str, Any]:
    """From its creation until it is over; how many are awake meanwhile."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    lines = (
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions",
         "body": {"model": model, "prompt": [1 + (7 * n + i) % 500 for i in range(size[0])], "max_tokens": size[1],
                  "temperature": 0, "ignore_eos": True}}
        for n in range(num_lines)
    )  # fmt: skip
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("lines.jsonl", io.BytesIO(content)), purpose="batch")
    begun_s, awake = time.monotonic(), []
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window=window,  # type: ignore[arg-type]
    )
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        if time.monotonic() - begun_s > LONGEST_S:
            client.batches.cancel(batch.id)
        time.sleep(POLL_S)
        awake.append(metric(server, "jettison:devices_awake"))
        batch = client.batches.retrieve(batch.id)
    took_s, counts = time.monotonic() - begun_s, batch.request_counts
    done = 0 if counts is None else counts.completed
    return {"status": batch.status, "took_s": took_s, "late_lines": num_lines - done,
            "awake_mean": sum(awake) / max(1, len(awake)), "awake_max": max(awake, default=0.0)}  # fmt: skip


def metric(server: ServerProcess, name: str) -> float:
    """One of the server's, summed over its labels."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


if __name__ == "__main__":
    main()

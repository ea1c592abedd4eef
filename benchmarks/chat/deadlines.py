"""Live batches with completion windows beside a chat, while an instance sleeps until a deadline needs it.

    python -m benchmarks chat deadlines --seconds 20 --json batch_deadlines.json

Two instances of a small model. First three batches are computed one after the other with both awake, each sized to take
``--seconds`` or so: that says what all awake need. Then a server with ``--sleep auto`` gets the same batches, each once
only one instance is awake, with windows of 1.15, 1.4 and 2 times that. Judged: every batch is completed, none of its
lines expired. The margin is thin where others use the machine, who are not the same for both.
"""

from __future__ import annotations

import math
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.chat.interactive import CHAT
from benchmarks.engines.weights import Shape, make_folder
from benchmarks.servers import Batch, ServerProcess, batch_lines, completion, metrics, replayed
from benchmarks.shared import LIVE, Namespace, Row, keep, machine, parse, print_block, print_verdicts, settings_of
from jettison.workload.synthetic import SyntheticSpec, generate

SMALL = Shape("qwen3-small", 6, 256, 4, 2, 64, 768, 512)
FACTORS = (1.15, 1.4, 2.0)
SIZES = ((120, 60), (300, 40), (60, 120))
"""Tokens of prompts and answers of each batch."""
POLL_S = 0.2
LONGEST_S = 120.0


def main() -> None:
    args = parse(
        __doc__, seconds=(20.0, "that a batch takes with all awake, about"), rate=(0.3, "chat requests a second"),
        json=Path("batch_deadlines.json"),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="jettison-deadlines-") as name:
        rows = measure(Path(name), args)
    print_block("batch_deadlines", {"rows": rows})
    late = sum(row["late_lines"] for row in rows)
    print_verdicts([(not late, f"{late} lines late")])
    setting = settings_of(args) | {"machine": machine()}
    keep(args.json, {"setting": setting, "rows": rows, "holds": not late}, *LIVE)


def measure(folder: Path, args: Namespace) -> list[Row]:
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
    """A client asks now and then, until the end."""
    is_over = threading.Event()

    def ask() -> None:
        seed = 0
        while not is_over.is_set():
            load = generate(SyntheticSpec("chat", rate, 10.0, **CHAT), seed)
            if load.rows:
                replayed(url, load, seed)
            seed += 1

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    try:
        yield
    finally:
        is_over.set()
        asking.join(timeout=60.0)


def all_awake(server: ServerProcess, model: str, size: tuple[int, int], seconds: float) -> Row:
    """How many lines take about so long, and how long they really do."""
    few = run_batch(server, model, size, 48, "24h")
    num_lines = max(48, round(48 * seconds / few["took_s"]))
    came = run_batch(server, model, size, num_lines, "24h")
    return {"prompt_tokens": size[0], "answer_tokens": size[1], "lines": num_lines, "all_awake_s": came["took_s"]}


def meet(server: ServerProcess, model: str, row: Row, factor: float) -> None:
    """The same batch once only one is awake, with so many times as long."""
    until_s = time.monotonic() + 60.0
    while awake_at(server) > 1.0 and time.monotonic() < until_s:
        time.sleep(POLL_S)
    row |= {"factor": factor, "window_s": math.ceil(factor * row["all_awake_s"]),
            "awake_before": awake_at(server)}  # fmt: skip
    size = row["prompt_tokens"], row["answer_tokens"]
    (before,) = metrics(server.url, "jettison:wakes_total").values()
    row |= run_batch(server, model, size, row["lines"], f"{row['window_s']}s")
    row["wakes"] = sum(metrics(server.url, "jettison:wakes_total").values()) - before


def awake_at(server: ServerProcess) -> float:
    """Instances."""
    return sum(metrics(server.url, "jettison:devices_awake").values())


def run_batch(server: ServerProcess, model: str, size: tuple[int, int], num_lines: int, window: str) -> Row:
    """From its creation until it is over; how many are awake meanwhile."""
    prompts = ([1 + (7 * n + i) % 500 for i in range(size[0])] for n in range(num_lines))
    batch = Batch(server.url, batch_lines(completion(model, prompt, size[1]) for prompt in prompts), window)
    begun_s, awake = time.monotonic(), list[float]()
    status = batch.wait(lambda status: status in Batch.ENDED, LONGEST_S, lambda: awake.append(awake_at(server)))
    if status not in Batch.ENDED:
        batch.cancel()
        status = batch.wait(lambda status: status in Batch.ENDED, LONGEST_S)
    took_s, counts = time.monotonic() - begun_s, batch.document.request_counts
    done = 0 if counts is None else counts.completed
    return {"status": status, "took_s": took_s, "late_lines": num_lines - done,
            "awake_mean": sum(awake) / max(1, len(awake)), "awake_max": max(awake, default=0.0)}  # fmt: skip

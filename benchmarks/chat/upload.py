"""What an upload of 200 MB, and the check of its lines, do to the gaps between tokens of a chat.

    python -m benchmarks chat upload --seconds 20 --rounds 3 --json upload_beside_chat.json

One server (a 107M-parameter Qwen3, one compute thread) is asked the same Poisson arrivals in turns: ``alone``,
``again`` (what the machine does by itself), ``upload`` (a process sends files of ``--megabytes``, one after another),
and ``check`` (a batch of such a file is validated, again and again). Each round begins with another one. Every line has
a prompt that is longer than the context: it is parsed, tokenized and refused, and nothing of it reaches the engine.
Judged: the median over rounds of P99 ITL over that of ``alone`` is at most 1.1 for ``upload``, and for ``check``.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Callable
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from benchmarks.chat.interactive import CHAT, WARM_UP
from benchmarks.engines.weights import QWEN3_110M, make_folder
from benchmarks.evidence import LIVE
from benchmarks.servers import Batch, ServerProcess, replayed
from benchmarks.shared import (
    Row,
    in_turn,
    keep,
    machine,
    parse,
    percentiles_ms,
    print_block,
    print_verdicts,
    say,
    settings_of,
)
from jettison.report.results import RunResult
from jettison.workload.synthetic import SyntheticSpec, generate

TURNS = ("alone", "again", "upload", "check")
LIMIT = 1.1
CONTEXT = 1024
NUM_LINES = 48_000
BOUNDARY = "one-file"
HEAD = (
    f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="lines.jsonl"\r\n\r\n'
).encode()
TAIL = f"\r\n--{BOUNDARY}--\r\n".encode()
PIECE_BYTES = 1 << 20


def main() -> None:
    args = parse(
        __doc__, seconds=(20.0, "of arrivals, each turn"), rounds=3, rate=(2.0, "chat requests a second"),
        megabytes=199.0, json=Path("upload_beside_chat.json"),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="jettison-upload-") as name:
        rows = measure(Path(name), args)
    found = verdicts(rows)
    print_block("upload_beside_chat", {"verdicts": found})
    print_verdicts((e["holds"], f"P99 ITL of {e['turn']}, at most {LIMIT}") for e in found if e["holds"] is not None)
    setting = settings_of(args) | {"machine": machine()}
    keep(args.json, {"setting": setting, "rows": rows, "verdicts": found}, *LIVE)


def measure(folder: Path, args: Namespace) -> list[Row]:
    """All turns of all rounds on one server."""
    lines, model_dir = folder / "lines.jsonl", make_folder(folder, QWEN3_110M)
    num_bytes = write_lines(lines, model_dir.name, int(args.megabytes * 1e6))
    flags: dict[str, object] = {
        "num_threads": 1, "dtype": "bfloat16", "memory": "1GiB", "max_model_len": CONTEXT,
        "batch_dir": folder / "batches",
    }  # fmt: skip
    rows: list[Row] = []
    with ServerProcess(model_dir, flags, folder / "server.log") as server:
        replayed(server.url, WARM_UP)
        file_id = send_file(server.port, lines)
        for number in range(args.rounds):
            for turn in in_turn(TURNS, number):
                with beside(turn, server.port, lines, file_id) as count:
                    run = chat(server.url, args, number)
                    num_times = count()
                rows.append(row_of(turn, number, run, num_times, num_bytes))
                say(rows[-1])
    return rows


def chat(url: str, args: Namespace, seed: int) -> RunResult:
    """The round's arrivals. Raises JettisonError where one is not answered."""
    load = generate(SyntheticSpec("chat", args.rate, args.seconds, **CHAT), seed)
    return replayed(url, load, seed)


def row_of(turn: str, number: int, run: RunResult, num_times: float, num_bytes: int) -> Row:
    """As it is stored."""
    return {
        "round": number, "turn": turn, "num_gaps": run.itl_s.count, **percentiles_ms(run.itl_s, "itl", 50, 99),
        **percentiles_ms(run.ttft_s, "ttft", 99), "files": num_times,
        "megabytes_per_s": num_times * num_bytes / 1e6 / run.duration_s,
    }  # fmt: skip


def verdicts(rows: list[Row]) -> list[Row]:
    """Of each turn beside ``alone``: the median over rounds, and whether it holds where that is judged."""
    gaps = {(row["turn"], row["round"]): row["itl_p99_ms"] for row in rows}
    found = []
    for turn in TURNS[1:]:
        ratios = [gap / gaps["alone", number] for (name, number), gap in gaps.items() if name == turn]
        ratio = statistics.median(ratios)
        holds = None if turn == "again" else ratio <= LIMIT
        found.append({"turn": turn, "ratio": ratio, "lowest": min(ratios), "highest": max(ratios), "holds": holds})
    return found


# --- what goes on beside it


@contextmanager
def beside(turn: str, port: int, lines: Path, file_id: str) -> Any:
    """A process that uploads or has lines checked until the end; yields how many files that were, in part, too."""
    work: dict[str, Callable[..., None]] = {"upload": keep_uploading, "check": keep_checking}
    if turn not in work:
        yield lambda: 0.0
        return
    context = multiprocessing.get_context("spawn")
    is_over, done = context.Event(), context.Value("d", 0.0)
    process = context.Process(target=work[turn], args=(port, lines, file_id, is_over, done), daemon=True)
    process.start()
    try:
        yield lambda: done.value
    finally:
        is_over.set()
        process.join()


def keep_uploading(port: int, lines: Path, _: str, is_over: Event, done: Any) -> None:
    """Send the file and delete it again."""
    while not is_over.is_set():
        file_id = send_file(port, lines, done)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        connection.request("DELETE", f"/v1/files/{file_id}")
        answer_of(connection)


def keep_checking(port: int, _: Path, file_id: str, is_over: Event, done: Any) -> None:
    """Have the file's lines checked; the batch fails, for none of them can run."""
    while not is_over.is_set():
        batch = Batch(f"http://127.0.0.1:{port}", file_id)
        if batch.wait(lambda status: status != "validating" or is_over.is_set(), 600.0) == "validating":
            batch.cancel()
            return
        assert batch.document.errors.data[0].code == "no_valid_lines", batch.document.errors
        done.value += 1.0


def write_lines(path: Path, model: str, num_bytes: int) -> int:
    """Lines whose prompts are longer than the context, together so many bytes; returns how many they are."""
    def line(number: int, prompt: str) -> str:
        body = {"model": model, "prompt": prompt}
        return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}) + "\n"

    num_chars = max(2 * CONTEXT, num_bytes // NUM_LINES - len(line(NUM_LINES, "")))
    count = num_bytes // len(line(NUM_LINES, "x" * num_chars))
    path.write_text("".join(line(n, f"{n} " + "x" * (num_chars - len(f"{n} "))) for n in range(count)))
    return path.stat().st_size


def send_file(port: int, path: Path, done: Any = None) -> str:
    """Upload a file as it is read; its id. ``done`` grows by the part that was sent."""
    size = path.stat().st_size
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.putrequest("POST", "/v1/files")
    connection.putheader("Content-Type", f"multipart/form-data; boundary={BOUNDARY}")
    connection.putheader("Content-Length", str(len(HEAD) + size + len(TAIL)))
    connection.endheaders()
    connection.send(HEAD)
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            connection.send(piece)
            if done is not None:
                done.value += len(piece) / size
    connection.send(TAIL)
    return str(answer_of(connection)["id"])


def answer_of(connection: http.client.HTTPConnection) -> Any:
    """Raises RuntimeError where it is not 200."""
    response = connection.getresponse()
    text = response.read()
    connection.close()
    if response.status != 200:
        raise RuntimeError(f"HTTP {response.status}: {text[:300]!r}")
    return json.loads(text)

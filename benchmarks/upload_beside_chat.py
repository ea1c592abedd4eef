"""What an upload of 200 MB, and the check of its lines, do to the gaps between tokens of a chat.

    python benchmarks/upload_beside_chat.py --seconds 20 --rounds 3 --json upload_beside_chat.json

One server (a 107M-parameter Qwen3, one compute thread) is asked the same Poisson arrivals in turns: ``alone``,
``again`` (what the machine does by itself), ``upload`` (a process sends files of ``--megabytes``, one after another),
and ``check`` (a batch of such a file is validated, again and again). Each round begins with another one. Every line has
a prompt that is longer than the context: it is parsed, tokenized and refused, and nothing of it reaches the engine.
Judged: the median over rounds of P99 ITL over that of ``alone`` is at most 1.1 for ``upload``, and for ``check``.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from engines.weights import QWEN3_110M, make_folder
from evidence import LIVE, write_result
from interactive_beside_batch import CHAT, warm
from peers import machine

from jettison.live.experiments.server_process import ServerProcess
from jettison.report.failures import check_answered
from jettison.report.results import RunResult
from jettison.workload.client import ReplayOptions, replay_sync
from jettison.workload.prompts import PromptMaker
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
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals, each turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=2.0, help="chat requests a second")
    parser.add_argument("--megabytes", type=float, default=199.0)
    parser.add_argument("--json", type=Path, default=Path("upload_beside_chat.json"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="jettison-upload-") as name:
        rows = measure(Path(name), args)
    found = verdicts(rows)
    for line in found:
        print(f"{line['turn']:8} P99 ITL {line['ratio']:.3f} of alone ({line['lowest']:.3f} to {line['highest']:.3f})"
              + ("" if line["holds"] is None else ": holds" if line["holds"] else ": DOES NOT HOLD"))  # fmt: skip
    setting = {name: value for name, value in vars(args).items() if name != "json"} | {"machine": machine()}
    document = {"benchmark": "upload_beside_chat", "setting": setting, "rows": rows, "verdicts": found}
    write_result(args.json, document, *LIVE)


def measure(folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All turns of all rounds on one server."""
    lines, model_dir = folder / "lines.jsonl", make_folder(folder, QWEN3_110M)
    num_bytes = write_lines(lines, model_dir.name, int(args.megabytes * 1e6))
    flags: dict[str, object] = {
        "num_threads": 1, "dtype": "bfloat16", "memory": "1GiB", "max_model_len": CONTEXT,
        "batch_dir": folder / "batches",
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    with ServerProcess(model_dir, flags, folder / "server.log") as server:
        warm(server.url)
        file_id = send_file(server.port, lines)
        for number in range(args.rounds):
            for turn in (*TURNS[number % len(TURNS) :], *TURNS[: number % len(TURNS)]):
                with beside(turn, server.port, lines, file_id) as count:
                    run = chat(server.url, args, number)
                    num_times = count()
                rows.append(row_of(turn, number, run, num_times, num_bytes))
                print(rows[-1], flush=True)
    return rows


def chat(url: str, args: argparse.Namespace, seed: int) -> RunResult:
    """The round's arrivals. Raises JettisonError where one is not answered."""
    load = generate(SyntheticSpec("chat", args.rate, args.seconds, **CHAT), seed)
    run = replay_sync(url, load, ReplayOptions(seed=seed, prompts=PromptMaker(seed=seed), observe=False))
    check_answered([run])
    return run


def row_of(turn: str, number: int, run: RunResult, num_times: float, num_bytes: int) -> dict[str, Any]:
    """As it is stored."""
    return {
        "round": number, "turn": turn, "itl_p50_ms": 1e3 * (run.itl_s.p50 or 0.0), "num_gaps": run.itl_s.count,
        "itl_p99_ms": 1e3 * (run.itl_s.p99 or 0.0), "ttft_p99_ms": 1e3 * (run.ttft_s.p99 or 0.0),
        "files": num_times, "megabytes_per_s": num_times * num_bytes / 1e6 / run.duration_s,
    }  # fmt: skip


def verdicts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
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
        ask(port, "DELETE", f"/v1/files/{file_id}")


def keep_checking(port: int, _: Path, file_id: str, is_over: Event, done: Any) -> None:
    """Have the file's lines checked; the batch fails, for none of them can run."""
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    while not is_over.is_set():
        batch = ask(port, "POST", "/v1/batches", json.dumps(body).encode(), "application/json")
        while batch["status"] == "validating":
            if is_over.wait(0.2):
                ask(port, "POST", f"/v1/batches/{batch['id']}/cancel")
                return
            batch = ask(port, "GET", f"/v1/batches/{batch['id']}")
        assert batch["errors"]["data"][0]["code"] == "no_valid_lines", batch["errors"]
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


def ask(port: int, method: str, path: str, body: bytes | None = None, kind: str = "") -> Any:
    """One request, and its JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request(method, path, body, {"Content-Type": kind} if kind else {})
    return answer_of(connection)


def answer_of(connection: http.client.HTTPConnection) -> Any:
    """Raises RuntimeError where it is not 200."""
    response = connection.getresponse()
    text = response.read()
    connection.close()
    if response.status != 200:
        raise RuntimeError(f"HTTP {response.status}: {text[:300]!r}")
    return json.loads(text)


if __name__ == "__main__":
    main()

"""Serve chat alone, then with a batch beside it: what the batch got done, and what it cost the chat.

    .venv/bin/python examples/03_batch_beside_chat.py

Makes a small random model, starts one server, replays ten seconds of chat with ``jettison bench``, sends a file of
requests to the Batches API, and replays the same chat again while the batch runs, which takes what the chat leaves.
To see a batch that only goes behind in the queue, write ``priority`` for ``harvest`` in SERVE.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

PORT = 8013
URL = f"http://127.0.0.1:{PORT}"
JETTISON = [sys.executable, "-m", "jettison"]
SERVE = ["--offline", "harvest", "--memory", "512MiB", "--port", str(PORT), "--log-level", "warning"]
CHAT = ["--workload", "burst", "--duration", "10", "--length-scale", "0.5"]
NUM_LINES = 2000
BOUNDARY = "one-file"


def main() -> None:
    """Create, serve, measure alone, measure beside a batch, stop."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model_dir = folder / "tiny"
        subprocess.run([*JETTISON, "model", "create", str(model_dir)], check=True)
        batches = ["--batch-dir", str(folder / "batches")]
        server = subprocess.Popen([*JETTISON, "serve", str(model_dir), *batches, *SERVE])
        try:
            wait_until_ready(server)
            alone = chat(folder / "alone.json")
            batch = start_batch()
            beside = chat(folder / "beside.json")
            seen = get(f"/v1/batches/{batch}")
            print_beside(alone, beside)
            done = seen["request_counts"]["completed"]
            print(f"meanwhile the batch finished {done} of {NUM_LINES} requests, and is {seen['status']}")
            print("stopped by hand it is", stop_batch(batch))
        finally:
            server.terminate()
            server.wait()


def chat(out: Path) -> dict[str, Any]:
    """Replay the chat; what it measured."""
    subprocess.run([*JETTISON, "bench", "--url", URL, *CHAT, "--json", str(out)], check=True, stdout=subprocess.DEVNULL)
    (run,) = json.loads(out.read_text(encoding="utf-8"))["runs"]
    return run


def start_batch() -> str:
    """Upload a file of long prompts, and ask for it to be computed."""
    body = {"model": "tiny", "max_tokens": 32}
    lines = [
        json.dumps({
            "custom_id": f"line-{i}", "method": "POST", "url": "/v1/completions",
            "body": {**body, "prompt": f"Report {i}: " + "and so on " * 40},
        })
        for i in range(NUM_LINES)
    ]  # fmt: skip
    file = post("/v1/files", form("\n".join(lines)), f"multipart/form-data; boundary={BOUNDARY}")
    wanted = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = post("/v1/batches", json.dumps(wanted).encode())
    while get(f"/v1/batches/{batch['id']}")["status"] == "validating":
        time.sleep(0.1)
    return str(batch["id"])


def stop_batch(batch: str) -> str:
    """Cancel it, which keeps what is done; the state in which it ends."""
    try:
        post(f"/v1/batches/{batch}/cancel", b"")
    except urllib.error.HTTPError as error:
        if error.code != 400:  # that is the answer where it has ended by itself
            raise
    while (status := get(f"/v1/batches/{batch}")["status"]) in ("cancelling", "finalizing"):
        time.sleep(0.1)
    return str(status)


def form(text: str) -> bytes:
    """A file as a browser would send it."""
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n',
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="lines.jsonl"\r\n\r\n{text}\r\n',
        f"--{BOUNDARY}--\r\n",
    ]
    return "".join(parts).encode()


def print_beside(alone: dict[str, Any], beside: dict[str, Any]) -> None:
    """Latencies of the chat, both times."""
    print(f"{'':22}{'alone':>10}{'with batch':>12}")
    for label, key, which in (("first token, median", "ttft_s", "p50"), ("first token, P99", "ttft_s", "p99"),
                              ("gap of tokens, P99", "itl_s", "p99")):  # fmt: skip
        print(f"{label:22}{1e3 * alone[key][which]:>7.1f} ms{1e3 * beside[key][which]:>9.1f} ms")


def wait_until_ready(server: subprocess.Popen[bytes]) -> None:
    """Poll /health, which answers 200 once the model is loaded."""
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"{URL}/health"):
                return
        except urllib.error.URLError:  # not listening yet, or 503 while loading
            time.sleep(0.2)
    sys.exit(f"the server left with exit code {server.returncode}")


def get(path: str) -> dict[str, Any]:
    """GET JSON."""
    with urllib.request.urlopen(URL + path) as response:
        return json.load(response)


def post(path: str, body: bytes, content_type: str = "application/json") -> dict[str, Any]:
    """POST, get JSON."""
    request = urllib.request.Request(URL + path, body, headers={"Content-Type": content_type})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


if __name__ == "__main__":
    main()

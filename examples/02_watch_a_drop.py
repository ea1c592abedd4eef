"""Two instances with little memory meet a burst: watch layers being dropped, and coming back.

    .venv/bin/python examples/02_watch_a_drop.py [FOLDER]

Serves a small random model, replays the workload ``burst`` against it with ``jettison bench``, and prints once a
second what ``/metrics`` says. FOLDER (default: ``demo/watch``) gets the bench's figures and its report with plots.
To see the same burst without dropping, write ``recompute`` for ``drop`` in SERVE.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

PORT = 8012
URL = f"http://127.0.0.1:{PORT}"
JETTISON = [sys.executable, "-m", "jettison"]
SERVE = ["--instances", "2", "--memory", "64MiB", "--overload", "drop", "--port", str(PORT), "--log-level", "warning"]
BENCH = ["--workload", "burst", "--seed", "1", "--duration", "60"]
WATCHED = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "drops": "jettison:drops_total",
    "restores": "jettison:restores_total",
}


def main() -> None:
    """Create, serve, replay while watching, stop."""
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "demo/watch")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        model_dir = Path(folder) / "tiny"
        subprocess.run([*JETTISON, "model", "create", str(model_dir)], check=True)
        server = subprocess.Popen([*JETTISON, "serve", str(model_dir), *SERVE])
        try:
            wait_until_ready(server)
            files = ["--json", str(out / "run.json"), "--html", str(out / "report.html")]
            with open(out / "bench.txt", "w", encoding="utf-8") as log:
                bench = subprocess.Popen([*JETTISON, "bench", "--url", URL, *BENCH, *files], stdout=log)
                watch(bench)
            print((out / "bench.txt").read_text(encoding="utf-8"))
            print(f"report: {out / 'report.html'}")
        finally:
            server.terminate()
            server.wait()


def watch(bench: subprocess.Popen[bytes]) -> None:
    """Print the watched metrics once a second while the bench runs."""
    started = time.monotonic()
    print("   time" + "".join(f"{name:>10}" for name in WATCHED))
    while bench.poll() is None:
        values = scrape()
        row = "".join(f"{values.get(metric, 0.0):>10.0f}" for metric in WATCHED.values())
        print(f"{time.monotonic() - started:6.1f}s{row}", flush=True)
        time.sleep(1.0)


def scrape() -> dict[str, float]:
    """``/metrics`` as name -> value, summed over labels."""
    totals: dict[str, float] = {}
    with urllib.request.urlopen(f"{URL}/metrics") as response:
        for line in response.read().decode().splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def wait_until_ready(server: subprocess.Popen[bytes]) -> None:
    """Poll /health, which answers 200 once the model is loaded."""
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"{URL}/health"):
                return
        except urllib.error.URLError:  # not listening yet, or 503 while loading
            time.sleep(0.2)
    sys.exit(f"the server left with exit code {server.returncode}")


if __name__ == "__main__":
    main()

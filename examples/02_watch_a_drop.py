"""Two instances with little memory meet a burst: watch layers being dropped, and coming back.

    .venv/bin/python examples/02_watch_a_drop.py [FOLDER]

Makes the demo's small random model, measures how fast this machine serves it, replays the workload ``burst`` as much
faster or slower with ``jettison bench``, and prints once a second what ``/metrics`` says. FOLDER (default:
``demo/watch``) gets the bench's figures and its report with plots.
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

from jettison.demo.burst import make_setup, plan_load
from jettison.live.experiments.overload import ExperimentSetup, measure_speed

PORT = 8012
URL = f"http://127.0.0.1:{PORT}"
JETTISON = [sys.executable, "-m", "jettison"]
SEED = 1
SERVE = ["--overload", "drop", "--port", str(PORT), "--log-level", "warning"]
BENCH = ["--workload", "burst", "--seed", str(SEED)]
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
        setup = make_setup(Path(folder), SEED)
        print("measuring this machine, to replay the burst at a rate that its memory cannot hold")
        rate = ["--rate-scale", f"{rate_scale(setup):.2f}"]
        memory = [f"--{name.replace('_', '-')}={value}" for name, value in setup.flags().items()]
        server = subprocess.Popen([*JETTISON, "serve", str(setup.model_dir), *memory, *SERVE])
        try:
            wait_until_ready(server)
            files = ["--json", str(out / "run.json"), "--html", str(out / "report.html")]
            with open(out / "bench.txt", "w", encoding="utf-8") as log:
                bench = subprocess.Popen([*JETTISON, "bench", "--url", URL, *rate, *BENCH, *files], stdout=log)
                watch(bench)
            if not scrape().get(WATCHED["drops"]):
                print("nothing was dropped: this machine was faster than when it was measured; try again")
            print((out / "bench.txt").read_text(encoding="utf-8"))
            print(f"report: {out / 'report.html'}")
        finally:
            server.terminate()
            server.wait()


def rate_scale(setup: ExperimentSetup) -> float:
    """By how much the built-in burst has to be faster or slower here: the demo's rule."""
    return plan_load(setup, measure_speed(setup), SEED).rate_scale


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

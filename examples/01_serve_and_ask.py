"""Start a server on a small random model, ask it something over plain HTTP, and stop it.

    .venv/bin/python examples/01_serve_and_ask.py

Uses the command line and HTTP only, as any program in any language could. The model is random, so its answer is
gibberish; the same prompt always gets the same gibberish.
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

PORT = 8011
URL = f"http://127.0.0.1:{PORT}"
JETTISON = [sys.executable, "-m", "jettison"]


def main() -> None:
    """Create, serve, ask, stop."""
    with tempfile.TemporaryDirectory() as folder:
        model_dir = Path(folder) / "tiny"
        subprocess.run([*JETTISON, "model", "create", str(model_dir)], check=True)
        server = subprocess.Popen([*JETTISON, "serve", str(model_dir), "--memory", "256MiB", "--port", str(PORT)])
        try:
            wait_until_ready(server)
            answer = post("/v1/completions", {"prompt": "The ship", "max_tokens": 16, "temperature": 0})
            print("answer:", repr(answer["choices"][0]["text"]))
            print("usage: ", answer["usage"])
        finally:
            server.terminate()  # the server finishes what runs (--shutdown-timeout), then leaves
            server.wait()


def wait_until_ready(server: subprocess.Popen[bytes]) -> None:
    """Poll /health, which answers 200 once the model is loaded."""
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"{URL}/health"):
                return
        except urllib.error.URLError:  # not listening yet, or 503 while loading
            time.sleep(0.2)
    sys.exit(f"the server left with exit code {server.returncode}")


def post(path: str, body: dict[str, object]) -> dict:
    """POST JSON, get JSON. The model's name may be left out only if the server allows it, so ask for it."""
    with urllib.request.urlopen(f"{URL}/v1/models") as response:
        body = {"model": json.load(response)["data"][0]["id"], **body}
    request = urllib.request.Request(
        URL + path, json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)


if __name__ == "__main__":
    main()

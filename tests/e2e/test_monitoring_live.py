"""What operators watch, over a real server: Prometheus scrapes it and answers each query of the dashboard, each metric
of the alerts is there, and ``jettison top`` shows its instances."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml
from e2e_server import MODEL, eventually
from typer.testing import CliRunner

from jettison.cli.main import app

pytestmark = pytest.mark.live

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
WHILE_BATCHES_HAVE_WINDOWS = "jettison:devices_needed_for_deadlines"
RATED_S = 4
"""Rates are taken over so many seconds, for Grafana's minutes."""


@contextmanager
def prometheus(url, folder):
    """Scrapes the server twice a second; the address of its API."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("there is no prometheus (Debian's package)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    host = url.partition("://")[2]
    scrape = {"job_name": "jettison", "scrape_interval": "500ms", "scrape_timeout": "500ms",
              "static_configs": [{"targets": [host]}]}  # fmt: skip
    (folder / "p.yaml").write_text(yaml.safe_dump({"scrape_configs": [scrape]}))
    arguments = [program, f"--config.file={folder / 'p.yaml'}", f"--storage.tsdb.path={folder / 'data'}",
                 f"--web.listen-address={address}", "--log.level=error"]  # fmt: skip
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://{address}"
        finally:
            process.terminate()


def answered(api, query):
    """Samples of the answer, now. No server yet: none."""
    try:
        asked = f"{api}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return json.load(answer)["data"]["result"]
    except (ConnectionError, urllib.error.URLError):
        return []


def test_prometheus_answers_each_query_of_the_dashboard(server, client, tmp_path):
    panels = json.loads((DEPLOY / "grafana" / "jettison.json").read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    queries = [each.replace("$__rate_interval", f"{RATED_S}s").replace("$instance", ".*") for each in asked]
    with prometheus(server.url, tmp_path) as api:
        eventually(lambda: answered(api, "up == 1"), "Prometheus has scraped the server")
        end_s = time.monotonic() + RATED_S / 2
        while time.monotonic() < end_s:
            client.completions.create(model=MODEL, prompt="to be watched", max_tokens=4)
        silent = list(queries)

        def all_answered():
            silent[:] = [query for query in silent if not answered(api, query)]
            return not silent

        eventually(all_answered, f"answers to {silent}", 20)


def test_each_metric_of_the_alerts_is_there(server):
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        exported = set(re.findall(r"^([a-z_]+:\w+)", answer.read().decode(), re.MULTILINE))
    named = set(re.findall(r"\b(?:vllm|jettison):\w+", (DEPLOY / "prometheus" / "alerts.yaml").read_text()))
    assert named - exported == {WHILE_BATCHES_HAVE_WINDOWS}


def test_top_shows_its_instances(server):
    done = CliRunner().invoke(app, ["top", server.url, "--once"], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    assert "ready" in done.output and MODEL in done.output and len(re.findall("group [01]", done.output)) == 2


def test_only_workers_and_what_forks_them_hold_torch(server, client):
    """A hundred MiB and a second of a processor for each process that imports it; one has for all. It has served."""
    client.completions.create(model=MODEL, prompt="hello", max_tokens=2)
    workers = server.worker_pids()
    forkers = {psutil.Process(pid).ppid() for pid in workers}
    holding = {pid for pid in server.pids() if "libtorch" in Path(f"/proc/{pid}/maps").read_text()}
    assert len(workers) == 2 and len(forkers) == 1
    assert holding == workers | forkers

"""Serving beside others: what arrives at a point, and a server as a child that stands still while others work."""

from __future__ import annotations

import statistics
import sys
import urllib.request
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.engines.child_server import ChildServer
from benchmarks.peers.serving import LEAST_REQUESTS, OUTPUTS, POINT_S, PROMPTS, arrivals
from jettison.live.experiments.server_process import free_port

ANSWERS_HEALTH = """
import http.server, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""


@given(rate_per_s=st.floats(0.5, 100.0), seed=st.integers(0, 2**32 - 1))
def test_a_point_is_long_enough_and_its_gaps_are_those_of_its_rate(rate_per_s: float, seed: int) -> None:
    load = arrivals(rate_per_s, seed)
    times = [row.arrival_s for row in load.rows]
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    number = len(load.rows)
    assert number >= LEAST_REQUESTS and number >= round(rate_per_s * POINT_S)
    assert min(gaps) >= 0.0
    assert {row.input_tokens for row in load.rows} == set(PROMPTS)
    assert {row.output_tokens for row in load.rows} == set(OUTPUTS)
    # Ten deviations of the mean of exponential gaps: no seed is that unlucky, a wrong rate is.
    assert abs(statistics.mean(gaps) * rate_per_s - 1.0) < 10.0 / number**0.5


def test_the_rate_stretches_time_and_changes_nothing_else() -> None:
    slow, fast = arrivals(2.0, 7).rows, arrivals(4.0, 7).rows
    assert [row.arrival_s for row in fast] == pytest.approx([row.arrival_s / 2.0 for row in slow])
    assert [row[1:] for row in fast] == [row[1:] for row in slow]


def test_a_child_stands_still_goes_on_and_ends(tmp_path: Path) -> None:
    port = free_port()
    server = ChildServer([sys.executable, "-c", ANSWERS_HEALTH, str(port)], port, tmp_path / "log", {})
    server.launch()
    try:
        server.wait_ready(60.0)
        server.freeze()
        with pytest.raises(OSError):
            urllib.request.urlopen(f"{server.url}/health", timeout=0.3)
        server.thaw()
        with urllib.request.urlopen(f"{server.url}/health", timeout=60.0) as answer:
            assert answer.status == 200
        server.freeze()  # one that stands still must end, too
    finally:
        server.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{server.url}/health", timeout=60.0)


def test_a_child_that_does_not_come_up_says_why(tmp_path: Path) -> None:
    server = ChildServer([sys.executable, "-c", "raise SystemExit('no such model')"], 1, tmp_path / "log", {})
    server.launch()
    with pytest.raises(RuntimeError, match="no such model"):
        server.wait_ready(60.0)

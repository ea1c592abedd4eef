"""The dashboard: what is committed is what its program writes, and it asks for metrics that a server exports.

``tests/e2e/test_monitoring_live.py`` has Prometheus answer each query from a real server.
"""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
from manifests import DEPLOY, ROOT
from queries import metrics_of, names_in

sys.path.append(str(ROOT / "tests" / "server"))
from fake_engine import FakeEngine

from jettison.server.metrics import ServerMetrics

pytest.importorskip("grafana_foundation_sdk")


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("make_dashboard", DEPLOY / "grafana" / "make_dashboard.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_committed_is_what_is_written(program):
    assert program.FILE.read_text(encoding="utf-8") == program.document()


def test_each_query_asks_for_metrics_that_are_exported(program):
    exported = names_in(ServerMetrics(FakeEngine(), "fake").exposition().decode())
    found = {query: metrics_of(query.replace("$__rate_interval", "1m")) for query in program.queries()}
    assert found and all(asked and asked <= exported for asked in found.values()), found
    shown = [target["expr"] for panel in json.loads(program.FILE.read_text())["panels"]
             for target in panel.get("targets", ())]  # fmt: skip
    assert shown == program.queries()

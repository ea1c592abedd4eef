"""The alerts: by promtool against series that fire them and series that do not; each metric is one that is exported."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from manifests import DEPLOY, ROOT, documents
from queries import metrics_of, names_in

sys.path.append(str(ROOT / "tests" / "server"))
from fake_engine import FakeEngine

from jettison.cli.main import app as commands
from jettison.server.metrics import ServerMetrics

FOLDER = DEPLOY / "prometheus"
RULES = [rule for group in documents(FOLDER / "alerts.yaml")[0]["groups"] for rule in group["rules"]]
OF_PROMETHEUS = {"up"}
"""Made by Prometheus itself."""


@pytest.fixture(scope="module")
def exported():
    engine = FakeEngine()
    engine.gauges = {"devices_needed_for_deadlines": 1.0}  # while batches have windows
    return names_in(ServerMetrics(engine, "fake").exposition().decode())


def test_the_gauge_of_deadlines_is_the_engines_own():
    """The one that a server without batches does not have."""
    source = ROOT.joinpath("src/jettison/core/ladder/waking/wake.py").read_text()
    assert '"devices_needed_for_deadlines": num' in source


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_its_metrics_are_exported(rule, exported):
    asked = metrics_of(rule["expr"])
    assert asked and asked <= exported | OF_PROMETHEUS


def test_a_metric_that_is_not_exported_is_found(exported):
    assert metrics_of('sum(rate(a:b_total{x="y"}[5m])) > 2 and c unless -d') == {"a:b_total", "c", "d"}
    assert not metrics_of("jettison:drop_count_total") <= exported


def test_each_alert_has_words_and_a_test_that_fires_it():
    tests = documents(FOLDER / "alerts_test.yaml")[0]["tests"]
    fired = {each["alertname"] for test in tests for each in test["alert_rule_test"] if each.get("exp_alerts")}
    quiet = {each["alertname"] for test in tests for each in test["alert_rule_test"] if not each.get("exp_alerts")}
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names) and fired == quiet == set(names)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "what_to_do"}


def test_flags_that_they_name_are_ours():
    import re

    import typer

    known = {flag for each in typer.main.get_command(commands).commands["serve"].params for flag in each.opts}
    named = set(re.findall(r"--[a-z][a-z-]+", FOLDER.joinpath("alerts.yaml").read_text()))
    assert named and named <= known


def test_promtool_agrees():
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("there is no promtool (Debian's package prometheus)")
    for arguments in (("check", "rules", "alerts.yaml"), ("test", "rules", "alerts_test.yaml")):
        run = subprocess.run([promtool, *arguments], cwd=Path(FOLDER), capture_output=True, text=True, timeout=120,
                             check=False)  # fmt: skip
        assert run.returncode == 0, run.stdout + run.stderr

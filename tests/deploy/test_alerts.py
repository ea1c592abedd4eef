"""The alerts: by promtool against series that fire them and series that do not; each metric is one that is exported."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml
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


def jobs_of_docs():
    """The configurations of Prometheus that docs/deploy.md shows."""
    page = ROOT.joinpath("docs/deploy.md").read_text()
    blocks = re.findall(r"^ *```yaml\n(.*?)^ *```", page, re.DOTALL | re.MULTILINE)
    return [found for block in blocks if "scrape_configs" in (found := yaml.safe_load(textwrap.dedent(block)))]


def test_the_jobs_that_are_shown_are_those_that_alerts_expect(tmp_path):
    one_machine, in_kubernetes = jobs_of_docs()
    expected = re.findall(r'up\{job="(.*?)"\}', FOLDER.joinpath("alerts.yaml").read_text())
    assert {job["job_name"] for each in (one_machine, in_kubernetes) for job in each["scrape_configs"]} == set(expected)
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("there is no promtool (Debian's package prometheus)")
    shutil.copy(FOLDER / "alerts.yaml", tmp_path)
    for each in (one_machine, in_kubernetes):
        for job in each["scrape_configs"]:  # Debian's promtool is built without Kubernetes
            if job.pop("kubernetes_sd_configs", None):
                job["static_configs"] = [{"targets": ["pod:8000"]}]
        file = tmp_path / "prometheus.yaml"
        file.write_text(yaml.safe_dump(each))
        run = subprocess.run([promtool, "check", "config", file], capture_output=True, text=True, timeout=60,
                             check=False)  # fmt: skip
        assert run.returncode == 0, run.stdout + run.stderr


def test_the_job_of_kubernetes_keeps_the_manifests_pods():
    (job,) = jobs_of_docs()[1]["scrape_configs"]
    (keep,) = [rule for rule in job["relabel_configs"] if rule.get("action") == "keep"]
    (stateful,) = [each for each in documents(DEPLOY / "kubernetes" / "jettison.yaml") if each["kind"] == "StatefulSet"]
    template = stateful["spec"]["template"]
    told = {f"__meta_kubernetes_pod_label_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}": value
            for name, value in template["metadata"]["labels"].items()}
    (port,) = template["spec"]["containers"][0]["ports"]
    told["__meta_kubernetes_pod_container_port_name"] = port["name"]
    assert re.fullmatch(keep["regex"], ";".join(told[name] for name in keep["source_labels"]))
    # A job of another name that takes pods by their annotations would fire each alert twice.
    assert "annotations" not in template["metadata"]

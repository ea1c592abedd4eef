"""The manifests, strictly by Kubernetes' published schemas; their commands, times, names and sizes by our own rules."""

from __future__ import annotations

import pytest
import yaml
from manifests import DEPLOY, by_kind, documents, served

from jettison.config.values import parse_bytes
from jettison.live.machine.memory import FRONT_END_BYTES, INTERPRETER_BYTES, SERVER_BYTES
from jettison.server.serving import ABORT_GRACE_S
from jettison.server.tracing import TIMEOUT_S

FILE = DEPLOY / "kubernetes" / "jettison.yaml"
VERSIONS = ("1.27.0", "1.32.0", "1.37.0")
"""The oldest that has ``unhealthyPodEvictionPolicy`` on, one between, the newest with a schema."""


@pytest.fixture(scope="module")
def kinds():
    return by_kind(FILE)


@pytest.fixture(scope="module")
def pod(kinds):
    return kinds["StatefulSet"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def config(kinds, pod, model_dir, tmp_path_factory):
    """What the container serves; the volume's model and keys are elsewhere here."""
    file = tmp_path_factory.mktemp("etc") / "config.yaml"
    told = yaml.safe_load(kinds["ConfigMap"]["data"]["config.yaml"])
    file.write_text(yaml.safe_dump(told | {"model": str(model_dir)}))
    arguments = [str(file) if each == "/etc/jettison/config.yaml" else each for each in pod["containers"][0]["args"]]
    assert arguments.pop(0) == "serve" and str(file) in arguments
    return served(arguments)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_schemas_take_them(version):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for each in documents(FILE):
        kubernetes_validate.validate(each, version, strict=True)
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(each | {"sepc": {}}, version, strict=True)


def test_streams_have_time_to_end(pod, config):
    container = pod["containers"][0]
    (word, asleep_s) = container["lifecycle"]["preStop"]["exec"]["command"]
    assert word == "sleep" and float(asleep_s) >= 1
    needed_s = float(asleep_s) + config.server.shutdown_timeout_s + ABORT_GRACE_S + TIMEOUT_S
    assert pod["terminationGracePeriodSeconds"] > needed_s


def test_probes_ask_what_the_server_answers(pod, config):
    container = pod["containers"][0]
    (port,) = container["ports"]
    assert port["containerPort"] == config.server.port and config.server.host == "0.0.0.0"
    paths = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert all(each["port"] == port["name"] for each in paths.values())
    assert {name: each["path"] for name, each in paths.items()} == {
        "startup": "/ping", "liveness": "/ping", "readiness": "/health"}, "a loading server is alive, and not ready"


def test_names_lead_somewhere(kinds, pod):
    labels = kinds["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    assert kinds["Service"]["spec"]["selector"].items() <= labels.items()
    assert kinds["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert kinds["StatefulSet"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert kinds["StatefulSet"]["spec"]["serviceName"] == kinds["Service"]["metadata"]["name"]
    volumes = {each["name"] for each in pod["volumes"]}
    volumes |= {each["metadata"]["name"] for each in kinds["StatefulSet"]["spec"]["volumeClaimTemplates"]}
    for container in (*pod["initContainers"], *pod["containers"]):
        assert {each["name"] for each in container["volumeMounts"]} <= volumes
    mapped = {each["configMap"]["name"] for each in pod["volumes"] if "configMap" in each}
    assert mapped == {kinds["ConfigMap"]["metadata"]["name"]}


def test_the_limit_holds_what_the_instances_need(pod, config):
    resources = pod["containers"][0]["resources"]
    limit = parse_bytes(resources["limits"]["memory"] + "B")
    assert resources["requests"]["memory"] == resources["limits"]["memory"], "else a full node kills it first"
    server_bytes = SERVER_BYTES + config.api_servers * FRONT_END_BYTES
    assert limit >= server_bytes + config.instances * (config.memory.memory_bytes + INTERPRETER_BYTES)


def test_threads_are_no_more_than_the_cores_asked_for(kinds, pod, config):
    """A request of cores is no quota: on a node of 64 cores ``auto`` would take them all."""
    assert "num_threads" in yaml.safe_load(kinds["ConfigMap"]["data"]["config.yaml"])
    assert config.instances * config.num_threads <= float(pod["containers"][0]["resources"]["requests"]["cpu"])


def test_it_is_locked_up(pod):
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
    for container in (*pod["initContainers"], *pod["containers"]):
        told = container["securityContext"]
        assert told["readOnlyRootFilesystem"] and not told["allowPrivilegeEscalation"]
        assert told["capabilities"] == {"drop": ["ALL"]}
    assert not pod["automountServiceAccountToken"]


def test_the_model_is_fetched_by_a_command_of_ours(pod, kinds):
    from typer.testing import CliRunner

    from jettison.cli.main import app

    arguments = pod["initContainers"][0]["args"]
    done = CliRunner().invoke(app, [*arguments[:-1], "--help"])
    assert done.exit_code == 0 and arguments[-1] in done.output
    assert yaml.safe_load(kinds["ConfigMap"]["data"]["config.yaml"])["model"] == arguments[-1]

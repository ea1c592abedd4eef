"""The Ray cluster's manifest: by KubeRay's published schema (kept here in part, with its source) and, for
pods, by Kubernetes' own; what its server is told, and what its workers have room for, by our rules."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import pytest
import yaml
from manifests import DEPLOY, by_kind, served

from jettison.config.values import parse_bytes
from jettison.live.machine.memory import FRONT_END_BYTES, INTERPRETER_BYTES, SERVER_BYTES
from jettison.server.serving import ABORT_GRACE_S
from jettison.server.tracing import TIMEOUT_S

FILE = DEPLOY / "kubernetes" / "ray.yaml"
SCHEMA = json.loads(Path(__file__).with_name("raycluster.schema.json").read_text())
NODE_BYTES = 1 << 30
"""What a node of Ray takes beside its object store, with room."""


@pytest.fixture(scope="module")
def kinds():
    return by_kind(FILE)


@pytest.fixture(scope="module")
def cluster(kinds):
    return kinds["RayCluster"]["spec"]


@pytest.fixture(scope="module")
def groups(cluster):
    """Group -> what its pods are."""
    workers = {group["groupName"]: group["template"]["spec"] for group in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"]["template"]["spec"]} | workers


@pytest.fixture(scope="module")
def server(groups):
    (container,) = [each for each in groups["server"]["containers"] if each["name"] == "jettison"]
    return container


@pytest.fixture(scope="module")
def config(kinds, server, model_dir, tmp_path_factory):
    """What the server's container serves; the model and keys are elsewhere here."""
    file = tmp_path_factory.mktemp("etc") / "config.yaml"
    told = yaml.safe_load(kinds["ConfigMap"]["data"]["config.yaml"])
    file.write_text(yaml.safe_dump(told | {"model": str(model_dir)}))
    arguments = [str(file) if each == "/etc/jettison/config.yaml" else each for each in server["args"]]
    assert arguments.pop(0) == "serve" and str(file) in arguments
    return served(arguments)


def test_kuberay_s_schema_takes_it(cluster):
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(cluster, SCHEMA)
    wrong = [deepcopy(cluster) for _ in range(3)]
    wrong[0]["authOptions"]["mode"] = "tokens"
    wrong[1]["headGroupSpec"]["rayStartParam"] = {}
    wrong[2]["workerGroupSpecs"][0]["replicas"] = "one"
    for each in wrong:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(each, SCHEMA)


def test_what_it_offers_in_a_comment_is_taken_too(cluster):
    jsonschema = pytest.importorskip("jsonschema")
    text = FILE.read_text()
    chosen = text.replace("  # gcsFaultToleranceOptions:", "  gcsFaultToleranceOptions:")
    (changed,) = [each["spec"] for each in yaml.safe_load_all(chosen) if each["kind"] == "RayCluster"]
    assert changed == cluster | {"gcsFaultToleranceOptions": {"redisAddress": "redis:6379"}}
    jsonschema.validate(changed, SCHEMA)


@pytest.mark.parametrize("version", ["1.27.0", "1.37.0"])
def test_kubernetes_takes_the_rest(version, kinds, groups):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": pod} for name, pod in groups.items()]
    for each in [*pods, *(each for kind, each in kinds.items() if kind != "RayCluster")]:
        kubernetes_validate.validate(each, version, strict=True)


def test_it_serves_with_the_cluster_s_ray(kinds, cluster, config, server):
    name = kinds["RayCluster"]["metadata"]["name"]
    assert config.hosts.launcher == "ray" and config.hosts.ray_address == f"{name}-head-svc:6379"
    assert cluster["authOptions"] == {"mode": "token"}
    token = {each["name"]: each for each in server["env"]}
    assert token["RAY_AUTH_MODE"]["value"] == "token"
    assert token["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": name, "key": "auth_token"}
    selector = kinds["Service"]["spec"]["selector"]
    assert selector == {"ray.io/cluster": name, "ray.io/group": "server"}, "the labels that KubeRay sets"


def test_the_server_joins_by_the_node_beside_it(groups, server):
    node = groups["server"]["containers"][0]
    for path in ("/tmp", "/dev/shm"):
        ours, its = (
            {each["mountPath"]: each["name"] for each in container["volumeMounts"]}[path]
            for container in (server, node)
        )
        assert ours == its


def test_each_instance_has_a_pod_that_holds_it(cluster, groups, config):
    (workers,) = [group for group in cluster["workerGroupSpecs"] if group["groupName"] == "workers"]
    assert workers["replicas"] >= config.instances and workers["maxReplicas"] >= workers["replicas"]
    for container in groups["workers"]["containers"]:
        limits = container["resources"]["limits"]
        store_bytes = int(workers["rayStartParams"]["object-store-memory"])
        needed = config.memory.memory_bytes + INTERPRETER_BYTES + store_bytes + NODE_BYTES
        assert parse_bytes(limits["memory"] + "B") >= needed
        assert float(limits["cpu"]) >= config.num_threads
    others = [cluster["headGroupSpec"], *(g for g in cluster["workerGroupSpecs"] if g is not workers)]
    assert all(group["rayStartParams"]["num-cpus"] == "0" for group in others), "no instance beside the head"


def test_more_pods_are_brought_for_more_instances_by_an_autoscaler_that_may_ask_for_them(cluster, groups):
    """It runs beside the head, in its image, with an account of KubeRay's, and writes where the head does."""
    (workers,) = [group for group in cluster["workerGroupSpecs"] if group["groupName"] == "workers"]
    assert workers["maxReplicas"] > workers["replicas"] and cluster["enableInTreeAutoscaling"]
    assert groups["head"]["automountServiceAccountToken"] and "serviceAccountName" not in groups["head"]
    head, options = groups["head"]["containers"][0], cluster["autoscalerOptions"]
    assert options["securityContext"] == head["securityContext"]
    assert options["volumeMounts"] == head["volumeMounts"] and options["env"][0] in head["env"]


def test_a_controller_that_crashes_is_followed_by_another(config):
    assert config.api_servers >= 1


def test_the_server_has_memory_and_time_to_end(groups, server, config):
    needed = SERVER_BYTES + config.api_servers * FRONT_END_BYTES
    assert parse_bytes(server["resources"]["limits"]["memory"] + "B") >= needed
    (_, asleep_s) = server["lifecycle"]["preStop"]["exec"]["command"]
    needed_s = float(asleep_s) + config.server.shutdown_timeout_s + ABORT_GRACE_S + TIMEOUT_S
    assert groups["server"]["terminationGracePeriodSeconds"] > needed_s


def test_names_lead_somewhere_and_all_is_locked_up(kinds, groups):
    for name, pod in groups.items():
        volumes = {each["name"] for each in pod["volumes"]}
        assert pod["securityContext"]["runAsNonRoot"] and pod["automountServiceAccountToken"] == (name == "head")
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            assert {each["name"] for each in container["volumeMounts"]} <= volumes
            told = container["securityContext"]
            assert told["readOnlyRootFilesystem"] and not told["allowPrivilegeEscalation"]
            assert told["capabilities"] == {"drop": ["ALL"]}
    mapped = {each["configMap"]["name"] for pod in groups.values() for each in pod["volumes"] if "configMap" in each}
    assert mapped == {kinds["ConfigMap"]["metadata"]["name"]}

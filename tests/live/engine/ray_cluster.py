"""A Ray of these tests' own, for spawners that join one: started once, ended by its process id with this process."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest

HAS_RAY = importlib.util.find_spec("ray") is not None
WHY_NOT = "Ray is not installed: pip install 'jettison[ray]'"
_HEAD = """
import logging, sys
sys.path[:0] = sys.argv[2:]
import ray
found = ray.init(address="local", num_cpus=int(sys.argv[1]), include_dashboard=False, object_store_memory=80 << 20,
                 log_to_driver=False, logging_level=logging.ERROR)
print(found.address_info["address"], flush=True)
sys.stdin.read()
ray.shutdown()
"""


class RayHead:
    """One node on this machine, with more cores than it has."""

    def __init__(self, num_cpus=16):
        self.token = secrets.token_hex(32)
        self._set_environment()
        self._process = subprocess.Popen(
            (sys.executable, "-c", _HEAD, str(num_cpus)), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=self._own_environment(), start_new_session=True,
        )
        self.address = self._process.stdout.readline().decode().strip()
        if not self.address:
            pytest.skip("Ray itself does not start on this machine")

    @property
    def pid(self):
        return self._process.pid

    def close(self):
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:  # it waits for a head that a test has ended
            self._process.kill()
            self._process.wait()
        self._restore_environment()

    def _set_environment(self):
        """Drivers of this process' spawners show the token, too."""
        environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}
        self._before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)

    def _own_environment(self):
        """With what Ray's processes import, actors of ours among it."""
        paths = os.pathsep.join(filter(None, [os.path.abspath("src"), os.environ.get("PYTHONPATH")]))
        return os.environ | {"PYTHONPATH": paths, "RAY_memory_monitor_refresh_ms": "0"}

    def _restore_environment(self):
        for name, value in self._before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class FixedHead(RayHead):
    """A head at a port of its own, which may be killed with all that it has started, and started again there: it has
    forgotten everything then."""

    def __init__(self, num_cpus=16):
        self.num_cpus = num_cpus
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.token = secrets.token_hex(32)
        self._set_environment()
        self._nodes, self._options = [], []
        self._prepare()
        self.start()

    def _prepare(self):
        """Before the first start."""

    def start(self):
        self._process = subprocess.Popen(
            (sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port", str(self.port),
             "--num-cpus", str(self.num_cpus), "--include-dashboard", "false", "--object-store-memory",
             str(80 << 20), "--disable-usage-stats", *self._options),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=self._own_environment(), start_new_session=True,
        )  # fmt: skip
        for line in self._process.stdout:
            found = re.search(r"--address=.?([\d.]+:\d+)", line)
            if found is not None:
                self.address = found[1]
                break
        else:
            raise AssertionError("Ray did not start")
        threading.Thread(target=self._process.stdout.read, daemon=True).start()

    def add_node(self, num_cpus):
        """Another on this machine; it ends with the head."""
        self._nodes.append(subprocess.Popen(
            (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--address", self.address,
             "--num-cpus", str(num_cpus), "--object-store-memory", str(80 << 20), "--disable-usage-stats"),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=self._own_environment(), start_new_session=True,
        ))  # fmt: skip

    def kill(self):
        for node in self._nodes:
            self._kill(node)
        self._nodes.clear()
        self._kill(self._process)

    def _kill(self, process):
        for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()

    def close(self):
        if self._process.poll() is None:
            self.kill()
        self._restore_environment()


class AutoscaledHead(FixedHead):
    """With Ray's autoscaler over its fake provider: a node more is processes on this machine, and ends once it is
    idle."""

    def __init__(self, num_cpus, more_cpus):
        """``more_cpus``: of each node that is added, two at most."""
        self.more_cpus = more_cpus
        super().__init__(num_cpus)

    def _prepare(self):
        """What ``ray up`` would read and complete. Ray's package lacks the example of it that Ray's own
        ``AutoscalingCluster`` needs, which would also end every Ray on the machine."""
        import ray

        resources = {"CPU": self.more_cpus, "object_store_memory": 80 << 20}
        lists = ("cluster_synced_files", "initialization_commands", "setup_commands", "head_setup_commands",
                 "worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands")  # fmt: skip
        config = {
            "cluster_name": "fake", "max_workers": 2, "idle_timeout_minutes": 0.05, "upscaling_speed": 1.0,
            "provider": {
                "type": "external",
                "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
                "gcs_address": f"{ray.util.get_node_ip_address()}:{self.port}",
                "use_node_id_as_ip": True, "disable_node_updaters": True, "disable_launch_config_check": True,
                "worker_liveness_check": False,
            },
            "head_node_type": "ray.head.default",
            "available_node_types": {
                "ray.head.default": {"resources": {"CPU": self.num_cpus}, "node_config": {}, "max_workers": 0},
                "more": {"resources": resources, "node_config": {}, "min_workers": 0, "max_workers": 2},
            },
            "auth": {}, "docker": {}, "file_mounts": {}, "file_mounts_sync_continuously": False,
            **{name: [] for name in lists},
        }  # fmt: skip
        self._folder = tempfile.TemporaryDirectory(prefix="autoscaled-")
        path = Path(self._folder.name, "cluster.json")
        path.write_text(json.dumps(config))
        self._options = ["--autoscaling-config", str(path)]

    def _own_environment(self):
        return super()._own_environment() | {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}

    def close(self):
        super().close()
        self._folder.cleanup()

"""A Ray of these tests' own, for spawners that join one: started once, ended by its process id with this process."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import secrets
import socket
import subprocess
import sys
import threading

import psutil

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
        assert self.address, "Ray did not start"

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
        self._nodes = []
        self.start()

    def start(self):
        self._process = subprocess.Popen(
            (sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port", str(self.port),
             "--num-cpus", str(self.num_cpus), "--include-dashboard", "false", "--object-store-memory",
             str(80 << 20), "--disable-usage-stats"),
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

"""A Ray of these tests' own, for spawners that join one: started once, ended by its process id with this process."""

from __future__ import annotations

import importlib.util
import os
import secrets
import subprocess
import sys

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
        environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}
        self._before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)  # drivers of this process' spawners show it, too
        # What Ray's processes import, actors of ours among it.
        paths = os.pathsep.join(filter(None, [os.path.abspath("src"), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            (sys.executable, "-c", _HEAD, str(num_cpus)), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": paths, "RAY_memory_monitor_refresh_ms": "0"}, start_new_session=True,
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
        for name, value in self._before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

"""Of one keeper, in a process of Ray's on its host. A module of its own, which Ray imports there by its name: no code
of ours travels, and the Python that starts the keeper is that host's."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from jettison.live.host.keeper import worker_environment
from jettison.live.machine.identity import machine_name
from jettison.live.wire.host_orders import Place

_KEEPER_COMMAND = (sys.executable, "-P", "-m", "jettison.live.host.far_keeper", "--detach")


class KeeperActor:
    """It starts the keeper and waits for its end."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, post: bytes) -> bytes:
        """Returns the signing request in hex. Raises OSError."""
        env = {name: value for name, value in worker_environment(1).items() if not name.startswith("RAY_")}
        self._process = subprocess.Popen(_KEEPER_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        if code := self._process.wait():  # the keeper is a grandchild of its own
            raise OSError(f"the keeper could not be started (code {code}): Ray's worker-*.err on its host says why")
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(post + b"\n")
        self._process.stdin.flush()
        request = self._process.stdout.readline().strip()
        if not request:
            raise OSError("the keeper has ended at once")
        return request

    def ip(self) -> str:
        """Of this host, as the others reach it."""
        import ray

        return str(ray.util.get_node_ip_address())

    def admit(self, certificate_pem: str) -> None:
        """Bring it its certificate, and tell it where it is. Raises OSError."""
        assert self._process is not None and self._process.stdin is not None
        ip = self.ip()
        # Not Ray's name of the node: a machine whose Ray was started again has another one, and the keepers of before.
        place = Place(host=machine_name(ip), ip=ip, certificate_pem=certificate_pem)
        self._process.stdin.write(msgspec.json.encode(place) + b"\n")
        self._process.stdin.flush()

    def run(self) -> None:
        """Return when the keeper has ended."""
        assert self._process is not None and self._process.stdout is not None
        self._process.stdout.read()

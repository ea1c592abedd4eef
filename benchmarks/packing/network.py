"""Two network namespaces and a link between them that `tc tbf` limits in both directions. Needs root, `ip` and `tc`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from jettison.live.machine.netns import Placement

NAMES = ("jettison-x0", "jettison-x1")
HOSTS = ("10.213.77.1", "10.213.77.2")


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def network(mbit: float) -> Iterator[dict[int, Placement]]:
    """Two namespaces and a limited link between them; gone afterwards, whatever happened."""
    remove_network()
    try:
        for name in NAMES:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", "v0", "netns", NAMES[0], "type", "veth", "peer", "name", "v1", "netns", NAMES[1])
        for i, (name, host) in enumerate(zip(NAMES, HOSTS, strict=True)):
            inside = ("ip", "netns", "exec", name)
            run(*inside, "ip", "addr", "add", f"{host}/24", "dev", f"v{i}")
            # Large frames, as in machine rooms: with small ones the packets' handling would take a tenth of a core.
            run(*inside, "ip", "link", "set", f"v{i}", "mtu", "9000", "up")
            run(*inside, "ip", "link", "set", "lo", "up")
            device = ("dev", f"v{i}")
            # Buckets of a few packets: the link is never idle for longer and never faster. Below them the queue that
            # Linux gives an interface by itself.
            run(*inside, "tc", "qdisc", "add", *device, "root", "handle", "1:", "tbf", "rate", f"{mbit}mbit",
                "burst", "16kb", "latency", "50ms")  # fmt: skip
            run(*inside, "tc", "qdisc", "add", *device, "parent", "1:", "handle", "2:", "pfifo_fast")
        yield {i: Placement(host, name) for i, (name, host) in enumerate(zip(NAMES, HOSTS, strict=True))}
    finally:
        remove_network()


def remove_network() -> None:
    for name in NAMES:
        subprocess.run(("ip", "netns", "del", name), check=False, capture_output=True)


def why_not() -> str | None:
    """What is missing here, if anything."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"needs {' and '.join(missing)} (iproute2)"
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    try:
        with network(100):
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        detail = error.stderr.decode().strip() if isinstance(error, subprocess.CalledProcessError) else error
        return f"no network namespaces here: {detail}"

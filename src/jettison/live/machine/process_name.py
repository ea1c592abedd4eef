"""Names of processes in ``ps -o comm`` and ``top``, by which an operator tells them apart."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

PARENT, STARTER, CONTROLLER = "jettison-parent", "jettison-start", "jettison-serve"
FRONT_END, FORK_SERVER, KEEPER, HOST_SERVER = "jettison-front", "jettison-forks", "jettison-keeper", "jettison-hosts"
"""The kernel keeps 15 characters. Workers are ``jettison-w`` and their number, as no other name begins."""


def name_process(name: str) -> None:
    """Name this process; its command line stays. Nothing where the kernel does not let it."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)

"""Workers in network namespaces of this machine: how experiments get a real network between them.

A socket belongs to the namespace in which it was made, whichever process uses it later; so the keeper makes a worker's
listening socket inside, and the worker starts inside. Needs root; nothing else in the product does.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import NamedTuple

_CLONE_NEWNET = 0x40000000
_OWN = "/proc/thread-self/ns/net"


class Placement(NamedTuple):
    """Where a worker's links live."""

    host: str = "127.0.0.1"
    """The address that its peers connect to."""
    netns: str | None = None
    """A namespace as `ip netns` names it; None = the keeper's own."""
    bytes_per_s: float | None = None
    """What it sends over each of its links at most, as the links themselves see to it (``transport.pacing``); None: as
    fast as they go."""

    @property
    def machine(self) -> str:
        """A namespace is one, the keeper's own is another; a worker whose links are slowed down stands for one."""
        return self.netns or ("" if self.bytes_per_s is None else self.host)


@contextlib.contextmanager
def entered(netns: str | None) -> Iterator[None]:
    """This thread inside a namespace for a moment. Raises OSError; then it is where it was."""
    if netns is None:
        yield
        return
    with open(_OWN, "rb") as home, open(f"/run/netns/{netns}", "rb") as there:
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(home.fileno())


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")

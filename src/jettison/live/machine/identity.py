"""Which machine a process is on, as far as others matter to it: whose process ids it sees, and with which others it can
share memory."""

from __future__ import annotations

import hashlib
import os

_NAMESPACES = ("mnt", "net", "user")


def process_table() -> str:
    """Names the table of process ids of this process: of one boot and one namespace. Raises OSError."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"


def machine_name(ip: str) -> str:
    """Names the machine of this process, for as long as it is up: processes of one name see the same files, sockets and
    process ids as the same user, so that they can share memory. ``ip``: of the machine, as others reach it. Raises
    OSError.

    Two namespaces, containers or users of one kernel are two machines. So are copies of a virtual machine that was
    running, which have one boot's name: they have addresses of their own.
    """
    root = os.stat("/")
    sees = [process_table(), *(os.readlink(f"/proc/self/ns/{kind}") for kind in _NAMESPACES),
            str(os.getuid()), f"{root.st_dev}/{root.st_ino}"]  # fmt: skip
    return f"{ip}/{hashlib.sha256(' '.join(sees).encode()).hexdigest()[:16]}"

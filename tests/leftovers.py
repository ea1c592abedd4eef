"""A test run that is terminated, however, leaves no process behind: a pytest plugin, and the reaper that it starts.

Each pytest process (the one a person starts, and each of xdist's workers) marks its environment, which what it starts
inherits, and starts a reaper in a session of its own. When the process has ended the reaper kills what bears its mark.
A worker of xdist bears the mark of its controller, so an end of the controller ends all, one after the other.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import uuid

MARK = "JETTISON_TEST_RUN"
MAX_SCANS = 50
"""A process may start another between two scans; what is still there after so many cannot be killed."""


def pytest_configure() -> None:
    """Mark what this process will start, and have it watched."""
    os.environ[MARK] = mark = uuid.uuid4().hex
    unmarked = {name: value for name, value in os.environ.items() if name != MARK}
    subprocess.Popen(
        [sys.executable, "-S", __file__, str(os.getpid()), mark], env=unmarked, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def marked(mark: str) -> list[int]:
    """Ids of living processes whose environment had the mark when they were started."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for name in os.listdir("/proc"):
        try:
            if name.isdecimal():
                with open(f"/proc/{name}/environ", "rb") as file:
                    if wanted in file.read().split(b"\0"):
                        found.append(int(name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def reap(pid: int, mark: str) -> None:
    """Wait until the process has ended, then kill all that bear the mark."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:  # it has ended already
        pass
    else:
        select.select([watched], [], [])
    for _ in range(MAX_SCANS):
        left = marked(mark)
        if not left:
            return
        for child in left:
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)


if __name__ == "__main__":
    reap(int(sys.argv[1]), sys.argv[2])

"""Where this machine's kernel lets a thread wake up: on an idle core, or on a busy one although another is idle."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from collections.abc import Callable

from jettison.config import usable_cores

NUM_WAKES = 60
REST_S, BUSY_S = 0.004, 0.0005
"""Before each wake nobody does anything; after it the waker goes on for a while, so that it has not left its core."""

_SLEEPER = """
import ctypes, sys
where = ctypes.CDLL(None).sched_getcpu
for line in sys.stdin:
    print(where(), flush=True)
"""


def wakes_pack() -> bool:
    """Whether most wakes are on the waker's core while it is busy and another is idle.

    Linux looks for an idle core; kernels of some virtual machines keep cores idle instead, so that their host may give
    them to others. False where there is one core, or the system does not tell where a thread runs.
    """
    try:
        where = ctypes.CDLL(None).sched_getcpu
    except (OSError, AttributeError):
        return False
    if usable_cores() < 2:
        return False
    try:
        return _num_on_the_wakers_core(where) > NUM_WAKES / 2
    except (OSError, ValueError):  # the sleeper has ended
        return False


def _num_on_the_wakers_core(where: Callable[[], int]) -> int:
    num_same = 0
    with subprocess.Popen(
        [sys.executable, "-c", _SLEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as sleeper:
        assert sleeper.stdin is not None and sleeper.stdout is not None
        for index in range(NUM_WAKES + 1):
            time.sleep(REST_S)
            here = where()
            sleeper.stdin.write("\n")
            sleeper.stdin.flush()
            until_s = time.perf_counter() + BUSY_S
            while time.perf_counter() < until_s:
                pass
            num_same += int(sleeper.stdout.readline()) == here and index > 0  # the first one starts it
        sleeper.stdin.close()
    return num_same

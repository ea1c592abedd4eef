"""The kernels' pool of threads: each item once, whoever draws it, and whatever else the process does."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.device.kernels.library import LIBRARY_PATH
from jettison.device.kernels.native import load_native
from jettison.device.kernels.registry import KernelsUnavailableError


@pytest.fixture(scope="module", autouse=True)
def _needs_the_library() -> None:
    try:
        load_native()
    except KernelsUnavailableError as error:
        pytest.skip(str(error))


def mark(num_threads: int, num_items: int) -> np.ndarray:
    seen = np.zeros(num_items, dtype=np.int32)
    library = ctypes.CDLL(str(LIBRARY_PATH))
    library.jettison_pool_mark.argtypes = (ctypes.c_int, ctypes.c_long, ctypes.c_void_p)
    library.jettison_pool_mark.restype = None
    library.jettison_pool_mark(num_threads, num_items, seen.ctypes.data)
    return seen


@given(num_threads=st.integers(1, 6), num_items=st.integers(0, 5000))
def test_each_item_is_drawn_once(num_threads: int, num_items: int) -> None:
    assert (mark(num_threads, num_items) == 1).all()


def test_regions_that_follow_each_other_at_once_do_not_mix() -> None:
    for number in range(20_000):
        seen = mark(2 + number % 3, 1 + number % 7)
        assert (seen == 1).all(), number


def test_callers_at_the_same_time_each_get_their_own_items() -> None:
    wrong: list[int] = []

    def call(first: int) -> None:
        for number in range(2_000):
            if not (mark(3, 1 + (first + number) % 50) == 1).all():
                wrong.append(number)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


FORKS = """
import os, sys
import numpy as np
from tests.device.test_pool import mark
assert (mark(3, 100) == 1).all()
pid = os.fork()
if pid == 0:
    os._exit(0 if (mark(3, 1000) == 1).all() else 1)
_, status = os.waitpid(pid, 0)
assert (mark(3, 100) == 1).all()
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_has_a_pool_of_its_own() -> None:
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.path.join(root, "src")])}
    done = subprocess.run([sys.executable, "-c", FORKS], env=env, timeout=60, check=False)
    assert done.returncode == 0

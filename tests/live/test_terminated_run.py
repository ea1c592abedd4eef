"""A run of tests that is terminated leaves no process behind, whichever process the signal reaches."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.live

WAIT_S = 60.0
CHILD = """
import os, subprocess, sys, time
from pathlib import Path

def test_that_starts_a_process_and_lasts():
    asleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
    child = subprocess.Popen(asleep, start_new_session=True)
    told = Path(os.environ["PIDS"])
    told.with_suffix(".part").write_text(f"{os.getpid()} {child.pid}")
    told.with_suffix(".part").rename(told)
    time.sleep(1000)
"""


def await_that(holds) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(("options", "to_worker", "number"), [
    ((), False, signal.SIGTERM),
    ((), False, signal.SIGKILL),
    (("-n", "1"), False, signal.SIGTERM),
    (("-n", "1"), False, signal.SIGINT),
    (("-n", "1", "--max-worker-restart", "0"), True, signal.SIGTERM),
    (("-n", "1", "--max-worker-restart", "0"), True, signal.SIGKILL),
])  # fmt: skip
def test_nothing_is_left(options: tuple[str, ...], to_worker: bool, number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "test_child.py").write_text(CHILD)
    told = tmp_path / "pids"
    tests = Path(__file__).resolve().parents[1]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"PYTHONPATH": os.pathsep.join([str(tests), env.get("PYTHONPATH", "")]), "PIDS": str(told)}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # else most of its life were imports of plugins that it does not use
    command = [sys.executable, "-m", "pytest", "-p", "xdist.plugin", "-p", "leftovers", "-p", "no:cacheprovider",
               "-c", "/dev/null", "--rootdir", str(tmp_path), *options, str(tmp_path / "test_child.py")]  # fmt: skip
    # What a shell has started in the background ignores SIGINT, and so does all that it starts.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        run = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        await_that(lambda: told.exists() or run.poll() is not None)
        tester, child = map(int, told.read_text().split())
        assert (tester == run.pid) == (not options)
        assert not gone(child)
        os.kill(tester if to_worker else run.pid, number)
        run.wait(WAIT_S)
        await_that(lambda: gone(tester) and gone(child))
    finally:
        run.kill()
        run.wait()

"""A server of one's own: what is raised where it does not come up, and that it ends with the one who started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import jettison
from jettison.device.model.create import create_model
from jettison.errors import JettisonError, UserError
from jettison.live.experiments.server_process import ServerProcess
from longrun import part_of

pytestmark = pytest.mark.live


@pytest.mark.parametrize("flags", [{}, {"memory": "lots"}])
def test_what_a_person_can_mend_is_the_server_s_own_line(flags: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        ServerProcess(tmp_path / "none", flags, tmp_path / "log").start()
    line = str(caught.value)
    assert line.startswith("the server did not come up: ") and "\n" not in line and "jettison: " not in line
    assert ("--memory" if flags else str(tmp_path / "none")) in line


def test_of_any_other_end_the_log_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jettison.live.experiments.server_process.sys.executable", "/bin/false")
    with pytest.raises(JettisonError, match=r"exit code 1") as caught:
        ServerProcess(tmp_path / "none", {}, tmp_path / "log").start()
    assert not isinstance(caught.value, UserError)


OWNER = """
import sys, threading, time
from pathlib import Path
from jettison.live.experiments.server_process import ServerProcess

server = ServerProcess(Path(sys.argv[1]), {"instances": 2, "memory": "16MiB"}, Path(sys.argv[2]))
if sys.argv[3] == "ready":
    server.start()
else:
    threading.Thread(target=server.start, daemon=True).start()
    while server._process is None:
        time.sleep(0.01)
print(server.pid, flush=True)
time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def tree_below(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [pid for child in children for pid in tree_below(child)]


ENDS = [(when, end) for when in ("ready", "at once") for end in (signal.SIGKILL, signal.SIGTERM)]


@pytest.mark.parametrize(("when", "end"), part_of(ENDS, [ENDS[0], ENDS[3]]))
def test_a_server_ends_with_the_process_that_started_it(when: str, end: signal.Signals, tmp_path: Path) -> None:
    create_model(tmp_path / "model", arch="llama", layers=2, hidden=16, heads=2, kv_heads=1)
    env = os.environ | {"PYTHONPATH": str(Path(jettison.__file__).parent.parent)}
    command = [sys.executable, "-c", OWNER, str(tmp_path / "model"), str(tmp_path / "log"), when]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as owner:
        assert owner.stdout is not None
        server = int(owner.stdout.readline())
        pids = [server, *tree_below(server)]
        owner.send_signal(end)
        owner.wait()
    try:
        assert (when == "ready") == (len(pids) == 5), "server, fork server, two workers, guard of their folder"
        deadline_s = time.monotonic() + 60
        while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert [pid for pid in pids if is_alive(pid)] == [], (tmp_path / "log").read_text()
        assert "Traceback" not in (tmp_path / "log").read_text()
    finally:
        if is_alive(server):
            os.kill(server, signal.SIGKILL)

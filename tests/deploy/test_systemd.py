"""The unit: ``systemd-analyze verify``, its command and times, and what the server tells a supervisor."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess

import pytest
from manifests import DEPLOY, served

from jettison.server.notify import notify
from jettison.server.serving import ABORT_GRACE_S
from jettison.server.tracing import TIMEOUT_S

UNIT = DEPLOY / "systemd" / "jettison.service"
SERVER = "/opt/jettison/bin/jettison"


def setting(name):
    lines = UNIT.read_text().splitlines()
    (found,) = [line.partition("=")[2] for line in lines if line.startswith(f"{name}=")]
    return found


def test_systemd_takes_it(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace(SERVER, shutil.which("true")))  # a program has to be there
    run = subprocess.run(["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True, timeout=60,
                         check=False)  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "")


def test_its_command_is_ours_and_has_time_to_end(model_dir, tmp_path):
    program, word, *arguments = shlex.split(setting("ExecStart"))
    assert (program, word) == (SERVER, "serve")
    arguments[arguments.index("--config") + 1] = str(tmp_path / "config.yaml")
    (tmp_path / "config.yaml").write_text(f"model: {model_dir}\n")
    config = served(arguments)
    assert int(setting("TimeoutStopSec")) > config.server.shutdown_timeout_s + ABORT_GRACE_S + TIMEOUT_S
    assert (setting("Type"), setting("NotifyAccess")) == ("notify", "main")


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_a_supervisor_is_told(kind, tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        name = str(tmp_path / "s") if kind == "path" else f"@jettison-test-{os.getpid()}"
        supervisor.bind(name if kind == "path" else "\0" + name[1:])
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        notify("READY=1", "STATUS=x")
        assert supervisor.recv(100) == b"READY=1\nSTATUS=x"
    notify("STOPPING=1")  # a supervisor that is gone stops nothing
    for nowhere in ("", "relative"):
        monkeypatch.setenv("NOTIFY_SOCKET", nowhere)
        notify("READY=1")

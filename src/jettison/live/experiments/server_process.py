"""A ``jettison serve`` of one's own, on a free loopback port, ended for certain: for demos, benchmarks, tests.

It ends with the process that started it, too: a session of its own keeps the terminal's signals away from it, and a
process that is killed closes nothing, but the kernel closes its pipes.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from jettison.errors import JettisonError, UserError

ENDS_WITH_STDIN = "JETTISON_ENDS_WITH_STDIN"
"""Environment variable: where it is 1, the server ends with its standard input, and so with the process that holds the
other end, however that one ends."""


def flag_arguments(flags: Mapping[str, object]) -> list[str]:
    """Options as a command line has them: a switch is ``--name`` or ``--no-name``, everything else ``--name value``."""
    arguments: list[str] = []
    for name, value in flags.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{option}" if value else f"--no-{option}")
        else:
            arguments += [f"--{option}", str(value)]
    return arguments


class ServerProcess:
    """Runs ``python -m jettison serve MODEL_DIR FLAGS`` as a child in a process group of its own.

    ``flags`` are long option names without dashes, underscores allowed: ``{"instances": 2, "memory": "64MiB"}``.
    """

    def __init__(self, model_dir: Path, flags: dict[str, object], log_path: Path, port: int | None = None) -> None:
        self._model_dir = model_dir
        self._flags = flags
        self._log_path = log_path
        self.port = port or free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Root of the server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the server. Raises JettisonError when it is not running."""
        if self._process is None:
            raise JettisonError("the server is not running")
        return self._process.pid

    def start(self, timeout_s: float = 120.0) -> None:
        """Start and wait until it is ready.

        If it does not come up: raises UserError with its own line where a person can mend it, else JettisonError with
        the end of its log.
        """
        if self._process is not None:
            return
        command, environment = self._command()
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.PIPE, start_new_session=True,
                env=environment,
            )
        try:
            self._await(self._process, timeout_s)
        except BaseException:  # it is in a session of its own, and would stay
            self.close()
            raise

    def _command(self) -> tuple[Sequence[str], Mapping[str, str]]:
        """What is run, and its environment."""
        command = [sys.executable, "-m", "jettison", "serve", str(self._model_dir), "--port", str(self.port)]
        return command + flag_arguments(self._flags), os.environ | {ENDS_WITH_STDIN: "1"}

    def _await(self, process: subprocess.Popen[bytes], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.is_ready():
            if process.poll() is not None or time.monotonic() > deadline:
                code = process.poll()
                tail = self._log_path.read_text(errors="replace")[-2000:]
                last = tail.rstrip().rpartition("\n")[2]
                if code == 2 and last.startswith("jettison: "):
                    raise UserError(f"the server did not come up: {last.removeprefix('jettison: ')}")
                raise JettisonError(f"the server did not come up (exit code {code}):\n{tail}")
            time.sleep(0.1)

    def is_ready(self) -> bool:
        """Whether /health says so."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2.0) as response:
                return bool(response.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def close(self, timeout_s: float = 10.0) -> int | None:
        """SIGTERM, then SIGKILL for the whole group; returns the exit code. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return None
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        assert process.stdin is not None
        process.stdin.close()
        return process.returncode

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def free_port() -> int:
    """A loopback port that no process uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

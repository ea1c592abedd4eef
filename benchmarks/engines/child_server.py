"""An HTTP server of any make as a child: started, timed until it answers, held still while another one works, ended.

Only ``vllm_server.py`` and ``../serving.py`` know what is behind the address.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from benchmarks.engines.processes import members_of, processor_s, signal_all
from jettison.live.experiments.server_process import ENDS_WITH_STDIN

NOT_INHERITED = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "LD_PRELOAD")
"""What the caller may hold (its shell; or our packages, which have torch's threads sleep), and every server must be
told in its own way."""
_POLL_S = 0.02


class ChildServer:
    """One server. ``launch`` returns at once, ``wait_ready`` when ``/health`` answers; ``close`` is idempotent.

    ``own_packages`` leaves it this process's PYTHONPATH, which a server of another environment must not see.
    """

    def __init__(
        self, command: Sequence[str], port: int, log_path: Path, environ: Mapping[str, str], own_packages: bool = False
    ) -> None:
        self.port = port
        self._command = list(command)
        self._log_path = log_path
        hidden = NOT_INHERITED if own_packages else (*NOT_INHERITED, "PYTHONPATH")
        self._environ = {name: value for name, value in os.environ.items() if name not in hidden} | dict(environ)
        self._process: subprocess.Popen[bytes] | None = None
        self._members: list[psutil.Process] = []

    @property
    def url(self) -> str:
        """Root of the server."""
        return f"http://127.0.0.1:{self.port}"

    def launch(self) -> None:
        """Start the process. Its standard input is a pipe: where it can end with that, it ends with this process."""
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.PIPE, start_new_session=True,
                env=self._environ | {ENDS_WITH_STDIN: "1"},
            )  # fmt: skip

    def wait_ready(self, timeout_s: float = 600.0) -> None:
        """Wait for ``/health``. Raises RuntimeError with the end of its log."""
        assert self._process is not None, "launch first"
        deadline = time.monotonic() + timeout_s
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                end = self._log_path.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{self._command[0]} did not come up:\n{end}")
            time.sleep(_POLL_S)
        self._members = members_of(self._process.pid)

    def processor_s(self) -> float:
        """Seconds of processor time that its processes have used."""
        return processor_s(self._members)

    def freeze(self) -> None:
        """Stop all its processes: an idle engine polls, and would take time from the one that is measured."""
        signal_all(self._members, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them go on."""
        signal_all(self._members, signal.SIGCONT)

    def close(self) -> None:
        """SIGTERM, then SIGKILL for what is left of it."""
        process, self._process = self._process, None
        if process is None:
            return
        self.thaw()
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdin is not None
        process.stdin.close()
        signal_all(self._members[1:], signal.SIGKILL)  # those that left the process group

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2.0) as response:
                return bool(response.status == 200)
        except (OSError, urllib.error.URLError):
            return False

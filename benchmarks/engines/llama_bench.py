"""``llama-batched-bench``: llama.cpp's own measure of a batch, without a server, sampling or scheduling.

It is a program that runs once and ends, so it loads the weights each time, outside of what it times.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from benchmarks.engines.host import EngineFailedError, EngineSpec, Measurement, Workload


class LlamaBatchedBench:
    """Runs the program for each batch. ``max_model_len``: tokens of a request, at most."""

    def __init__(self, binary: Path, gguf: Path, cores: list[int], max_model_len: int, realtime: bool = False) -> None:
        self.spec = EngineSpec("llama-batched-bench", "", {}, note=f"{gguf.name}, no server, nothing sampled")
        self.facts: dict[str, object] = {}
        bound = ["taskset", "--cpu-list", ",".join(map(str, cores)), *(["chrt", "--rr", "1"] if realtime else [])]
        self._command = [*bound, str(binary), "-m", str(gguf), "-t", str(len(cores)), "-tb", str(len(cores))]
        self._max_model_len = max_model_len

    def run(self, workload: Workload, seed: int, timeout_s: float) -> Measurement:
        """Seconds of prompts and outputs; the tokens are its own. Raises EngineFailedError."""
        number = workload.num_requests
        lengths = ["-npp", str(workload.prompt_len), "-ntg", str(workload.max_tokens), "-npl", str(number)]
        context = ["-c", str(number * self._max_model_len), "--output-format", "jsonl"]
        try:
            run = subprocess.run(
                [*self._command, *lengths, *context], capture_output=True, text=True, timeout=timeout_s, check=True
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise EngineFailedError(str(error)) from None
        rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
        if not rows:
            raise EngineFailedError(f"no figures: {run.stderr[-300:]}")
        return Measurement(rows[-1]["t_pp"] + rows[-1]["t_tg"], number * workload.max_tokens, 0.0, 0.0)

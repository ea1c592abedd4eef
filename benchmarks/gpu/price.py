"""What bits that do not depend on the batch cost: `cuda` beside `cuda-invariant` on one card, in turns, with a target.

    python3 -m benchmarks gpu price --out gpu_price.json          # whole steps of a 7B shape, half a minute
    python3 -m benchmarks gpu price --device cpu --tiny           # two of the CPU's kinds, at toy sizes

Each kind is a process with a device of its own, as how products are made is a setting of a process; one measures while
the other waits. Then `cuda`'s tokens through events of ``jettison verify`` are held against ``transformers`` by its
rule for ties (logits of two tokens within 4 units of the last place). Without a GPU it needs Triton, too
(TRITON_INTERPRET=1).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.evidence import REPOSITORY
from benchmarks.gpu.results import Results

KINDS = {"cuda": ("cuda", "cuda-invariant"), "cpu": ("native", "torch")}
"""The second is the dear one."""
MOST = 1.10
TURNS = 5
BUDGET_BYTES = 24 << 30
EVENTS = ("batches of 1 to 64", "chunked prefill", "drop + exchange (transfer)")
"""Of verify."""
ANSWER = "price: "


class Kind:
    """A process that measures when it is asked to."""

    def __init__(self, kernels: str, device: str) -> None:
        self.kernels = kernels
        command = [sys.executable, "-m", "benchmarks", "gpu", "price", "--serve", kernels, "--device", device]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                         cwd=REPOSITORY)  # fmt: skip

    def ask(self, what: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, float]:
        """Raises RuntimeError where the process has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise RuntimeError(f"the process of {self.kernels} ended with code {self._process.wait()}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def serve(kernels: str, device: str) -> int:
    """Answers each line of standard input: a number of rows with milliseconds of a step, ``ties`` with a verdict."""
    from benchmarks.gpu.steps import BATCHES, CONTEXT, NUM_STEPS, measured, opened, step

    def say(**found: float | str) -> None:
        print(ANSWER + json.dumps(found), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        worker = opened(Path(folder), budget_bytes=BUDGET_BYTES, kernels=kernels)
        say(rows=min(64, BATCHES[-1]))
        for line in sys.stdin:
            if line.strip() == "ties":
                worker.close()
                say(**ties(kernels, device, Path(folder)))
                return 0
            rows = int(line)
            ms, start_ms = measured(worker, step([1] * rows, [CONTEXT] * rows, []), NUM_STEPS)
            say(ms=ms, start_ms=start_ms)
    return 0


def ties(kernels: str, device: str, folder: Path) -> dict[str, float]:
    """Tokens through some of verify's events, held against ``transformers`` in the same precision."""
    from jettison.device.model.samples import make_sample
    from jettison.device.reference import TransformersReference, transformers_available
    from jettison.live.verify import run
    from jettison.live.verify.proof_table import compare
    from jettison.live.verify.scenarios import Setting

    if not transformers_available():
        return {"tokens": 0}
    is_card = device == "cuda"
    dtype = "bfloat16" if is_card else "float32"
    architecture = next(each for each in run.ARCHITECTURES if each.arch == "qwen3")
    own = make_sample(architecture, folder / "ties", run.SEED, is_for_cards=is_card)
    setting = Setting(own, dtype, run.NUM_OUTPUT_TOKENS, run.SEED, kernels=kernels, device=device)
    reference = TransformersReference(own, dtype)
    rows = [compare(architecture.name, name, run.SCENARIOS[name](setting), reference) for name in EVENTS]
    return {"tokens": sum(row.tokens_compared for row in rows), "mismatches": sum(row.mismatches for row in rows),
            "ties": sum(row.ties for row in rows), "is_whole": all(row.happened for row in rows)}  # fmt: skip


def compare_kinds(device: str, results: Results) -> None:
    """In turns, another one first each time."""
    begun = time.monotonic()
    kinds = [Kind(kernels, device) for kernels in KINDS[device]]
    try:
        started = [kind.answer() for kind in kinds]
        many = int(started[0]["rows"])
        results.tell("start of both, s", time.monotonic() - begun)
        for rows in (1, many):
            found: dict[str, list[float]] = {kind.kernels: [] for kind in kinds}
            for turn in range(TURNS):
                for kind in kinds if turn % 2 else reversed(kinds):
                    kind.ask(str(rows))
                    found[kind.kernels].append(kind.answer()["ms"])
            fast, dear = (statistics.median(found[kind.kernels]) for kind in kinds)
            for name, times in found.items():
                results.tell(f"7b decode {rows}, {name}, ms", statistics.median(times))
            results.tell(f"7b decode {rows}: equal bits, of {kinds[0].kernels}", dear / fast, MOST, dear / fast <= MOST)
        kinds[0].ask("ties")
        told = kinds[0].answer()
        if told["tokens"]:
            results.tell(f"{kinds[0].kernels}: tokens against transformers", told["tokens"])
            results.tell(f"{kinds[0].kernels}: of them ties", told["ties"])
            results.tell(f"{kinds[0].kernels}: tokens that differ by more than a tie", told["mismatches"], 0,
                         told["mismatches"] == 0 and bool(told["is_whole"]))  # fmt: skip
        else:
            print("transformers is not installed: no tokens are compared", flush=True)
        results.tell("seconds", time.monotonic() - begun)
    finally:
        for kind in kinds:
            kind.close()


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="gpu_price.json")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="toy sizes, as always without a GPU")
    parser.add_argument("--serve", metavar="KERNELS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve, options.device)
    compare_kinds(options.device, Results(options.out))
    return 0

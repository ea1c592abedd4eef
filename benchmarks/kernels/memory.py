"""What a device holds beside its memory budget, over steps of every number of rows that it can be given.

    python -m benchmarks kernels memory [--tokens 512] [--seqs 256] [--kernels native ...] [--small] [--json OUT]

The budget (parameters, KV, workspace) is one shared mapping; everything else that a worker allocates is anonymous
memory, which is read from the kernel after each step. Two layers and the head of the 107M-parameter Qwen3 in bfloat16
(its other layers have the same products) run, for every n from 1 up, a prompt of n tokens and (up to ``--seqs``) n
decodes, twice over: what has been seen must cost nothing again. One process each of the kinds of kernels; ``unbounded``
is ``native+torch-linear`` without the bound on oneDNN's caches.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

from benchmarks.engines.weights import QWEN3_02M, QWEN3_110M, make_folder
from benchmarks.shared import REPOSITORY, SUPPRESS, Row, again, keep, parse, print_rows, work_folder
from jettison.device.beside import ONEDNN_CACHES

KINDS = ("native", "native+torch-linear", "torch")
UNBOUNDED = "unbounded"
ONEDNN_DEFAULT = "1024"
BLOCK_SIZE, THREADS, NUM_PASSES = 16, 2, 2
TWO_LAYERS = replace(QWEN3_110M, name="qwen3-110m-2-layers", layers=2)


def anonymous_bytes(field: str = "RssAnon") -> int:
    """Resident memory of this process that no file or shared mapping stands behind."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/self/status has no {field}")


def walk(model_dir: Path, kernels: str, num_tokens: int, num_seqs: int) -> Row:
    """Run the steps; the bytes after the load, and the most, and what each pass has added to those before it."""
    from jettison.cost.model import ChunkShape, StepShape
    from jettison.cost.shapes import ShapeLimits
    from jettison.device.spec import DeviceSpec
    from jettison.device.worker import make_device
    from jettison.live.profile.step_timer import StepTimer

    # A sample is one row more than its context; every sequence has a block.
    num_blocks = max(-(-num_tokens // BLOCK_SIZE), num_seqs) + 1
    spec = DeviceSpec(
        model_dir=model_dir, dtype="bfloat16", budget_bytes=1 << 30, block_size=BLOCK_SIZE, max_num_tokens=num_tokens,
        max_num_seqs=num_seqs, kernels=kernels, num_threads=THREADS, max_model_len=num_tokens + 1,
    )  # fmt: skip
    device = make_device(spec)
    device.start()
    layers = device.shape.num_layers
    limits = ShapeLimits(layers, num_tokens, num_seqs, num_tokens, num_blocks * BLOCK_SIZE, BLOCK_SIZE)
    timer = StepTimer(device, limits)
    start = anonymous_bytes()
    timer.prepare()
    passes: list[dict[str, int]] = []
    for _ in range(NUM_PASSES):
        most: dict[str, int] = {}
        for n in range(1, num_tokens + 1):
            shapes = [StepShape((ChunkShape(0, n),), layers, num_samples=1)]
            if n <= num_seqs:
                shapes.append(StepShape((ChunkShape(1, 1),) * n, layers, num_samples=n))
            for shape in shapes:
                timer.time_s(shape)
            now = anonymous_bytes()
            top = str(1 << (n - 1).bit_length())
            most[top] = max(most.get(top, 0), now - start)
        passes.append(most)
    name = device.kernels_name
    device.close()
    return {"kernels": name, "start_bytes": start, "passes": passes}


def run_apart(model_dir: Path, kind: str, num_tokens: int, num_seqs: int) -> Row:
    """``walk`` in a process of its own."""
    env = {name: value for name, value in os.environ.items() if name not in ONEDNN_CACHES}
    if kind == UNBOUNDED:
        env |= dict.fromkeys(ONEDNN_CACHES, ONEDNN_DEFAULT)
    kernels = "native+torch-linear" if kind == UNBOUNDED else kind
    command = again("kernels", "memory", "--walk", str(model_dir), kernels, str(num_tokens), str(num_seqs))
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True, cwd=REPOSITORY)
    return {"kind": kind, **json.loads(done.stdout.splitlines()[-1])}


def main() -> None:
    args = parse(
        __doc__, tokens=(512, "token budget of a step"), seqs=(256, "most sequences of a step"),
        kernels=(None, "default: all", {"nargs": "+", "choices": [*KINDS, UNBOUNDED]}),
        small=(False, "a model of 0.2M parameters"), walk=(str, {"nargs": 4, "help": SUPPRESS}),
    )  # fmt: skip
    if args.walk:
        folder, kernels, num_tokens, num_seqs = args.walk
        print(json.dumps(walk(Path(folder), kernels, int(num_tokens), int(num_seqs))))
        return
    results = []
    model_dir = make_folder(work_folder(None, "memory"), QWEN3_02M if args.small else TWO_LAYERS)
    for kind in args.kernels or [*KINDS, UNBOUNDED]:
        results.append(run_apart(model_dir, kind, args.tokens, args.seqs))
        most = [{n: size / 2**20 for n, size in each.items()} for each in results[-1]["passes"]]
        print_rows(most, title=f"{kind}: MiB more than after the load, by rows up to; a line a pass")
        keep(args.json, {"rows": results}, "device")

"""How long a worker's whole steps take on one card, from arrays on the host to tokens there, with targets beside.

    python3 -m benchmarks gpu steps --out gpu_steps.json      # the 7B shape with weights from a seed, in a minute

Steps one after the other, each read before the next is started, and each started behind the one before it, as the
server does it; beside them what the card alone takes for the same layers, in the same process. "Start" is what the host
does before a step's first layer runs. Needs what a worker needs, msgspec among it. Without a GPU: a toy on the CPU, to
see that it runs, where no step is started behind another.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.gpu.kernels import DENSE_TFLOPS, TARGETS_MS, step_ms
from benchmarks.gpu.model import DEVICE, GPU, SHAPES, Model, products
from benchmarks.gpu.results import Results
from jettison.device.cuda.kernels import CudaKernels
from jettison.device.spec import CUDA, HOST, RANDOM, DeviceSpec
from jettison.device.step import SamplingRow, StepInput
from jettison.device.worker import DeviceWorker, make_device
from jettison.live.worker.beside import STEP_WAIT_S

NAME, BLOCK = "7b", 16
SHAPE = SHAPES[NAME]
BATCHES = (1, 64, 256) if GPU else (1, 3)
CONTEXT, PROMPT = (1024, 8192) if GPU else (20, 24)
ASKED = {
    "temperature": {}, "top-p": {"top_p": 0.9}, "top-k, top-p": {"top_k": 50, "top_p": 0.9}, "logprobs": {"logprobs": 5}
}  # fmt: skip
NUM_STEPS = 20 if GPU else 2


def opened(folder: Path, host_bytes: int = 0, budget_bytes: int = 40 << 30, kernels: str = "auto") -> DeviceWorker:
    """A device with the shape's weights from a seed, and blocks for the largest batch."""
    shape = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": SHAPE["hidden"],
        "num_attention_heads": SHAPE["heads"], "num_key_value_heads": SHAPE["kv_heads"],
        "intermediate_size": SHAPE["inner"], "num_hidden_layers": SHAPE["layers"], "vocab_size": SHAPE["vocab"],
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": PROMPT + 64, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "head_dim": SHAPE["dim"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape))
    spec = DeviceSpec(
        model_dir=folder, dtype="bfloat16" if GPU else "float32", budget_bytes=budget_bytes if GPU else 16 << 20,
        block_size=BLOCK, max_num_tokens=PROMPT, max_num_seqs=BATCHES[-1], back_end=CUDA if GPU else HOST,
        host_bytes=host_bytes, load_format=RANDOM, page_bytes=(10 << 20) if GPU else 65536,
        kernels=kernels,
    )  # fmt: skip
    device = make_device(spec)
    device.start()
    return device


def step(
    queries: list[int], contexts: list[int], sampling: list[SamplingRow], step_id: int = 1, **more: object
) -> StepInput:
    """Rows with blocks of their own."""
    rows, width = len(queries), -(-max(q + c for q, c in zip(queries, contexts, strict=True)) // BLOCK)
    return StepInput(
        step_id=step_id, layer_lo=0, layer_hi=SHAPE["layers"], token_ids=np.arange(sum(queries), dtype=np.int32) % 128,
        query_lens=np.array(queries, np.int32), context_lens=np.array(contexts, np.int32),
        block_tables=np.arange(rows * width, dtype=np.int32).reshape(rows, width),
        sample_rows=np.arange(rows, dtype=np.int32), sampling=sampling, **more,
    )  # fmt: skip


def measured(device: DeviceWorker, work: StepInput, num_steps: int) -> tuple[float, float]:
    """Median milliseconds of a step, and of its start."""
    whole, start = [], []
    for _ in range(2 + num_steps):  # the first ones capture
        begun = time.perf_counter()
        running = device.start_step(work, None)
        start.append(time.perf_counter() - begun)
        while not running.poll():
            pass
        running.result()
        whole.append(time.perf_counter() - begun)
    return statistics.median(whole[2:]) * 1e3, statistics.median(start[2:]) * 1e3


def followed(device: DeviceWorker, rows: int, num_steps: int) -> float | None:
    """Median milliseconds from a step's end to the next one's, where each takes the tokens of the one before it, which
    is under way, and the thread waits as a worker's does; None where the device has no such steps."""
    lens, contexts, ends = [1] * rows, [CONTEXT] * rows, []
    running = device.start_step(step(lens, contexts, [], 2), None)
    for step_id in range(3, 3 + num_steps):
        while not running.may_be_followed:
            if running.poll():
                return None
        work = step(lens, contexts, [], step_id, follows_step=step_id - 1)
        work.token_ids[:] = -1 - np.arange(rows)
        behind = device.start_step(work, None)
        while not running.poll():
            behind.poll()
            if behind.is_launched:
                running.wait(STEP_WAIT_S)
        running.result()
        ends.append(time.perf_counter())
        running = behind
    running.result()
    return statistics.median(np.diff(ends)) * 1e3


def decode(device: DeviceWorker, model: Model | None, rows: int, results: Results) -> None:
    """Greedy."""
    ms, start_ms = measured(device, step([1] * rows, [CONTEXT] * rows, []), NUM_STEPS)
    results.tell(f"worker's step {NAME} {rows}, read before the next is started, ms", ms)
    results.tell(f"its start, {rows}, ms", start_ms)
    behind_ms = followed(device, rows, 2 * NUM_STEPS)
    if behind_ms is not None and model is not None:
        alone_ms = step_ms(model, rows)
        results.tell(f"the card alone {rows}, ms", alone_ms)
        target, gap = TARGETS_MS.get(f"{NAME} {rows}"), max(0.0, behind_ms - alone_ms) / behind_ms
        results.tell(f"worker's step {NAME} {rows}, ms", behind_ms, target, target and behind_ms <= target)
        results.tell(f"gap between steps, of the step, {rows}", gap, 0.05, gap <= 0.05)


def sampled(device: DeviceWorker, rows: int, results: Results) -> None:
    """What drawing adds to a greedy step."""
    for name, fields in ASKED.items():
        fields = {"top_p": 1.0, "top_k": 0, **fields}
        asks = [SamplingRow(row, CONTEXT, row, 0.7, min_p=0.0, **fields) for row in range(rows)]
        ms, _ = measured(device, step([1] * rows, [CONTEXT] * rows, asks), NUM_STEPS)
        results.tell(f"worker's step {NAME} {rows} with {name}, ms", ms)


def prefill(device: DeviceWorker, results: Results) -> None:
    """One long prompt."""
    ms, _ = measured(device, step([PROMPT], [0], []), 3)
    flop = 2 * PROMPT * SHAPE["layers"] * sum(n * k for n, k in products(SHAPE).values())
    share = (flop + 2 * SHAPE["heads"] * SHAPE["dim"] * SHAPE["layers"] * PROMPT**2) / ms / 1e9 / DENSE_TFLOPS
    results.tell(f"worker's prefill {NAME} {PROMPT}, ms", ms)
    results.tell(f"worker's prefill: share of {DENSE_TFLOPS} TFLOP/s", share, 0.5, share >= 0.5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="gpu_steps.json")
    results = Results(parser.parse_args().out)
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        device = opened(Path(folder))
        results.tell("start of a worker's device, s", time.perf_counter() - begun)
        model = Model(CudaKernels(device.kernels_name, DEVICE), SHAPE, BATCHES[-1], 0) if GPU else None
        for rows in BATCHES:
            decode(device, model, rows, results)
        del model
        sampled(device, min(64, BATCHES[-1]), results)
        prefill(device, results)
        device.close()
    return 0

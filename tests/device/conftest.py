"""Tiny models, a driver that runs requests over stages, and transformers in double as the second opinion."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import math
import os
import random
import shlex
import shutil
import subprocess
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from jettison.device.dtypes import name_of
from jettison.types import TokenLogprobs

if importlib.util.find_spec("msgspec") is not None:
    from jettison.device.devicebytes_host import HostBytes
    from jettison.device.kernels import build, library, native
    from jettison.device.model.create import create_model
    from jettison.device.model.hf_config import read_config
    from jettison.device.model.shards import model_shape
    from jettison.device.model.weights import WeightFolder
    from jettison.device.model.workspaceplan import plan_workspace
    from jettison.device.runner import Runner
    from jettison.device.step import PromptLogprobsRow, SamplingRow, StepInput, StepOutput
else:  # a machine with a GPU that has PyTorch and little else: what is collected there is what needs the card
    ON_ANY_MACHINE = ("test_memory.py", "test_pages_contract.py", "test_pages_host.py")
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py") if path.name not in ON_ANY_MACHINE]

# cuBLAS reads it at a process's first product, and kernels "cuda-invariant" need it (``choose_invariant_products``).
os.environ |= {"CUBLASLT_WORKSPACE_SIZE": "1", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # processes share the cores, and threads that wait for each other spin

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts no test folder on the path

BLOCK_SIZE = 4

TINY = {
    "layers": 3, "hidden": 48, "heads": 4, "kv_heads": 2, "intermediate": 80, "max_position_embeddings": 512,
    "std": 0.2,
}  # fmt: skip
"""At this width a standard deviation of 0.2 gives output as varied as the default does from about 256 up."""

TINY_MODELS = {
    "llama": {"arch": "llama", **TINY},
    "llama3-rope": {"arch": "llama", **TINY, "rope_scaling": "llama3", "tied": True, "head_dim": 20},
    "mistral": {"arch": "mistral", **TINY, "head_dim": 16, "shard_bytes": 40_000},
    "qwen2": {"arch": "qwen2", **TINY, "layers": 4, "kv_heads": 4},
    "qwen3": {"arch": "qwen3", **TINY, "head_dim": 16, "kv_heads": 1, "shard_bytes": 100_000},
}
"""Every architecture, and between them: grouped heads, one head, odd head sizes, tied weights, several files."""


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory) -> dict[str, Path]:
    """Name in ``TINY_MODELS`` -> a folder with float64 weights. Read only."""
    folders = {}
    for seed, (name, options) in enumerate(TINY_MODELS.items()):
        folders[name] = tmp_path_factory.mktemp(name) / "model"
        create_model(folders[name], **options, dtype="float64", seed=seed)
    return folders


@pytest.fixture(scope="session")
def emulated(tmp_path_factory):
    """The kernels with tile registers, which a model in C stands in for: they run on any processor, and attend by tiles
    where it has AVX512_BF16."""
    emulated_path = tmp_path_factory.mktemp("tiles") / "emulated.so"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        pytest.skip("no C compiler")
    flags = ["-std=gnu11", "-O1", "-fPIC", "-pthread", "-shared", "-DEMULATE_TILES", "-DVARIANT=emulated"]
    if "avx512bf16" in library.supported_variants():
        flags += next(variant.flags for variant in build.variants() if variant.name == "avx512bf16")
    sources = [str(build.SOURCES / name) for name in ("kernels.c", "pool.c")]
    subprocess.run([*compiler, *flags, *sources, "-o", str(emulated_path), "-lm"], check=True, capture_output=True)
    return native.NativeKernels(ctypes.CDLL(str(emulated_path)), "emulated")


@dataclass
class PlainMemory:
    """The decoder's view of a device's memory, without pages: everything is always there."""

    slabs: dict[str, torch.Tensor]
    arenas: list[torch.Tensor]
    space: torch.Tensor
    dropped: set[str] = field(default_factory=set)

    def shard_bytes(self, shard: str) -> torch.Tensor:
        assert shard not in self.dropped, f"{shard} was read though it is dropped"
        return self.slabs[shard]

    def kv_arena(self, layer: int) -> torch.Tensor:
        return self.arenas[layer]

    def workspace(self) -> torch.Tensor:
        return self.space


def make_runner(
    model_dir: Path, dtype=torch.float64, *, kernels, num_blocks=256, max_num_tokens=64, max_num_seqs=8, build=None,
    max_model_len=None,
):
    """A loaded ``Runner``, or what ``build`` makes of its arguments, on a ``PlainMemory``; parameters, KV and workspace
    start as garbage."""
    config = read_config(model_dir, max_model_len)
    shape = model_shape(config, name_of(dtype))
    num_bytes = plan_workspace(config, name_of(dtype), max_num_tokens, max_num_seqs, keeps_rows=True).num_bytes
    space = torch.full((num_bytes,), 0xFF, dtype=torch.uint8)
    slabs = {shard: torch.full((size,), 0xFF, dtype=torch.uint8) for shard, size in shape.shard_bytes.items()}
    arena_shape = (num_blocks, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    arenas = [torch.full(arena_shape, torch.nan, dtype=dtype) for _ in range(config.num_layers)]
    memory = PlainMemory(slabs, arenas, space)
    runner = (build or Runner)(config, dtype, memory, kernels, max_num_tokens, max_num_seqs, HostBytes())
    folder = WeightFolder(model_dir, config, name_of(dtype), kernels)
    for shard, slab in slabs.items():
        folder.load_shard(shard, slab)
    folder.load_final_norm(runner.final_norm)
    return runner


@pytest.fixture(scope="session")
def new_runner():
    """``make_runner``, for test modules."""
    return make_runner


@dataclass
class TestRequest:
    """One request as ``StepDriver`` sees it."""

    __test__ = False

    token_ids: list[int]
    tables: list[list[int]]
    """Block ids, one list a stage: shuffled differently, as in life."""
    num_prompt_tokens: int
    num_computed: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def num_pending(self) -> int:
        return len(self.token_ids) - self.num_computed

    def prompt_after(self, position: int) -> list[int]:
        return self.token_ids[position + 1 : self.num_prompt_tokens]

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


class StepDriver:
    """Runs requests through stages, in chunks as told: what the core does, without its policies.

    ``stages``: (run, layers) pairs, run being ``Runner.run`` or ``DeviceWorker.run_step``. Greedy.
    """

    def __init__(
        self, stages, num_blocks: int, *, with_logprobs=False, seed=0, wire=lambda hidden, stage: hidden
    ) -> None:
        self.stages = stages
        self.requests: dict[str, TestRequest] = {}
        self._random = random.Random(seed)
        self._free = [self._random.sample(range(num_blocks), num_blocks) for _ in stages]
        self._with_logprobs = with_logprobs
        self._wire = wire
        self._num_steps = 0

    def add(self, name: str, prompt: list[int]) -> None:
        self.requests[name] = TestRequest(list(prompt), [[] for _ in self.stages], len(prompt))

    def step(self, plan: dict[str, int]) -> StepOutput:
        """One step: request -> number of its pending tokens to compute. Its last pending token is sampled from."""
        self._num_steps += 1
        rows = [self.requests[name] for name in plan]
        counts = list(plan.values())
        samples = [i for i, (request, n) in enumerate(zip(rows, counts)) if n == request.num_pending]
        result = None
        for stage, (run, layers) in enumerate(self.stages):
            step = self._input(rows, counts, samples, stage, layers)
            result = run(step, None if stage == 0 else self._wire(result, stage))
        self._commit(rows, counts, samples, result)
        return result

    def decode(self, names: list[str], num_tokens: int) -> None:
        for _ in range(num_tokens):
            self.step(dict.fromkeys(names, 1))

    def _input(self, rows, counts, samples, stage, layers) -> StepInput:
        for request, n in zip(rows, counts):
            num_blocks = -(-(request.num_computed + n) // BLOCK_SIZE)
            while len(request.tables[stage]) < num_blocks:
                request.tables[stage].append(self._free[stage].pop())
        width = max(len(request.tables[stage]) for request in rows)
        tables = [request.tables[stage] + [0] * (width - len(request.tables[stage])) for request in rows]
        chunks = [request.token_ids[request.num_computed :][:n] for request, n in zip(rows, counts)]
        extra = {}
        if self._with_logprobs:
            extra["sampling"] = [
                SamplingRow(row, len(rows[row].token_ids), 0, 0.0, 1.0, 0, 0.0, logprobs=10) for row in samples
            ]
            extra["prompt_logprobs"] = [
                PromptLogprobsRow(i, 2, tuple(request.prompt_after(request.num_computed)[:n]))
                for i, (request, n) in enumerate(zip(rows, counts))
                if request.num_computed < request.num_prompt_tokens
            ]
        return StepInput(
            step_id=self._num_steps,
            layer_lo=layers.lo,
            layer_hi=layers.hi,
            token_ids=np.array([token for chunk in chunks if layers.lo == 0 for token in chunk], dtype=np.int32),
            query_lens=np.array(counts, dtype=np.int32),
            context_lens=np.array([request.num_computed for request in rows], dtype=np.int32),
            block_tables=np.array(tables, dtype=np.int32),
            sample_rows=np.array(samples, dtype=np.int32),
            **extra,
        )

    @staticmethod
    def _commit(rows, counts, samples, result: StepOutput) -> None:
        for request, n in zip(rows, counts):
            request.num_computed += n
        for i, described in result.prompt_logprobs.items():
            rows[i].prompt_logprobs += described
        assert len(result.tokens) == len(samples)
        for i, token in zip(samples, result.tokens):
            rows[i].token_ids.append(token.token_id)
            if token.logprobs is not None:
                rows[i].logprobs.append(token.logprobs)


@pytest.fixture(scope="session")
def new_driver():
    """``StepDriver``, for test modules."""
    return StepDriver


def in_double(model: torch.nn.Module, model_dir: Path) -> torch.nn.Module:
    """transformers computes norms and rotary tables in float32 whatever the model's dtype: mend both."""
    values = json.loads((model_dir / "config.json").read_text())
    head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    frequencies = torch.tensor(
        reference_frequencies(head_dim, values["rope_theta"], values["rope_scaling"]), dtype=torch.float64
    )

    def rms_norm(module, x):
        return module.weight * (x / (x.double().pow(2).mean(-1, keepdim=True) + module.variance_epsilon).sqrt())

    def rotary(module, x, position_ids):
        assert torch.allclose(module.inv_freq.double(), frequencies, rtol=1e-5, atol=0)  # theirs, in single
        angles = torch.cat([position_ids[..., None].double() * frequencies] * 2, dim=-1)
        return angles.cos(), angles.sin()

    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            module.forward = types.MethodType(rms_norm, module)
        elif name.endswith("RotaryEmbedding"):
            module.forward = types.MethodType(rotary, module)
    return model


def reference_frequencies(head_dim: int, theta: float, scaling: dict | None) -> list[float]:
    """Radians per position in plain Python, for rope types default, linear and llama3."""
    result = []
    for i in range(head_dim // 2):
        frequency = theta ** (-2 * i / head_dim)
        kind = scaling["rope_type"] if scaling else "default"
        if kind == "linear":
            frequency /= scaling["factor"]
        elif kind == "llama3":
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
            if turns < low:
                frequency /= scaling["factor"]
            elif turns < high:
                smooth = (turns - low) / (high - low)
                frequency = (1 - smooth) * frequency / scaling["factor"] + smooth * frequency
        result.append(frequency)
    return result


@pytest.fixture(scope="session")
def reference_logprobs():
    """(folder, token ids, dtype) -> transformers' log-probabilities [tokens, vocab]; in float64 all is double."""
    transformers = pytest.importorskip("transformers")
    models = {}

    def compute(model_dir: Path, token_ids: list[int], dtype=torch.float64) -> torch.Tensor:
        if (model_dir, dtype) not in models:
            model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()
            models[model_dir, dtype] = in_double(model, model_dir) if dtype == torch.float64 else model
        with torch.no_grad():
            logits = models[model_dir, dtype](torch.tensor([token_ids])).logits[0]
        return logits.double().log_softmax(-1)

    return compute

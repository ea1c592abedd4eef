"""Offline throughput beside vLLM, OpenVINO GenAI, llama.cpp and transformers: same weights, cores and requests,
interleaved.

    python -m benchmarks peers throughput --vllm-python VLLM_ENV/bin/python --openvino-python OPENVINO_ENV/bin/python
        --llama-server LLAMA_CPP/build/bin/llama-server

A random Qwen3 of 107M parameters (`--shape`: or 0.5B, or a mixture of 32 experts, 4 a token, 311M in all) is written
once (safetensors in bfloat16; GGUF in float16 for OpenVINO, in bfloat16 for llama.cpp: these need `pip install gguf`;
the mixture has none). With `--float32` every engine computes in that. `--beside CHECKOUT` adds Jettison as it is in
another checkout, with its kernels built there, so that two states of its code are compared.
Every engine is a process of its own, bound to the same cores; while one computes, the others are stopped. Each round
measures every engine on the same fresh prompts, in an order that turns by one each round. Ratios are taken inside a
round and then summarized, so that a machine that drifts moves both sides. Prefix caches are off.

The peers live in environments of their own, because their pins exclude each other: docs/performance.md says how to make
them. An engine without one is left out; one that cannot run is reported with its own words. `--list` shows every
configuration. Tuned means: what its authors document, and of what remains the fastest that was found on the machine
(`docs/performance.md` says what was tried). Prints a table, writes JSON.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.engines.host import EngineFailedError, EngineProcess, EngineSpec, Measurement, Workload
from benchmarks.engines.weights import QWEN3_110M, QWEN3_500M, QWEN3_MOE, Shape, make_folder, make_gguf
from benchmarks.shared import LIVE, Row, absolute, in_turn, keep, machine, parse, print_block, say, spread

PROMPT_LEN, MAX_TOKENS = 128, 64
KV_GIB = 2
"""KV space of every engine that lets one say it: all requests fit many times over."""
SHAPES = {"107m": QWEN3_110M, "0.5b": QWEN3_500M, "moe": QWEN3_MOE}
REFERENCES = ("vllm", "jettison-beside")
"""Whose throughput is 1 in the ratio column: tuned vLLM's, and without it the other checkout's."""
START_TIMEOUT_S = 900
RUN_TIMEOUT_S = 600


class Peers(NamedTuple):
    """What is compared, and where the others are."""

    model: Path
    dtype: str
    """In which engines that can are to compute."""
    max_model_len: int
    most_requests: int
    vllm: Path | None = None
    openvino: Path | None = None
    llama: Path | None = None
    beside: Path | None = None
    """Another checkout of Jettison."""

    def jettison(self, name: str, note: str, mode: str = "local", **config: Any) -> EngineSpec:
        """Jettison with ``config`` over the common settings."""
        keys = {
            "model": str(self.model), "instances": 1, "num_threads": 2, "memory": "4GiB", "overload": "recompute",
            "enable_prefix_caching": False, "max_model_len": self.max_model_len, "dtype": self.dtype, **config,
        }  # fmt: skip
        log = str(Path(tempfile.gettempdir()) / "jettison-peers-server.log")
        return EngineSpec(name, "jettison_engine.py", {"mode": mode, "config": keys, "log": log}, note=note)

    def jettison_beside(self, name: str, **config: Any) -> EngineSpec:
        """Jettison as the other checkout has it, by its own adapter, in this environment."""
        assert self.beside is not None
        script, environ = self.beside / "benchmarks/engines/jettison_engine.py", {"PYTHONPATH": self.beside / "src"}
        ours = self.jettison(name, f"as in {self.beside.name}", **config)
        told = tuple((key, str(value)) for key, value in environ.items())
        return EngineSpec(name, str(script), ours.settings, environ=told, note=ours.note)

    def vllm_spec(self, name: str, note: str, tuned: bool = True, **options: Any) -> EngineSpec:
        """vLLM; ``tuned`` is what its CPU guide recommends for the process, ``options`` go to ``LLM``."""
        assert self.vllm is not None
        environ = {"VLLM_CPU_KVCACHE_SPACE": str(KV_GIB), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        if tuned:
            libraries = [self.vllm.parent.parent / "lib" / "libiomp5.so"]  # where its intel-openmp package puts it
            libraries += sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.?"))[:1]
            environ |= {
                "VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
                "LD_PRELOAD": ":".join(str(path) for path in libraries if path.exists()),
            }  # fmt: skip
        settings = {"model": str(self.model), "options": {"max_model_len": self.max_model_len, **options}}
        return EngineSpec(name, "vllm_engine.py", settings, str(self.vllm), tuple(environ.items()), note)

    def openvino_spec(self, name: str, note: str, properties: dict[str, Any], **scheduler: Any) -> EngineSpec:
        """OpenVINO GenAI's continuous batching."""
        if self.dtype == "float32":
            properties = {**properties, "INFERENCE_PRECISION_HINT": "f32"}
        gguf = make_gguf(self.model, "float16")
        settings = {"gguf": str(gguf), "properties": properties, "scheduler": {"cache_size": KV_GIB, **scheduler}}
        return EngineSpec(name, "openvino_engine.py", settings, str(self.openvino), note=note)

    def llama_spec(self, name: str, note: str, dtype: str, *options: str) -> EngineSpec:
        """llama.cpp's server, as many slots as there are requests."""
        settings = {
            "binary": str(self.llama), "gguf": str(make_gguf(self.model, dtype)), "dtype": dtype,
            "slots": self.most_requests, "context": self.max_model_len, "options": list(options),
        }  # fmt: skip
        return EngineSpec(name, "llama_engine.py", settings, note=note)

    def transformers(self, name: str, dtype: str, note: str) -> EngineSpec:
        """transformers in this environment."""
        return EngineSpec(name, "transformers_engine.py", {"model": str(self.model), "dtype": dtype}, note=note)


def all_specs(peers: Peers) -> list[EngineSpec]:
    """Every configuration that the given environments allow, tuned ones first."""
    has_bf16 = torch.cpu._is_avx512_bf16_supported()
    best = peers.dtype if has_bf16 else "float32"
    budget = max(2048, peers.max_model_len)
    specs = [peers.jettison("jettison", "token budget 2048", max_num_batched_tokens=2048)]
    if peers.beside is not None:
        specs.append(peers.jettison_beside("jettison-beside", max_num_batched_tokens=2048))
    libraries = "bound to both cores, none reserved, libiomp5 and tcmalloc preloaded"
    if peers.vllm is not None:
        specs.append(peers.vllm_spec("vllm", f"tuned: {libraries}, {best}", dtype=best))
    if peers.openvino is not None:
        specs.append(
            peers.openvino_spec("openvino", f"tuned: two pinned threads, prefill unsplit, token budget {budget}",
                                {"ENABLE_CPU_PINNING": True, "INFERENCE_NUM_THREADS": 2},
                                max_num_batched_tokens=budget, max_num_seqs=256, dynamic_split_fuse=False)
        )  # fmt: skip
    if peers.llama is not None:
        specs.append(peers.llama_spec("llama-server", f"a slot a request, {peers.dtype}", peers.dtype, "-b", "2048"))
        if peers.dtype != "float32":
            specs.append(peers.llama_spec("llama-server-f16", "the same in float16", "float16", "-b", "2048"))
    specs.append(peers.transformers("transformers", best, f"generate, {best}"))
    specs += [
        peers.jettison("jettison-torch-linear", "products by torch", kernels="native+torch-linear",
                       max_num_batched_tokens=2048),
        peers.jettison("jettison-default", "all defaults: token budget 512"),
        peers.jettison("jettison-http", "jettison serve, one streaming connection a request", mode="http",
                       max_num_batched_tokens=2048),
        peers.jettison("jettison-workers", "engine with a worker process, no HTTP", mode="workers",
                       max_num_batched_tokens=2048),
    ]  # fmt: skip
    if peers.dtype != "float32":
        specs.append(peers.jettison("jettison-f32", "the same in float32", dtype="float32",
                                    max_num_batched_tokens=2048))  # fmt: skip
    if peers.vllm is not None:
        if not has_bf16:
            specs.append(peers.vllm_spec("vllm-bf16", f"{libraries}, bfloat16 as stored", dtype="bfloat16"))
        specs.append(peers.vllm_spec("vllm-default", "all defaults", tuned=False))
    if peers.openvino is not None:
        specs.append(peers.openvino_spec("openvino-default", "all defaults", {}))
    if not has_bf16:
        specs.append(peers.transformers("transformers-bf16", "bfloat16", "generate, bfloat16 as stored"))
    return specs


Results = dict[str, dict[str, list[Measurement]]]
"""Workload -> engine -> one measurement a round."""


def start_all(
    specs: Sequence[EngineSpec], cores: list[int], realtime: bool
) -> tuple[list[EngineProcess], dict[str, str]]:
    """Start one after the other; what fails is left out, with its reason."""
    engines: list[EngineProcess] = []
    failures: dict[str, str] = {}
    for spec in specs:
        say(f"starting {spec.name} ...")
        engine = EngineProcess(spec, cores, realtime)
        try:
            engine.start(START_TIMEOUT_S)
            engines.append(engine)
        except EngineFailedError as error:
            failures[spec.name] = str(error)
            engine.close()
            say(f"does not run: {error}")
    return engines, failures


def measure(
    engines: list[EngineProcess],
    workloads: list[Workload],
    num_rounds: int,
    slow_s: float,
    failures: dict[str, str],
    save: Callable[[Results], None],
) -> Results:
    """Warm every engine up, then interleave; an engine whose warm-up took longer than ``slow_s`` is measured once.

    ``save`` is given the results so far after every workload.
    """
    results: Results = {workload.name: {} for workload in workloads}
    for workload in workloads:
        rounds_of = dict.fromkeys((engine.spec.name for engine in engines), num_rounds)
        for round_index in range(-1, num_rounds):
            for engine in in_turn(engines, max(round_index, 0)):
                name = engine.spec.name
                if name in failures or round_index >= rounds_of[name]:
                    continue
                try:
                    taken = engine.run(workload, seed=1000 + round_index, timeout_s=RUN_TIMEOUT_S)
                except EngineFailedError as error:
                    failures[name] = str(error)
                    continue
                if round_index < 0:
                    rounds_of[name] = 1 if taken.seconds > slow_s else num_rounds
                else:
                    results[workload.name].setdefault(name, []).append(taken)
                say(f"{workload.name}, round {round_index}, {name}: {taken.tokens_per_s:.1f} tokens/s, "
                    f"others {taken.cores_of_others:.2f} cores")  # fmt: skip
        save(results)  # a long run that is cut off leaves what it has
    return results


def ratios(of: list[Measurement], to: list[Measurement]) -> list[float]:
    """Throughput over throughput, round by round."""
    return [a.tokens_per_s / b.tokens_per_s for a, b in zip(of, to)]


def print_http_cost(results: Results) -> None:
    for workload, by_engine in results.items():
        for base in ("jettison", "jettison-workers"):
            if base in by_engine and "jettison-http" in by_engine:
                costs = [1.0 - r for r in ratios(by_engine["jettison-http"], by_engine[base])]
                print(f"HTTP costs, {workload}, against {base}: {spread(costs)}")


def document_of(shape: Shape, results: Results, engines: list[EngineProcess], failures: dict[str, str]) -> Row:
    def row_of(taken: list[Measurement], reference: list[Measurement]) -> Row:
        return {
            "tokens_per_s": [round(m.tokens_per_s, 2) for m in taken],
            "ratio_to_reference": [round(r, 3) for r in ratios(taken, reference)],
            "cores_used": [round(m.cores_used, 2) for m in taken],
            "cores_of_others": [round(m.cores_of_others, 2) for m in taken],
        }

    measured = {name for by_engine in results.values() for name in by_engine}
    reference = next((name for name in REFERENCES if name in measured), None)
    return {
        "machine": machine(), "model": {"name": shape.name, "parameters": shape.num_parameters()},
        "engines": {e.spec.name: {"note": e.spec.note, **e.facts} for e in engines}, "does_not_run": failures,
        "reference": reference, "workloads": {
            workload: {name: row_of(taken, by_engine.get(reference or "", [])) for name, taken in by_engine.items()}
            for workload, by_engine in results.items()
        },
    }  # fmt: skip


def main() -> None:
    arguments = parse(
        __doc__, vllm_python=(Path, "interpreter of the environment that has vllm-cpu"),
        openvino_python=(Path, "interpreter of the environment that has openvino-genai"),
        llama_server=(Path, "llama.cpp's server, built for this machine"),
        beside=(Path, "another checkout of Jettison, its kernels built"), shape=("107m", {"choices": SHAPES}),
        float32=(False, "every engine computes in float32"), prompt_len=PROMPT_LEN,
        engines=(None, "only these", {"nargs": "+"}), list=(False, "show the configurations and end"),
        requests=[16, 64], rounds=5, cores=[0, 1], slow=(30.0, "a batch this slow is measured once"),
        realtime=(False, "measure at real-time priority (root): for machines that do other work"),
        models=(Path(tempfile.gettempdir()) / "jettison-peers", "where the models are made and kept"),
        json=Path("peers.json"),
    )  # fmt: skip

    shape = SHAPES[arguments.shape]
    if shape.experts and (arguments.openvino_python or arguments.llama_server):
        raise SystemExit("no GGUF is made of the mixture: without --openvino-python and --llama-server")
    peers = Peers(
        make_folder(arguments.models, shape), "float32" if arguments.float32 else "bfloat16",
        -(-(arguments.prompt_len + MAX_TOKENS) // 512) * 512, max(arguments.requests),
        absolute(arguments.vllm_python), absolute(arguments.openvino_python), absolute(arguments.llama_server),
        absolute(arguments.beside),
    )  # fmt: skip
    specs = all_specs(peers)
    if arguments.engines:
        unknown = set(arguments.engines) - {spec.name for spec in specs}
        if unknown:
            raise SystemExit(f"no engine {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in specs)}")
        specs = [spec for spec in specs if spec.name in arguments.engines]
    if arguments.list:
        for spec in specs:
            print(f"{spec.name:19}{spec.note}")
        return
    print(f"machine: {json.dumps(machine())}")
    print(f"model: {shape.name}, {shape.num_parameters() / 1e6:.1f}M parameters, stored in bfloat16")
    workloads = [Workload(n, arguments.prompt_len, MAX_TOKENS) for n in arguments.requests]
    engines, failures = start_all(specs, arguments.cores, arguments.realtime)
    try:
        results = measure(
            engines, workloads, arguments.rounds, arguments.slow, failures,
            lambda results: keep(arguments.json, document_of(shape, results, engines, failures), *LIVE),
        )  # fmt: skip
        print_block("peers_16_64_5th", document_of(shape, results, engines, failures))
        print_http_cost(results)
        print(*(f"{name} does not run: {reason}" for name, reason in failures.items()), sep="\n")
    finally:
        for engine in engines:
            engine.close()

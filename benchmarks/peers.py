"""Offline throughput beside vLLM, OpenVINO GenAI and transformers: same weights, cores and requests, interleaved.

    python benchmarks/peers.py --vllm-python VLLM_ENV/bin/python --openvino-python OPENVINO_ENV/bin/python

A random Qwen3 of 107M parameters is written once (safetensors in bfloat16; float16 GGUF for OpenVINO, which needs
`pip install gguf`). Every engine is a process of its own, bound to the same cores; while one computes, the others are
stopped. Each round measures every engine on the same fresh prompts, in an order that turns by one each round. Ratios
are taken inside a round and then summarized, so that a machine that drifts moves both sides. Prefix caches are off.

The peers live in environments of their own, because their pins exclude each other: docs/performance.md says how to make
them. An engine without one is left out; one that cannot run is reported with its own words. `--list` shows every
configuration. Tuned means: what its authors document, and of what remains the fastest that was found on the machine
(`docs/performance.md` says what was tried). Prints a table, writes JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from engines.host import EngineFailedError, EngineProcess, EngineSpec, Measurement, Workload
from engines.weights import QWEN3_110M, make_folder, make_gguf
from evidence import LIVE, write_result

PROMPT_LEN, MAX_TOKENS = 128, 64
MAX_MODEL_LEN = 512
KV_GIB = 1
"""KV space of every engine that lets one say it: all requests fit many times over."""
REFERENCE = "vllm"
"""Whose throughput is 1 in the ratio column: tuned vLLM."""
START_TIMEOUT_S = 900
RUN_TIMEOUT_S = 600


def jettison_spec(name: str, model: Path, note: str, mode: str = "local", **config: Any) -> EngineSpec:
    """Jettison with ``config`` over the common settings."""
    keys = {
        "model": str(model), "instances": 1, "num_threads": 2, "memory": "2GiB", "overload": "recompute",
        "enable_prefix_caching": False, "max_model_len": MAX_MODEL_LEN, **config,
    }  # fmt: skip
    log = str(Path(tempfile.gettempdir()) / "jettison-peers-server.log")
    return EngineSpec(name, "jettison_engine.py", {"mode": mode, "config": keys, "log": log}, note=note)


def vllm_spec(name: str, python: Path, model: Path, note: str, tuned: bool = True, **options: Any) -> EngineSpec:
    """vLLM; ``tuned`` is what its CPU guide recommends for the process, ``options`` go to ``LLM``."""
    environ = {"VLLM_CPU_KVCACHE_SPACE": str(KV_GIB), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if tuned:
        libraries = [python.parent.parent / "lib" / "libiomp5.so"]  # where its intel-openmp package puts it
        libraries += sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.?"))[:1]
        environ |= {
            "VLLM_CPU_OMP_THREADS_BIND": "0-1",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "LD_PRELOAD": ":".join(str(path) for path in libraries if path.exists()),
        }
    settings = {"model": str(model), "options": {"max_model_len": MAX_MODEL_LEN, **options}}
    return EngineSpec(name, "vllm_engine.py", settings, str(python), tuple(environ.items()), note)


def openvino_spec(
    name: str, python: Path, gguf: Path, note: str, properties: dict[str, Any], **scheduler: Any
) -> EngineSpec:
    """OpenVINO GenAI's continuous batching."""
    settings = {"gguf": str(gguf), "properties": properties, "scheduler": {"cache_size": KV_GIB, **scheduler}}
    return EngineSpec(name, "openvino_engine.py", settings, str(python), note=note)


def transformers_spec(name: str, model: Path, dtype: str, note: str) -> EngineSpec:
    """transformers in this environment."""
    return EngineSpec(name, "transformers_engine.py", {"model": str(model), "dtype": dtype}, note=note)


def all_specs(model: Path, gguf: Path | None, vllm: Path | None, openvino: Path | None) -> list[EngineSpec]:
    """Every configuration that the given environments allow, tuned ones first."""
    has_bf16 = torch.cpu._is_avx512_bf16_supported()
    vllm_best = "bfloat16" if has_bf16 else "float32"
    specs = [jettison_spec("jettison", model, "token budget 2048", max_num_batched_tokens=2048)]
    if vllm is not None:
        libraries = "bound to both cores, none reserved, libiomp5 and tcmalloc preloaded"
        specs.append(vllm_spec("vllm", vllm, model, f"tuned: {libraries}, {vllm_best}", dtype=vllm_best))
    if openvino is not None and gguf is not None:
        specs.append(
            openvino_spec("openvino", openvino, gguf, "tuned: two pinned threads, prefill unsplit, token budget 2048",
                          {"ENABLE_CPU_PINNING": True, "INFERENCE_NUM_THREADS": 2},
                          max_num_batched_tokens=2048, max_num_seqs=256, dynamic_split_fuse=False)
        )  # fmt: skip
    specs.append(transformers_spec("transformers", model, vllm_best, f"generate, {vllm_best}"))
    specs.append(jettison_spec("jettison-f32", model, "the same in float32", dtype="float32",
                               max_num_batched_tokens=2048))  # fmt: skip
    specs.append(jettison_spec("jettison-torch-linear", model, "products by torch: what auto is where there is AMX",
                               kernels="native+torch-linear", max_num_batched_tokens=2048))  # fmt: skip
    specs.append(jettison_spec("jettison-default", model, "all defaults: token budget 512"))
    specs.append(jettison_spec("jettison-http", model, "jettison serve, one streaming connection a request",
                               mode="http", max_num_batched_tokens=2048))  # fmt: skip
    specs.append(jettison_spec("jettison-workers", model, "engine with a worker process, no HTTP", mode="workers",
                               max_num_batched_tokens=2048))  # fmt: skip
    if vllm is not None:
        if not has_bf16:
            specs.append(vllm_spec("vllm-bf16", vllm, model, f"{libraries}, bfloat16 as stored", dtype="bfloat16"))
        specs.append(vllm_spec("vllm-default", vllm, model, "all defaults", tuned=False))
    if openvino is not None and gguf is not None:
        specs.append(openvino_spec("openvino-default", openvino, gguf, "all defaults", {}))
    if not has_bf16:
        specs.append(transformers_spec("transformers-bf16", model, "bfloat16", "generate, bfloat16 as stored"))
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
        print(f"starting {spec.name} ...", file=sys.stderr, flush=True)
        engine = EngineProcess(spec, cores, realtime)
        try:
            engine.start(START_TIMEOUT_S)
            engines.append(engine)
        except EngineFailedError as error:
            failures[spec.name] = str(error)
            engine.close()
            print(f"  does not run: {error}", file=sys.stderr, flush=True)
    return engines, failures


def measure(
    engines: list[EngineProcess],
    workloads: list[Workload],
    num_rounds: int,
    slow_s: float,
    failures: dict[str, str],
    path: Path,
) -> Results:
    """Warm every engine up, then interleave; an engine whose warm-up took longer than ``slow_s`` is measured once.

    The results so far are in ``path`` after every workload.
    """
    results: Results = {workload.name: {} for workload in workloads}
    for workload in workloads:
        rounds_of = dict.fromkeys((engine.spec.name for engine in engines), num_rounds)
        for round_index in range(-1, num_rounds):
            turn = max(round_index, 0) % max(1, len(engines))
            for engine in engines[turn:] + engines[:turn]:
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
                print(f"  {workload.name}, round {round_index}, {name}: {taken.tokens_per_s:.1f} tokens/s, "
                      f"others {taken.cores_of_others:.2f} cores", file=sys.stderr, flush=True)  # fmt: skip
        write_json(path, results, engines, failures)  # a long run that is cut off leaves what it has
    return results


def ratios(of: list[Measurement], to: list[Measurement]) -> list[float]:
    """Throughput over throughput, round by round."""
    return [a.tokens_per_s / b.tokens_per_s for a, b in zip(of, to)]


def spread(values: Sequence[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def print_table(results: Results, engines: list[EngineProcess], failures: dict[str, str]) -> None:
    for workload, by_engine in results.items():
        print(f"\n{workload}\n")
        columns = ("output tokens/s", f"of {REFERENCE}, same round", "cores", "others")
        print(f"{'':19}" + "".join(f"{c:>24}" for c in columns[:2]) + f"{columns[2]:>8}{columns[3]:>8}  computes in")
        reference = by_engine.get(REFERENCE, [])
        for engine in engines:
            taken = by_engine.get(engine.spec.name)
            if not taken:
                continue
            rates = [m.tokens_per_s for m in taken]
            rate = f"{statistics.median(rates):.0f} ({min(rates):.0f}-{max(rates):.0f})"
            ratio = spread(ratios(taken, reference)) if reference else "-"
            cores = statistics.median(m.cores_used for m in taken)
            others = statistics.median(m.cores_of_others for m in taken)
            facts = engine.facts
            print(f"{engine.spec.name:19}{rate:>24}{ratio:>24}{cores:>8.2f}{others:>8.2f}  "
                  f"{facts['dtype']}{' ' + facts['kernels'] if 'kernels' in facts else ''}")  # fmt: skip
    for name, reason in failures.items():
        print(f"{name:19}does not run: {reason}")


def print_http_cost(results: Results) -> None:
    for workload, by_engine in results.items():
        for base in ("jettison", "jettison-workers"):
            if base in by_engine and "jettison-http" in by_engine:
                costs = [1.0 - r for r in ratios(by_engine["jettison-http"], by_engine[base])]
                print(f"HTTP costs, {workload}, against {base}: {spread(costs)}")


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    model = platform.processor() or platform.machine()
    flags = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
        if key.strip() == "flags":
            flags = value
    known = ("avx2", "f16c", "avx512f", "avx512_bf16", "amx_bf16")
    return {"cpu": model, "cores": os.cpu_count(), "flags": [f for f in known if f in flags.split()],
            "kernel": platform.release(), "python": platform.python_version(), "torch": torch.__version__}  # fmt: skip


def write_json(path: Path, results: Results, engines: list[EngineProcess], failures: dict[str, str]) -> None:
    document = {
        "machine": machine(),
        "model": {"name": QWEN3_110M.name, "parameters": QWEN3_110M.num_parameters()},
        "engines": {e.spec.name: {"note": e.spec.note, **e.facts} for e in engines},
        "does_not_run": failures,
        "workloads": {
            workload: {
                name: {
                    "tokens_per_s": [round(m.tokens_per_s, 2) for m in taken],
                    "ratio_to_reference": [round(r, 3) for r in ratios(taken, by_engine.get(REFERENCE, []))],
                    "cores_used": [round(m.cores_used, 2) for m in taken],
                    "cores_of_others": [round(m.cores_of_others, 2) for m in taken],
                }
                for name, taken in by_engine.items()
            }
            for workload, by_engine in results.items()
        },
    }
    write_result(path, document, *LIVE)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vllm-python", type=Path, help="interpreter of the environment that has vllm-cpu")
    parser.add_argument("--openvino-python", type=Path, help="interpreter of the environment that has openvino-genai")
    parser.add_argument("--engines", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--list", action="store_true", help="show the configurations and end")
    parser.add_argument("--requests", type=int, nargs="+", default=[16, 64], metavar="N")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=int, nargs="+", default=[0, 1], metavar="CORE")
    parser.add_argument("--slow", type=float, default=30.0, metavar="S", help="a batch this slow is measured once")
    parser.add_argument("--realtime", action="store_true",
                        help="measure at real-time priority (root): for machines that do other work")  # fmt: skip
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "jettison-peers",
                        help="where the models are made and kept")  # fmt: skip
    parser.add_argument("--json", type=Path, default=Path("peers.json"))
    arguments = parser.parse_args()

    model = make_folder(arguments.models, QWEN3_110M)
    gguf = make_gguf(model) if arguments.openvino_python else None
    specs = all_specs(model, gguf, absolute(arguments.vllm_python), absolute(arguments.openvino_python))
    if arguments.engines:
        unknown = set(arguments.engines) - {spec.name for spec in specs}
        if unknown:
            parser.error(f"no engine {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in specs)}")
        specs = [spec for spec in specs if spec.name in arguments.engines]
    if arguments.list:
        for spec in specs:
            print(f"{spec.name:19}{spec.note}")
        return
    print(f"machine: {json.dumps(machine())}")
    print(f"model: {QWEN3_110M.name}, {QWEN3_110M.num_parameters() / 1e6:.1f}M parameters, stored in bfloat16")
    workloads = [Workload(n, PROMPT_LEN, MAX_TOKENS) for n in arguments.requests]
    engines, failures = start_all(specs, arguments.cores, arguments.realtime)
    try:
        results = measure(engines, workloads, arguments.rounds, arguments.slow, failures, arguments.json)
        print_table(results, engines, failures)
        print_http_cost(results)
        print(f"written: {arguments.json}")
    finally:
        for engine in engines:
            engine.close()


def absolute(python: Path | None) -> Path | None:
    """Not resolved: the interpreter of a virtual environment is a link, and the link is what says which one."""
    return None if python is None else Path(os.path.abspath(python))


if __name__ == "__main__":
    main()

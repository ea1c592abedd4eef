"""``jettison verify --alone`` in bfloat16, small models beside each other, so that it ends within a minute on a card.

    python3 -m benchmarks gpu verify --out gpu_verify.json
    python3 -m benchmarks gpu verify --device cpu --architectures Qwen3

Each model has a process of its own: most of an event's time is the host's. The file has the rows of all, as they come.
``jettison verify --alone --dtype bfloat16 --device cuda`` has all models, one after the other.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence import REPOSITORY
from jettison.device.model.samples import make_sample
from jettison.live.verify.run import ARCHITECTURES, run_verify
from jettison.report.output import write_whole

BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
USUAL = ("Qwen2", "Llama 3", "Qwen3", "Qwen3-MoE")
LOOKS_EVERY_S = 0.3


ADDED = ("rows", "tokens_compared", "mismatches", "in_parts", "incomplete", "not_applicable", "failed")


def merged(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One table of several: rows one after the other, counts added, complete where all are."""
    whole = dict(documents[0])
    for document in documents[1:]:
        whole |= {name: whole[name] + document[name] for name in ADDED}
        whole["complete"] = whole["complete"] and document["complete"]
    return whole


def beside_each_other(options: argparse.Namespace) -> int:
    """Run each model's process to its end, all of them up to the first that fails; the file is written anew whenever
    one of them has another row. The largest exit code."""
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / f"{number}.json" for number in range(len(options.architectures))]
        command = [sys.executable, "-m", "benchmarks", "gpu", "verify", "--device", options.device, "--architectures"]
        processes = [
            subprocess.Popen([*command, name, "--out", str(out)], cwd=REPOSITORY)
            for name, out in zip(options.architectures, outs, strict=True)
        ]
        seen: list[str] = []
        try:
            is_over = False
            while not is_over:
                codes = [process.poll() for process in processes]
                is_over = None not in codes or any(codes)
                texts = [out.read_text() for out in outs if out.exists()]
                if texts and texts != seen:
                    table = merged([json.loads(text) for text in texts])
                    table["complete"] = table["complete"] and len(texts) == len(outs)
                    write_whole(options.out, json.dumps(table, indent=1) + "\n")
                    seen = texts
                if not is_over:
                    time.sleep(LOOKS_EVERY_S)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return max(abs(code or 0) for code in codes)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_verify.json"))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--architectures", nargs="+", default=USUAL, choices=BY_NAME, metavar="NAME")
    options = parser.parse_args()
    if len(options.architectures) > 1:
        return beside_each_other(options)
    with tempfile.TemporaryDirectory() as folder:
        only = BY_NAME[options.architectures[0]]
        model = make_sample(only, Path(folder) / "model", 0, is_for_cards=options.device == "cuda")
        return run_verify(model, options.out, "bfloat16", alone=True, device=options.device)

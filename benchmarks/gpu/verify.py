"""``jettison verify --alone`` in bfloat16 with one small model, so that it ends within a minute on a card.

    python3 -m benchmarks gpu verify --out gpu_verify.json
    python3 -m benchmarks gpu verify --device cpu --architecture Qwen3

``jettison verify --alone --dtype bfloat16 --device cuda`` has all of them, in some five minutes.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from jettison.device.model.samples import make_sample
from jettison.live.verify.run import ARCHITECTURES, run_verify


def main() -> int:
    """Command line."""
    by_name = {architecture.name: architecture for architecture in ARCHITECTURES}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_verify.json"))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--architecture", default="Qwen2", choices=by_name)
    options = parser.parse_args()
    is_for_cards = options.device == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        model = make_sample(by_name[options.architecture], Path(folder) / "model", 0, is_for_cards=is_for_cards)
        return run_verify(model, options.out, "bfloat16", alone=True, device=options.device)

"""Steps of a live run, from the time line of its engine."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jettison.cost.recorded import RecordedStep


def read_steps(path: Path, num_layers: int) -> list[RecordedStep]:
    """``recorded_steps`` of a file. Raises OSError, ValueError where it is no JSON."""
    data = path.read_bytes()
    return recorded_steps(json.loads(gzip.decompress(data) if path.suffix == ".gz" else data), num_layers)


def recorded_steps(document: Mapping[str, Any], num_layers: int) -> list[RecordedStep]:
    """Of ``Timeline.document`` for a model of so many layers, as they began; without those that took no time by the
    worker's clock."""
    steps = [
        _step(event, num_layers) for event in document["traceEvents"]
        if event.get("cat") == "step" and event["dur"] > 0.0 and event["args"]["layers"] is not None
    ]  # fmt: skip
    return sorted(steps, key=lambda step: step.began_s)


def _step(event: Mapping[str, Any], num_layers: int) -> RecordedStep:
    args = event["args"]
    lo, hi = args["layers"]
    return RecordedStep(
        event["tid"], event["ts"] / 1e6, event["dur"] / 1e6, args["requests"], args["tokens"], args["pairs"],
        args["kv_tokens"], hi - lo, lo == 0, args["samples"] if hi == num_layers else 0,
    )

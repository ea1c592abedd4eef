"""Small specs for the tests of this folder: seconds of load on a model of which a step takes milliseconds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "sim"))

from scenarios import BLOCK_SIZE, PAGE_BYTES, PROFILE, make_shape

from jettison.cost.deployment import Deployment, deployment_to_document
from jettison.cost.hardware import HardwareProfile
from jettison.sim.setup import MemorySetup

EAGER = {
    "overload_trigger": "pressure", "overload_min_wait_ms": 10, "overload_check_interval_ms": 20, "drop_dwell_ms": 50,
    "restore_dwell_ms": 100,
}  # fmt: skip


def deployment(
    *, num_instances: int = 2, num_blocks: int = 36, profile: HardwareProfile = PROFILE
) -> Deployment:
    """Two instances of the simulator's little model, each with so many blocks."""
    shape = make_shape()
    memory = MemorySetup.for_blocks(shape, BLOCK_SIZE, num_blocks, page_bytes=PAGE_BYTES)
    return Deployment(
        "little", shape, num_instances, memory.budget_bytes, 0, PAGE_BYTES, 4096, profile,
        settings={"block_size": BLOCK_SIZE, "max_num_batched_tokens": 128, "max_num_seqs": 64, "page_size": PAGE_BYTES},
    )


def spec(**changes: Any) -> dict[str, Any]:
    """A burst that two little instances cannot hold without dropping."""
    raw: dict[str, Any] = {
        "name": "little",
        "cluster": {"description": deployment_to_document(deployment())},
        "workload": {
            "arrivals": {"process": "poisson", "rate_per_s": 60.0, "duration_s": 1.0,
                         "bursts": [{"start_s": 0.1, "duration_s": 0.4, "multiplier": 8.0}]},
            "lengths": {"input": {"median": 50, "sigma": 0.5, "cap": 200},
                        "output": {"median": 40, "sigma": 0.4, "cap": 90}},
        },
        "settings": {**EAGER, "enable_prefix_caching": False},
        "variants": ["recompute", "drop"],
    }  # fmt: skip
    return raw | changes

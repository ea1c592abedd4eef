"""kill -9 and SIGSTOP of real worker processes at named places: no token lost, repeated or wrong; nothing leaks.

``JETTISON_FAULT_SCHEDULES=200`` looks further than the default; ``benchmarks/faults.py`` prints what it saw.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jettison.device.model.create import create_model
from jettison.live.fault_schedules import FaultRounds, Schedule
from jettison.live.safepoints import NAMES

pytestmark = pytest.mark.live

N_SCHEDULES = int(os.environ.get("JETTISON_FAULT_SCHEDULES", "8"))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults") / "model"
    create_model(
        folder, arch="qwen2", layers=4, hidden=32, heads=4, kv_heads=2, seed=5, max_position_embeddings=512, std=0.2
    )
    return folder


async def test_seeded_deaths_lose_nothing(model_dir: Path) -> None:
    step = max(1, len(NAMES) // N_SCHEDULES)
    async with FaultRounds.running(model_dir) as rounds:
        for index in range(N_SCHEDULES):
            report = await rounds.run(Schedule.draw(index * step if len(NAMES) > N_SCHEDULES else index))
            assert not report.problems, report
            assert report.num_tokens > 0

"""Ray's driver as a process that does not answer: what waits for it has a limit, and none is left. Needs no Ray."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from jettison.errors import UserError
from jettison.live.engine import spawn_ray
from jettison.live.wire.placing import Room
from waiting import PATIENCE_S


@pytest.fixture
def placer(monkeypatch):
    monkeypatch.setattr(spawn_ray, "_COMMAND", (sys.executable, "-c", "import time; time.sleep(1000)"))
    return spawn_ray.RayPlacer([Room(num_cpus=1, num_gpus=0, memory_bytes=0)], "nowhere:1", "pack", room_timeout_s=0.0)


async def test_a_start_of_ray_has_a_limit(placer, monkeypatch):
    monkeypatch.setattr(spawn_ray, "_JOIN_TIMEOUT_S", 0.05)
    with pytest.raises(UserError, match=r"Ray has not started in 0\.05 s"):
        await asyncio.wait_for(placer.open(), PATIENCE_S)
    assert placer.pid is None
    await placer.close()


async def test_a_start_of_ray_that_is_given_up_leaves_no_driver(placer):
    opening = asyncio.create_task(placer.open())
    async with asyncio.timeout(PATIENCE_S):
        while (pid := placer.pid) is None:
            await asyncio.sleep(0.001)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    assert placer.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    await placer.close()

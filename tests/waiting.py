"""How long tests wait for what must come.

A bound on a wait asserts no time: it only ends a test that would hang. So it is longer than a start of a process takes
on a machine that does five other things.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PATIENCE_S = 120.0


async def until(holds: Callable[[], object]) -> None:
    """Wait until something holds. Raises TimeoutError after ``PATIENCE_S``."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.001)

"""Lines that cannot be prepared now, for a reason that is not theirs: they are tried again."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from jettison.server.compiling import MAX_COMPILE_S, MAX_WAITING
from jettison.server.endpoint import GenerationEndpoint, WireAnswer
from jettison.server.errors import ApiError
from jettison.server.prompts import Prompt
from jettison.server.sampling import GenerationPlan

AGAIN_S = 1.0
"""Seconds between two attempts."""
PATIENCE_S = MAX_WAITING * MAX_COMPILE_S
"""Seconds of attempts: as long as the compiler takes at most for all constraints that may wait for it."""


async def prepared_patiently(
    endpoint: GenerationEndpoint, body: dict[str, Any]
) -> tuple[GenerationPlan, list[Prompt], WireAnswer]:
    """The endpoint's ``prepare`` for a line, tried again while it answers 503. Raises ApiError, 503 at the end of all
    patience."""
    end_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return await endpoint.prepare(body)
        except ApiError as error:
            if error.status != 503 or time.monotonic() + AGAIN_S > end_s:
                raise
        await asyncio.sleep(AGAIN_S)

"""One life of a worker, as its crew knows it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from jettison.live.engine.spawner import Handle
from jettison.live.wire import messages as m


@dataclass(slots=True, eq=False)
class Life:
    """One life of a worker."""

    handle: Handle
    number: int
    started: asyncio.Future[m.WorkerReady]
    """What it says of its start."""
    token: bytes | None
    """What one certificate is signed for; None: none is, or it has been."""
    reported: bool = False
    """Its end has been told, or needs not be: it does not count any more."""
    is_orphan: bool = False
    """It has outlived an earlier controller, and has not been taken over."""
    is_known: bool = False
    """Peers have been told where it is."""
    is_retired: bool = False
    """It was told to end, as it is not needed."""
    why_given_up: str | None = None

    @property
    def why_over(self) -> str:
        """Once its end has been told."""
        return self.why_given_up or f"its process ended with code {self.handle.ended.result()}"

    @property
    def is_up(self) -> bool:
        """It counts as a live worker, or as one that starts."""
        return not self.handle.ended.done() and not self.reported

    @property
    def has_weights(self) -> bool:
        """Whether it has answered, and knows what is served: the controller may have died before it said so."""
        is_there = self.started.done() and self.started.exception() is None
        return is_there and self.started.result().weights is not None

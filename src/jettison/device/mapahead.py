"""What a device maps ahead of its next layouts, so that these call no driver: all at once, or in turns beside steps.

On back ends where that has no gain, nothing is done. Which layouts are likely: ``memory.mapahead``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from jettison.device.memory import DeviceMemory
from jettison.errors import JettisonError
from jettison.memory.layout import LayoutSpec
from jettison.memory.mapahead import layouts_ahead
from jettison.types import LayerRange, ModelShape

logger = logging.getLogger(__name__)

PAGES_A_TURN = 2
"""About 0.1 ms on a card: no longer than a layer of a decode step, in whose shadow it is to be."""


class MappedAhead:
    """Of one device's memory, from ``follow`` to the next change of layout."""

    def __init__(self, memory: DeviceMemory, shape: ModelShape, drops: Sequence[LayerRange]) -> None:
        """``drops``: the layers that the first drops of a whole model are likely to leave."""
        self._memory = memory
        self._shape = shape
        self._drops = drops
        self._turns: Iterator[int] = iter(())

    def follow(self, spec: LayoutSpec) -> None:
        """``spec`` is the layout now: forget what was to come before it."""
        self._turns = (
            turn for each in layouts_ahead(spec, self._shape, self._drops)
            for turn in self._memory.preparing(each, PAGES_A_TURN)
        )

    def turn(self) -> bool:
        """Map a few pages, beside a step; False where nothing is left to map."""
        try:
            return next(self._turns, None) is not None
        except JettisonError as error:
            logger.warning("the next layout will call the driver, as it could not be mapped ahead: %s", error)
            self._turns = iter(())
            return False

    def finish(self) -> None:
        """Map all that is left: up to a second, at 30 µs a page."""
        while self.turn():
            pass

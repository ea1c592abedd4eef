"""Which products of a model each worker computes itself, and whether they agree on it.

A card's library keeps the rows of a product independent of their number or not, and each worker looks at that for
itself. Where two workers find different answers, they compute the same product with other bits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from jettison.live.wire import messages as m
from jettison.types import WorkerId

log = logging.getLogger(__name__)


class OwnProducts:
    """By worker, as its newest life has found them."""

    def __init__(self) -> None:
        self._of: dict[WorkerId, frozenset[str]] = {}

    @property
    def all(self) -> tuple[str, ...]:
        """Shapes that some worker computes itself, sorted."""
        return tuple(sorted(frozenset[str]().union(*self._of.values())))

    @property
    def of_some(self) -> tuple[str, ...]:
        """Those of them that some worker leaves to its library: bits may change where KV or a request moves between
        workers."""
        return tuple(shape for shape in self.all if not all(shape in own for own in self._of.values()))

    def note(self, ready: Sequence[m.WorkerReady]) -> None:
        """Workers that have started, or come back. Warns where they differ from others now and did not before."""
        before = self.of_some
        self._of |= {event.worker_id: frozenset(event.own_products) for event in ready}
        for shape in self.of_some:
            if shape not in before:
                own = sorted(worker for worker, shapes in self._of.items() if shape in shapes)
                log.warning(
                    "product %s is computed by Triton on workers %s and by cuBLAS on workers %s: bits of tokens may "
                    "change where requests move between them", shape, own, sorted(self._of.keys() - own),
                )

"""A step under way on a card: launched layer by layer as it is polled, and never waited for until its result is.

Where a step may be given up, or peers ask between its layers, the host is at most ``AHEAD`` layers before the card:
layer i is launched once layer i - 2 has ended, and the safepoint before it is asked then. All other steps are launched
as fast as they are polled.

A step may be started behind another that is all launched. The card computes one after the other, and they end in that
order.

A card that has failed reports it wherever it is asked next, for good: that is a WorkerLostError, as the process has to
be started again.

Not here: what a layer launches (``runner``), and events themselves (``card``).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from jettison.device.cuda.card import Card, Event
from jettison.device.model.decoder import GivesUp
from jettison.device.step import StepOutput
from jettison.errors import WorkerLostError
from jettison.types import LayerRange

AHEAD = 2
"""Layers that the card has not ended when the next one is launched, at most."""


class Launches(NamedTuple):
    """The parts of one step, each of which only launches."""

    layers: LayerRange
    layer: Callable[[int], None]
    tail: Callable[[], Callable[[], Any]]
    """After the last layer; returns what makes the result once all that was launched is over."""
    num_captures: Callable[[], int]
    """So far, of any step: layers capture what later steps replay."""


class Safepoints(NamedTuple):
    """Where a step may be given up."""

    gives_up: GivesUp
    every: int
    """Layers between two of them."""


def wait_for(launched: Event | Card) -> None:
    """Wait on the host. Raises WorkerLostError."""
    try:
        launched.synchronize()
    except RuntimeError as error:
        raise _lost(error) from error


def _is_reached(event: Event) -> bool:
    try:
        return event.done()
    except RuntimeError as error:
        raise _lost(error) from error


def _lost(error: RuntimeError) -> WorkerLostError:
    return WorkerLostError(f"the card has failed: {str(error).partition(chr(10))[0]}")


class CudaStep:
    """See ``Running``."""

    def __init__(
        self, card: Card, launches: Launches, safepoints: Safepoints | None, between_layers: Callable[[], None] | None,
        before: CudaStep | None = None,
    ) -> None:
        """Launches the first layers. ``before``: a step under way, behind which this one is computed."""
        self._start_ns = time.perf_counter_ns()
        self._begin_ns = self._start_ns
        """When the card could begin with it."""
        self._end_ns = 0
        self._before = before
        self._card = card
        self._launches = launches
        self._safepoints = safepoints
        self._between_layers = between_layers
        self._is_bounded = safepoints is not None or between_layers is not None
        self._next = launches.layers.lo
        self._flying: deque[Event] = deque()
        """Ends of the last layers, at most ``AHEAD``, where the host may not run ahead."""
        self._end: Event | None = None
        """Of all that was launched; None while there is more to launch."""
        self._finish: Callable[[], Any] | None = None
        """None: the step was given up."""
        self._is_over = False
        self._num_captures = launches.num_captures()
        """Before its first layer."""
        self.has_prepared = False
        """See ``Running.has_prepared``. Known once all is launched."""
        self._result: Any = None
        self._error: Exception | None = None
        card.begin_step()
        for _ in range(AHEAD):
            self._try(self._launch_next)

    @property
    def is_over(self) -> bool:
        """Whether a poll has found it so."""
        return self._is_over

    @property
    def may_be_followed(self) -> bool:
        """See ``Running``. Not where it may be given up or peers take part: what follows is not known then."""
        return self._end is not None and not self._is_bounded and not self._is_over

    def settle(self) -> None:
        """Wait until it is over; whether it has failed is told by its result."""
        while not self.poll():
            self._wait()

    def poll(self) -> bool:
        """Launch the next layer if it may be, or see whether the last one has ended."""
        if not self._is_over:
            self._try(self._go_on)
        return self._is_over

    @property
    def is_launched(self) -> bool:
        """See ``Running.is_launched``."""
        return self._end is not None

    def wait(self, most_s: float) -> None:
        """See ``Running.wait``."""
        if self._end is not None or len(self._flying) == AHEAD:
            time.sleep(most_s)

    def result(self) -> Any:
        """See ``Running.result``."""
        self.settle()
        if self._error is not None:
            raise self._error
        return self._result

    def _wait(self) -> None:
        """For the card, where there is nothing to launch."""
        if self._end is not None:
            wait_for(self._end)
        elif len(self._flying) == AHEAD:
            wait_for(self._flying[0])

    def _try(self, step: Callable[[], None]) -> None:
        if self._is_over:
            return
        try:
            step()
        except Exception as error:  # noqa: BLE001 - it is raised where the result is asked for
            self._error = error
            try:
                wait_for(self._card)  # the caller may give away what launched layers still use
            except WorkerLostError as lost:
                self._error = lost
            self._leave()

    def _go_on(self) -> None:
        if self._end is None:
            self._launch_next()
        elif (self._before is None or self._before.poll()) and _is_reached(self._end):
            self._leave()
            self._result = None if self._finish is None else self._finish()
            if isinstance(self._result, StepOutput):
                self._result.compute_ns = self._end_ns - self._begin_ns

    def _leave(self) -> None:
        if self._is_over:
            return
        before, self._before = self._before, None
        if before is not None:
            before.settle()
            self._begin_ns = max(self._start_ns, before._end_ns)
        self._is_over = True
        self._end_ns = time.perf_counter_ns()
        self._card.end_step()

    def _launch_next(self) -> None:
        """The next layer, and after the last one the tail; nothing while the host is too far ahead."""
        layers, layer = self._launches.layers, self._next
        if self._end is not None:
            return
        if len(self._flying) == AHEAD:
            if not _is_reached(self._flying[0]):
                return
            self._flying.popleft()
        if self._is_given_up(layer):
            self._end = self._card.record()
            return
        self._launches.layer(layer)
        self._next += 1
        if self._next == layers.hi:
            self.has_prepared = self._launches.num_captures() > self._num_captures
            self._finish = self._launches.tail()
            self._end = self._card.record()
        elif self._is_bounded:
            self._flying.append(self._card.record())
            if self._between_layers is not None:
                self._between_layers()

    def _is_given_up(self, layer: int) -> bool:
        asked = self._safepoints
        is_safe = asked is not None and (layer - self._launches.layers.lo) % asked.every == 0
        return asked is not None and is_safe and asked.gives_up()

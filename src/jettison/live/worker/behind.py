"""The step that a worker starts while another is still computed, on a device that computes by itself.

    step N      start, launch ... all launched | wait                | result, told
    step N + 1                                 | start, launch ...                  | wait | result, told

So the device has no pause between the two, whatever the host does there. Step N + 1 is the next entry of the control
stream: no command comes between them, and it has no other stage, no peer's KV and no safepoint. Where step N fails,
the device lets a step that follows it fail, too.

Not here: which steps are planned ahead (``core.serving.stepsahead``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from jettison.core.controlstream import ControlStream, StepEntry
from jettison.device.step import Running, StepInput
from jettison.errors import WorkerLostError
from jettison.live.wire import messages as m
from jettison.live.wire.codec import CodecError

if TYPE_CHECKING:
    from jettison.live.worker.device_port import Device


class Behind:
    """At most one step, behind the one that is waited for."""

    def __init__(
        self, device: Device, stream: ControlStream[StepInput, Any], receive: Callable[[], Iterable[m.Command]],
        deliver: Callable[[m.Command], None],
    ) -> None:
        """``receive``: commands that have come, at once; each is given to ``deliver``."""
        self._device = device
        self._stream = stream
        self._receive = receive
        self._deliver = deliver
        self._started: tuple[StepEntry[StepInput], Running | Exception] | None = None

    @property
    def entry(self) -> StepEntry[StepInput] | None:
        """The step that was started and not taken: it is the next one."""
        return None if self._started is None else self._started[0]

    @property
    def is_launching(self) -> bool:
        """A step was started here of which something is left to launch."""
        running = None if self._started is None else self._started[1]
        return not (running is None or isinstance(running, Exception) or running.is_launched)

    def take(self, entry: StepEntry[StepInput]) -> Running | None:
        """The entry's step, if it was started here. Raises what starting it raised."""
        if self._started is None or self._started[0] is not entry:
            return None
        running, self._started = self._started[1], None
        if isinstance(running, Exception):
            raise running
        return running

    def go_on(self, running: Running) -> None:
        """While ``running`` is waited for: start the next step, or let it launch more. Raises WorkerLostError."""
        if self._started is not None:
            _, behind = self._started
            if not isinstance(behind, Exception):
                behind.poll()
        elif running.may_be_followed:
            self._listen()
            entry = self._stream.next_entry()
            if isinstance(entry, StepEntry) and _stands_alone(entry):
                self._stream.begin(entry)
                self._started = entry, self._start(entry.step)

    def _start(self, step: StepInput) -> Running | Exception:
        try:
            return self._device.start_step(step, None)
        except WorkerLostError:
            raise
        except Exception as error:  # noqa: BLE001  # it is that step's, and raised where the step is taken
            return error

    def _listen(self) -> None:
        try:
            for command in self._receive():
                self._deliver(command)
        except CodecError as error:
            raise WorkerLostError(f"the controller cannot be understood: {error}") from error

    def close(self) -> None:
        """Wait for a step that was not taken: nothing is computed after this."""
        started, self._started = self._started, None
        if started is not None and not isinstance(started[1], Exception):
            with suppress(Exception):
                started[1].result()


def _stands_alone(entry: StepEntry[StepInput]) -> bool:
    step = entry.step
    has_peers = step.prev_worker is not None or step.next_worker is not None or bool(step.remote)
    return entry.failure is None and not entry.orphaned and not has_peers and not step.safepoint_layers

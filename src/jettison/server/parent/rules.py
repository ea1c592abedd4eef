"""What becomes of a server when its controller ends. Pure: time is an argument.

    STARTING --ready--> SERVING --ended--> COMING_BACK --ready--> SERVING
       |                   |                  '--ended: after a longer pause; too often: the server ends with 1
       |                   '--ended with code 0, or without ``orphan_timeout_s``: the server ends with its code
       |--ended: as if there were no parent: the server ends with its code
       '--------- a signal, in any state: STOPPING --ended: the server ends with its code

A controller that hangs is killed, which is an end: there are never two.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

FIRST_PAUSE_S = 0.1
MOST_PAUSE_S = 10.0
"""Before a controller is started again: the first, and twice as long after each end that follows within the window."""
MOST_RESTARTS = 5
WINDOW_S = 300.0
"""So many restarts in so long: as many as a worker has by default."""


class ServerPhase(StrEnum):
    """Of a server, as its parent sees it."""

    STARTING = "starting"
    SERVING = "serving"
    COMING_BACK = "coming back"
    STOPPING = "stopping"


class Exit(NamedTuple):
    """The server ends."""

    code: int


class StartAgain(NamedTuple):
    """Another controller begins."""

    pause_s: float


def exit_code(returncode: int) -> int:
    """What a shell makes of a process that a signal ended (-N)."""
    return returncode if returncode >= 0 else 128 - returncode


class Rules:
    """One server's."""

    def __init__(self, orphan_timeout_s: float) -> None:
        self._orphan_timeout_s = orphan_timeout_s
        self.state = ServerPhase.STARTING
        self._restarts_s: list[float] = []

    def on_ready(self) -> None:
        """The controller serves."""
        if self.state is not ServerPhase.STOPPING:
            self.state = ServerPhase.SERVING

    def on_signal(self) -> bool:
        """A signal to end has come; whether it is the first."""
        is_first = self.state is not ServerPhase.STOPPING
        self.state = ServerPhase.STOPPING
        return is_first

    def on_end(self, returncode: int, now_s: float) -> Exit | StartAgain:
        """The controller has ended (-N: by signal N)."""
        lives_on = self.state in (ServerPhase.SERVING, ServerPhase.COMING_BACK)
        if not lives_on or not self._orphan_timeout_s or returncode == 0:
            return Exit(exit_code(returncode))
        self.state = ServerPhase.COMING_BACK
        self._restarts_s = [at_s for at_s in self._restarts_s if now_s - at_s < WINDOW_S]
        num_recent = len(self._restarts_s)
        if num_recent >= MOST_RESTARTS:
            return Exit(1)
        self._restarts_s.append(now_s)
        return StartAgain(min(MOST_PAUSE_S, FIRST_PAUSE_S * 2**num_recent))

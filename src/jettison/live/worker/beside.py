"""What a worker's thread does while its device computes a step by itself: links, and what is prepared ahead.

By rules 4 and 5 of ``live.worker.loop``. Not here: what a link's turn is (``live.worker.peers``), and copies that run
on a thread of their own (``live.worker.copies``).
"""

from __future__ import annotations

from jettison.device.step import Running
from jettison.live.worker.device_port import Ahead
from jettison.live.worker.peers import Peers

STEP_WAIT_S = 50e-6
"""Between two looks at a step and at the links, where there was nothing to do: a hundredth of a short step. Without it
the thread would hold the interpreter's lock, for which a copying thread waits at each of its launches: 3.5 ms instead
of 30 us."""


def serve_beside(running: Running, peers: Peers, ahead: Ahead) -> bool:
    """Serve the links until the step is over; whether bulk had turns."""
    had_turns = False
    while not running.poll():
        is_busy = peers.serve_urgent() | ahead.turn()
        if running.is_launched and peers.run_bulk():
            is_busy = had_turns = True
        if not is_busy:
            running.wait(STEP_WAIT_S)
    return had_turns

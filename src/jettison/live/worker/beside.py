"""What a worker's thread does while its device computes a step by itself: links, the next step, what is mapped ahead.

By rules 4 and 5 of ``live.worker.loop``. Not here: what a link's turn is (``live.worker.peers``), and copies that run
on a thread of their own (``live.worker.copies``).
"""

from __future__ import annotations

from jettison.device.step import Running
from jettison.live.worker.behind import Behind
from jettison.live.worker.device_port import Ahead
from jettison.live.worker.peers import Peers

STEP_WAIT_S = 50e-6
"""Between two looks at a step and at the links, where there was nothing to do: a hundredth of a short step. Without it
the thread would hold the interpreter's lock, for which a copying thread waits at each of its launches: 3.5 ms instead
of 30 us."""


def serve_beside(running: Running, peers: Peers, behind: Behind, ahead: Ahead) -> bool:
    """Serve the links until the step is over, and start the next one behind it; whether bulk had turns.

    What steps need of this thread goes before bulk, since a piece takes as long as it takes to launch several layers.
    """
    had_turns = False
    while not running.poll():
        is_busy = peers.serve_urgent()
        behind.go_on(running)
        is_busy |= ahead.turn() | behind.is_launching
        if running.is_launched and not behind.is_launching and peers.run_bulk():
            is_busy = had_turns = True
        if not is_busy:
            running.wait(STEP_WAIT_S)
    return had_turns

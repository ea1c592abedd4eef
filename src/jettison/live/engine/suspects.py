"""Workers that a peer has lost the link to: usually they are dead, which is told soon; else the link has made them
useless, and they are declared lost."""

from __future__ import annotations

import asyncio

from jettison.core.controlstream import LINK_GRACE_S
from jettison.core.state import ClusterState
from jettison.live.engine.crew import Crew
from jettison.types import WorkerId


class Suspects:
    """What peers report of links that broke. All calls on the crew's loop."""

    def __init__(self, crew: Crew, state: ClusterState) -> None:
        self._crew = crew
        self._state = state
        self._first_step: dict[WorkerId, int] = {}
        """The first step that the present life of a worker that came back can have been in."""

    def joined(self, worker_id: WorkerId) -> None:
        """A new life begins: steps so far were an older one's."""
        self._first_step[worker_id] = self._state.next_step_id

    def suspect(self, worker_id: WorkerId, step_id: int) -> None:
        """A stage lost its link to this worker in this step.

        The report may come late, from a survivor that was busy when the worker died: while the worker is dead or being
        started again, and for steps older than its present life, it is about a life that is over.
        """
        if not self._state.workers[worker_id].alive or step_id < self._first_step.get(worker_id, 0):
            return
        life = self._crew.life(worker_id)

        def check() -> None:
            if self._crew.life(worker_id) == life:
                self._crew.declare_lost(worker_id, "a peer has lost the link to it")

        asyncio.get_running_loop().call_later(LINK_GRACE_S, check)

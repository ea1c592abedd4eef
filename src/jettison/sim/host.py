"""A machine whose cores workers, controller and clients share: whose turn it is, and what each thing takes.

Only where the host's costs were measured (``cost.hostcosts``). Elsewhere the controller is never busy, and the way to
it is a constant.
"""

from __future__ import annotations

from collections.abc import Callable

from jettison.core import ports
from jettison.cost.drift import SpeedLine
from jettison.cost.hostcosts import HostCosts
from jettison.sim.loop import EventLoop
from jettison.sim.processors import Processors, Runner, TeamJob, Thread
from jettison.types import NANOSECONDS, WorkerId


class SharedHost:
    """The controller's event loop and the clients' are a thread each; workers compute beside them."""

    def __init__(self, loop: EventLoop, costs: HostCosts, drift: SpeedLine = ()) -> None:
        self.costs = costs
        self._processors = Processors(loop, costs.num_cores, costs.core_speeds, drift)
        self.controller = Thread(self._processors)
        self.clients = Thread(self._processors)
        self._workers: dict[WorkerId, list[Runner]] = {}

    def compute(self, worker_id: WorkerId, work_ns: int, on_done: Callable[[], None]) -> TeamJob:
        """A worker's work, of all its threads at once. What it takes is known at its end."""
        if worker_id not in self._workers:
            self._workers[worker_id] = [self._processors.runner() for _ in range(self.costs.threads_per_worker)]
        return TeamJob(self._processors, self._workers[worker_id], work_ns, on_done)

    def worker_ns(self, num_rows: int) -> int:
        """Of a worker's own thread, for a step with so many requests, beside computing it."""
        return _ns(self.costs.worker_step_s + num_rows * self.costs.worker_row_s)

    def event_ns(self, event: ports.Event) -> int:
        """Of the controller, until what follows from an event is on its way to the workers."""
        costs = self.costs
        match event:
            case ports.StepCompleted():
                return _ns(costs.controller_step_s + len(event.tokens) * costs.controller_row_s)
            case ports.Arrived():
                num_tokens = len(event.request.prompt_token_ids)
                return _ns(costs.controller_request_s + num_tokens * costs.controller_prompt_token_s)
            case ports.Tick():
                return _ns(costs.controller_tick_s)
            case _:
                return _ns(costs.controller_step_s)

    def emit_ns(self, emit: ports.Emit) -> int:
        """Of the server, to send tokens, or an end, to a client."""
        end_s = 0.0 if emit.finish_reason is None else self.costs.controller_end_s
        return _ns(len(emit.tokens) * self.costs.controller_token_s + end_s)

    def scrape(self) -> None:
        """Somebody reads the metrics."""
        self.controller.do(_ns(self.costs.controller_scrape_s), lambda: None)
        self.clients.do(_ns(self.costs.client_scrape_s), lambda: None)

    def send_request(self, act: Callable[[], None]) -> None:
        """A client sends a request; ``act`` when it is on its way."""
        self.clients.do(_ns(self.costs.client_request_s), act)

    def receive(self, num_tokens: int, act: Callable[[], None]) -> None:
        """A client gets tokens; ``act`` when it has seen them."""
        self.clients.do(_ns(num_tokens * self.costs.client_token_s), act)


def _ns(seconds: float) -> int:
    return round(seconds * NANOSECONDS)

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
from jettison.sim.processors import HOT_NS, Processors, Runner, TeamJob, Thread
from jettison.types import NANOSECONDS, WorkerId

CLIENTS, CONTROLLER, WORKER = range(3)
"""By how short their bursts are: tens and hundreds of microseconds, and milliseconds."""
SLEEP_NS = HOT_NS
"""Who has slept for so long comes back to cold caches; the tokens of one step follow each other sooner."""


class SharedHost:
    """The controller's event loop and the clients' are a thread each; workers compute beside them."""

    def __init__(self, loop: EventLoop, costs: HostCosts, drift: SpeedLine = ()) -> None:
        self.costs = costs
        self._processors = Processors(loop, costs.num_cores, costs.core_speeds, drift, packs=costs.packs_wakes)
        self.controller = Thread(self._processors, CONTROLLER)
        self.clients = Thread(self._processors, CLIENTS)
        self._workers: dict[WorkerId, list[Runner]] = {}
        self._loop = loop
        self._later_stages: dict[int, int] = {}
        """Of steps under way in pipelines: how many stages come after the first."""

    def compute(
        self, worker_id: WorkerId, num_tokens: int, work_ns: int, on_done: Callable[[], None]
    ) -> TeamJob:
        """A worker's work for a step of so many tokens, of all its threads at once. What it takes is known at its
        end."""
        if worker_id not in self._workers:
            number = self.costs.threads_per_worker
            self._workers[worker_id] = [self._processors.runner(WORKER) for _ in range(number)]
        factor = self.costs.crowded_factor_of(num_tokens)
        return TeamJob(self._processors, self._workers[worker_id], work_ns, on_done, factor)

    def worker_ns(self, step: ports.RunStep) -> int:
        """Of a worker's own thread, for its part of a step, beside computing it."""
        costs = self.costs
        stage_s = costs.worker_stage_s if len(step.stages) > 1 else 0.0
        return _ns(costs.worker_step_s + len(step.rows) * costs.worker_row_s + stage_s)

    def issued(self, step: ports.RunStep) -> None:
        """The controller has sent a step to its stages."""
        if len(step.stages) > 1:
            self._later_stages[step.step_id] = len(step.stages) - 1

    def hear_of_stage(self) -> None:
        """A stage tells that it has handed on. Half of what the stage takes of the controller: the other half is its
        command, which is sent with the next step of its microbatch."""
        self.controller.do(_ns(self.costs.controller_stage_s / 2), lambda: None)

    def event_ns(self, event: ports.Event) -> int:
        """Of the controller, until what follows from an event is on its way to the workers."""
        costs = self.costs
        match event:
            case ports.StepCompleted():
                later = self._later_stages.pop(event.step_id, 0)
                rows_s = len(event.tokens) * costs.controller_row_s
                return _ns(costs.controller_step_s + rows_s + later * costs.controller_stage_s / 2)
            case ports.StepFailed():
                self._later_stages.pop(event.step_id, None)
                return _ns(costs.controller_step_s)
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
        ended_ns = self.clients.ended_ns
        rested = ended_ns is None or self._loop.now_ns - ended_ns >= SLEEP_NS
        wake_s = self.costs.client_wake_s if rested and not self.clients.is_busy else 0.0
        self.clients.do(_ns(wake_s + num_tokens * self.costs.client_token_s), act, self.controller.runner)


def _ns(seconds: float) -> int:
    return round(seconds * NANOSECONDS)

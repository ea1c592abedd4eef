"""Loads at a live engine without HTTP, and one policy after the other over the same workers.

Not a benchmark by itself (``overload.py``, ``foreseen.py``). What a client would measure is measured here: a request's
time begins where its arrival stands in the load, also where it is submitted late.
"""

from __future__ import annotations

import asyncio
import os
import time
import zlib
from collections.abc import Iterable, Sequence
from copy import deepcopy

from jettison.config import EngineConfig
from jettison.core.totals import counters
from jettison.cost.predictor import StepTimePredictor
from jettison.cost.speed import MachineSpeed
from jettison.errors import JettisonError
from jettison.live.engine.assembly import Assembly, assemble
from jettison.live.engine.deployed import deployment_of
from jettison.live.engine.driver import CoreDriver
from jettison.live.engine.encoder import StepEncoder
from jettison.live.engine.engine import Engine
from jettison.live.engine.orders import Orders
from jettison.report.fairness import FairnessHeader, measured_demand, measured_in
from jettison.report.results import RequestRecord, RunResult, build_run
from jettison.types import FinishReason, Request, SamplingParams, ServiceClass
from jettison.workload.conditions import capacities
from jettison.workload.prompts import PromptMaker
from jettison.workload.rows import TraceRow, Workload


class PolicyEngine(Engine):
    """An engine whose workers stay while the policy changes: starting them anew costs more than a run."""

    _known: StepTimePredictor | None = None

    def serve_by(self, policy: str) -> None:
        """A new core over the workers, with this ``--overload``; of the times of steps each knows what the engine knew
        when it changed first. Nothing may be open or on the move, and all workers must hold the whole model."""
        old = self._driver
        assert old is not None and self._crew is not None and old.core.state.is_idle() and not old.core.in_transition
        assembly = assemble(EngineConfig.resolve(**self._config.flat() | {"overload": policy}))
        capacity = {w: state.ledger.capacity for w, state in old.core.state.workers.items()}
        core = assembly.build_core(capacity, os.urandom(16), assembly.load_profile(),
                                   old.core.state.params.machine_of)  # fmt: skip
        if self._known is None:
            self._known = old.core.state.predictor
        core.state.predictor = deepcopy(self._known)
        core.state.next_step_id = old.core.state.next_step_id
        ledgers = {w: state.ledger for w, state in core.state.workers.items()}
        encoder = StepEncoder(ledgers, assembly.config.memory.block_size, core.state.limits.eos_token_ids)
        driver = CoreDriver(core, encoder, self._crew.send, self._crew.abandon, self._streams.on_emit, self._on_record,
                            observer=self.timeline)  # fmt: skip
        driver.memory = old.memory
        self._driver, self._orders, self._info = driver, Orders(driver, self._crew), None

    @property
    def assembly(self) -> Assembly:
        return self.prepare()

    def totals(self) -> dict[str, float]:
        """Of the present core."""
        return counters(self.core)

    async def until_idle(self) -> None:
        """No request holds anything any more."""
        while not self.core.state.is_idle():
            if self.failure is not None:
                raise JettisonError(self.failure)
            await asyncio.sleep(0.005)

    async def until_whole(self, most_s: float) -> bool:
        """Restore what is dropped, and wait for it; whether all workers hold the whole model."""
        ends_s = time.monotonic() + most_s
        core = self.core
        while core.in_transition or any(len(group.stages) > 1 for group in core.groups.values()):
            if time.monotonic() > ends_s:
                return False
            if not core.in_transition:
                self.orders.request_restore()
            await asyncio.sleep(0.02)
        return True


async def replay(
    engine: PolicyEngine, load: Workload, name: str, seed: int = 0, most_s: float | None = None,
    batch: Sequence[tuple[int, int]] = (),
) -> RunResult:
    """All requests of the load at their times, with the fairness header. Those that have not ended after ``most_s``
    are cancelled, and have failed.

    ``batch``: (prompt, output) lengths of offline requests that are there from the start; they are cancelled when the
    load has ended. Their tokens are among the run's events.
    """
    prompts = PromptMaker(seed=seed, low_token_id=8, high_token_id=engine.info.vocab_size)
    before, epoch = counters(engine.core), time.monotonic()
    engine.event_log.clear()
    records = [RequestRecord(i, row.arrival_s, row.input_tokens, row.output_tokens) for i, row in enumerate(load.rows)]
    asks = [asyncio.create_task(_ask(engine, record, prompts, name, epoch)) for record in records]
    others = [asyncio.create_task(_harvest(engine, f"{name} batch {i}", *row)) for i, row in enumerate(batch)]
    _, late = await asyncio.wait(asks, timeout=most_s)
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    for ask in late:
        ask.cancel()
    await asyncio.gather(*asks, return_exceptions=bool(late))
    await engine.until_idle()
    events = {key: value - before.get(key, 0.0) for key, value in counters(engine.core).items()}
    log = [{"t": r.time_ns / 1e9 - epoch, "kind": r.kind, **r.fields} for r in engine.event_log]
    run = build_run(name, records, events=events | {"log": log})
    run.config["fairness"] = fairness_of(engine, records, load, name).as_dict()
    return run


def fairness_of(
    engine: PolicyEngine, records: Sequence[RequestRecord], load: Workload, name: str
) -> FairnessHeader:
    """Its conditions, with the demand that was measured."""
    deployment = deployment_of(engine.assembly)
    capacity, merged = capacities(deployment)
    mean_tokens, peak_tokens = measured_demand(records, load.duration_s)
    share = deployment.shape.parameter_bytes / deployment.budget_bytes
    return FairnessHeader(
        mean_tokens, peak_tokens, measured_in(name), share, capacity, merged, arrivals=(load.source, *load.notes)
    )


async def _ask(engine: Engine, record: RequestRecord, prompts: PromptMaker, name: str, epoch: float) -> None:
    prompt = tuple(prompts.token_ids(record.index, record.input_tokens))
    await asyncio.sleep(max(0.0, epoch + record.scheduled_s - time.monotonic()))
    record.sent_s = time.monotonic() - epoch
    params = SamplingParams(max_tokens=record.wanted_tokens, temperature=0.0, ignore_eos=True)
    last_s = None
    async for event in engine.submit(Request(f"{name} {record.index}", prompt, params, time.monotonic_ns())):
        now_s = time.monotonic() - epoch
        if event.tokens:
            if last_s is None:
                record.first_s = now_s
            else:
                record.gaps_s.append(now_s - last_s)
            last_s = now_s
            record.output_tokens += len(event.tokens)
        if event.finish_reason is not None:
            record.finished_s, record.error = now_s, event.error
            record.status = "completed" if event.finish_reason is FinishReason.LENGTH else "failed"


async def _harvest(engine: Engine, name: str, num_prompt: int, num_output: int) -> None:
    """One offline request."""
    prompt = tuple(PromptMaker(2, 8, engine.info.vocab_size).token_ids(zlib.crc32(name.encode()), num_prompt))
    params = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
    request = Request(name, prompt, params, time.monotonic_ns(), service_class=ServiceClass.OFFLINE)
    async for _ in engine.submit(request):
        pass


def at_once(rows: Iterable[tuple[int, int]], name: str) -> Workload:
    """Requests of these (prompt, output) lengths."""
    return Workload(tuple(TraceRow(0.0, *row) for row in rows), name, "at once")


async def measured_speed(engine: PolicyEngine, batches: tuple[int, ...], prompt: int) -> MachineSpeed:
    """Of one instance while all of them work (as ``live.experiments.overload.measure_speed_at``, without HTTP)."""
    instances = len(engine.core.groups)
    steps = []
    for batch in batches:
        run = await replay(engine, at_once([(16, 24)] * (batch * instances), "decodes"), f"decode {batch}")
        assert run.itl_s.p50 is not None
        steps.append((batch, run.itl_s.p50))
    run = await replay(engine, at_once([(prompt, 1)] * (2 * instances), "prompts"), "prefill")
    assert run.ttft_s.max is not None
    return MachineSpeed.from_points(2 * prompt / run.ttft_s.max, steps)

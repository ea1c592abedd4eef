"""House rule 3: events recorded from a live cluster, fed through a fresh core, give the same actions.

The in-process cluster has real devices and memory moves; the engine has worker processes besides, one of which is
killed, and the clock is the machine's. The fresh core is what the simulator drives, too.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from jettison.config import EngineConfig
from jettison.core import ports
from jettison.core.cluster import ClusterCore
from jettison.core.totals import counters as totals
from jettison.live.engine.assembly import Assembly, assemble
from jettison.live.engine.engine import Engine
from jettison.live.engine.local_cluster import LocalCluster
from jettison.live.engine.warmup import WarmUp
from jettison.types import Request, SamplingParams
from longrun import part_of
from waiting import until

sys.path.insert(0, str(Path(__file__).parents[2] / "core"))

from fakes import describe

SECRET = b"local-cluster"


class Recorded(LocalCluster):
    """Writes every call of the core down, with what came of it."""

    def start(self) -> None:
        super().start()
        self.recording: list[tuple[object, int, list[object]]] = []
        self.capacity = {w: s.full_blocks for w, s in self.core.state.workers.items()}
        for name in ("handle", "request_drop", "request_restore"):
            self._record(name)

    def _record(self, name: str) -> None:
        call = getattr(self.core, name)

        def recorded(*args: object) -> list[ports.Action]:
            actions: list[ports.Action] = call(*args)
            event, now_ns = args if name == "handle" else (name, args[0])
            self.recording.append((event, int(now_ns), [describe(a) for a in actions]))  # type: ignore[call-overload]
            return actions

        setattr(self.core, name, recorded)


def config_for(model_dir: Path, policy: str, num_blocks: int = 40) -> EngineConfig:
    settings = {
        "model": str(model_dir), "dtype": "float64", "instances": 2, "block_size": 4, "max_num_batched_tokens": 32,
        "max_num_seqs": 16, "overload": policy,
    }
    memory = assemble(EngineConfig.resolve(**settings)).memory_for_blocks(num_blocks)
    return EngineConfig.resolve(**settings, memory=memory)


@pytest.mark.parametrize("policy", ["drop", "recompute", "swap", "migrate", "pipeline"])
def test_a_live_recording_replays_through_a_fresh_core(policy: str, model_dir: Path) -> None:
    config, (number, longest) = config_for(model_dir, policy), (14, 30) if policy == "drop" else (30, 90)
    rng = random.Random(5)
    with Recorded(config, seed=2) as live:
        for i in range(number):
            prompt = [rng.randrange(1, 200) for _ in range(rng.randint(1, 40))]
            params = SamplingParams(max_tokens=rng.randint(1, longest), temperature=0.0, seed=i, ignore_eos=True)
            live.submit(f"r{i}", prompt, params)
        if policy == "drop":
            live.run(until=lambda: sum(len(c.tokens) for c in live.completions.values()) > 30)
            live.request_drop()
            live.run(until=lambda: any(r.kind == "exchange_done" for r in live.records))
            live.request_restore()
        live.cancel("r3")
        live.run()
        recording, capacity, cluster_params = live.recording, live.capacity, live.core.params
        live_counters, live_totals = live.core.state.counters, totals(live.core)
        core = live.assembly.build_core(capacity, SECRET)
        core.reconfigure(cluster_params)
    assert (live_counters.num_drops > 0) == (policy == "drop")
    assert (live_totals["swapped_out_blocks"] > 0) == (policy == "swap")
    assert live_totals["num_preemptions"] > 0 or policy != "recompute"
    assert live_totals["migrations"] > 0 or policy != "migrate"
    replay(recording, core)
    assert core.state.counters == live_counters and totals(core) == live_totals
    assert core.state.is_idle()


def replay(recording: list[tuple[object, int, list[object]]], core: ClusterCore) -> None:
    """Feed what was recorded and compare, step by step."""
    for number, (event, now_ns, expected) in enumerate(recording):
        if isinstance(event, str):
            actions = getattr(core, event)(now_ns)
        else:
            actions = core.handle(event, now_ns)  # type: ignore[arg-type]
        assert [describe(a) for a in actions] == expected, f"event {number} at {now_ns}: {event}"


class Recording:
    """What an engine's core was told, from its making on, and what came of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[object, int, list[object]]] = []
        self.warm_up: list[tuple[Any, Any, Any]] = []
        """What the first steps showed (work, times, part): the predictor begins with it."""
        self.fresh: ClusterCore | None = None
        """A core made of the same words as the engine's."""
        build, run = Assembly.build_core, WarmUp.run

        def built(assembly: Assembly, *args: Any, **more: Any) -> ClusterCore:
            self.fresh = build(assembly, *args, **more)
            core = build(assembly, *args, **more)
            for name in ("handle", "request_drop", "request_restore"):
                self._record(core, name)
            return core

        async def ran(warm_up: WarmUp, core: ClusterCore) -> None:
            observe = core.state.predictor.observe

            def observed(work: object, times_ns: object, *, part: object) -> None:
                self.warm_up.append((work, times_ns, part))
                observe(work, times_ns, part=part)  # type: ignore[arg-type]

            monkeypatch.setattr(core.state.predictor, "observe", observed)
            await run(warm_up, core)
            monkeypatch.delattr(core.state.predictor, "observe")

        monkeypatch.setattr(Assembly, "build_core", built)
        monkeypatch.setattr(WarmUp, "run", ran)

    def _record(self, core: ClusterCore, name: str) -> None:
        call = getattr(core, name)

        def recorded(*args: Any) -> list[ports.Action]:
            actions: list[ports.Action] = call(*args)
            event = args[0] if name == "handle" else name
            self.calls.append((event, args[-1], [describe(a) for a in actions]))
            return actions

        setattr(core, name, recorded)

    def replay(self) -> ClusterCore:
        """Through the fresh core."""
        assert self.fresh is not None
        for work, times_ns, part in self.warm_up:
            self.fresh.state.predictor.observe(work, times_ns, part=part)
        replay(self.calls, self.fresh)
        return self.fresh


@pytest.mark.live
@pytest.mark.parametrize("policy", part_of(("drop", "swap", "pipeline"), ("drop",)))
async def test_what_an_engine_with_worker_processes_was_told_replays(
    policy: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under ``drop`` a worker is killed while requests run in a pipeline, and comes back."""
    recording, rng, engine = Recording(monkeypatch), random.Random(7), Engine(config_for(model_dir, policy))

    async def ask(index: int) -> None:
        prompt = tuple(rng.randrange(1, 200) for _ in range(rng.randint(1, 40)))
        params = SamplingParams(max_tokens=rng.randint(10, 30), temperature=0.0, seed=index, ignore_eos=True)
        async for _ in engine.submit(Request(f"r{index}", prompt, params, 0, tenant="ab"[index % 2])):
            pass

    try:
        await engine.start()
        async with asyncio.timeout(60):
            asked = asyncio.gather(*(ask(index) for index in range(16)))
            if policy == "drop":
                await until(lambda: any(group.queues.running for group in engine.core.groups.values()))
                engine.orders.request_drop()
                await until(lambda: any(r.kind == "exchange_done" for r in engine.event_log))
                assert engine._crew is not None
                os.kill(engine._crew.pids[1], signal.SIGKILL)
                await until(lambda: any(r.kind == "worker_lost" for r in engine.event_log))
            await asked
            state = engine.core.state
            await until(lambda: all(w.alive for w in state.workers.values()) and not engine.core.in_transition)
        found, num_calls = totals(engine.core), len(recording.calls)
        kinds = {record.kind for record in engine.event_log}
    finally:
        await engine.close()
    assert (found["drops"] > 0) == ("worker_lost" in kinds) == (policy == "drop")
    assert (found["swapped_out_blocks"] > 0) == (policy == "swap")
    del recording.calls[num_calls:]  # what came while it was closed
    fresh = recording.replay()
    assert num_calls > 50 and totals(fresh) == found and fresh.state.is_idle()

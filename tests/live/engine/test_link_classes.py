"""Networks between hosts are measured before a live engine serves, and the nearer host is the partner."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
from host_engines import engine_of

from jettison.core import ports
from jettison.core.load.distances import known_links
from jettison.device.model.create import create_model
from jettison.errors import WorkerLostError
from jettison.live.engine import link_classes
from jettison.live.engine.link_classes import LinkMeter, rounds
from jettison.live.engine.spawn_local import LocalSpawner
from jettison.live.machine.netns import Placement
from jettison.memory.stages import StagePlan
from jettison.policy.links import FAR
from jettison.types import LayerRange
from waiting import PATIENCE_S, until

FAST, SLOW = 1e7, 1e6
"""Bytes per second, of the sending end."""
BLOCK_BYTES = 1000


@pytest.mark.parametrize("num", range(2, 8))
def test_every_pair_is_measured_once_and_no_host_twice_at_a_time(num: int) -> None:
    drawn = list(rounds(range(num)))
    assert sorted(tuple(sorted(pair)) for pairs in drawn for pair in pairs) == list(
        itertools.combinations(range(num), 2)
    )
    for pairs in drawn:
        ends = [end for pair in pairs for end in pair]
        assert len(ends) == len(set(ends))


class Probed:
    """Workers that answer a probe at once, with what it would have taken; ``rates``: by pair, None: no answer."""

    def __init__(self, rates: dict[tuple[int, int], float | None]) -> None:
        self.rates = rates
        self.seen: list[ports.SendKV] = []
        self.called_off: list[int] = []
        self.ends_cancelled = True
        self.meter = LinkMeter(self.send)

    def send(self, worker: int, command: object) -> None:
        if isinstance(command, ports.CancelTransfer):
            self.called_off.append(command.transfer_id)
            if self.ends_cancelled:
                self.meter.on_event(ports.TransferEnded(command.transfer_id, False, 0, 0))
            return
        assert isinstance(command, ports.SendKV) and command.src == worker
        self.seen.append(command)
        rate = self.rates[command.src, command.dst]
        if rate is None:
            return
        num_bytes = len(command.src_blocks) * len(command.layers) * BLOCK_BYTES
        self.meter.on_event(ports.TransferEnded(command.transfer_id, True, num_bytes, round(1e9 * num_bytes / rate)))


async def test_probes_grow_until_they_tell_and_a_pair_without_an_answer_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_classes, "PATIENCE_S", 0.05)
    probed = Probed({(0, 1): 1e6, (1, 0): 1e5, (0, 2): 1e12, (2, 0): 2e6, (1, 2): None, (2, 1): 3e6})
    stages = [StagePlan(worker, LayerRange(0, 4)) for worker in range(3)]
    found = await probed.meter.measure({0: 7, 1: 8, 2: 9}, stages, dict.fromkeys(range(3), 16))
    assert found == pytest.approx({(7, 8): 1e6, (8, 7): 1e5, (7, 9): 1e12, (9, 7): 2e6, (9, 8): 3e6}, rel=1e-3)
    sizes = [len(probe.src_blocks) for probe in probed.seen if (probe.src, probe.dst) == (0, 1)]
    assert sizes == [1, 2, 4, 8, 16, 32, 32], "25 blocks of 4,000 bytes take a tenth of a second"
    assert all(max(probe.src_blocks) < 16 for probe in probed.seen)
    assert max(len(probe.src_blocks) for probe in probed.seen) == link_classes.MAX_BLOCKS


async def test_a_probe_that_was_disturbed_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    probed = Probed({(0, 1): 1e6, (1, 0): 1e6})
    send = probed.send

    def disturbed_once(worker: int, command: object) -> None:
        probed.rates[0, 1] = 1e5 if not any(probe.src == 0 for probe in probed.seen) else 1e6
        send(worker, command)

    monkeypatch.setattr(link_classes, "SPAN_S", 1e-3)
    monkeypatch.setattr(probed.meter, "_send", disturbed_once)
    stages = [StagePlan(worker, LayerRange(0, 4)) for worker in range(2)]
    found = await probed.meter.measure({0: 0, 1: 1}, stages, dict.fromkeys(range(2), 16))
    assert found == pytest.approx({(0, 1): 1e6, (1, 0): 1e6}, rel=1e-3)


async def test_a_second_probe_without_an_answer_leaves_the_first_one_s_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    probed = Probed({(0, 1): 1e6, (1, 0): 1e6})
    send = probed.send

    def answered_once(worker: int, command: object) -> None:
        probed.rates[0, 1] = None if any(probe.src == 0 for probe in probed.seen) else 1e6
        send(worker, command)

    monkeypatch.setattr(link_classes, "SPAN_S", 1e-3)
    monkeypatch.setattr(link_classes, "PATIENCE_S", 0.05)
    monkeypatch.setattr(probed.meter, "_send", answered_once)
    stages = [StagePlan(worker, LayerRange(0, 4)) for worker in range(2)]
    found = await probed.meter.measure({0: 0, 1: 1}, stages, dict.fromkeys(range(2), 16))
    assert found == pytest.approx({(0, 1): 1e6, (1, 0): 1e6}, rel=1e-3)


async def test_a_probe_that_takes_too_long_is_called_off_and_its_end_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would write into blocks that requests have by then."""
    monkeypatch.setattr(link_classes, "PATIENCE_S", 0.02)
    probed = Probed({(0, 1): None, (1, 0): 1e6})
    probed.ends_cancelled = False
    stages = [StagePlan(worker, LayerRange(0, 4)) for worker in range(2)]
    measured = asyncio.create_task(probed.meter.measure({0: 0, 1: 1}, stages, dict.fromkeys(range(2), 16)))
    await until(lambda: probed.called_off)
    assert probed.called_off == [probed.seen[0].transfer_id] and not measured.done()
    probed.meter.on_event(ports.LinkLost(0, 1, 0))
    await asyncio.sleep(0)
    assert not measured.done(), "what is on the way to the other end may still arrive"
    probed.meter.on_event(ports.LinkLost(1, 0, 0))
    assert await measured == pytest.approx({(1, 0): 1e6}, rel=1e-3)
    monkeypatch.setattr(link_classes, "END_PATIENCE_S", 0.02)
    again = Probed({(0, 1): None, (1, 0): 1e6})
    again.ends_cancelled = False
    with pytest.raises(WorkerLostError, match="from worker 0 to worker 1"):
        await again.meter.measure({0: 0, 1: 1}, stages, dict.fromkeys(range(2), 16))


async def test_workers_without_a_layer_in_common_are_left_out() -> None:
    stages = [StagePlan(0, LayerRange(0, 2)), StagePlan(1, LayerRange(2, 4))]
    assert await Probed({}).meter.measure({0: 0, 1: 1}, stages, {0: 16, 1: 16}) == {}


@pytest.mark.live
async def test_an_engine_measures_its_hosts_and_merges_with_the_nearer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_classes, "PATIENCE_S", PATIENCE_S)
    folder = tmp_path / "model"
    create_model(folder, arch="qwen2", layers=4, hidden=32, heads=4, kv_heads=2, max_position_embeddings=256, std=0.2)
    rates = {0: FAST, 1: SLOW, 2: FAST}
    placements = {w: Placement(f"127.0.0.{w + 1}", bytes_per_s=rate) for w, rate in rates.items()}
    engine = engine_of(folder, LocalSpawner(placements), instances=3)
    try:
        await engine.start()
        networks, machine = engine.core.params.networks, engine.core.params.machine_of
        assert len(networks) == 6
        assert all(rate < 2 * SLOW for (src, _), rate in networks.items() if src == machine[1])
        links = known_links(engine.core.state)
        assert links is not None
        assert FAR <= max(links.distance(0, 2), links.distance(2, 0)) < links.distance(1, 0)
        engine.orders.request_drop()
        await until(lambda: engine.snapshot().counters["drops"] == 1)
        groups = {group.worker_ids for group in engine.snapshot().groups}
        assert {tuple(sorted(ids)) for ids in groups} == {(0, 2), (1,)}
    finally:
        await engine.close()


@pytest.mark.live
async def test_on_one_host_nothing_is_measured(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    create_model(folder, arch="qwen2", layers=2, hidden=32, heads=4, kv_heads=2, max_position_embeddings=128)
    engine = engine_of(folder, None, instances=2)
    try:
        await engine.start()
        assert engine.core.params.networks == {} and known_links(engine.core.state) is None
    finally:
        await engine.close()

"""A process that probes this machine's speed while something else goes on."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jettison.config import EngineConfig
from jettison.device.model.create import create_model
from jettison.errors import WorkerLostError
from jettison.live import machine_time
from jettison.live.core_speeds import measure_core_speeds
from jettison.live.speed_watch import SpeedWatch, cores_taken, taken_of
from jettison.live.step_process import Sample


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("watched") / "model"
    create_model(folder, arch="qwen3", layers=2, hidden=32, heads=4, kv_heads=2, max_position_embeddings=256)
    return EngineConfig.resolve(
        model=str(folder), memory="64MiB", num_threads=1, dtype="float32", max_num_batched_tokens=64, max_num_seqs=32
    )


def test_what_probing_takes_itself() -> None:
    assert cores_taken([]) == cores_taken([Sample(5.0, 0.1)]) == 0.0
    assert cores_taken([Sample(5.0, 0.1), Sample(6.0, 0.1), Sample(7.0, 0.2)]) == pytest.approx(0.2)


def test_what_is_stolen_is_neither_busy_nor_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """user nice system idle iowait irq softirq steal guest guest_nice, of all cores."""
    text = "cpu  100 20 30 4000 500 6 7 80 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n"
    monkeypatch.setattr(machine_time, "Path", lambda _: SimpleNamespace(read_text=lambda: text))
    per_s = os.sysconf("SC_CLK_TCK")
    assert machine_time.machine_time() == (163 / per_s, 80 / per_s)


def test_a_system_that_does_not_tell_is_never_busy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine_time, "Path", lambda _: tmp_path / "none")
    assert machine_time.machine_time() == (0.0, 0.0)


def test_what_was_taken_between_probes_is_told_in_seconds_of_a_core() -> None:
    probes = [Sample(1.0, 0.1, 9.0, 9.0), Sample(1.5, 0.1, 1.0, 0.5), Sample(5.5, 0.1, 0.5, 1.5)]
    assert taken_of(probes) == [(1.0, 1.5, 0.5, 0.25), (1.5, 5.5, 2.0, 6.0)]
    assert taken_of(probes[:1]) == []


@pytest.mark.live
def test_probes_are_timed_on_the_clock_of_the_run_and_in_processor_time(config: EngineConfig) -> None:
    with SpeedWatch(config, interval_s=0.01) as watch:
        before_s = time.monotonic()
        time.sleep(0.3)
        samples = watch.end()
        after_s = time.monotonic()
    assert len([s for s in samples if before_s <= s.at_s <= after_s]) > 1
    assert [s.at_s for s in samples] == sorted(s.at_s for s in samples)
    assert sum(s.took_s for s in samples) <= after_s - samples[0].at_s, "one thread, and it sleeps in between"
    with pytest.raises(WorkerLostError):
        watch.end()  # the process is gone


@pytest.mark.live
def test_speeds_of_cores_side_by_side(config: EngineConfig) -> None:
    speeds = measure_core_speeds(config, 2, rounds=1, window_s=0.05)
    assert len(speeds) == 2 and speeds[0] == 1.0 and speeds[1] > 0

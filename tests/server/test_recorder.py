"""The recorder keeps when and how long, and nothing else; it never stands in the way."""

from __future__ import annotations

import re
import stat
import time
from pathlib import Path

import pytest
from fake_engine import FakeEngine

from jettison.errors import ConfigError, TraceError
from jettison.server import recorder as module
from jettison.server.recorder import TraceRecorder
from jettison.types import NANOSECONDS
from jettison.workload.bench import load_workload
from jettison.workload.options import LoadOptions
from jettison.workload.traces import read_trace


def recorded(path: Path, requests: list[tuple[float, int, int, int, bool]], max_bytes: int = 1 << 20) -> TraceRecorder:
    """Record requests that came so many seconds after the start."""
    recorder = TraceRecorder(path, max_bytes)
    recorder.start()
    start_ns = recorder._start_ns
    for arrival_s, *rest in requests:
        recorder.record(start_ns + int(arrival_s * NANOSECONDS), *rest)
    recorder.close()
    return recorder


def test_what_is_recorded_can_be_read_and_replayed(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    recorded(path, [(2.5, 30, 7, 16, False), (1.00499, 100, 5, 0, True), (0.5, 8, 0, 0, False)])
    workload = read_trace(path)
    assert [tuple(row) for row in workload.rows] == [
        (0.5, 8, 1, 0, False, 0), (1.0, 100, 5, 0, True, 0), (2.5, 30, 7, 16, False, 0),
    ]  # fmt: skip
    assert "recorded by jettison" in workload.source
    assert len(load_workload(LoadOptions(trace=path, max_model_len=64)).rows) == 3


def test_only_its_owner_reads_it_and_it_holds_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    recorded(path, [(1.23456789, 5, 6, 0, False)])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    head, row = path.read_text().split("class\n")
    assert row == "1.23,5,6,0,online\n"
    assert not re.search(r"\d{4}-\d\d|\d\d:\d\d", head), "no date, no time of day"


def test_files_rotate_and_never_exceed_their_size(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    recorded(path, [(second, 1000, 1000, 0, False) for second in range(10_000)], max_bytes=1 << 16)
    assert {p.name for p in tmp_path.iterdir()} == {"r.csv", "r.csv.1"}
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= 1 << 16
    before, last = read_trace(tmp_path / "r.csv.1"), read_trace(path)
    for load in (before, last):
        assert load.rows[0].arrival_s == 0.0 and load.mean_rate_per_s == pytest.approx(1.0, rel=0.01)
    (tmp_path / "both.csv").write_bytes((tmp_path / "r.csv.1").read_bytes() + path.read_bytes())
    both = read_trace(tmp_path / "both.csv")
    assert [row.arrival_s for row in both.rows] == list(range(len(before.rows) + len(last.rows))), "times run on"
    start_s = 10_000 - len(both.rows)
    assert any(f"arrivals count from {start_s:.2f} s" in note for note in both.notes)


def test_the_first_part_of_a_recording_counts_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    recorded(path, [(50.0, 1000, 1000, 0, False), (60.0, 9, 9, 0, False)])
    assert [row.arrival_s for row in read_trace(path).rows] == [50.0, 60.0]


def test_a_new_start_keeps_the_file_before(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    recorded(path, [(1.0, 1, 1, 0, False)])
    recorded(path, [(2.0, 2, 2, 0, False)])
    assert read_trace(path).rows[0].input_tokens == 2
    assert read_trace(tmp_path / "r.csv.1").rows[0].input_tokens == 1
    both = tmp_path / "both.csv"
    both.write_bytes((tmp_path / "r.csv.1").read_bytes() + path.read_bytes())
    with pytest.raises(TraceError, match="line 6: part 1 of a recording does not follow part 1"):
        read_trace(both)


@pytest.mark.parametrize(("name", "reason"), [("no/folder/r.csv", "No such file"), ("r.csv.gz", "not packed")])
def test_a_path_that_cannot_be_used_is_told_at_once(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        TraceRecorder(tmp_path / name, 1 << 20).start()


def test_what_does_not_fit_is_counted_and_left_out(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(module, "MAX_PENDING", 3)
    monkeypatch.setattr(module, "WRITE_EVERY_S", 60.0)
    recorder = TraceRecorder(tmp_path / "r.csv", 1 << 20)
    recorder.start()
    for _ in range(5):
        recorder.record(time.monotonic_ns(), 1, 1, 0, False)
    assert recorder.num_left_out == 2
    recorder.close()
    recorder.close()
    assert len(read_trace(tmp_path / "r.csv").rows) == 3
    assert "2 requests are not in the recorded trace" in caplog.text


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path: Path, monkeypatch, caplog) -> None:
    recorder = TraceRecorder(tmp_path / "r.csv", 1 << 20)
    recorder.start()

    def full() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorder, "_write_pending", full)
    recorder.record(time.monotonic_ns(), 1, 1, 0, False)
    recorder.close()
    recorder.record(time.monotonic_ns(), 1, 1, 0, False)
    assert recorder.num_left_out == 1
    assert "stops: No space left on device" in caplog.text


def test_with_several_keys_it_says_which_requests_came_together(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    recorder = TraceRecorder(path, 1 << 20, tells_tenants=True)
    recorder.start()
    for tenant in ("label of a", "label of b", "label of a"):
        recorder.record(recorder._start_ns, 5, 6, 0, False, tenant)
    recorder.close()
    assert [row.tenant for row in read_trace(path).rows] == [1, 2, 1]
    assert "label" not in path.read_text()


async def test_a_server_records_its_requests(serve, tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    recorder = TraceRecorder(path, 1 << 20)
    recorder.start()
    async with serve(FakeEngine(), record_request=recorder.record) as served:
        assert (await served.completion(prompt="my secret", max_tokens=5)).status_code == 200
        assert (await served.completion(prompt="two", max_tokens=3, n=2, service_tier="flex")).status_code == 200
        assert (await served.completion(prompt="x" * 5000)).status_code == 400
    recorder.close()
    rows = read_trace(path).rows
    assert [(row.input_tokens, row.output_tokens, row.is_offline) for row in rows] == [
        (9, 5, False), (3, 3, True), (3, 3, True),
    ]  # fmt: skip
    assert "secret" not in path.read_text()

"""What bounds the memory of this machine's processes, and what a configuration beyond it is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jettison.config import EngineConfig
from jettison.device.model.create import create_model
from jettison.errors import BudgetError
from jettison.live.engine import assembly
from jettison.live.machine.memory import (
    FRONT_END_BYTES,
    INTERPRETER_BYTES,
    SERVER_BYTES,
    Wanted,
    cores_warning,
    memory_limit,
)

GIB = 1 << 30
MACHINE = "this machine's memory and swap"
GROUP = "this control group's limit"


def file_system(root: Path, files: dict[str, str]) -> Path:
    """A root with 4 GiB of memory and 1 GiB of swap, and these files."""
    meminfo = f"MemTotal: {4 << 20} kB\nMemFree: 17 kB\nSwapTotal: {1 << 20} kB\n"
    for name, text in ({"proc/meminfo": meminfo} | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(("files", "limit"), [
    ({}, (5 * GIB, MACHINE)),
    ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max\n"}, (5 * GIB, MACHINE)),
    ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": f"{2 * GIB}\n"}, (2 * GIB, GROUP)),
    ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.high": f"{3 * GIB}\n",
      "sys/fs/cgroup/a/memory.max": f"{GIB}\n"}, (GIB, GROUP)),
    ({"proc/self/cgroup": "0::/of/the/host\n", "sys/fs/cgroup/memory.max": f"{GIB}\n"}, (GIB, GROUP)),
    ({"proc/self/cgroup": "9:name=systemd:/\n4:memory:/x\n",
      "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{GIB}\n"}, (GIB, GROUP)),
    ({"proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"},
     (5 * GIB, MACHINE)),
    ({"proc/self/cgroup": "4:cpu:/x\n", "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{GIB}\n"},
     (5 * GIB, MACHINE)),
])
def test_the_least_of_machine_and_control_groups_counts(
    files: dict[str, str], limit: tuple[int, str], tmp_path: Path
) -> None:
    assert memory_limit(file_system(tmp_path, files)) == limit


def test_a_system_that_does_not_tell_warns_of_nothing(tmp_path: Path) -> None:
    much = Wanted(1, 1 << 60, 1 << 60)
    assert memory_limit(tmp_path) is None and much.warning(None) is None and much.complaint(None) is None


def test_the_warning_is_one_line_with_all_numbers() -> None:
    wanted = Wanted(4, 3 * GIB, GIB)
    assert wanted.process_bytes == SERVER_BYTES + 4 * INTERPRETER_BYTES
    assert wanted.warning((3 * GIB + wanted.process_bytes, MACHINE)) is None
    warning = wanted.warning((3 * GIB + wanted.process_bytes - 1, GROUP))
    assert warning is not None and "\n" not in warning
    assert "use 3.88 GiB (0.88 GiB of it for 5 interpreters), more than the 3.87 GiB of this control group" in warning


def test_front_ends_are_processes_too_and_the_page_has_the_same_formula() -> None:
    wanted = Wanted(4, 3 * GIB, GIB, num_front_ends=2)
    assert wanted.process_bytes == SERVER_BYTES + 4 * INTERPRETER_BYTES + 2 * FRONT_END_BYTES
    warning = wanted.warning((3 * GIB + wanted.process_bytes - 1, GROUP))
    assert warning is not None and "for 7 interpreters" in warning
    page = " ".join((Path(__file__).parents[3] / "docs" / "deploy.md").read_text().split())
    each, server, front_end = (num >> 20 for num in (INTERPRETER_BYTES, SERVER_BYTES, FRONT_END_BYTES))
    assert f"instances × (`--memory` + {each} MiB) + {server} MiB" in page
    assert f"{front_end} MiB for each of `--api-servers`" in page


def test_interpreters_and_parameters_that_do_not_fit_are_a_complaint_with_both_numbers() -> None:
    wanted = Wanted(4, 3 * GIB, GIB)
    start_bytes = GIB + wanted.process_bytes
    assert wanted.complaint((start_bytes, MACHINE)) is None
    complaint = wanted.complaint((start_bytes - (1 << 28), MACHINE))
    assert complaint is not None and "\n" not in complaint
    assert "4 instances need 1.88 GiB" in complaint and "1.62 GiB of this machine's memory and swap" in complaint


@pytest.mark.parametrize(("instances", "cores", "warns"), [(1, 1, False), (2, 2, False), (3, 2, True), (64, 2, True)])
def test_more_instances_than_cores_are_a_warning(instances: int, cores: int, warns: bool) -> None:
    warning = cores_warning(instances, 1, cores, "--max-instances")
    assert (warning is not None) == warns
    assert warning is None or (f"{instances} instances" in warning and f"{cores} core" in warning)
    assert warning is None or warning.endswith("; lower --max-instances")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("machine-memory") / "model"
    create_model(folder, arch="llama", layers=2, hidden=16, heads=2, kv_heads=1, seed=1, max_position_embeddings=256)
    return folder


@pytest.mark.parametrize("api_servers", [0, 2])
@pytest.mark.parametrize(("instances", "overload", "offline", "warns"), [
    (2, "drop", "priority", False), (3, "drop", "priority", True), (2, "swap", "priority", True),
    (2, "drop", "scheduler", False), (2, "drop", "harvest", True),
])
def test_all_instances_and_their_host_pools_count_together(
    instances: int, overload: str, offline: str, warns: bool, api_servers: int, model_dir: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:
    processes_bytes = SERVER_BYTES + instances * INTERPRETER_BYTES + api_servers * FRONT_END_BYTES
    monkeypatch.setattr(assembly, "memory_limit", lambda: (2 * GIB + GIB // 2 + processes_bytes, MACHINE))
    monkeypatch.setattr(assembly, "usable_cores", lambda: instances)
    has_pool = overload == "swap" or offline == "harvest"
    config = EngineConfig.resolve(
        model=str(model_dir), memory="1GiB", instances=instances, overload=overload, offline=offline,
        api_servers=api_servers,
        **({"host_memory": "512MiB"} if has_pool else {}),
    )
    assembly.assemble(config).check()
    assert [r.levelname for r in caplog.records] == ["WARNING"] * warns


def test_more_than_the_physical_memory_is_no_reason_to_refuse(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Pages are made when they are written."""
    physical_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    config = EngineConfig.resolve(model=str(model_dir), memory=str(16 * physical_bytes), instances=1)
    assembly.assemble(config).check()
    (record,) = caplog.records
    assert "lower --memory or --instances" in record.getMessage()


def test_processes_that_do_not_fit_are_refused_before_they_start(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(assembly, "memory_limit", lambda: (4 * GIB, MACHINE))
    monkeypatch.setattr(assembly, "usable_cores", lambda: 2)
    config = EngineConfig.resolve(model=str(model_dir), memory="4MiB", instances=64, num_threads=1)
    with pytest.raises(BudgetError, match=r"^64 instances need 10\.\d\d GiB .* 65 interpreters.* 4\.00 GiB"):
        assembly.assemble(config).check()
    monkeypatch.setattr(assembly, "memory_limit", lambda: (24 * GIB, MACHINE))
    assembly.assemble(config).check()
    (record,) = caplog.records
    assert record.getMessage().startswith("64 instances of 1 thread(s) on 2 core(s)")


@pytest.mark.parametrize(("at_start", "flag"), [(3, "--instances"), (1, "--max-instances")])
def test_a_warning_names_the_flag_that_says_how_many_there_may_be(
    at_start: int, flag: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(assembly, "memory_limit", lambda: None)
    monkeypatch.setattr(assembly, "usable_cores", lambda: 2)
    config = EngineConfig.resolve(
        model=str(model_dir), memory="4MiB", instances=at_start, max_instances=3, num_threads=1)
    assembly.assemble(config).check()
    (record,) = caplog.records
    assert record.getMessage().endswith(f"; lower {flag}")


def test_this_machine_is_not_asked_for_the_room_of_other_hosts(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(assembly, "memory_limit", lambda: (1, MACHINE))
    monkeypatch.setattr(assembly, "usable_cores", lambda: 1)
    of_ray = {"model": str(model_dir), "memory": "4MiB", "instances": 4, "launcher": "ray"}
    assembly.assemble(EngineConfig.resolve(**of_ray, ray_address="head:6379")).check()
    assert not caplog.records
    with pytest.raises(BudgetError, match="4 instances need"):  # a cluster that is started here
        assembly.assemble(EngineConfig.resolve(**of_ray)).check()

"""How many cores a process may use: affinity, and quotas of control groups of both versions."""

from __future__ import annotations

import os

import pytest

from jettison.config import cores, usable_cores

POD = "kubepods/pod1"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """``machine(cgroup, **files)``: the root of a machine of 64 cores whose control groups say this."""
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)

    def make(cgroup, files):
        tmp_path.joinpath("proc/self").mkdir(parents=True)
        tmp_path.joinpath("proc/self/cgroup").write_text(cgroup)
        for name, text in files.items():
            file = tmp_path / "sys/fs/cgroup" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path

    return make


@pytest.mark.parametrize(("cgroup", "files", "num_cores"), [
    ("", {}, 64),
    (f"0::/{POD}\n", {f"{POD}/cpu.max": "max 100000\n"}, 64),
    (f"0::/{POD}\n", {f"{POD}/cpu.max": "400000 100000\n"}, 4),
    (f"0::/{POD}\n", {f"{POD}/cpu.max": "max 100000\n", "kubepods/cpu.max": "250000 100000\n"}, 2),
    (f"0::/{POD}\n", {"cpu.max": "50000 100000\n"}, 1),
    (f"0::/{POD}\n", {f"{POD}/cpu.max": "9900000 100000\n"}, 64),
    (f"7:memory:/a\n4:cpu,cpuacct:/{POD}\n",
     {f"cpu/{POD}/cpu.cfs_quota_us": "300000\n", f"cpu/{POD}/cpu.cfs_period_us": "100000\n"}, 3),
    (f"4:cpu:/{POD}\n", {f"cpu/{POD}/cpu.cfs_quota_us": "-1\n", f"cpu/{POD}/cpu.cfs_period_us": "100000\n"}, 64),
])
def test_the_least_of_affinity_and_quotas(machine, cgroup, files, num_cores):
    assert usable_cores(machine(cgroup, files)) == num_cores


def test_of_this_machine():
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)

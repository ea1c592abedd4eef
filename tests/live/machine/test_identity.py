"""A machine's name lasts as long as the machine, and two processes have one only where they can share memory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jettison.live.machine import identity
from jettison.live.machine.identity import machine_name

IP = "10.0.0.1"
PROGRAM = "import sys; from jettison.live.machine.identity import machine_name; print(machine_name(sys.argv[1]))"


def named(*before: str) -> str:
    """As a process behind this command names its machine."""
    command = (*before, sys.executable, "-c", PROGRAM, IP)
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def can_unshare() -> bool:
    return subprocess.run(("unshare", "--mount", "--net", "true"), capture_output=True).returncode == 0


def test_processes_that_know_nothing_of_each_other_name_their_machine_alike() -> None:
    assert named() == named("setsid") == machine_name(IP)
    assert machine_name(IP).startswith(f"{IP}/")


def test_another_address_is_another_machine() -> None:
    assert machine_name("10.0.0.2").split("/")[1] == machine_name(IP).split("/")[1]
    assert machine_name("10.0.0.2") != machine_name(IP)


@pytest.mark.parametrize("what", ["--mount", "--net", "--pid"])
def test_namespaces_of_one_kernel_are_machines_of_their_own(what: str) -> None:
    """As containers, and hosts in the benchmarks, which have other folders for sockets."""
    if not can_unshare():
        pytest.skip("namespaces need root")
    assert named("unshare", what, "--fork") != named("unshare", "--fork")


def test_another_user_shares_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    before = machine_name(IP)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert machine_name(IP) != before


def test_another_boot_is_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    before = machine_name(IP)
    monkeypatch.setattr(identity, "process_table", lambda: "another boot/pid:[4026531836]")
    assert machine_name(IP) != before

"""How long a start still takes, seen from outside of the workers."""

from __future__ import annotations

import mmap
import os

import pytest

from jettison.live.engine.loading import LOOK_AGAIN_S, LoadingWatch
from jettison.live.machine.memory import shared_bytes


class Machine:
    """A clock, and what two workers have read."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.read = {1: 0, 2: 0}
        self.num_looks = 0

    def watch(self) -> LoadingWatch:
        return LoadingWatch(1000, lambda: self.now_s, self.bytes_of)

    def bytes_of(self, pid: int) -> int:
        self.num_looks += 1
        return self.read[pid]


def test_what_is_left_follows_from_what_is_read() -> None:
    machine = Machine()
    watch = machine.watch()
    guessed_s = watch.left_s(machine.read)
    machine.now_s += 10.0
    machine.read = {1: 100, 2: 100}
    assert watch.left_s(machine.read) == pytest.approx(40.0) != guessed_s
    machine.now_s += 10.0
    machine.read = {1: 500, 2: 300}
    assert watch.left_s(machine.read) == pytest.approx(5.0)


def test_behind_the_last_byte_it_takes_as_long_again_as_it_has() -> None:
    machine = Machine()
    watch = machine.watch()
    machine.now_s += 10.0
    machine.read = {1: 600, 2: 700}  # links and first steps touch some memory, too
    assert watch.left_s(machine.read) == 0.0
    machine.now_s += 4.0
    machine.read = {1: 600, 2: 100}  # a worker that starts anew changes nothing of it
    assert watch.left_s(machine.read) == pytest.approx(4.0)


def test_first_steps_go_on_as_they_have_gone() -> None:
    machine = Machine()
    watch = machine.watch()
    watch.all_read()
    machine.now_s += 6.0
    assert watch.left_s(machine.read, 0.25) == pytest.approx(18.0)
    machine.now_s += 3.0
    assert watch.left_s(machine.read, 0.9) == pytest.approx(1.0)
    assert machine.num_looks == 0


def test_a_flood_of_clients_looks_seldom() -> None:
    machine = Machine()
    watch = machine.watch()
    for _ in range(1000):
        watch.left_s(machine.read)
        machine.now_s += LOOK_AGAIN_S / 1000
    assert machine.num_looks <= 4


def test_the_kernel_tells_what_of_a_memory_file_is_touched() -> None:
    size = 8 << 20
    before = shared_bytes(os.getpid())
    fd = os.memfd_create("test")
    os.ftruncate(fd, size)
    with mmap.mmap(fd, size) as area:
        assert shared_bytes(os.getpid()) - before < size // 2
        for at in range(0, size, mmap.PAGESIZE):
            area[at] = 1
        assert shared_bytes(os.getpid()) - before >= size // 2
    os.close(fd)
    assert shared_bytes(1 << 30) == 0

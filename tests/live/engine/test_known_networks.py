"""What was measured between hosts outlives its controller, and follows the hosts to other numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from jettison.config import EngineConfig
from jettison.core.cluster import ClusterCore
from jettison.core.load.distances import known_links
from jettison.device.model.create import create_model
from jettison.live.engine.assembly import Assembly, assemble
from jettison.live.engine.crew import Crew
from jettison.live.engine.known_networks import KnownNetworks
from jettison.live.engine.provisioner import Provisioner
from jettison.live.engine.restart import Restarter
from jettison.live.engine.spawner import Spawner
from jettison.live.host.heritage import Heritage
from jettison.policy.links import FAR

RATES = {(0, 1): 20e6, (1, 0): 20e6, (0, 2): 100e6, (2, 0): 100e6, (1, 2): 20e6, (2, 1): 20e6}
"""Of hosts a, b and c, of which b is behind a slower network."""


@pytest.fixture
def fd() -> Iterator[int]:
    made = os.memfd_create("test")
    yield made
    os.close(made)


def recalled(fd: int) -> KnownNetworks:
    networks = KnownNetworks(fd)
    networks.recall()
    return networks


def test_a_later_controller_numbers_hosts_otherwise_and_knows_them(fd: int) -> None:
    KnownNetworks(fd).note({(0, 1): 5.0, (1, 0): 7.0, (1, 2): 9.0}, {"a": 0, "b": 1, "c": 2})
    later = recalled(fd)
    assert later.between({"b": 0, "a": 3}) == {(3, 0): 5.0, (0, 3): 7.0}
    assert later.between({"a": 0, "new": 1}) == {}


def test_what_is_measured_again_counts_and_what_is_not_stays(fd: int) -> None:
    KnownNetworks(fd).note({(0, 1): 123456789.125, (1, 0): 7.0}, {"a": 0, "b": 1})
    second = recalled(fd)
    second.note({(0, 1): 6.0}, {"a": 0, "b": 1})
    assert recalled(fd).between({"a": 0, "b": 1}) == second.between({"a": 0, "b": 1}) == {(0, 1): 6.0, (1, 0): 7.0}


@pytest.mark.parametrize("left", [b'[["a","b",5', b'{"a": 1}', b"\x00\x00"])
def test_a_controller_that_was_killed_while_it_wrote_has_left_nothing(fd: int, left: bytes) -> None:
    os.pwrite(fd, left, 0)
    later = recalled(fd)
    assert later.between({"a": 0, "b": 1}) == {}
    later.note({(0, 1): 5.0}, {"a": 0, "b": 1})
    assert recalled(fd).between({"a": 0, "b": 1}) == {(0, 1): 5.0}


def test_a_server_without_a_parent_keeps_its_own() -> None:
    networks = KnownNetworks()
    networks.recall()
    networks.note({(0, 1): 5.0, (-3, 1): 6.0}, {"a": 0, "b": 1})
    assert networks.between({"a": 1, "b": 0}) == {(1, 0): 5.0}


# --- what the core is told


@pytest.fixture
def assembly(tmp_path: Path) -> Assembly:
    folder = tmp_path / "model"
    create_model(folder, arch="llama", layers=2, hidden=16, heads=2, kv_heads=1, max_position_embeddings=64)
    return assemble(EngineConfig.resolve(model=str(folder), memory="16MiB", instances=4))


class Controller:
    """One, whose workers are on these hosts (by worker) as it begins."""

    def __init__(self, assembly: Assembly, homes: dict[int, str], fd: int | None, machines: tuple[int, ...] = ()):
        self.homes, hosts = homes, sorted(set(homes.values()))
        spawner = SimpleNamespace(hosts=lambda: hosts, host_of=lambda worker: self.homes[worker])
        heritage = None if fd is None else SimpleNamespace(networks_fd=fd)
        self.provisioner = Provisioner(
            cast(Crew, None), cast(Restarter, None), cast(Spawner, spawner), lambda: None,
            names_machines=not machines, heritage=cast(Heritage | None, heritage),
        )
        machine_of = dict(enumerate(machines)) or {worker: hosts.index(host) for worker, host in homes.items()}
        self.core: ClusterCore = assembly.build_core(
            dict.fromkeys(homes, 100), b"s" * 16, None, machine_of, has_profiled_links=len(hosts) == 1,
            missing=[worker for worker in range(4) if worker not in homes],
        )

    def begin(self, measured: dict[tuple[int, int], float] | None = None) -> Controller:
        if measured is not None:
            self.core.reconfigure(replace(self.core.params, networks=measured))
        self.provisioner.begin(self.core)
        return self

    def join(self, worker: int, host: str) -> None:
        self.homes[worker] = host
        self.provisioner.joined(worker, self.core)


def test_a_controller_that_comes_back_knows_distances_as_the_one_before(assembly: Assembly, fd: int) -> None:
    Controller(assembly, {0: "a", 1: "b", 2: "c"}, fd).begin(RATES)
    later = Controller(assembly, {0: "a", 1: "b", 2: "c"}, fd).begin()
    assert later.core.params.networks == RATES
    links = known_links(later.core.state)
    assert links is not None and links.distance(0, 2) == FAR < links.distance(0, 1)


def test_a_host_whose_worker_is_there_again_later_is_known_from_then_on(assembly: Assembly, fd: int) -> None:
    Controller(assembly, {0: "a", 1: "b", 2: "c"}, fd).begin(RATES)
    later = Controller(assembly, {0: "b", 2: "c"}, fd).begin()
    assert later.core.params.networks == {(0, 1): 20e6, (1, 0): 20e6}
    later.join(1, "a")
    assert later.core.params.machine_of == {0: 0, 2: 1, 1: 2}
    assert later.core.params.networks == {
        (0, 1): 20e6, (1, 0): 20e6, (2, 0): 20e6, (0, 2): 20e6, (2, 1): 100e6, (1, 2): 100e6}  # fmt: skip


def test_machines_that_the_configuration_names_keep_their_numbers(assembly: Assembly, fd: int) -> None:
    Controller(assembly, {0: "a", 1: "b", 2: "c"}, fd, machines=(7, 9, 7, 9)).begin({(7, 9): 5.0})
    assert Controller(assembly, {0: "c"}, fd, machines=(7, 9, 7, 9)).begin().core.params.networks == {(7, 9): 5.0}


def test_a_second_host_ends_the_time_when_all_links_were_shared_memory(assembly: Assembly) -> None:
    controller = Controller(assembly, {0: "a", 1: "a"}, None).begin()
    controller.join(2, "a")
    params = controller.core.params
    assert params.has_profiled_links and params.machine_of == {0: 0, 1: 0, 2: 0}
    controller.join(3, "b")
    assert not controller.core.params.has_profiled_links and controller.core.params.machine_of[3] == 1
    params = controller.core.params
    controller.join(3, "b")
    assert controller.core.params is params, "no news"

"""Clusters of specs: which link a change is for, which is reported, and how much memory there can be."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from specs import deployment, spec

from jettison.cost.presets import instance_preset
from jettison.errors import BudgetError, ConfigError
from jettison.sim.links import LinkClass, LinkSpec, PortId, Topology, host_of
from jettison.simulate.cases import cases_of, run_case
from jettison.simulate.machines import Machine, cluster_setup, of_deployment, resolve_machine
from jettison.simulate.sizing import with_instances
from jettison.simulate.spec import ClusterSpec, LinkChange, parse_spec
from jettison.types import LayerRange


def machine(**cluster: Any) -> Machine:
    return resolve_machine(parse_spec({"cluster": cluster, "workload": "burst"}).cluster, {})


def links(topology: Topology, num_instances: int) -> list[LinkSpec]:
    """Of each instance to each other."""
    ids = range(num_instances)
    return [topology.link(a, b) for a in ids for b in ids if a != b]


@pytest.mark.parametrize(
    ("preset", "instances", "is_inside"),
    [
        ("mell-4090", None, True), ("mell-a100", None, True), ("mell-4090", 16, False), ("kunserve-a", None, False),
        ("kunserve-b", None, False), ("kunserve-b", 2, True), ("kunserve-v1-70b", 2, True), ("conserve", 2, False),
    ],
)  # fmt: skip
def test_a_change_of_the_link_is_for_the_one_that_joins_the_instances(
    preset: str, instances: int | None, is_inside: bool
) -> None:
    cluster = {"preset": preset} | ({} if instances is None else {"instances": instances})
    before = machine(**cluster)
    after = machine(**cluster, link={"gbps": 8.0, "efficiency": 0.5})
    assert before.topology.host == after.topology.host
    changed, kept = ("inside", "between") if is_inside else ("between", "inside")
    assert getattr(after.topology, kept) == getattr(before.topology, kept)
    num_gpus = after.gpus_per_instance or 1
    assert getattr(after.topology, changed).bytes_per_s == pytest.approx(num_gpus * 0.5e9)
    # It is used, and what plans count on.
    slowest = min(link.bytes_per_s for link in links(after.topology, after.num_instances))
    assert slowest == after.profile.link_bytes_per_s == pytest.approx(num_gpus * 0.5e9)


def test_a_change_of_a_measured_link_is_what_plans_count_on_too() -> None:
    measured = deployment()
    assert of_deployment(measured).profile == measured.profile
    changed = of_deployment(measured, ClusterSpec(link=LinkChange(gbps=1.0, latency_us=300.0)))
    link = changed.topology.between
    assert (changed.profile.link_bytes_per_s, changed.profile.link_latency_s) == (link.bytes_per_s, link.latency_s)
    assert link.bytes_per_s < 1e9 / 8 and link.latency_s == pytest.approx(3e-4)


def test_a_spec_may_say_which_link_it_means() -> None:
    before = machine(preset="kunserve-b")
    for said, changed, kept in ((True, "inside", "between"), (False, "between", "inside")):
        for instances in (2, 4):
            after = machine(preset="kunserve-b", instances=instances, link={"gbps": 16, "within_node": said})
            assert getattr(after.topology, changed).bytes_per_s < 4 * 2e9
            assert getattr(after.topology, kept) == getattr(before.topology, kept)
    with pytest.raises(ConfigError, match=r"^cluster.link.within_node: kunserve-a has no link inside a node$"):
        machine(preset="kunserve-a", link={"within_node": True})
    with pytest.raises(ConfigError, match=r"^cluster.link.within_node goes with a preset only"):
        parse_spec({"cluster": {"model": "qwen2.5-14b", "gpu": "h200", "link": {"within_node": True}},
                    "workload": "burst"})  # fmt: skip


@pytest.mark.parametrize(("preset", "is_inside"), [("kunserve-b", False), ("mell-a100", True), ("kunserve-a", False)])
def test_a_search_keeps_to_the_link_that_the_spec_s_own_number_means(preset: str, is_inside: bool) -> None:
    raw = spec(cluster={"preset": preset, "link": {"gbps": 8}}, workload={"rows": [[0, 9, 3]]}, settings={})
    for number in (1, 2, 4, 16):
        cluster = parse_spec(with_instances(cases_of(raw, "file")[0], number).raw).cluster
        assert cluster.link.within_node is is_inside and cluster.instances == number
    plain = cases_of(spec(cluster=preset, workload={"rows": [[0, 9, 3]]}, settings={}), "file")[0]
    assert with_instances(plain, 2).raw["cluster"] == {"preset": preset, "instances": 2}


def test_results_report_the_link_that_is_used() -> None:
    raw = spec(
        cluster={"preset": "mell-a100"}, workload={"rows": [[0, 50, 3]]}, settings={}, variants=["recompute"],
        sweep={"cluster.link.gbps": [10, 100]},
    )
    found = [run_case(case).config["cluster"] for case in cases_of(raw, "file")]
    assert [f["link_bytes_per_s"] / 1e9 for f in found] == pytest.approx([0.78 * 1.25, 0.78 * 12.5])
    assert all(f["link"] == "pcie" and f["link_within_node_bytes_per_s"] == f["link_bytes_per_s"] for f in found)
    split = run_case(cases_of(raw | {"cluster": {"preset": "kunserve-b"}, "sweep": None}, "file")[0]).config["cluster"]
    assert split["link"] == "rdma" and split["link_within_node_bytes_per_s"] > split["link_bytes_per_s"]


def test_links_are_of_what_their_presets_say() -> None:
    for preset, inside, between in (
        ("mell-a100", LinkClass.PCIE, LinkClass.ETHERNET), ("mell-4090", LinkClass.PCIE, LinkClass.ETHERNET),
        ("kunserve-b", LinkClass.NVLINK, LinkClass.RDMA), ("kunserve-v1-90b", LinkClass.NVLINK, LinkClass.RDMA),
    ):  # fmt: skip
        topology = machine(preset=preset).topology
        assert topology.inside is not None
        assert (topology.inside.link_class, topology.between.link_class) == (inside, between)
        # PCIe between processors is the port of copies to the host; NVLink is none.
        shares = PortId.of(0, topology.link(0, 1)) == PortId.of(0, topology.link(0, host_of(0)))
        assert shares == (inside is LinkClass.PCIE)
    assert machine(preset="kunserve-a").topology.between.link_class is LinkClass.RDMA


def test_kv_tokens_cannot_need_more_than_the_gpus_have() -> None:
    instance = instance_preset("qwen2.5-14b", "a800-80g")
    most = (instance.memory_bytes - instance.parameter_bytes) // instance.kv_bytes_per_token
    assert machine(preset="kunserve-a", kv_tokens=most).kv_tokens == most
    told = rf"^cluster.kv_tokens: {most + 1} tokens beside the parameters are \d+ bytes, more than the 85899345920 of 1"
    with pytest.raises(BudgetError, match=told):
        machine(preset="kunserve-a", kv_tokens=most + 1)


def test_copies_beside_the_steps_may_take_a_whole_step_and_copies_between_them_a_quarter() -> None:
    for cluster, share in (({"preset": "kunserve-a"}, 1.0), (spec()["cluster"], 0.25)):
        parsed = parse_spec(spec(cluster=cluster, settings={}, variants=["swap"]))
        found = resolve_machine(parsed.cluster, {})
        setup = cluster_setup(found, parsed, parsed.variants[0], 0)
        assert (setup.topology.host is not None) == (share == 1.0)
        assert setup.params.swap.time_share == share


@pytest.mark.parametrize(("place", "change"), [
    ("cluster: the memory", {"cluster": {**spec()["cluster"], "memory": 10**30}}),
    ("cluster: the memory", {"cluster": {**spec()["cluster"], "kv_tokens": 10**12}}),
    ("settings.host_memory", {"settings": {"host_memory": 10**14}, "variants": ["swap"]}),
])  # fmt: skip
def test_more_blocks_than_books_have_room_for_are_one_line(place: str, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^{place} .*KV blocks, and 10,000,000 can be simulated at most$"):
        cases_of(spec(**change), "file")


def test_a_node_may_have_one_card() -> None:
    shared = machine(preset="mell-4090", instances=16, link={"card_per_node": True, "within_node": False})
    assert shared.topology.card_of == shared.topology.machine_of and set(shared.topology.card_of.values()) == {0, 1}
    assert machine(preset="mell-4090", instances=16).topology.card_of == {}
    with pytest.raises(ConfigError, match=r"^cluster.link.card_per_node goes with a preset only"):
        parse_spec({"cluster": {"model": "qwen2.5-14b", "gpu": "h200", "link": {"card_per_node": True}},
                    "workload": "burst"})  # fmt: skip


@pytest.mark.parametrize(("cluster", "drops"), [
    ({"model": "qwen2.5-14b", "gpu": "h200"}, (LayerRange(0, 24), LayerRange(24, 48))),
    ({"preset": "kunserve-a"}, None),
])  # fmt: skip
def test_cards_map_the_first_drop_ahead_but_in_papers(cluster: dict[str, Any], drops: object) -> None:
    parsed = parse_spec({"cluster": cluster, "workload": {"rows": [[0.0, 10, 10]]}})
    memory = cluster_setup(resolve_machine(parsed.cluster, parsed.settings), parsed, parsed.variants[0], 0).memory
    assert memory.drops == drops and (memory.page_bytes == 2 << 20) == (drops is None)


def test_a_queue_has_a_limit_only_where_the_spec_says_so() -> None:
    raw = spec(variants=["drop", {"name": "short", "policy": "drop", "settings": {"max_num_queued_reqs": 7}}])
    parsed = parse_spec(raw)
    machine = resolve_machine(parsed.cluster, parsed.settings)
    limits = [cluster_setup(machine, parsed, variant, 0).max_num_queued_reqs for variant in parsed.variants]
    assert limits == [None, 7]

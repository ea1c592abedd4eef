"""Profiles as values and documents."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.cost.hardware import BatchPoint, HardwareProfile, PrefillPoint
from jettison.cost.model import COEFFICIENTS, CostModel
from jettison.cost.profile_document import (
    Fingerprint,
    ModelSizes,
    ProfileDocumentError,
    StoredProfile,
    from_document,
    to_document,
)

times = st.floats(0.0, 1e3)
rates = st.floats(1e-3, 1e15)
costs = st.builds(CostModel, st.integers(1, 99), *[times] * len(COEFFICIENTS), *[st.integers(1, 99)] * 3)
prefills = st.builds(PrefillPoint, st.integers(1, 256), st.integers(0, 4096), rates)
points = st.builds(BatchPoint, st.integers(1, 8), st.integers(1, 256), st.integers(1, 4096), rates)
profiles = st.builds(
    HardwareProfile, costs, rates, times, times, times, rates, rates, st.lists(points, max_size=4).map(tuple),
    st.none() | rates, st.none() | times, st.floats(1.0, 1e3), st.integers(1, 9),
    st.none() | rates, st.none() | times, st.none() | times, st.lists(prefills, max_size=3).map(tuple),
    st.none() | times,
)
marks = st.builds(Fingerprint, *[st.text(max_size=9)] * 4, st.integers(1, 64), st.text(max_size=9))


def a_profile(**changes: object) -> HardwareProfile:
    cost = CostModel(6, *[1e-5] * len(COEFFICIENTS))
    profile = HardwareProfile(cost, 1e9, 1e-4, 1e-3, 1e-11, 5e9, 1e9, (BatchPoint(1, 8, 64, 500.0),))
    return dataclasses.replace(profile, **changes)  # type: ignore[arg-type]


STORED = StoredProfile(Fingerprint("cpu", "abc", "0.1", "float32", 1, "torch"), a_profile())


@given(stored=st.builds(StoredProfile, marks, profiles))
def test_a_profile_survives_json(stored):
    assert from_document(json.loads(json.dumps(to_document(stored)))) == stored


def changed(path: str, value: object, *, remove: bool = False) -> dict:
    document = json.loads(json.dumps(to_document(STORED)))
    *parents, last = path.split("/")
    at = document
    for name in parents:
        at = at[int(name)] if name.isdigit() else at[name]
    if remove:
        del at[last]
    else:
        at[last] = value
    return document


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "mapping"),
        (changed("format", "other-1"), "format"),
        (changed("extra", 1), "'extra'"),
        (changed("profile/extra", 1), "'extra'"),
        (changed("profile/cost/extra", 1), "'extra'"),
        (changed("profile/cost/layer_s", None, remove=True), "'layer_s'"),
        (changed("profile/cost/layer_s", "fast"), "profile.cost.layer_s"),
        (changed("profile/cost/layer_s", True), "profile.cost.layer_s"),
        (changed("profile/cost/layer_s", float("nan")), "profile.cost.layer_s"),
        (changed("profile/cost/layer_s", -1.0), "layer_s"),
        (changed("profile/cost/row_tile", 1.5), "profile.cost.row_tile"),
        (changed("profile/link_bytes_per_s", 0), "link_bytes_per_s"),
        (changed("profile/hop_s", -1.0), "hop_s"),
        (changed("profile/hop_s", "soon"), "profile.hop_s"),
        (changed("profile/contention", 0.9), "contention"),
        (changed("profile/contention_instances", 0), "contention"),
        (changed("profile/contention_instances", 1.5), "profile.contention_instances"),
        (changed("profile/link_beside_byte_s", -1.0), "link_beside_byte_s"),
        (changed("profile/prefill_points", [{"batch_size": 1, "num_tokens": -1, "seconds": 1.0}]), "prefill points"),
        (changed("profile/prefill_points", [{"batch_size": 1}]), "'num_tokens'"),
        (changed("profile/batch_points", {}), "batch_points"),
        (changed("profile/batch_points/0/batch_size", 0), "batch points"),
        (changed("profile/batch_points/0/batch_size", None, remove=True), "'batch_size'"),
        (changed("fingerprint/dtype", 5), "fingerprint.dtype"),
        (changed("fingerprint", None), "fingerprint"),
    ],
)
def test_a_bad_document_is_refused_by_name(document, words):
    with pytest.raises(ProfileDocumentError, match=words):
        from_document(document)


def test_whole_numbers_are_read_where_times_are_meant() -> None:
    assert from_document(changed("profile/link_latency_s", 0)).profile.link_latency_s == 0.0


def test_profiles_of_earlier_versions_have_no_boundaries() -> None:
    document = to_document(STORED)
    assert "prefill_points" not in document["profile"] and "link_beside_byte_s" not in document["profile"]
    assert from_document(document).profile.prefill_points == ()


def test_fingerprints_tell_what_differs() -> None:
    mark = STORED.fingerprint
    other = dataclasses.replace(mark, num_threads=2, dtype="bfloat16")
    assert mark.differences(mark) == []
    assert [text.split()[0] for text in mark.differences(other)] == ["dtype", "num_threads"]
    assert mark.digest() != other.digest()
    assert len(mark.digest()) == 12


def test_profiles_of_earlier_versions_say_nothing_of_weights() -> None:
    document = to_document(STORED)
    assert document["fingerprint"].pop("weights") == "plain"
    assert from_document(document) == STORED
    kept = dataclasses.replace(STORED.fingerprint, weights="int4-g64")
    assert kept.digest() != STORED.fingerprint.digest()
    assert kept.differences(STORED.fingerprint) == ["weights 'int4-g64' and not 'plain'"]


def test_moves_cost_fixed_and_per_byte() -> None:
    profile = a_profile()
    assert profile.remap_cost_s(0) == 0.0
    assert profile.remap_cost_s(10**9) == pytest.approx(0.011)
    assert profile.remap_cost_s(10**9, 100) == pytest.approx(0.011) and not profile.keeps_mappings
    card = a_profile(remap_page_s=1e-4)
    assert card.remap_cost_s(10**9, 100) == pytest.approx(0.021) and card.keeps_mappings
    assert profile.host_copy_cost_s(5 * 10**9) == pytest.approx(1.0)
    assert profile.disk_cost_s(10**9) == pytest.approx(1.0)
    assert profile.device_copy_cost_s(5 * 10**9) == pytest.approx(1.0)  # the device's memory is the host's
    assert a_profile(device_copy_bytes_per_s=1e12).device_copy_cost_s(10**9) == pytest.approx(1e-3)


def test_a_stage_adds_what_batches_show_that_were_measured_both_ways() -> None:
    alone_s = {1: 2e-3, 8: 4e-3, 32: 10e-3}
    alone = [BatchPoint(1, size, 256, size / seconds) for size, seconds in alone_s.items()]
    pairs = [BatchPoint(2, size, 256, size / (seconds / 2 + 1e-4 * size)) for size, seconds in alone_s.items()]
    profile = a_profile(batch_points=(*alone, *pairs))
    assert profile.added_stage_s(2) == pytest.approx(8e-4), "the median"
    assert profile.added_stage_s(4) == profile.added_stage_s(2), "the longest that was measured"
    faster = [BatchPoint(2, size, 256, 4 * size / seconds) for size, seconds in alone_s.items()]
    assert a_profile(batch_points=(*alone, *faster)).added_stage_s(2) == 0.0
    others = (*alone, BatchPoint(2, 16, 256, 1.0))
    for points in ((), tuple(alone), others):
        assert a_profile(batch_points=points).added_stage_s(2) == 0.0


def test_the_batch_limit_is_where_throughput_stops_growing() -> None:
    measured = [(1, 1, 100.0), (1, 8, 600.0), (1, 16, 950.0), (1, 32, 1000.0), (2, 8, 900.0), (2, 32, 2000.0)]
    profile = a_profile(batch_points=tuple(BatchPoint(s, b, 256, rate) for s, b, rate in measured))
    assert profile.batch_limit(1) == 16
    assert profile.batch_limit(2) == profile.batch_limit(3) == 32
    assert profile.group_tokens_per_s(1) == 1000.0
    assert profile.group_tokens_per_s(2) == 2000.0
    assert profile.group_tokens_per_s(7) == 7000.0  # two members lose nothing, so seven do not (``test_grouprate``)
    assert a_profile(batch_points=()).batch_limit(1) is None
    assert a_profile(batch_points=()).group_tokens_per_s(1) is None


@pytest.mark.parametrize(
    "change", [{"disk_bytes_per_s": 0.0}, {"remap_fixed_s": -1.0}, {"link_latency_s": float("nan")}]
)
def test_impossible_speeds_are_refused(change) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        a_profile(**change)


def test_sizes_of_the_model_survive_and_may_be_missing() -> None:
    stored = dataclasses.replace(STORED, sizes=ModelSizes(6, 256, 4))
    assert from_document(json.loads(json.dumps(to_document(stored)))) == stored
    assert "sizes" not in to_document(STORED)
    with pytest.raises(ProfileDocumentError, match="sizes has no key 'hidden_size'"):
        from_document(to_document(STORED) | {"sizes": {"num_layers": 6, "dtype_bytes": 4}})


def test_profiles_of_earlier_versions_know_no_hop_and_no_contention():
    plain = to_document(STORED)["profile"]
    assert not {"hop_s", "contention", "contention_instances"} & plain.keys()
    assert not a_profile().shares_cores and a_profile().slowdown(9) == 1.0


def test_contention_grows_with_those_who_compute():
    profile = a_profile(contention=1.6, contention_instances=3)
    assert [profile.slowdown(number) for number in (1, 2, 3, 5)] == pytest.approx([1.0, 1.3, 1.6, 2.2])
    assert not a_profile(contention=1.6).shares_cores, "measured of one instance, it is of no others"

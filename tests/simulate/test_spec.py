"""Specs: what is read, and one line that names the place for everything that is wrong."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest

from jettison.config.files import parse_yaml
from jettison.errors import ConfigError
from jettison.sim.faults import Crash, Cut, Slow
from jettison.simulate.spec import RandomFaults, VariantSpec, parse_spec
from jettison.simulate.sweeps import apply_settings, expand_sweep, set_at
from jettison.workload.synthetic import Burst, Lengths

SPEC = """
name: whole
cluster: {preset: kunserve-a, instances: 4, memory_utilisation: 0.8, block_size: 64,
          link: {class: rdma, gbps: 100, latency_us: 20, duplex_efficiency: 0.5}}
workload:
  arrivals: {process: gamma, rate_per_s: 2, cv: 1.5, duration_s: 60,
             bursts: [{start_s: 20, duration_s: 5, multiplier: 4}]}
  lengths: {input: {median: 100, sigma: 0.5, cap: 1000}, output: 64}
  mean_load: 0.5
variants:
- recompute
- {name: live, policy: drop, settings: {exchange: live, max-num-seqs: 64}}
settings: {max_num_batched_tokens: 1024}
seeds: [3, 5]
slo: {ttft_s: 1.0}
faults:
- {kind: crash, at_s: 3, worker: 1, restarts: false}
- {kind: cut, at_s: 4, a: 0, b: 1}
- {kind: slow, at_s: 5, worker: 2, for_s: 1, factor: 3}
run: {until_s: 100}
plan: {slo_ttft_p99_s: 2, price_per_gpu_hour: 1.5}
"""


def whole() -> dict[str, Any]:
    return copy.deepcopy(parse_yaml(SPEC, "test"))


def test_a_whole_spec() -> None:
    spec = parse_spec(whole())
    assert (spec.name, spec.seeds) == ("whole", (3, 5))
    assert spec.cluster.instances == 4 and spec.cluster.link.gbps == 100 and not spec.cluster.is_local
    assert spec.workload.arrivals is not None and spec.workload.lengths is not None
    assert dict(spec.workload.arrivals.numbers) == {"rate_per_s": 2, "cv": 1.5}
    assert spec.workload.arrivals.bursts == (Burst(20, 5, 4),)
    assert spec.workload.lengths.output == Lengths(64, 0.0, 64, 64)
    assert spec.variants == (
        VariantSpec("recompute", "recompute"), VariantSpec("live", "drop", {"exchange": "live", "max_num_seqs": 64}),
    )
    assert dict(spec.settings) == {"max_num_batched_tokens": 1024, "block_size": 64}
    assert spec.faults == (Crash(3, 1, None, 0.01), Cut(4, 0, 1), Slow(5, 2, 1, 3))


def test_the_least_spec_and_its_shorthands() -> None:
    spec = parse_spec({"cluster": "kunserve-a", "workload": "burst"}, "file")
    assert spec.name == "file" and spec.cluster.preset == "kunserve-a" and spec.workload.builtin == "burst"
    assert spec.variants == (VariantSpec("drop"),) and spec.seeds == (0,)
    assert parse_spec({"cluster": {"model": "folder"}, "workload": "burst"}).cluster.is_local
    assert parse_spec(whole() | {"seeds": 3}).seeds == (0, 1, 2)
    drawn = parse_spec(whole() | {"faults": {"number": 4, "span_s": 10}}).faults
    assert drawn == RandomFaults(0, 4, 10)


def test_batches_have_windows_and_an_endless_one_has_none() -> None:
    batch = {"lengths": {"input": 10, "output": 5}, "num_requests": 8, "completion_window_s": 60, "tenant": "b"}
    spec = parse_spec({"cluster": "kunserve-a", "workload": {"builtin": "burst", "batches": [batch, batch]}})
    assert [(b.completion_window_s, b.tenant) for b in spec.workload.batches] == [(60.0, "b")] * 2
    endless = {key: value for key, value in batch.items() if key != "num_requests"} | {"unfinished": 2}
    with pytest.raises(ConfigError, match=r"workload\.batches\[0\]\.num_requests is missing: an endless batch"):
        parse_spec({"cluster": "kunserve-a", "workload": {"builtin": "burst", "batches": [endless]}})


def test_a_misspelt_section_is_told_before_the_missing_one() -> None:
    with pytest.raises(ConfigError, match=r"clusterr: unknown key \(did you mean 'cluster'\?\)"):
        parse_spec({"clusterr": "kunserve-a", "workload": "burst"})


def test_a_misspelt_key_is_told_beside_the_one_that_is_missing() -> None:
    raw = parse_yaml(SPEC, "test")
    raw["workload"]["arrivals"]["rate_per_sec"] = raw["workload"]["arrivals"].pop("rate_per_s")
    with pytest.raises(ConfigError, match=r"^workload.arrivals.rate_per_s is missing \(written: rate_per_sec\)$"):
        parse_spec(raw)


def test_an_unknown_key_is_answered_with_all_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"workload\.qqq: unknown key") as told:
        parse_spec({"cluster": "kunserve-a", "workload": {"builtin": "burst", "qqq": 1}})
    assert all(word in str(told.value) for word in ("arrivals", "servegen", "rows", "lengths", "replay_burst"))


def changed(place: str, value: object) -> dict[str, Any]:
    raw = whole()
    set_at(raw, place, value)
    return raw


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("clutser", {}, "clutser: unknown key (did you mean 'cluster'?)"),
        ("clusterr", {}, "clusterr: unknown key (did you mean 'cluster'?)"),
        ("workload.lengthz", "sharegpt", "workload.lengthz: unknown key (did you mean 'lengths'?)"),
        ("cluster", None, "cluster is missing"),
        ("cluster", 5, "cluster needs `key: value` lines, not 5"),
        ("cluster.instences", 3, "cluster.instences: unknown key (did you mean 'instances'?)"),
        ("cluster.instances", 0, "cluster.instances needs a whole number from 1 to 1024, not 0"),
        ("cluster.instances", 2.5, "cluster.instances needs a whole number"),
        ("cluster.gpu", "h200", "cluster.gpu does not go with cluster.preset"),
        ("cluster.model", "x", "cluster.model does not go with cluster.preset"),
        ("cluster.profile", 5, "cluster.profile needs a text that is not empty, not 5"),
        ("cluster.gpus_per_instance", 2, "cluster.gpus_per_instance goes with cluster.gpu only"),
        ("cluster.memory", "1GiB", "cluster.memory_utilisation does not go with cluster.memory"),
        ("cluster.memory_utilisation", 1.5, "cluster.memory_utilisation needs a part from 0 to 1, not 1.5"),
        ("cluster.block_size", 0, "cluster.block_size needs a whole number from 1 to 1024"),
        ("cluster.link.class", "rmda", "cluster.link.class must be nvlink, rdma, pcie or ethernet, not 'rmda'"),
        ("cluster.link.gbps", -1, "cluster.link.gbps needs a number from 1e-06 to 1e+09, not -1"),
        ("cluster.link.duplex_efficiency", 0.2, "cluster.link.duplex_efficiency needs a number from 0.5 to 1"),
        ("workload", None, "workload is missing"),
        ("workload.trace", "f.csv", "workload needs exactly one of trace, builtin, arrivals, servegen, rows"),
        ("workload.arrivals.rate_per_s", 0, "workload.arrivals.rate_per_s needs a number above 0, not 0"),
        ("workload.arrivals.rate_per_s", "fast", "workload.arrivals.rate_per_s needs a number above 0, not 'fast'"),
        ("workload.arrivals.rate_per_s", None, "workload.arrivals.rate_per_s is missing"),
        ("workload.arrivals.process", "gama", "workload.arrivals.process must be poisson, gamma"),
        ("workload.arrivals.process", "poisson", "workload.arrivals.cv: unknown key"),
        ("workload.arrivals.bursts", 3, "workload.arrivals.bursts needs a list, not 3"),
        ("workload.arrivals.bursts.0.multiplier", 0, "workload.arrivals.bursts[0].multiplier needs a number above 0"),
        ("workload.lengths", None, "workload.lengths is missing: arrivals have none of their own"),
        ("workload.lengths.output", 0, "workload.lengths.output needs a whole number from 1 to 2147483647, not 0"),
        ("workload.lengths.output", 10**10, "workload.lengths.output needs a whole number from 1 to 2147483647, not 1"),
        ("workload.lengths.input.cap", 2**31, "workload.lengths.input.cap needs a whole number from 1 to 2147483647"),
        ("workload.lengths.input.median", 3e9, "workload.lengths.input.median needs a number above 0 and at most 2147"),
        ("workload.max_model_len", 10**10, "workload.max_model_len needs a whole number from 2 to 2147483647, not 1"),
        ("workload.spread_s", 1e-300, "workload.spread_s needs a number from 1e-09 to 1e+11, not 1e-300"),
        ("workload.arrivals.cv", 1e-170, "workload.arrivals.cv needs a number from 1e-06 to 100, not 1e-170"),
        ("workload.arrivals.cv", 1e160, "workload.arrivals.cv needs a number from 1e-06 to 100, not 1e+160"),
        ("workload.arrivals.duration_s", 1e12, "workload.arrivals.duration_s needs a number above 0 and at most 1e+11"),
        ("workload.arrivals.rate_per_s", 10**400, "workload.arrivals.rate_per_s needs a number above 0, not 1000000"),
        ("workload.lengths.input.mean", 120, "workload.lengths.input needs either mean or sigma"),
        ("workload.jitter", True, "workload.jitter is for traces"),
        ("workload.slice_s", 5, "workload.slice_index is missing"),
        ("workload.window_s", [5, 3], "workload.window_s needs [from, to] with from before to"),
        ("workload.thin", 2, "workload.thin needs a part from 0 to 1, not 2"),
        ("workload.upscale", 0.5, "workload.upscale needs a number >= 1"),
        ("variants", "drop", "variants needs a list, not 'drop'"),
        ("variants", [{"name": "a"}, {"name": "a"}], "variants[1].name 'a' is taken"),
        ("variants.live.policy", "dropp", "variants[1].policy must be drop, recompute, swap, migrate or pipeline"),
        ("variants.live.settings.exchange", "no", "variants[1].settings.exchange must be auto, transfer"),
        ("variants.live.settings.overload", "drop", "variants[1].settings.overload has a place of its own in a spec"),
        ("settings.max_num_seq", 4, "settings.max_num_seq: unknown key (did you mean 'max_num_seqs'?)"),
        ("settings.instances", 4, "settings.instances has a place of its own in a spec: cluster.instances"),
        ("settings.block_size", 4, "settings.block_size is given as cluster.block_size, too"),
        ("settings.max_num_seqs", "many", "settings.max_num_seqs needs a whole number >= 1, not 'many'"),
        ("seeds", [], "seeds needs at least one seed"),
        ("seeds", [1, 1], "seeds needs at least one seed, and none twice"),
        ("seeds", "all", "seeds needs a number of seeds or a list of them, not 'all'"),
        ("slo.ttft", 1, "slo.ttft: unknown key (did you mean 'ttft_s'?)"),
        ("faults.0.kind", "crush", "faults[0].kind must be crash, cut, slow, delay or duplicate"),
        ("faults.2.factor", None, "faults[2].factor is missing"),
        ("timing.noise", -1, "timing.noise needs a number from 0 to 2"),
        ("run.observe_interval_s", 1e-10, "run.observe_interval_s needs a number from 0.001 to 1e+11, not 1e-10"),
        ("run.until_s", 0, "run.until_s needs a number above 0"),
        ("run.until_s", 1e300, "run.until_s needs a number above 0 and at most 1e+11, not 1e+300"),
        ("run.observe_interval_s", 1e300, "run.observe_interval_s needs a number from 0.001 to 1e+11, not 1e+300"),
        ("cluster.link.gbps", 1e300, "cluster.link.gbps needs a number from 1e-06 to 1e+09, not 1e+300"),
        ("cluster.link.gbps", 1e-300, "cluster.link.gbps needs a number from 1e-06 to 1e+09, not 1e-300"),
        ("cluster.link.efficiency", 1e-300, "cluster.link.efficiency needs a part of 1e-06 at least, not 1e-300"),
        ("faults.0.at_s", 1e300, "faults[0].at_s needs a number from 0 to 1e+11, not 1e+300"),
        ("faults.0.detect_s", 1e300, "faults[0].detect_s needs a number from 0 to 1e+11, not 1e+300"),
        ("faults.1.b", 0, "faults[1].b 0 is faults[1].a, too: a link joins two workers"),
        ("faults.2.for_s", 1e300, "faults[2].for_s needs a number above 0 and at most 1e+11, not 1e+300"),
        ("faults.2.factor", 1e300, "faults[2].factor needs a number from 1e-06 to 1e+06, not 1e+300"),
        ("faults", {"number": 3, "span_s": 1e300}, "faults.span_s needs a number above 0 and at most 1e+11, not 1e+3"),
        ("plan.price_per_gpu_hour", 1e300, "plan.price_per_gpu_hour needs a number from 0 to 1e+09, not 1e+300"),
        ("cluster.instances", 10**400, "cluster.instances needs a whole number from 1 to 1024, not 1000"),
        ("plan.max_instances", 0, "plan.max_instances needs a whole number from 1"),
    ],
)
def test_what_is_wrong_is_one_line_that_names_the_place(place: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_spec(changed(place, value))
    text = str(raised.value)
    assert text.startswith(message), text
    assert "\n" not in text and len(text) < 300


def numbers(node: object, place: str = "") -> Iterator[str]:
    """Places of all numbers of a spec."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        inner = f"{place}.{key}".lstrip(".")
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield inner
        yield from numbers(value, inner)


@pytest.mark.parametrize("place", [*numbers(parse_yaml(SPEC, "test")), "timing.noise", "cluster.link.latency_us"])
def test_whatever_is_written_for_a_number_is_a_number_or_one_line(place: str) -> None:
    """And what is accepted can be run: the schedule of faults and the run's end are on a clock of whole nanoseconds."""
    last = place.rpartition(".")[2]
    for value in (0, -1, 1e300, 1e-300, 10**400, math.nan, math.inf, "many", [1], {}, True, None):
        try:
            parsed = parse_spec(changed(place, value))
        except ConfigError as error:
            text = str(error)
            assert (last if not last.isdigit() else place.split(".")[0]) in text and "\n" not in text
            assert len(text) < 200
            continue
        times = [getattr(fault, name) for fault in parsed.faults for name in ("at_s", "for_s") if hasattr(fault, name)]
        assert all(round(s * 1e9) >= 0 for s in (*times, parsed.run.until_s or 0.0, parsed.run.observe_interval_s))


@pytest.mark.parametrize("raw", [None, 3, "kunserve-a", [1], {1: 2}])
def test_what_is_no_spec(raw: object) -> None:
    with pytest.raises(ConfigError):
        parse_spec(raw)


def test_rows_are_requests_in_order_of_arrival() -> None:
    spec = parse_spec({"cluster": "kunserve-a", "workload": {"rows": [[2, 10, 5], [1.5, 3, 4]], "span_s": 9}})
    assert spec.workload.rows is not None
    assert [tuple(row)[:3] for row in spec.workload.rows] == [(1.5, 3, 4), (2.0, 10, 5)]
    for rows in ([], [[1, 2]], [[-1, 2, 3]], [[1, 0, 3]], [[1, 2, 2.5]], 7):
        with pytest.raises(ConfigError, match=r"workload\.rows"):
            parse_spec({"cluster": "kunserve-a", "workload": {"rows": rows}})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([0, 10**10, 5], "needs a whole number from 1 to 2147483647, not 10000000000"),
        ([0, 5, 2**31], "needs a whole number from 1 to 2147483647, not 2147483648"),
        ([1e12, 5, 5], r"needs a number from 0 to 1e\+11, not 1000000000000"),
    ],
)
def test_rows_have_lengths_and_times_that_their_columns_hold(row: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^workload\.rows\[1\] {message}"):
        parse_spec({"cluster": "kunserve-a", "workload": {"rows": [[0, 1, 1], row]}})
    largest = {"cluster": "kunserve-a", "workload": {"rows": [[1e11, 2**31 - 1, 2**31 - 1]]}}
    assert parse_spec(largest).workload.rows == ((1e11, 2**31 - 1, 2**31 - 1, 0, False, 0),)


# --- sweeps and --set


def test_a_sweep_is_every_combination_in_order() -> None:
    raw = whole() | {"sweep": {"cluster.instances": [2, 4], "cluster.link.gbps": [10, 20, 30]}}
    points = expand_sweep(raw)
    assert [tuple(point.values.values()) for point in points] == [(2, 10), (2, 20), (2, 30), (4, 10), (4, 20), (4, 30)]
    assert points[4].label == "instances=4 gbps=20"
    assert parse_spec(points[4].raw).cluster.instances == 4
    assert parse_spec(points[4].raw).cluster.link.gbps == 20
    assert raw["cluster"]["instances"] == 4  # the spec itself is left alone
    assert expand_sweep(whole())[0].label == ""


def test_labels_tell_places_with_the_same_last_part_from_each_other() -> None:
    raw = whole() | {"sweep": {"variants.live.settings.exchange": ["live"], "settings.exchange": ["auto"]}}
    assert expand_sweep(raw)[0].label == "variants.live.settings.exchange=live settings.exchange=auto"


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ([1], "sweep needs `place: [values]` lines"),
        ({}, "sweep needs `place: [values]` lines"),
        ({"cluster.instances": 3}, "sweep.cluster.instances needs a list of values, not 3"),
        ({"cluster.instances": []}, "sweep.cluster.instances needs a list of values"),
        ({"cluster.instances": [1, 1]}, "sweep.cluster.instances has a value twice"),
        ({"seeds": [[1], [2]]}, "sweep.seeds: seeds cannot be swept"),
        ({"variants.nobody.policy": ["drop"]}, "variants.nobody.policy: there is no 'nobody' among 2 entries"),
        ({"name.first": ["x"]}, "sweep.name.first: name cannot be swept"),
        ({"cluster.instances.x": [1]}, "cluster.instances.x: cluster.instances is 4, not a mapping"),
        ({"seed": list(range(101)), "a": list(range(100))}, "sweep has 10100 combinations"),
    ],
)
def test_sweeps_that_are_none(sweep: object, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        expand_sweep(whole() | {"sweep": sweep})
    assert str(raised.value).startswith(message)


def test_a_variant_that_is_null_is_the_default_one() -> None:
    raw = whole() | {"variants": [None, {"name": None, "policy": "swap", "settings": None}]}
    assert parse_spec(raw).variants == (VariantSpec("drop"), VariantSpec("swap", "swap"))
    changed = apply_settings(raw, ["variants.drop.settings.exchange=live", "variants.swap.name=other"])
    live = VariantSpec("drop", "drop", {"exchange": "live"})
    assert parse_spec(changed).variants == (live, VariantSpec("other", "swap"))


def test_values_are_set_from_outside() -> None:
    changes = ["cluster.instances=7", "slo.tpot_s=0.1", "variants.recompute.name=base", "seeds=[1, 2]"]
    raw = apply_settings(whole(), changes)
    spec = parse_spec(raw)
    assert spec.cluster.instances == 7 and spec.slo.tpot_s == 0.1 and spec.seeds == (1, 2)
    assert spec.variants[0] == VariantSpec("base", "recompute")
    short = apply_settings({"cluster": "kunserve-a", "workload": "burst"}, ["cluster.instances=2", "workload.thin=0.5"])
    assert parse_spec(short).cluster.preset == "kunserve-a" and parse_spec(short).workload.builtin == "burst"
    for bad in ("cluster.instances", "=3", "cluster.instances=[1"):
        with pytest.raises(ConfigError, match="--set"):
            apply_settings(whole(), [bad])


def test_a_span_holds_all_rows() -> None:
    with pytest.raises(ConfigError, match="span_s 5 ends before the last request, at 7 s"):
        parse_spec({"cluster": "kunserve-a", "workload": {"rows": [[0, 1, 1], [7, 1, 1]], "span_s": 5}})

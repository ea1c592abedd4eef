"""Presets hold what they say: published sizes, the papers' capacities, rooflines that behave."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from calibrate_presets import calibrate
from hypothesis import given
from hypothesis import strategies as st

from jettison.cost.gpus import AMPERE, GIB, GPUS, HOPPER, LinkPreset, network
from jettison.cost.hardware import HardwareProfile
from jettison.cost.model import ChunkShape
from jettison.cost.models import MODELS, ModelPreset, SmallWeights
from jettison.cost.presets import CLUSTERS, ClusterPreset, InstancePreset, cluster_preset, instance_preset
from jettison.cost.roofline import Collective, smooth_max
from jettison.device.model.integers import IntegerForm
from jettison.errors import ConfigError
from jettison.types import EMBED_SHARD, HEAD_SHARD

PUBLISHED = {
    # parameters in billions, GiB in bf16, KV bytes of a token, MiB of a layer (config files; reference counts)
    "qwen2.5-14b": (14.770, 27.51, 196_608, 525.0),
    "qwen2.5-72b": (72.706, 135.43, 327_680, 1674.1),
    "llama-3.1-70b": (70.554, 131.42, 327_680, 1632.0),
    "llama-3.1-405b": (405.853, 755.96, 516_096, 6080.1),
    "llama-2-7b": (6.738, 12.55, 524_288, 386.0),
    "llama-2-13b": (13.016, 24.24, 819_200, 605.0),
    "qwen3-235b": (235.09, 437.9, 192_512, 4745.0),
    "deepseek-v3": (671.03, 1249.9, 70_272, None),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_have_their_published_sizes(name):
    billions, gib, kv_bytes, layer_mib = PUBLISHED[name]
    model, shape = MODELS[name], MODELS[name].shape()
    assert model.num_parameters / 1e9 == pytest.approx(billions, abs=0.006)
    assert shape.parameter_bytes / GIB == pytest.approx(gib, abs=0.06)
    assert shape.num_layers * shape.kv_bytes_per_token_layer == kv_bytes
    if layer_mib is not None:
        assert shape.shard_bytes["layer:0"] / (1 << 20) == pytest.approx(layer_mib, abs=0.06)
    assert set(shape.shard_bytes) == shape.all_shards
    assert shape.shard_bytes[EMBED_SHARD] == 2 * shape.vocab_size * shape.hidden_size
    assert shape.shard_bytes[HEAD_SHARD] > shape.shard_bytes[EMBED_SHARD]


def test_active_parameters_of_mixtures():
    assert MODELS["qwen3-235b"].active_parameters / 1e9 == pytest.approx(22.19, abs=0.01)
    assert MODELS["deepseek-v3"].active_parameters / 1e9 == pytest.approx(37.55, abs=0.01)
    dense = MODELS["llama-2-7b"]
    assert dense.active_parameters == dense.num_parameters


@pytest.mark.parametrize(
    ("model", "gpu", "num_gpus", "thousand_tokens", "share"),
    [
        ("qwen2.5-14b", "a800-80g", 1, 243, 0.344),
        ("qwen2.5-72b", "h800-80g", 4, 500, 0.423),
        ("llama-3.1-70b", "a800-80g", 4, 513, 0.411),
        ("llama-2-7b", "a100-40g", 1, 48, 0.314),
        ("llama-2-7b", "rtx-4090", 1, 18.5, 0.523),
        ("llama-2-13b", "a100-40g", 1, 15.4, 0.606),
        ("qwen2.5-14b", "h200", 1, 533, 0.198),
        ("llama-3.1-405b", "a800-80g", 16, None, 0.591),
        ("qwen3-235b", "a800-80g", 8, None, 0.748),
        ("deepseek-v3", "a800-80g", 32, None, 0.614),
    ],
)
def test_capacities_and_parameter_shares(model, gpu, num_gpus, thousand_tokens, share):
    """KunServe Table 1's shares; 243 K tokens is the cache that its bursts fill."""
    preset = instance_preset(model, gpu, num_gpus)
    assert preset.parameter_share == pytest.approx(share, abs=0.001)
    assert preset.kv_bytes + preset.parameter_bytes == preset.budget_bytes
    if thousand_tokens is not None:
        assert preset.kv_tokens / 1e3 == pytest.approx(thousand_tokens, rel=0.005)


def test_the_papers_numbers_of_gpus_are_the_default():
    gpus = {name: instance_preset(name, "a800-80g").num_gpus for name in MODELS}
    assert gpus == {
        "qwen2.5-14b": 1, "qwen2.5-72b": 4, "llama-3.1-70b": 4, "llama-3.1-405b": 16, "llama-3.2-90b": 4,
        "llama-2-7b": 1, "llama-2-13b": 1, "qwen3-235b": 8, "deepseek-v3": 32,
    }  # fmt: skip


def test_replicas_show_in_what_an_instance_holds():
    deepseek, qwen = instance_preset("deepseek-v3", "a800-80g"), instance_preset("qwen3-235b", "a800-80g")
    assert deepseek.parameter_bytes / GIB == pytest.approx(1572, rel=0.04)
    assert qwen.parameter_bytes / GIB == pytest.approx(479, rel=0.01)
    assert deepseek.split.kv_copies == 4, "each rank of an attention needs the whole latent vector"
    assert qwen.split.kv_copies == 1
    assert instance_preset("llama-3.1-405b", "a800-80g").split.kv_copies == 2, "16 ranks, 8 KV heads"


def test_llama_90b_computes_with_80_of_its_100_layers():
    small, large = MODELS["llama-3.1-70b"], MODELS["llama-3.2-90b"]
    assert large.layer_active_parameters == small.layer_active_parameters
    assert large.num_parameters / small.num_parameters == pytest.approx(100 / 80, abs=0.01)


def decode_s(preset: InstancePreset, batch: int, context: int = 1000) -> float:
    return preset.cost_model().batch_cost_s([ChunkShape(context, 1)] * batch)


def prefill_s(preset: InstancePreset, tokens: int, context: int = 0) -> float:
    return preset.cost_model().batch_cost_s([ChunkShape(context, tokens)])


ALL = [instance_preset(model, gpu) for model in MODELS for gpu in ("a800-80g", "h800-80g")]


@pytest.mark.parametrize("preset", ALL, ids=lambda preset: preset.name)
def test_steps_cost_no_less_than_the_hardware_allows(preset):
    flops = 2 * 4096 * (MODELS[preset.model.name].layer_active_parameters * preset.model.num_layers)
    assert prefill_s(preset, 4096) > flops / (preset.num_gpus * preset.gpu.flops_per_s)
    read = preset.model.active_parameters * 2 / (preset.num_gpus * preset.gpu.memory_bytes_per_s)
    assert decode_s(preset, 1) > read


@pytest.mark.parametrize("preset", ALL, ids=lambda preset: preset.name)
def test_more_work_costs_more_and_batches_pay(preset):
    sizes = (1, 2, 8, 32, 128, 512)
    times = [decode_s(preset, size) for size in sizes]
    assert all(a < b for a, b in pairwise(times))
    assert all(a / n > b / m for (a, n), (b, m) in pairwise(zip(times, sizes, strict=True)))
    assert prefill_s(preset, 2048, 8192) > prefill_s(preset, 2048)


def test_experts_are_read_when_a_batch_touches_them():
    experts = MODELS["qwen3-235b"].experts
    assert experts.touched(1) == pytest.approx(8)
    assert 60 < experts.touched(10) < 80
    assert experts.touched(10_000) == pytest.approx(128)
    mixture = instance_preset("qwen3-235b", "h800-80g")
    assert decode_s(mixture, 32, 1) / decode_s(mixture, 1, 1) > 1.5, "more experts, more bytes"
    dense = instance_preset("qwen2.5-72b", "h800-80g")
    assert decode_s(dense, 32, 1) / decode_s(dense, 1, 1) < 1.3, "the same weights for all"


def test_tensor_parallelism_pays_less_than_it_costs_in_gpus():
    one, four = (InstancePreset(GPUS["h200"], MODELS["llama-2-13b"], n) for n in (1, 4))
    assert 1.5 < prefill_s(one, 4096) / prefill_s(four, 4096) < 4
    assert 1.2 < decode_s(one, 16) / decode_s(four, 16) < 4
    assert four.kv_tokens > 4 * one.kv_tokens, "one copy of the parameters instead of four"


def test_collectives_between_nodes_cost_more():
    two_nodes = instance_preset("llama-3.1-405b", "a800-80g")
    assert two_nodes.num_gpus == 2 * two_nodes.gpus_per_node
    assert prefill_s(replace(two_nodes, gpus_per_node=16), 2048) < prefill_s(two_nodes, 2048)


def test_decode_steps_are_affine_in_the_context():
    """What makes runs of decodes cheap to advance together."""
    for preset in ALL:
        cost = preset.cost_model()
        a, b, c = (cost.batch_cost_s([ChunkShape(p, 1), ChunkShape(2 * p, 1)]) for p in (100, 200, 300))
        assert b - a == pytest.approx(c - b, rel=1e-6)


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(1, 20))
def test_smooth_max_lies_between_the_larger_and_the_sum(a, b, knee):
    value = smooth_max(a, b, knee)
    assert max(a, b) <= value * (1 + 1e-12)
    assert value <= (a + b) * (1 + 1e-12)
    assert value == smooth_max(b, a, knee)


def test_a_ring_sends_each_byte_nearly_twice():
    assert Collective(1e-5, 1e9).token_s(1e6, 1) == 0.0
    assert Collective(1e-5, 1e9).token_s(1e6, 4) == pytest.approx(1.5e-3)


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=lambda cluster: cluster.name)
def test_clusters_give_a_profile_and_links(cluster):
    profile = cluster.profile()
    assert isinstance(profile, HardwareProfile)
    assert profile.remap_cost_s(1) == profile.remap_cost_s(1, 99) == 5e-3, "as the papers say"
    # Inside the device a byte is read and written; through the host's link it takes far longer.
    gpus = cluster.instance.num_gpus
    assert profile.device_copy_cost_s(2**30) < profile.host_copy_cost_s(2**30) / 4
    assert profile.device_copy_bytes_per_s < gpus * cluster.instance.gpu.memory_bytes_per_s / 2
    assert profile.cost.num_layers == cluster.instance.model.num_layers
    alone_s = profile.cost.batch_cost_s([ChunkShape(500, 1)] * 8)
    assert 0.0 <= profile.added_stage_s(2) < alone_s / 2, "half of the throughput at least"
    if cluster.num_instances > 1:
        assert profile.link_bytes_per_s == cluster.slowest_link.bytes_per_s
    assert replace(cluster, measured=replace(profile, disk_bytes_per_s=1.0)).profile().disk_bytes_per_s == 1.0


def test_the_papers_clusters():
    a, b, v1 = (CLUSTERS[name] for name in ("kunserve-a", "kunserve-b", "kunserve-v1-70b"))
    assert (a.num_instances, a.instance.num_gpus, a.scale_out.line_bytes_per_s) == (8, 1, 25e9)
    assert (b.num_instances, b.instance.num_gpus, b.scale_out.line_bytes_per_s) == (4, 4, 200e9)
    assert b.slowest_link is b.scale_out
    assert (v1.num_instances, v1.instance.num_gpus, v1.scale_out.line_bytes_per_s) == (4, 4, 50e9)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: instance_preset("qwen2.5-14", "a800-80g"), "did you mean 'qwen2.5-14b'"),
        (lambda: instance_preset("qwen2.5-14b", "b300"), "known: a800-80g, a100-40g"),
        (lambda: instance_preset("llama-3.1-405b", "a800-80g", 2), "needs 811706"),
        (lambda: instance_preset("qwen2.5-14b", "h200", 3), "40 heads of qwen2.5-14b cannot be split over 3"),
        (lambda: cluster_preset("kunserve-c"), "unknown cluster"),
    ],
)
def test_impossible_presets_are_one_line(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_values_out_of_range_are_refused():
    with pytest.raises(ValueError, match="duplex"):
        LinkPreset("x", 1e9, 1e-5, duplex_efficiency=0.3)
    with pytest.raises(ValueError, match="gemm"):
        replace(AMPERE, gemm=1.5)
    with pytest.raises(ValueError, match="utilisation"):
        replace(instance_preset("llama-2-7b", "h200"), memory_utilisation=0.0)
    with pytest.raises(ValueError, match="no experts"):
        replace(instance_preset("qwen2.5-72b", "h800-80g"), attention_ranks=2)


def test_constants_are_what_the_calibration_finds(data_dir):
    """A changed constant must have data for it."""
    for family, ours in (("a100", AMPERE), ("h100", HOPPER)):
        fitted = calibrate(family, data_dir / "calibration")["efficiency"]
        assert {name: getattr(ours, name) for name in fitted} == pytest.approx(fitted, rel=0.02)


@pytest.mark.parametrize("kernels", ["cuda", "cuda-invariant"])
def test_h200_steps_are_those_that_were_measured(kernels):
    """Our kernels' decodes and prefill, without the serving process."""
    file = Path(__file__).parents[2] / "benchmarks/results/gpu/kernels.json"
    measured = json.loads(file.read_text())[kernels]
    seven = ModelPreset("qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, 152064, "config.json", qkv_bias=True)
    for name, model, chunks in (
        *((f"7b {rows}", seven, [(1024, 1)] * rows) for rows in (1, 16, 64, 256)),
        *((f"14b {rows}", MODELS["qwen2.5-14b"], [(1024, 1)] * rows) for rows in (1, 64)),
        ("7b prefill 8192", seven, [(0, 8192)]),
    ):
        cost = InstancePreset(GPUS["h200"], model, host_step_s=0.0).cost_model()
        shapes = tuple(ChunkShape(*chunk) for chunk in chunks)
        predicted_ms = 1e3 * cost.batch_cost_s(shapes, model.num_layers, is_first=True)
        assert predicted_ms == pytest.approx(measured[f"step {name}: early"]["value"], rel=0.14), name


def test_a_change_of_layout_takes_what_its_calls_take_but_in_papers():
    profile = ClusterPreset("own", instance_preset("qwen2.5-14b", "h200"), 2, 2, network("RDMA", 400, 1e-5)).profile()
    assert profile.remap_cost_s(1) == 3.2e-3 and profile.remap_cost_s(1, 1000) == pytest.approx(46.2e-3)
    assert profile.keeps_mappings and not CLUSTERS["kunserve-a"].profile().keeps_mappings


def test_small_weights_take_what_they_are_and_leave_the_rest():
    plain = instance_preset("llama-3.1-70b", "h100-80g", 4)
    small = instance_preset("llama-3.1-70b", "h100-80g", 4, SmallWeights.parse("int4-g128"))
    layers = [sum(size for shard, size in each.shape.shard_bytes.items() if shard.startswith("layer"))
              for each in (plain, small)]  # fmt: skip
    assert layers[1] / layers[0] == pytest.approx(4.125 / 16, rel=1e-4)
    assert small.shape.shard_bytes[EMBED_SHARD] == plain.shape.shard_bytes[EMBED_SHARD]
    assert small.shape.kv_bytes_per_token_layer == plain.shape.kv_bytes_per_token_layer
    assert small.kv_tokens > plain.kv_tokens and small.parameter_share < plain.parameter_share / 3
    assert small.name == "llama-3.1-70b int4-g128/h100-80gx4"
    steps = [each.cost_model() for each in (plain, small)]
    decode, prompt = ([ChunkShape(64, 1)], [ChunkShape(0, 4096)])
    assert steps[1].batch_cost_s(decode) < 0.6 * steps[0].batch_cost_s(decode)
    assert steps[1].batch_cost_s(prompt) == pytest.approx(steps[0].batch_cost_s(prompt), rel=0.05)
    assert instance_preset("llama-3.1-70b", "h100-80g", None, SmallWeights.parse("int4-g128")).num_gpus == 1


def test_norms_biases_and_routers_stay_as_they_are():
    small = replace(MODELS["deepseek-v3"], weights=SmallWeights.parse("int4-g128"))
    norms, latent = 2 * 7168, small.latent
    for layer, router in ((0, 0), (3, (7168 + 1) * 256)):
        plain = norms + latent.q_rank + latent.kv_rank + router
        integers = small.dense_parameters(layer) - plain
        assert small.dense_bytes(layer) == 2 * plain + integers * 4.125 / 8
    plain = replace(MODELS["qwen3-235b"], weights=SmallWeights.parse("int4-g128"))
    kept = plain.dense_parameters(0) - 4096 * 128 - 2 * 4096 - 2 * 128
    assert plain.dense_bytes(0) == 2 * (plain.dense_parameters(0) - kept) + kept * 4.125 / 8


def test_experts_are_small_too():
    plain = MODELS["qwen3-235b"]
    small = replace(plain, weights=SmallWeights.parse("int8-g32-zero"))
    sizes = [each.shape().shard_bytes["layer:0"] for each in (plain, small)]
    assert sizes[1] / sizes[0] == pytest.approx(9 / 16, abs=1e-3)


@pytest.mark.parametrize("name", ["int4-g128", "int8-g32-zero", "int4-g32-min"])
def test_names_of_small_weights_are_those_of_forms(name):
    weights = SmallWeights.parse(name)
    assert weights.name == name
    assert weights.bytes_a_weight == IntegerForm(
        weights.bits, weights.group_size, "float16", weights.offset).num_bytes(32, 4096) / (32 * 4096)  # fmt: skip


@pytest.mark.parametrize(
    "name", ["int4", "int3-g32", "int4-g0", "int4-g48", "q4_0", "int4-g32-max", "int8-g32-min", ""]
)
def test_what_is_no_form_of_weights(name):
    with pytest.raises(ValueError, match="int4 or int8 in groups of 32 columns or a multiple"):
        SmallWeights.parse(name)

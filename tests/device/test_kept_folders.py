"""A quantized folder that is kept as integers is the exact model that it stands for, wherever its bytes come from."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from answers import PROMPTS as THREE
from answers import answers
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from quantized_goldens import DIGESTS, FOLDERS
from quantizers import KEPT, quantize
from safetensors.torch import load_file, save_file

from jettison.device.dtypes import name_of
from jettison.device.kernels.integers import pack_integers, widened
from jettison.device.kernels.operands import IntegerMatrix
from jettison.device.kernels.torch_kernels import TorchKernels
from jettison.device.model.create import create_model
from jettison.device.model.hf_config import read_config
from jettison.device.model.integers import IntegerForm
from jettison.device.model.kept import keep_integers, told_of_kept
from jettison.device.model.quantized.block_kinds import stored_name
from jettison.device.model.seeded import SeededWeights
from jettison.device.model.shards import HeadOrder, model_shape, shard_layouts
from jettison.device.model.weights import WeightFolder, ordered_integers
from jettison.device.spec import RANDOM
from jettison.errors import ConfigError, ModelError
from jettison.types import layer_shard

TORCH = TorchKernels()
SIZES = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "intermediate": 96, "max_position_embeddings": 256,
         "std": 0.2}  # fmt: skip
PROMPTS = {name: THREE[name] for name in "ab"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept") / "plain"
    create_model(folder, arch="qwen2", **SIZES, dtype="float64", seed=4)
    return folder


@pytest.fixture(scope="module")
def made(plain, tmp_path_factory):
    """(quantized, exactly widened) by way; read only."""
    folders = {}

    def make(way):
        if way not in folders:
            folder = tmp_path_factory.mktemp("way")
            folders[way] = folder / "quantized", folder / "widened"
            quantize(plain, way, *folders[way], 32, is_exact=True)
        return folders[way]

    return make


def kept_config(folder, dtype=torch.float64, **options):
    return keep_integers(read_config(folder), folder, name_of(dtype), TORCH, **options)


def loaded(weights):
    """Every slab."""
    slabs = {}
    for shard, layout in weights.layouts.items():
        slabs[shard] = torch.full((layout.num_bytes,), 0xFF, dtype=torch.uint8)
        weights.load_shard(shard, slabs[shard])
    return slabs


def exact_matrices(layouts, slabs):
    """Each kept slot's weights in double, by the tensors of the checkpoint."""
    found = {}
    for shard, layout in layouts.items():
        for slot in layout.slots:
            if slot.form is not None:
                matrix = IntegerMatrix(slot.view(slabs[shard]), *slot.shape, slot.form)
                parts = widened(matrix, 0, matrix.rows, torch.float64).split([each.shape[0] for each in slot.sources])
                found |= {source.name: part for source, part in zip(slot.sources, parts, strict=True)}
    return found


@pytest.mark.parametrize("way", KEPT)
def test_kept_weights_are_scale_times_integer(way, made):
    quantized, exact = made(way)
    config = kept_config(quantized)
    weights = WeightFolder(quantized, config, "float64", TORCH)
    found, expected = exact_matrices(weights.layouts, loaded(weights)), load_file(exact / "model.safetensors")
    assert len(found) == 2 * 7
    assert all(torch.equal(part, expected[name]) for name, part in found.items())


@pytest.mark.parametrize(("dtype", "kernels", "within"), [("float64", "torch", 1e-9), ("float32", "auto", 1e-3)])
@pytest.mark.parametrize("way", KEPT)
def test_an_engine_computes_what_the_exact_model_does(way, dtype, kernels, within, made, new_driver):
    quantized, exact = made(way)
    mine = told(quantized, kept_config(quantized), new_driver, dtype, kernels)
    theirs = told(exact, read_config(exact), new_driver)
    for one, other in zip(mine, theirs, strict=True):
        assert one.output == other.output
        values = [[choice.logprob for choice in each.logprobs] for each in (one, other)]
        assert torch.allclose(*map(torch.tensor, values), rtol=0, atol=within)


def told(folder, config, new_driver, dtype="float64", kernels="torch"):
    requests, _ = answers(folder, new_driver, PROMPTS, dtype=dtype, kernels=kernels, config=config)
    return list(requests.values())


@pytest.mark.parametrize("name", sorted(json.loads(DIGESTS.read_text()).keys() - {"mxfp4", "gptq-3", "gptq-4-ordered"}))
def test_folders_of_libraries_say_the_same_as_integers_and_widened(name):
    """Their groups are too small to be kept; the integers are there all the same."""
    folder = FOLDERS / name
    weights = WeightFolder(folder, read_config(folder), "float32")
    forms = weights.integer_forms()
    if "fp8" in name:
        assert not forms
        return
    assert {slot for _, slot in forms} == {"qkv_weight", "o_weight", "gate_up_weight", "down_weight"}
    with weights._reading() as rows_of:
        for (shard, name_of_slot), form in forms.items():
            slot = next(slot for slot in weights.layouts[shard].slots if slot.name == name_of_slot)
            for source in slot.sources:
                rows = source.shape[0]
                values, scales, offsets = ordered_integers(rows_of, source, form, 0, rows)
                assert offsets is None or form.offset == "zero"
                exact = values.double() if offsets is None else values + repeated(offsets, form)
                exact = exact * repeated(scales, form)
                wide = torch.empty(source.shape, dtype=torch.float32)
                rows_of.copy_rows(source, 0, wide)
                narrow = torch.float16 if name.startswith(("awq", "gptq")) else torch.float32
                assert torch.equal(exact.to(narrow).float(), wide)


def repeated(numbers, form):
    return numbers.double().repeat_interleave(form.group_size, 1)


@pytest.mark.parametrize("name", ["gptq-3", "gptq-4-ordered"])
def test_columns_that_are_out_of_order_are_widened(name):
    folder = FOLDERS / name
    assert not WeightFolder(folder, read_config(folder), "float32").integer_forms()


def test_what_is_kept_is_smaller_and_told(made):
    quantized, _ = made("awq")
    config = kept_config(quantized, torch.bfloat16)
    layout = shard_layouts(config, "bfloat16")[layer_shard(0)]
    wide = shard_layouts(read_config(quantized), "bfloat16")[layer_shard(0)]
    forms = {slot.name: slot.form for slot in layout.slots if slot.form is not None}
    assert forms == dict.fromkeys(
        ("qkv_weight", "o_weight", "gate_up_weight", "down_weight"), IntegerForm(4, 32, "float16", "zero"))  # fmt: skip
    matrices = [slot for slot in layout.slots if slot.form is not None]
    assert sum(slot.num_bytes for slot in matrices) == sum(
        slot.shape[0] * slot.shape[1] * 5 // 8 for slot in matrices)  # fmt: skip
    assert wide.num_bytes - layout.num_bytes == sum(slot.shape[0] * slot.shape[1] * 11 // 8 for slot in matrices)
    shape = model_shape(config, "bfloat16")
    assert shape.shard_bytes[layer_shard(1)] == layout.num_bytes
    told = told_of_kept(config, "bfloat16")
    assert told.endswith("bits a weight in memory; kept as integers but for embed, head")
    assert told_of_kept(read_config(quantized), "bfloat16") is None


def as_blocks(folder, target, kind):
    """(a folder with every matrix in blocks of a GGUF file, the same widened)."""
    name = kind.name.lower()
    stored, wide = {}, {}
    for each, tensor in load_file(folder / "model.safetensors").items():
        stored[each] = wide[each] = tensor
        if tensor.dim() == 2:
            blocks = quants.quantize(stored.pop(each).float().numpy(), kind)
            stored[stored_name(each, name)] = torch.from_numpy(blocks)
            wide[each] = torch.from_numpy(quants.dequantize(blocks, kind)).double()
    for part, tensors in (("blocks", stored), ("wide", wide)):
        shutil.copytree(folder, target / part)
        save_file(tensors, target / part / "model.safetensors")
    values = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "gguf"}}
    (target / "blocks" / "config.json").write_text(json.dumps(values))
    return target / "blocks", target / "wide"


@pytest.mark.parametrize(("arch", "kind"), [("llama", Kind.Q8_0), ("cohere2", Kind.Q4_1)])
def test_a_table_that_is_embedding_and_head_is_kept_too(arch, kind, new_driver, tmp_path):
    create_model(tmp_path / "plain", arch=arch, **SIZES, tied=True, vocab=288, dtype="float64", seed=4)
    blocks, wide = as_blocks(tmp_path / "plain", tmp_path, kind)
    config = kept_config(blocks)
    assert told_of_kept(config, "float64").endswith(" bits a weight in memory; all kept as integers")
    mine, theirs = told(blocks, config, new_driver, "float32", "auto"), told(wide, read_config(wide), new_driver)
    for one, other in zip(mine, theirs, strict=True):
        assert one.output == other.output
        values = [[choice.logprob for choice in each.logprobs] for each in (one, other)]
        assert torch.allclose(*map(torch.tensor, values), rtol=0, atol=1e-3)


def test_parts_of_one_matrix_that_are_not_alike_are_widened(plain, tmp_path):
    """As of a file whose values are in 8 bits and all else in 4, but for a plain tensor."""
    blocks, wide = as_blocks(plain, tmp_path, Kind.Q4_0)
    stored, exact = (load_file(each / "model.safetensors") for each in (blocks, wide))
    value, gate = "model.layers.0.self_attn.v_proj.weight", "model.layers.1.mlp.gate_proj.weight"
    for name in (value, gate):
        del stored[stored_name(name, "q4_0")]
    eight = quants.quantize(load_file(plain / "model.safetensors")[value].float().numpy(), Kind.Q8_0)
    stored |= {stored_name(value, "q8_0"): torch.from_numpy(eight), gate: exact[gate]}
    exact[value] = torch.from_numpy(quants.dequantize(eight, Kind.Q8_0)).double()
    save_file(stored, blocks / "model.safetensors")
    config = kept_config(blocks)
    assert {(layer_shard(0), "qkv_weight"), (layer_shard(1), "gate_up_weight")}.isdisjoint(
        kept[:2] for kept in config.kept)  # fmt: skip
    assert len(config.kept) == 2 * 4 - 2  # and no table, whose rows are no multiple of 32
    weights = WeightFolder(blocks, config, "float64", TORCH)
    slabs = loaded(weights)
    for shard, slot_name in ((layer_shard(0), "qkv_weight"), (layer_shard(1), "gate_up_weight")):
        slot = next(slot for slot in weights.layouts[shard].slots if slot.name == slot_name)
        assert torch.equal(slot.view(slabs[shard]), torch.cat([exact[source.name] for source in slot.sources]))
    assert all(torch.equal(part, exact[name]) for name, part in exact_matrices(weights.layouts, slabs).items())


def test_experts_that_are_not_alike_are_widened(tmp_path):
    extra = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    folder, exact = tmp_path / "quantized", tmp_path / "exact"
    for each in (folder, exact):
        create_model(each, arch="qwen3_moe", **SIZES, extra=extra, quantized="int4", is_widened=each is exact)
    module = "model.layers.0.mlp.experts.2.down_proj"
    tensors, plain = load_file(folder / "model.safetensors"), load_file(exact / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(module)}
    save_file(tensors | {f"{module}.weight": plain[f"{module}.weight"]}, folder / "model.safetensors")
    config = kept_config(folder)
    kept = [shard for shard, slot, _ in config.kept if slot == "experts_down_weight"]
    assert kept == [layer_shard(1)]
    weights = WeightFolder(folder, config, "float64", TORCH)
    slot = next(slot for slot in weights.layouts[layer_shard(0)].slots if slot.name == "experts_down_weight")
    expected = torch.stack([plain[source.name].double() for source in slot.sources])
    assert torch.equal(slot.view(loaded(weights)[layer_shard(0)]), expected)


def damaged(folder, target, name, edit):
    shutil.copytree(folder, target)
    path = target / "model.safetensors"
    tensors = load_file(path)
    edit(tensors[name])
    save_file(tensors, path)
    return target


def test_scales_are_checked(made, tmp_path):
    name = "model.layers.1.mlp.up_proj.scales"
    folder = damaged(made("awq")[0], tmp_path / "damaged", name, lambda scales: scales[0, :1].fill_(torch.nan))
    weights = WeightFolder(folder, kept_config(folder), "float64", TORCH)
    with pytest.raises(ModelError, match=rf"model\.safetensors: tensor {name} has values that are not finite; "):
        loaded(weights)


def test_zeros_that_config_json_denies(made, tmp_path):
    quantized, _ = made("gptq, 4 bits")
    folder = damaged(quantized, tmp_path / "denied", "model.layers.0.self_attn.q_proj.qzeros", lambda zeros: None)
    path = folder / "config.json"
    values = json.loads(path.read_text())
    values["quantization_config"]["sym"] = True
    path.write_text(json.dumps(values))
    config = kept_config(folder)
    assert {kept.form.offset for kept in config.kept} == {"none"}
    with pytest.raises(ModelError, match=r"qzeros has zeros of its own, though .*--quantized-weights widened"):
        loaded(WeightFolder(folder, config, "float64", TORCH))
    loaded(WeightFolder(folder, read_config(folder), "float64", TORCH))


def with_biases(quantized, target, num_last=0.0):
    """As AutoGPTQ wrote them, beside every matrix; ``num_last``: the last number of one that Qwen2 has not."""
    shutil.copytree(quantized, target)
    path = target / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(".qweight")]:
        bias = torch.zeros(tensors[name].shape[1], dtype=torch.float16)
        if name == "model.layers.1.mlp.down_proj.qweight":
            bias[-1] = num_last
        tensors.setdefault(name.replace("qweight", "bias"), bias)
    save_file(tensors, path)
    return target


@pytest.mark.parametrize("config_of", [kept_config, read_config])
def test_biases_of_zeros_change_nothing(config_of, made, tmp_path):
    quantized, _ = made("gptq, 4 bits")
    expected = loaded(WeightFolder(quantized, config_of(quantized), "float64", TORCH))
    folder = with_biases(quantized, tmp_path / "biased")
    slabs = loaded(WeightFolder(folder, config_of(folder), "float64", TORCH))
    assert all(torch.equal(slabs[shard], slab) for shard, slab in expected.items())


@pytest.mark.parametrize("config_of", [kept_config, read_config])
@pytest.mark.parametrize("number", [0.5, torch.nan])
def test_a_bias_that_is_not_zero_is_refused(config_of, number, made, tmp_path):
    folder = with_biases(made("gptq, 4 bits")[0], tmp_path / "biased", number)
    name = "model.layers.1.mlp.down_proj.bias"
    with pytest.raises(ModelError, match=rf"model\.safetensors: tensor {name} is not zero, and by config"):
        loaded(WeightFolder(folder, config_of(folder), "float64", TORCH))


def test_biases_are_no_sign_of_another_format(made, tmp_path):
    folder = with_biases(made("awq")[0], tmp_path / "biased")
    with pytest.raises(ModelError, match=r"unexpected tensor model\.layers\.0\.mlp\.down_proj\.bias"):
        WeightFolder(folder, read_config(folder), "float64", TORCH).open()


def test_a_folder_that_was_quantized_anew_is_not_mixed_in(made):
    config = kept_config(made("awq")[0])
    other = made("compressed, 8 bits")[0]
    with pytest.raises(ModelError, match="was quantized in another way at the start; put the old file back, or rest"):
        WeightFolder(other, config, "float64", TORCH).open()


def test_other_peers_and_pieces_make_the_same_bytes(made, monkeypatch):
    quantized, _ = made("compressed")
    config = kept_config(quantized)
    whole = loaded(WeightFolder(quantized, config, "float64", TORCH))
    monkeypatch.setattr("jettison.device.model.weights.PIECE_BYTES", 8 * 64 * 5)
    pieces = loaded(WeightFolder(quantized, config, "float64", TORCH))
    assert all(torch.equal(whole[shard], pieces[shard]) for shard in whole)


def test_heads_that_pair_neighbours_are_put_in_order(made):
    quantized, exact = made("awq")
    weights = WeightFolder(quantized, kept_config(quantized), "float64", TORCH)
    slot = next(slot for slot in weights.layouts[layer_shard(0)].slots if slot.name == "qkv_weight")
    source = slot.sources[0]._replace(order=HeadOrder(16, 8))
    matrix = IntegerMatrix(torch.zeros(slot.form.num_bytes(*source.shape), dtype=torch.uint8), *source.shape, slot.form)
    with weights._reading() as rows_of:
        for start in range(0, source.shape[0], 16):
            pack_integers(*ordered_integers(rows_of, source, slot.form, start, start + 16), start, matrix)
    expected = load_file(exact / "model.safetensors")[source.name]
    source.order.apply(expected)
    assert torch.equal(widened(matrix, 0, matrix.rows, torch.float64), expected)


def test_rows_that_change_places_are_no_view_of_the_file(plain, tmp_path):
    """As a column of scales would be, of a folder with one scale for a whole row."""
    folder = tmp_path / "quantized"
    quantize(plain, "gptq, 4 bits", folder, tmp_path / "widened", 64, is_exact=True)
    weights = WeightFolder(folder, kept_config(folder), "float64", TORCH)
    slot = next(slot for slot in weights.layouts[layer_shard(0)].slots if slot.name == "qkv_weight")
    source = slot.sources[0]._replace(order=HeadOrder(16, 8))
    with weights._reading() as rows_of:
        before = [rows.clone() for rows in rows_of.integers(source, slot.form, 0, 16)]
        ordered = ordered_integers(rows_of, source, slot.form, 0, 16)
        after = rows_of.integers(source, slot.form, 0, 16)
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
        assert all(torch.equal(rows[1], were[2]) for rows, were in zip(ordered, before, strict=True))


@pytest.mark.parametrize("group", [-1, 0, 1])
def test_groups_by_name_of_a_folder_with_one_scale_a_row(group, plain, tmp_path):
    """-1 says that columns are in their order."""
    folder = tmp_path / "quantized"
    quantize(plain, "compressed", folder, tmp_path / "widened", 64, is_exact=True)
    name = "model.layers.0.self_attn.o_proj.weight_g_idx"
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: torch.full((64,), group, dtype=torch.int32)}, folder / "model.safetensors")
    config = kept_config(folder)
    assert "o_weight" in {slot for _, slot, _ in config.kept}
    if group == 1:
        with pytest.raises(ModelError, match=f"{name} names groups beyond the 1 that have scales"):
            loaded(WeightFolder(folder, config, "float64", TORCH))
    else:
        loaded(WeightFolder(folder, config, "float64", TORCH))


@pytest.mark.parametrize("way", ["gptq, 4 bits", "compressed, 8 bits"])
def test_random_weights_have_the_forms_of_config_json(way, made):
    quantized, _ = made(way)
    config = kept_config(quantized, load_format=RANDOM)
    files = kept_config(quantized)
    assert [each[:2] for each in config.kept] == [each[:2] for each in files.kept]
    assert {each.form.bits for each in config.kept} == {each.form.bits for each in files.kept}
    weights = SeededWeights(quantized, config, "float64", TORCH)
    slabs, again = loaded(weights), loaded(SeededWeights(quantized, config, "float64", TORCH))
    assert all(torch.equal(slabs[shard], again[shard]) for shard in slabs)
    plain = SeededWeights(quantized, replace(config, kept=()), "float64")
    wide = plain.layouts[layer_shard(0)].views(loaded(plain)[layer_shard(0)])["o_weight"]
    found = exact_matrices(weights.layouts, slabs)["model.layers.0.self_attn.o_proj.weight"]
    assert 0.9 < found.std() / wide.std() < 1.1 and abs(found.mean()) < 0.1 * found.std()


@pytest.mark.parametrize(("arch", "quantized"), [("llama", "int4"), ("qwen3_moe", "int8-g64")])
def test_a_created_model_is_its_twin_of_exact_weights(arch, quantized, tmp_path):
    extra = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64} if arch == "qwen3_moe" else None
    for name in ("kept", "exact"):
        create_model(tmp_path / name, arch=arch, **SIZES | {"intermediate": 128}, quantized=quantized, extra=extra,
                     is_widened=name == "exact")  # fmt: skip
    config = kept_config(tmp_path / "kept")
    slots = {"qkv_weight", "o_weight", "gate_up_weight", "down_weight"}
    if arch == "qwen3_moe":
        slots = {"qkv_weight", "o_weight", "experts_gate_up_weight", "experts_down_weight"}
    assert {kept.slot for kept in config.kept} == slots
    weights = WeightFolder(tmp_path / "kept", config, "float64", TORCH)
    slabs, expected = loaded(weights), load_file(tmp_path / "exact" / "model.safetensors")
    compared = 0
    for shard, layout in weights.layouts.items():
        for slot in layout.slots:
            if slot.form is None:
                continue
            rows, columns = slot.shape[-2:]
            whole = slot.view(slabs[shard]).view(-1, slot.form.num_bytes(rows, columns))
            exact = torch.cat([expected[source.name] for source in slot.sources]).view(-1, rows, columns)
            for data, each in zip(whole, exact, strict=True):
                assert torch.equal(widened(IntegerMatrix(data, rows, columns, slot.form), 0, rows, torch.float64), each)
                compared += 1
    assert compared == (8 if arch == "llama" else 2 * (2 + 2 * 4))


def test_columns_that_make_no_whole_words_stay_plain(tmp_path):
    create_model(tmp_path / "odd", arch="llama", layers=1, hidden=36, heads=2, kv_heads=1, intermediate=64,
                 quantized="int4-g4")  # fmt: skip
    names = load_file(tmp_path / "odd" / "model.safetensors").keys()
    assert [name for name in names if name.endswith("packed")] == ["model.layers.0.mlp.down_proj.weight_packed"]
    WeightFolder(tmp_path / "odd", read_config(tmp_path / "odd"), "float32").open()


@pytest.mark.parametrize("name", ["int3", "int4-g", "int4-g0", "q4_0", "int8-gx"])
def test_what_is_no_way_to_quantize(name, tmp_path):
    with pytest.raises(ConfigError, match=r"^quantized must be int4 or int8, or with a group as int4-g128, not "):
        create_model(tmp_path / "none", arch="llama", **SIZES, quantized=name)
    assert not (tmp_path / "none").exists()

"""Weights from a seed: the same bytes in any piece, dtype, life and device, and a model that answers."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from cardbackend import PretendedBackEnd
from device_shards import copy_shard, shard_of
from doubledevice import BYPASSES, DoubleBackEnd

from jettison.device.backend_host import HostBackEnd
from jettison.device.kernels import library
from jettison.device.kernels.loading import load_kernels
from jettison.device.kernels.operands import PackedMatrix
from jettison.device.model import seeded, weights
from jettison.device.model.hf_config import read_config
from jettison.device.model.identity import digest_of
from jettison.device.model.samples import NAMED, make_sample
from jettison.device.model.seeded import SeededRows, SeededWeights, stream_bytes
from jettison.device.model.shards import TensorSource
from jettison.device.spec import RANDOM, DeviceSpec
from jettison.device.worker import DeviceWorker
from jettison.memory.layout import LayoutSpec
from jettison.types import LayerRange

ALL, LOW = LayerRange(0, 4), LayerRange(0, 1)
DOWN = TensorSource("model.layers.1.mlp.down_proj.weight", (60, 35))
NORM = TensorSource("model.layers.1.input_layernorm.weight", (500,))
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def folder(tiny_models, tmp_path):
    """Of a configuration alone."""
    (tmp_path / "config.json").write_bytes((tiny_models["qwen2"] / "config.json").read_bytes())
    return tmp_path


def made(source: TensorSource, dtype: torch.dtype = torch.float64, device: str = "cpu") -> torch.Tensor:
    dest = torch.full(source.shape, torch.nan, dtype=dtype, device=device)
    SeededRows().copy_rows(source, 0, dest)
    return dest


def test_bytes_are_the_hash_of_their_counter():
    """As anyone can compute them: in unsigned integers of 32 bits, which wrap."""
    words = np.arange(5000, dtype=np.uint32)
    for shift, factor, key in ((16, 0x7FEB352D, 77), (15, 0x31848BAD, 0)):
        words = ((words ^ (words >> np.uint32(shift))) * np.uint32(factor)) ^ np.uint32(key)
    expected = (words ^ (words >> np.uint32(16))).view(np.uint8)
    for first, count in ((0, 20_000), (0, 1), (3, 2), (4, 7), (4097, 4096), (19_999, 1)):
        assert (stream_bytes(77, first, count, torch.device("cpu")).numpy() == expected[first : first + count]).all()


@pytest.mark.parametrize("source", [DOWN, NORM], ids=["matrix", "norm"])
def test_every_dtype_has_the_same_values(source):
    exact = made(source)
    for dtype in DTYPES:
        assert torch.equal(made(source, dtype).double(), exact)


def test_the_bytes_of_a_matrix_never_change():
    """What one release has made, every later one makes: its identity is in logs."""
    assert digest_of(made(DOWN, torch.bfloat16)) == "2c2f92c678efde05c937618d5c9349ca"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_card_makes_the_same_bytes(dtype):
    large = TensorSource("lm_head.weight", (3001, 1023))
    for source in (DOWN, NORM, large):
        assert torch.equal(made(source, dtype, "cuda").cpu(), made(source, dtype))


def test_any_part_can_be_made_alone():
    whole = made(DOWN)
    for start, num_rows in ((0, 1), (7, 3), (59, 1), (20, 40)):
        part = torch.empty(num_rows, 35, dtype=torch.float64)
        SeededRows().copy_rows(DOWN, start, part)
        assert torch.equal(part, whole[start : start + num_rows])


def test_values_have_the_size_of_a_layer_s_inputs_and_do_not_repeat():
    wide = made(TensorSource("model.layers.0.self_attn.o_proj.weight", (256, 512)))
    assert 0.4 < wide.std().item() * math.sqrt(512) < 1.1 and abs(wide.mean().item()) < 1e-3
    assert torch.linalg.matrix_rank(wide) == 256
    other = made(TensorSource("model.layers.1.self_attn.o_proj.weight", (256, 512)))
    assert abs((wide * other).mean() / wide.var()) < 0.02
    norm = made(NORM)
    assert 0.7 < norm.min() < norm.max() < 1.3


@pytest.mark.parametrize("piece_bytes", [1000, 4 << 20])
def test_a_digest_is_of_the_slab_whatever_pieces_filled_it(folder, piece_bytes, monkeypatch):
    monkeypatch.setattr(weights, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(seeded, "PIECE_BYTES", piece_bytes)
    source = SeededWeights(folder, read_config(folder), "bfloat16")
    source.open()
    for shard, layout in source.layouts.items():
        slabs = [torch.full((layout.num_bytes,), fill, dtype=torch.uint8) for fill in (0, 255)]
        assert len({source.load_shard(shard, slab) for slab in slabs} | {digest_of(slab) for slab in slabs}) == 1


@pytest.mark.parametrize(
    ("back_end", "dtype"),
    [(HostBackEnd, "float64"), (HostBackEnd, "bfloat16"), (DoubleBackEnd, "bfloat16"), (PretendedBackEnd, "float32")],
)
def test_two_lives_a_restore_and_a_peer_have_equal_weights(folder, back_end, dtype, new_driver):
    BYPASSES.clear()

    def life(**changes) -> DeviceWorker:
        options = {
            "model_dir": folder, "dtype": dtype, "budget_bytes": 4 << 20, "block_size": 4, "max_num_tokens": 64,
            "max_num_seqs": 4, "page_bytes": 4096, "load_format": RANDOM, **changes,
        }  # fmt: skip
        worker = DeviceWorker(DeviceSpec(**options), back_end())
        worker.start()
        return worker

    def answer(worker: DeviceWorker) -> list[int]:
        driver = new_driver([(worker.run_step, ALL)], 16)
        driver.add("a", [5, 6, 7, 8, 9])
        driver.step({"a": 5})
        driver.decode(["a"], 12)
        return driver.requests["a"].output

    first, second = life(), life()
    identity = first.weights_identity
    assert identity == second.weights_identity and len(identity.digests) == len(first.shape.all_shards)
    expected = answer(first)
    assert answer(second) == expected and len(set(expected)) > 2, "random weights have something to say"
    for layers in (LOW, ALL):
        spec = LayoutSpec(first.shape.shards_for(layers), layers)
        missing = first.apply_layout(spec, 0, first.layout_version, []).missing_shards
        if layers == LOW:  # over the pages of what was dropped
            ids = list(range(first.capacity_blocks))
            first.kv_scatter(LOW, ids, np.full(len(LOW) * len(ids) * first.kv_block_bytes, 255, dtype=np.uint8))
    for shard in missing - {"layer:2"}:
        first.load_shard_from_disk(shard)
    copy_shard(second, first, "layer:2")
    first.mark_shard_filled("layer:2")
    assert all((shard_of(first, shard) == shard_of(second, shard)).all() for shard in first.shape.all_shards)
    assert answer(first) == expected
    empty = life(starts_empty=True, config=first.config)
    empty.adopt_weights(identity)
    (folder / "config.json").unlink()  # no life but the first reads it
    for shard in empty.shape.all_shards:
        empty.load_shard_from_disk(shard)
    assert answer(empty) == expected
    for worker in (first, second, empty):
        worker.close()
    assert not BYPASSES


@pytest.mark.skipif(not library.supported_variants(), reason="needs kernels that pack")
def test_packed_matrices_have_the_rows_of_plain_ones(tmp_path):
    """In the order of an architecture whose heads' rows change places."""
    make_sample(NAMED["GLM-4"], tmp_path / "glm", 1)
    config, rows = read_config(tmp_path / "glm"), []
    for kernels in (load_kernels("torch"), load_kernels("native")):
        folder = SeededWeights(tmp_path / "glm", config, "float32", kernels)
        layout = folder.layouts["layer:0"]
        slab = torch.empty(layout.num_bytes, dtype=torch.uint8)
        folder.load_shard("layer:0", slab)
        slot = next(slot for slot in layout.slots if slot.name == "qkv_weight")
        matrix = layout.views(slab)["qkv_weight"]
        is_packed = slot.lies_packed(kernels)
        rows.append(torch.empty(matrix.shape))
        kernels.gather_rows(PackedMatrix(matrix) if is_packed else matrix, torch.arange(len(matrix)), rows[-1])
    assert is_packed and torch.equal(*rows)
    stored = made(TensorSource("model.layers.0.self_attn.q_proj.weight", (config.q_size, config.hidden_size)))
    assert not torch.equal(rows[0][: config.q_size].double(), stored), "they do change places"


def test_another_shape_is_another_model(folder):
    before = SeededWeights(folder, read_config(folder), "float32")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"intermediate_size": values["intermediate_size"] * 2}))
    after = SeededWeights(folder, read_config(folder), "float32")
    digests = [
        source.load_shard("layer:0", torch.empty(source.layouts["layer:0"].num_bytes, dtype=torch.uint8))
        for source in (before, after)
    ]
    assert digests[0] != digests[1]

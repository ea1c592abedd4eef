"""Measures of models with small weights: the same tensors on all sides, the same windows, ratios round by round."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file
from tokenizers import Tokenizer

from benchmarks import figures
from benchmarks.engines.host import EngineFailedError, Workload
from benchmarks.engines.llama_bench import LlamaBatchedBench
from benchmarks.engines.vllm_logprobs import choices
from benchmarks.engines.weights import QWEN3_02M, QWEN3_MOE, Shape, make_folder, make_gguf
from benchmarks.models.perplexity import HALF, REFERENCE, TEXT, WINDOW, both_series, rows_of
from benchmarks.peers.agreement import Chosen, row_of
from benchmarks.peers.quantized import OURS, WIDE, ratios, verdicts
from jettison.modelfiles.importing import import_gguf

MIXTURE = Shape("tiny-moe", 2, 64, 2, 1, 32, 32, 512, experts=4, chosen=2)


def test_a_file_of_q4_0_holds_the_folders_tensors_and_can_be_imported(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, Shape("tiny", 2, 64, 2, 1, 32, 96, 512))
    path = make_gguf(folder, "q4_0")
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    kinds = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
    assert {kind for name, kind in kinds.items() if "norm" in name} == {"F32"}
    assert kinds.pop("token_embd.weight") == "BF16"
    assert {kind for name, kind in kinds.items() if "norm" not in name} == {"Q4_0"}
    plain = load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].float().numpy()
    widened = dequantize(tensors["blk.0.ffn_up.weight"].data, GGMLQuantizationType.Q4_0)
    assert np.abs(plain - widened).max() <= np.abs(plain).max() / 7
    import_gguf(path, tmp_path / "imported", "float32")
    imported = load_file(tmp_path / "imported" / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(imported, torch.from_numpy(widened))


@pytest.mark.parametrize("shape", [QWEN3_02M, MIXTURE], ids=lambda shape: shape.name)
def test_a_shape_says_how_many_parameters_its_model_has(shape: Shape, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, shape)
    assert sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values()) == shape.num_parameters()
    assert json.loads((folder / "config.json").read_text()).get("num_experts", 0) == shape.experts


def test_the_mixture_has_the_size_that_its_name_says() -> None:
    assert 0.29e9 < QWEN3_MOE.num_parameters() < 0.33e9


def test_two_series_of_windows_count_each_token_once(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(make_folder(tmp_path, QWEN3_02M) / "tokenizer.json"))
    text = TEXT.read_text(encoding="utf-8")
    first, second = both_series(tokenizer, text, 40)
    assert text.startswith("CHAPTER 1") and text.endswith(second.text) and first.text == text
    for series in (first, second):
        assert {len(window) for window in series.tokens} == {WINDOW}
        joined = [token for window in series.tokens for token in window]
        assert joined == tokenizer.encode(series.text).ids[: 40 * WINDOW]
    assert first.tokens[0][HALF:] == second.tokens[0][:HALF]
    with pytest.raises(ValueError, match="too few"):
        both_series(tokenizer, text[:5000], 40)


def test_perplexities_are_told_over_the_references() -> None:
    base = np.full((2, 255), -2.0)
    rows = rows_of({REFERENCE: base, "ours": base - 0.1}, {"theirs": -2.5})
    assert [row["perplexity"] for row in rows] == pytest.approx([math.exp(2.0), math.exp(2.1), math.exp(2.5)])
    assert [row["over_reference"] for row in rows] == pytest.approx([1.0, math.exp(0.1), math.exp(0.5)])
    assert rows[1]["largest_difference"] == pytest.approx(0.1) and rows[2]["mean_difference"] is None
    told = figures.made("perplexity", {"rows": rows, "tokens": 510, "windows": 2})
    assert "| theirs | 12.1825 | 1.6487 |  |  |" in told


def test_the_faster_one_of_llamas_two_counts_in_each_round() -> None:
    times = {OURS: {1: [1.0, 2.0]}, WIDE: {1: [2.0, 5.0]}, "llama-server": {1: [1.5, 2.0]},
             "llama-batched-bench": {1: [1.2, 3.0]}}  # fmt: skip
    found = ratios(times, 1)
    assert found == {WIDE: [2.0, 2.5], "llama.cpp": [1.2, 1.0]}
    assert [met for met, _ in verdicts({1: found})] == [True, True]
    assert [met for met, _ in verdicts({1: {WIDE: [1.9]}, 16: {WIDE: [1.1], "llama.cpp": []}})] == [False, True]
    speeds = {name: {"1": [1e3 / ms for ms in of[1]]} for name, of in times.items()}
    told = figures.made("quantized_peers", {"tokens_per_s": speeds, "times_as_fast": {"1": found}})
    assert told.count("1.1 (1 to 1.2)") == 2


def test_a_batch_of_llamas_own_measure_is_read(tmp_path: Path) -> None:
    program = tmp_path / "llama-batched-bench"
    program.write_text('#!/bin/sh\necho "loading"\necho "{\\"t_pp\\": 0.5, \\"t_tg\\": 1.5, \\"args\\": \\"$*\\"}"\n')
    program.chmod(0o755)
    bench = LlamaBatchedBench(program, Path("some.gguf"), [0], 64)
    taken = bench.run(Workload(4, 16, 32), 0, 60.0)
    assert (taken.seconds, taken.output_tokens) == (2.0, 128)
    program.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(EngineFailedError, match="3"):
        bench.run(Workload(4, 16, 32), 0, 60.0)


def test_of_equal_tokens_vllm_chooses_the_lowest() -> None:
    entry = {7: SimpleNamespace(logprob=-1.0), 3: SimpleNamespace(logprob=-1.0), 9: SimpleNamespace(logprob=-2.0)}
    assert choices([entry, entry], [9, 7]) == {"tokens": [3, 3], "logprobs": [-2.0, -1.0]}


def test_agreement_counts_tokens_and_distances() -> None:
    base = [Chosen([1, 2], np.array([-1.0, -2.0])), Chosen([3], np.array([-1.0]))]
    mine = [Chosen([1, 5], np.array([-1.0, -2.3])), Chosen([3], np.array([-1.0]))]
    row = row_of("ours", mine, base)
    assert (row["same"], row["tokens"], row["share"]) == (2, 3, pytest.approx(2 / 3))
    assert (row["mean_difference"], row["largest_difference"]) == pytest.approx((0.1, 0.3))
    assert "66.67%" in figures.made("agreement", {"rows": [row], "equal": 1})

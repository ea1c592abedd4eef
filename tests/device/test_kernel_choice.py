"""Which kernels run: the choice by the processor's features, names, and what ``native+torch-linear`` is made of."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jettison.device import beside
from jettison.device.dtypes import Dtype
from jettison.device.kernels import library
from jettison.device.kernels.choosing import resolve_kernels, rows_are_independent
from jettison.device.kernels.loading import load_kernels
from jettison.device.kernels.processor import AMX_BF16, TILES_GRANTED, Processor, choose_kind, cpu_flags
from jettison.errors import ConfigError

BF16, F32, F64 = "bfloat16", "float32", "float64"
ZEN4 = frozenset({"avx2", "fma", "avx512f", "avx512_bf16"})
SAPPHIRE_RAPIDS = ZEN4 | {"amx_tile", "amx_int8", "amx_bf16", TILES_GRANTED}

needs_native = pytest.mark.skipif(not library.supported_variants(), reason="no native kernels built")


@pytest.mark.parametrize(
    ("dtype", "features", "expected"),
    [
        (BF16, SAPPHIRE_RAPIDS, "native+torch-linear"),
        (BF16, SAPPHIRE_RAPIDS - {TILES_GRANTED}, "native"),
        (BF16, SAPPHIRE_RAPIDS - {"amx_bf16"}, "native"),
        (F32, SAPPHIRE_RAPIDS, "native"),
        (F64, SAPPHIRE_RAPIDS, "native"),
        (BF16, ZEN4, "native"),
        (BF16, frozenset(), "native"),
    ],
)
def test_auto_is_a_function_of_features_and_precision(
    dtype: Dtype, features: frozenset[str], expected: str
) -> None:
    assert choose_kind(dtype, features, has_native_tiles=False) == expected


def test_torch_multiplies_only_where_native_kernels_have_no_tiles() -> None:
    assert choose_kind(BF16, SAPPHIRE_RAPIDS, has_native_tiles=True) == "native"


def test_flags_of_the_first_processor() -> None:
    text = "processor\t: 0\nflags\t\t: fpu amx_bf16 amx_tile\nbugs\t\t: x\n\nprocessor\t: 1\nflags\t\t: fpu\n"
    assert cpu_flags(text) == {"fpu", "amx_bf16", "amx_tile"}
    assert cpu_flags("Features\t: fp asimd\n") == {"fp", "asimd"}
    assert cpu_flags("") == frozenset()


@needs_native
@pytest.mark.parametrize("features", [SAPPHIRE_RAPIDS, ZEN4])
def test_auto_resolves_to_one_name_that_loads_the_same(
    features: frozenset[str]
) -> None:
    variants = tuple(name for name in library.supported_variants() if name != library.TILES)
    processor, best, has_amx = Processor(features, variants), variants[0], features >= AMX_BF16
    expected = {BF16: f"native-{best}" + "+torch-linear" * has_amx, F32: f"native-{best}", F64: f"native-{best}"}
    for dtype, name in expected.items():
        assert resolve_kernels("auto", dtype, processor) == name
        # What the controller has resolved means the same to a worker that sees another processor.
        assert load_kernels(name, dtype, Processor(frozenset(), variants)).name == name
        assert rows_are_independent(name, dtype) == (not (dtype == BF16 and has_amx))
    given = resolve_kernels("native", BF16, processor)
    assert given == f"native-{best}", "a name that was given overrides the processor"
    assert resolve_kernels("torch", BF16, processor) == "torch"


@needs_native
def test_tiles_that_compute_wrong_results_are_passed_over_for_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor has AMX and the library was built with it, but its self-check fails."""
    best, *others = library.supported_variants()
    if not others:
        pytest.skip("one instruction set only")
    honest = library.passes_self_check
    monkeypatch.setattr(
        library, "passes_self_check", lambda opened, name: name != best and honest(opened, name)
    )
    monkeypatch.setattr(library, "TILES", best)
    processor = Processor(SAPPHIRE_RAPIDS, (best, *others))
    assert resolve_kernels("auto", BF16, processor) == f"native-{others[0]}+torch-linear"
    assert resolve_kernels("auto", F32, processor) == f"native-{others[0]}"
    monkeypatch.setattr(library, "passes_self_check", honest)
    assert resolve_kernels("auto", BF16, processor) == f"native-{best}"


def test_names_of_a_gpus_kernels_say_it_too() -> None:
    assert [rows_are_independent(name, BF16) for name in ("cuda", "cuda-invariant")] == [False, True]


@needs_native
def test_names_say_whether_rows_are_independent() -> None:
    for name in ("native", "native+torch-linear", "torch"):
        resolved = resolve_kernels(name, BF16)
        assert [rows_are_independent(resolved, dtype) for dtype in (F64, F32, BF16)] == {
            "native": [True, True, True],
            "native+torch-linear": [True, True, False],
            "torch": [False, False, False],
        }[name]


@needs_native
def test_native_with_torch_linear_is_native_but_for_products_in_bfloat16() -> None:
    mixed, pure = load_kernels("native+torch-linear"), load_kernels("native")
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = torch.randn(37, 96, generator=generator).to(dtype)
        weight, bias = (torch.randn(*size, generator=generator).to(dtype) for size in ((130, 96), (130,)))
        for b in (None, bias):
            ours, theirs = torch.empty(37, 130, dtype=dtype), torch.empty(37, 130, dtype=dtype)
            mixed.linear(x, weight, b, ours)
            if dtype == torch.bfloat16:
                theirs.copy_(torch.nn.functional.linear(x, weight, b))
            else:
                pure.linear(x, weight, b, theirs)
            assert torch.equal(ours, theirs)
        normed, expected = torch.empty_like(x), torch.empty_like(x)
        mixed.rms_norm(x, weight[0], 1e-6, normed)
        pure.rms_norm(x, weight[0], 1e-6, expected)
        assert torch.equal(normed, expected)


@needs_native
def test_every_number_of_rows_goes_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = load_kernels("native+torch-linear")
    monkeypatch.setattr(mixed, "_linear", lambda *_: pytest.fail("a native product"))
    weight = torch.randn(48, 64).to(torch.bfloat16)
    for rows in (1, 2, 15, 16, 17, 64, 300):
        x, out = torch.randn(rows, 64).to(torch.bfloat16), torch.empty(rows, 48, dtype=torch.bfloat16)
        mixed.linear(x, weight, None, out)


@pytest.mark.parametrize("name", ["magic", "torch+torch-linear", "native+", "+torch-linear", "auto+torch-linear"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="kernels must be auto, native"):
        load_kernels(name)


def test_kernels_that_cannot_be_had_are_not_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library.open_library.cache_clear()
    monkeypatch.setattr(library, "LIBRARY_PATH", tmp_path / "missing.so")
    try:
        assert resolve_kernels("auto", BF16, Processor(SAPPHIRE_RAPIDS, ())) == "torch"
        with pytest.raises(ConfigError, match="not built"):
            resolve_kernels("native+torch-linear", BF16)
    finally:
        library.open_library.cache_clear()


def test_caches_are_bounded_unless_somebody_has_set_them() -> None:
    environ = {beside.ONEDNN_CACHES[0]: "7"}
    beside.bound_onednn_caches(environ)
    assert environ == {beside.ONEDNN_CACHES[0]: "7", beside.ONEDNN_CACHES[1]: str(beside.NUM_KEPT_PRODUCTS)}


WALK = """
import json, sys
from pathlib import Path
import torch
from jettison.device.kernels.loading import load_kernels

def resident(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10

kernels = load_kernels(sys.argv[1])
torch.set_num_threads(2)
small = [torch.randn(n, k).bfloat16() for n, k in ((192, 128), (128, 128), (512, 128), (128, 256), (320, 128))]
rows = 160
inputs = {k: torch.randn(rows, k).bfloat16() for k in (128, 256)}
outputs = {w.shape[0]: torch.zeros(rows, w.shape[0], dtype=torch.bfloat16) for w in small}
start = resident("RssAnon")
for _ in range(2):
    for m in range(1, rows + 1):
        for w in small:
            kernels.linear(inputs[w.shape[1]][:m], w, None, outputs[w.shape[0]][:m])
walked = resident("RssAnon") - start
large = torch.zeros(16384, 4096, dtype=torch.bfloat16)
x, out = torch.ones(64, 4096, dtype=torch.bfloat16), torch.zeros(64, 16384, dtype=torch.bfloat16)
start = resident("RssAnon")
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
high = resident("VmHWM")
for m in (1, 2, 16, 33, 64):
    kernels.linear(x[:m], large, None, out[:m])
print(json.dumps({"walked": walked, "kept": resident("RssAnon") - start, "peak": resident("VmHWM") - high}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("name", [*(["native+torch-linear"] if library.supported_variants() else []), "torch"])
def test_products_keep_little_beside_the_weights(name: str) -> None:
    """Every number of rows in a fresh process: code for a few products at most, and no copy of the weights."""
    done = subprocess.run([sys.executable, "-c", WALK, name], capture_output=True, text=True, check=True, timeout=300)
    found = json.loads(done.stdout)
    # 160 numbers of rows of five products would keep code of 800; the largest seen is 0.8 MiB.
    assert found["walked"] < 2 * beside.NUM_KEPT_PRODUCTS << 20
    weight_bytes = 16384 * 4096 * 2
    assert found["kept"] < weight_bytes / 8
    assert found["peak"] < weight_bytes, "not even while they run"

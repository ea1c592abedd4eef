"""Every kernel but attention: each back end against plain torch in float64, strides, aliases, exact independence."""

from __future__ import annotations

import ctypes
import logging
import math
import shutil
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

from jettison.device.kernels import build, library, registry
from jettison.device.kernels.base import Kernels
from jettison.device.kernels.loading import load_kernels
from jettison.device.kernels.registry import (
    KernelSet,
    KernelsUnavailableError,
    find_kernels,
    kernel_names,
    register,
)
from jettison.device.spec import HOST
from jettison.errors import ConfigError

NATIVE = [f"native-{name}" for name in library.supported_variants()]
VARIANTS = [name for name in kernel_names(HOST) if NATIVE or not find_kernels(name)[0].has_variants] + NATIVE
"""Every set that is registered for host memory and can run here, and every instruction set of the native one."""
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)


@pytest.fixture(params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return load_kernels(request.param)


def randn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return weight.double() * wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 32, 48, 129])
def test_rms_norm(kernels: Kernels, dtype: torch.dtype, size: int) -> None:
    x, weight = randn(5, 2 * size, dtype=dtype)[:, :size], randn(size, dtype=dtype, seed=1)
    expected, out = norm(x, weight, 1e-3), torch.empty(5, size, dtype=dtype)
    kernels.rms_norm(x, weight, 1e-3, out)
    assert_close(out, expected)
    x = x.contiguous()
    kernels.rms_norm(x, weight, 1e-3, x)
    assert torch.equal(x, out), "out may be x"


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(kernels: Kernels, dtype: torch.dtype) -> None:
    x, residual, weight = randn(4, 50, dtype=dtype), randn(4, 50, dtype=dtype, seed=1), randn(50, dtype=dtype, seed=2)
    total = x + residual
    kernels.add_rms_norm(x, residual, weight, 1e-5, x)
    assert torch.equal(residual, total)
    assert_close(x, norm(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_head_rms_norm_in_a_fused_buffer(kernels: Kernels, dtype: torch.dtype) -> None:
    fused, weight = randn(3, 6 * 20, dtype=dtype), randn(20, dtype=dtype, seed=1)
    before = fused.clone()
    heads = fused[:, 20:80].unflatten(1, (3, 20))
    expected = norm(heads, weight, 1e-6)
    kernels.head_rms_norm(heads, weight, 1e-6)
    assert_close(heads, expected)
    assert torch.equal(fused[:, :20], before[:, :20])
    assert torch.equal(fused[:, 80:], before[:, 80:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(2, 2), (16, 16), (80, 80), (64, 32)])
@pytest.mark.parametrize("positions_dtype", [np.int32, np.int64, torch.int32, torch.int64])
def test_rotary(
    kernels: Kernels, dtype: torch.dtype, head_dim: int, rotary_dim: int, positions_dtype: type | torch.dtype
) -> None:
    fused = randn(4, 5 * head_dim, dtype=dtype)
    q, k = fused[:, : 3 * head_dim].unflatten(1, (3, head_dim)), fused[:, 3 * head_dim :].unflatten(1, (2, head_dim))
    angles = torch.arange(50.0)[:, None] * torch.logspace(0, -3, rotary_dim // 2)
    angles = torch.cat((angles, angles), dim=1).to(torch.float64 if dtype == torch.float64 else torch.float32)
    cos, sin = angles.cos(), angles.sin()
    positions = np.array([0, 49, 7, 7])
    expected = []
    for x in (q, k):
        wide = x.double().clone()
        part = wide[..., :rotary_dim].clone()
        left, right = part.chunk(2, -1)
        c, s = cos.double()[positions, None], sin.double()[positions, None]
        wide[..., :rotary_dim] = part * c + torch.cat((-right, left), -1) * s
        expected.append(wide)
    is_torch = isinstance(positions_dtype, torch.dtype)
    kernels.rotary(
        q,
        k,
        cos,
        sin,
        torch.tensor(positions, dtype=positions_dtype) if is_torch else positions.astype(positions_dtype),
    )
    assert_close(q, expected[0])
    assert_close(k, expected[1])
    for bad in (-1, 50):
        with pytest.raises(IndexError, match="position"):
            kernels.rotary(q, k, cos, sin, np.array([0, 0, bad, 0], dtype=np.int32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(kernels: Kernels, dtype: torch.dtype) -> None:
    gate_up = randn(3, 2 * 37, dtype=dtype) * 4
    gate_up[0, :6] = torch.tensor([-1e4, -100.0, -0.0, 0.0, 100.0, 1e4], dtype=dtype)
    out = torch.empty(3, 37, dtype=dtype)
    kernels.silu_mul(gate_up, out)
    gate, up = gate_up.double().chunk(2, dim=1)
    assert_close(out, F.silu(gate) * up)
    gate_up[1, 3] = math.nan
    kernels.silu_mul(gate_up, out)
    assert out[1, 3].isnan(), "a NaN is passed on, not hidden"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", VARIANTS)
def test_linear(name: str, dtype: torch.dtype) -> None:
    kernels = load_kernels(name)

    @settings(max_examples=30, deadline=None, derandomize=True)
    @given(
        m=st.integers(1, 80),
        n=st.sampled_from([1, 3, 4, 8, 63, 64, 65, 131]),
        k=st.sampled_from([1, 5, 16, 31, 32, 64, 100, 1024, 1030, 2100]),
        bias=st.booleans(),
    )
    def check(m: int, n: int, k: int, bias: bool) -> None:
        x = randn(m, k + 3, dtype=dtype)[:, :k]  # row-strided
        slab = torch.full((n * k + 64,), math.nan, dtype=dtype)  # what lies beside the weight must not leak in
        weight = slab[32 : 32 + n * k].view(n, k)
        weight.copy_(randn(n, k, seed=1) / math.sqrt(k))
        b = randn(n, dtype=dtype, seed=2) if bias else None
        buffer = torch.full((m, n + 2), math.nan, dtype=dtype)
        kernels.linear(x, weight, b, buffer[:, :n])
        expected = x.double() @ weight.double().t() + (0 if b is None else b.double())
        assert_close(buffer[:, :n], expected)
        assert buffer[:, n:].isnan().all()

    check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize(("n", "k"), [(70, 48), (64, 1500), (9, 33)])
def test_native_rows_do_not_depend_on_the_batch(name: str, dtype: torch.dtype, n: int, k: int) -> None:
    kernels = load_kernels(name)
    x, weight = randn(150, k, dtype=dtype), randn(n, k, dtype=dtype, seed=1)
    whole = torch.empty(150, n, dtype=dtype)
    kernels.linear(x, weight, None, whole)
    threads = torch.get_num_threads()
    for size in (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 64, 65, 150):
        out = torch.empty(size, n, dtype=dtype)
        torch.set_num_threads(1 + size % 2)
        kernels.linear(x[-size:], weight, None, out)
        torch.set_num_threads(threads)
        assert torch.equal(out, whole[-size:]), size


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_kernels_do_not_depend_on_the_batch(kernels: Kernels, dtype: torch.dtype) -> None:
    x, weight = randn(33, 96, dtype=dtype), randn(96, dtype=dtype, seed=1)
    whole, half = torch.empty_like(x), torch.empty(33, 48, dtype=dtype)
    kernels.rms_norm(x, weight, 1e-6, whole)
    kernels.silu_mul(x, half)
    for row in (0, 13, 32):
        one, part = torch.empty(1, 96, dtype=dtype), torch.empty(1, 48, dtype=dtype)
        kernels.rms_norm(x[row : row + 1], weight, 1e-6, one)
        kernels.silu_mul(x[row : row + 1], part)
        assert torch.equal(one[0], whole[row])
        assert torch.equal(part[0], half[row])


def test_broken_contracts_are_refused(kernels: Kernels) -> None:
    x, weight, out = randn(2, 8), randn(8), torch.empty(2, 8, dtype=torch.float64)
    for call in (
        lambda: kernels.rms_norm(x, weight[:4], 1e-6, out),
        lambda: kernels.rms_norm(x, weight, 1e-6, out.float()),
        lambda: kernels.rms_norm(x.t().contiguous().t(), weight, 1e-6, out),
        lambda: kernels.add_rms_norm(x, x[:1], weight, 1e-6, out),
        lambda: kernels.layer_norm(x, weight, weight[:4], 1e-6, out),
        lambda: kernels.silu_mul(x, out),
        lambda: kernels.activate("gelu", x, out[:, :5]),
        lambda: kernels.activate("swiglu_clamped", x, out),
        lambda: kernels.head_rms_norm(x, weight, 1e-6),
        lambda: kernels.linear(x, randn(3, 7), None, torch.empty(2, 3, dtype=torch.float64)),
        lambda: kernels.linear(x, randn(3, 8), randn(2), torch.empty(2, 3, dtype=torch.float64)),
        lambda: kernels.linear(x, randn(3, 8), None, torch.empty(2, 4, dtype=torch.float64)),
        lambda: kernels.rotary(randn(2, 1, 8), randn(2, 1, 8), randn(4, 10), randn(4, 10), np.zeros(2, np.int32)),
        lambda: kernels.rotary(randn(2, 1, 8), randn(2, 1, 8), randn(4, 8), randn(4, 8), np.zeros(3, np.int32)),
    ):
        with pytest.raises(ValueError):
            call()


def test_unknown_kernels_are_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"must be auto, native, native\+torch-linear or torch"):
        load_kernels("cuda")
    with pytest.raises(ConfigError):
        load_kernels("native-abacus")


def test_a_set_is_imported_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_SETS", dict(registry._SETS))
    with pytest.raises(ValueError, match="registered already"):
        register("torch", KernelSet(HOST, "nowhere:load"))
    register("abacus", KernelSet(HOST, "jettison.device.kernels.torch_kernels:load_torch"))
    assert load_kernels("abacus").name == "torch"
    register("beads", KernelSet(HOST, "no.such.module:load"))
    register("rods", KernelSet("another", "no.such.module:load"))
    with pytest.raises(ConfigError, match=r"no\.such\.module cannot be imported here"):
        load_kernels("beads")
    for name, back_end in (("rods", HOST), ("abacus", "another"), ("abacus-avx2", HOST)):
        with pytest.raises(ConfigError, match="kernels must be auto"):
            find_kernels(name, back_end)


def test_a_gpus_kernels_are_known_by_name_and_not_imported() -> None:
    script = (
        "import sys\nfrom jettison.device.kernels.registry import find_kernels, kernel_names\n"
        "assert kernel_names('cuda') == ['cuda', 'cuda-invariant']\n"
        "assert find_kernels('cuda')[0].back_end == 'cuda'\n"
        "assert not {'triton', 'jettison.device.cuda', 'jettison.device.cuda.kernels'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
@pytest.mark.parametrize("name", kernel_names("cuda"))
def test_a_gpus_kernels_cannot_be_had_without_one(name: str) -> None:
    with pytest.raises(KernelsUnavailableError):
        find_kernels(name)[0].load()


def test_without_a_library_auto_falls_back_with_one_note(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    library.open_library.cache_clear()
    monkeypatch.setattr(library, "LIBRARY_PATH", tmp_path / "missing.so")
    try:
        with caplog.at_level(logging.INFO):
            assert load_kernels("auto").name == "torch"
        assert len(caplog.records) == 1
        assert "jettison.device.kernels.build" in caplog.text
        with pytest.raises(ConfigError, match="not built"):
            load_kernels("native")
        assert library.supported_variants() == []
        (tmp_path / "missing.so").write_bytes(b"no library")
        with pytest.raises(ConfigError, match="does not load"):
            load_kernels("native")
    finally:
        library.open_library.cache_clear()


@pytest.mark.skipif(not library.supported_variants(), reason="no native kernels built")
def test_a_library_built_from_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library.open_library.cache_clear()
    monkeypatch.setattr(build, "build_id", lambda: "other")
    try:
        with pytest.raises(ConfigError, match="other sources"):
            load_kernels("native")
    finally:
        library.open_library.cache_clear()


@pytest.mark.skipif(not library.supported_variants(), reason="no native kernels built")
def test_a_miscompiled_variant_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    best, *others = library.supported_variants()
    honest = library.passes_self_check
    monkeypatch.setattr(
        library, "passes_self_check", lambda opened, name: name != best and honest(opened, name)
    )
    assert load_kernels("auto").name == (f"native-{others[0]}" if others else "torch")


def test_no_compiler_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler --flag")
    with pytest.raises(build.BuildError, match="no-such-compiler"):
        build.build_library(tmp_path)
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'x.c:1: error: broken' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(build.BuildError, match="broken"):
        build.build_library(tmp_path)
    assert not list(tmp_path.glob("*.so"))


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_build_makes_a_loadable_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # One variant, not optimized: a second instead of twenty.
    monkeypatch.setattr(build, "variants", lambda: (build.Variant("portable", ("-O0",)),))
    built = ctypes.CDLL(str(build.build_library(tmp_path)))
    built.jettison_build_id.restype = built.jettison_variants.restype = ctypes.c_char_p
    assert built.jettison_build_id().decode() == build.build_id()
    assert built.jettison_variants() == b"portable"
    assert built.jettison_cpu_supports(b"portable") == 1
    assert built.jettison_cpu_supports(b"abacus") == 0

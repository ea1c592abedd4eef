"""Products of few rows in Triton against float64: rows beyond those asked for are left alone, and rows do not mix."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from jettison.device.cuda.kernels import CudaKernels
from jettison.device.cuda.skinny import MOST_ROWS, fits, multiply
from jettison.device.cuda.tiles import SKINNY, Skinny

ON_GPU = torch.cuda.is_available()
DTYPE = torch.bfloat16 if ON_GPU else torch.float16
EARLY = ON_GPU and torch.cuda.get_device_capability() >= (9, 0)
WAYS = [Skinny(16, 64, 2, 3), SKINNY]


def matrices(device: torch.device, way: Skinny, parts: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """x [16, K] and a matrix [N, K]."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(MOST_ROWS, parts * way.depth, generator=generator, dtype=torch.float64)
    weight = torch.randn(3 * way.columns, parts * way.depth, generator=generator, dtype=torch.float64)
    return x.to(DTYPE).to(device), (weight / 30).to(DTYPE).to(device)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("rows", [1, 7, MOST_ROWS])
def test_rows_are_their_products(device: torch.device, way: Skinny, rows: int) -> None:
    x, weight = matrices(device, way)
    out = torch.full((MOST_ROWS, len(weight)), 7.0, dtype=DTYPE, device=device)
    multiply(x[:rows], weight, out[:rows], way, EARLY)
    expected = x[:rows].cpu().double() @ weight.cpu().double().t()
    torch.testing.assert_close(out[:rows].cpu().double(), expected, rtol=1e-2, atol=1e-2)
    assert bool((out[rows:] == 7).all())


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_row_does_not_depend_on_the_others(device: torch.device, way: Skinny) -> None:
    x, weight = matrices(device, way)
    whole, one = (torch.empty(rows, len(weight), dtype=DTYPE, device=device) for rows in (MOST_ROWS, 1))
    multiply(x, weight, whole, way, EARLY)
    multiply(x[5:6], weight, one, way, EARLY)
    torch.testing.assert_close(one[0], whole[5], rtol=0, atol=0)


def test_what_fits() -> None:
    x, weight = matrices(torch.device("cpu"), SKINNY, parts=1)
    assert fits(x, weight, SKINNY)
    assert not fits(torch.cat((x, x[:1])), weight, SKINNY)
    assert not fits(x.float(), weight.float(), SKINNY)
    assert not fits(x, weight[:-1], SKINNY)
    assert not fits(x[:, :-8], weight[:, :-8], SKINNY)


def test_only_the_fast_kind_uses_it(device: torch.device) -> None:
    x, weight = matrices(device, SKINNY)
    for name, rows in (("cuda", 16), ("cuda-invariant", 0)):
        kernels = CudaKernels(name, device)
        assert kernels.skinny_rows <= rows
    kernels = CudaKernels("cuda", device)
    kernels.skinny_rows = MOST_ROWS
    out = torch.empty(MOST_ROWS, len(weight), dtype=DTYPE, device=device)
    kernels.linear(x, weight, None, out)
    expected = x.cpu().double() @ weight.cpu().double().t()
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-2, atol=1e-2)

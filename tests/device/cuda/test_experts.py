"""Experts in Triton against ``torch_kernels``, on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from jettison.device.cuda.experts import SortedPairs
from jettison.device.cuda.kernels import CudaKernels
from jettison.device.kernels.operands import ExpertWeights, RoutedBuffers, WeightStack
from jettison.device.kernels.torch_kernels import TorchKernels

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
DTYPES = [torch.float32, torch.bfloat16 if torch.cuda.is_available() else torch.float16]
HIDDEN, INNER = 80, 48


class Case:
    """Random experts and routes; ``run`` computes some of the tokens on a device."""

    def __init__(self, dtype, tokens, number, num_chosen, *, bias=False) -> None:
        drawn = torch.Generator().manual_seed(tokens)

        def normal(*shape, scale=1.0):
            return torch.randn(*shape, generator=drawn).mul_(scale).to(dtype)

        self.x = normal(tokens, HIDDEN)
        self.chosen = torch.stack([torch.randperm(number, generator=drawn)[:num_chosen] for _ in range(tokens)])
        self.shares = torch.rand(tokens, num_chosen, generator=drawn)
        self.up, self.down = normal(number, 2 * INNER, HIDDEN, scale=0.1), normal(number, HIDDEN, INNER, scale=0.1)
        self.biases = (normal(number, 2 * INNER), normal(number, HIDDEN)) if bias else (None, None)

    def run(self, kernels, device, activation, rows=slice(None)):
        def there(tensor):
            return None if tensor is None else tensor.to(device).contiguous()

        x, chosen, shares = there(self.x[rows]), there(self.chosen[rows]), there(self.shares[rows])
        up_bias, down_bias = map(there, self.biases)
        weights = ExpertWeights(
            x, None, None, WeightStack(there(self.up), False), up_bias, WeightStack(there(self.down), False), down_bias
        )
        pairs = chosen.numel()
        buffers = RoutedBuffers(*(x.new_full((pairs, size), torch.nan) for size in (2 * INNER, INNER, HIDDEN)))
        out = torch.full_like(x, torch.nan)
        kernels.experts(x, chosen, shares, weights, activation, buffers, out)
        return out.cpu()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "number", "num_chosen"), [(1, 5, 2), (19, 3, 3), (70, 4, 1)])
@pytest.mark.parametrize("name", ["cuda", "cuda-invariant"])
def test_as_torch_has_it(device, dtype, tokens, number, num_chosen, name):
    activation = "swiglu_clamped" if tokens == 19 else "silu"
    case = Case(dtype, tokens, number, num_chosen, bias=activation != "silu")
    made = case.run(CudaKernels(name, device), device, activation)
    expected = case.run(TorchKernels(), torch.device("cpu"), activation)
    torch.testing.assert_close(made, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_depends_on_no_other(device, dtype):
    case, kernels = Case(dtype, 30, 4, 2), CudaKernels("cuda-invariant", device)
    together = case.run(kernels, device, "silu")
    for rows in (slice(0, 1), slice(7, 29)):
        assert torch.equal(case.run(kernels, device, "silu", rows), together[rows])


@pytest.mark.cuda
def test_pairs_are_sorted_by_expert_then_token(device):
    pairs = SortedPairs.of(torch.tensor([[2, 0], [0, 3], [2, 3]], device=device), 5)
    assert pairs.order.tolist() == [1, 2, 0, 4, 3, 5]
    assert pairs.places.tolist() == [2, 0, 1, 4, 3, 5]
    assert pairs.starts.tolist() == [0, 2, 2, 4, 6, 6]

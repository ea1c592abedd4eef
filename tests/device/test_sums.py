"""Products whose sums are not rounded to the operands' precision, as logits are: near to exact, and told apart."""

from __future__ import annotations

import random

import pytest
import torch

from jettison.device.kernels import library
from jettison.device.kernels.loading import load_kernels
from jettison.device.kernels.operands import PackedMatrix
from jettison.device.kernels.processor import TORCH_LINEAR
from jettison.types import LayerRange

NATIVE = [f"native-{name}" for name in library.supported_variants()]
BF16 = torch.bfloat16
NUM_ROWS, NUM_OUTPUTS = 200, 107
"""More rows than tiles have, and outputs of whole groups and of some beyond."""


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


@pytest.fixture(params=[*NATIVE, "emulated", "torch", *([TORCH_LINEAR] if NATIVE else [])])
def kernels(request):
    return request.getfixturevalue("emulated") if request.param == "emulated" else load_kernels(request.param)


def forms(kernels, plain: torch.Tensor) -> list[torch.Tensor | PackedMatrix]:
    """A matrix in each form that these kernels multiply."""
    if not kernels.packs(tuple(plain.shape), plain.dtype):
        return [plain]
    packed = PackedMatrix(torch.empty_like(plain))
    kernels.pack_rows(plain, 0, packed)
    return [plain, packed]


@pytest.mark.parametrize("inner", [544, 50])
def test_sums_of_exact_products(kernels, inner: int) -> None:
    x, plain, bias = randn(NUM_ROWS, inner), randn(NUM_OUTPUTS, inner, seed=1), randn(NUM_OUTPUTS, seed=2)
    largest = x.double().abs() @ plain.double().abs().t()
    for weight in forms(kernels, plain):
        for b in (None, bias):
            expected = x.double() @ plain.double().t() + (0 if b is None else b.double())
            buffer = torch.full((NUM_ROWS, NUM_OUTPUTS + 3), torch.nan)
            out = buffer[:, :NUM_OUTPUTS]
            kernels.linear(x, weight, b, out)
            assert bool(((out.double() - expected).abs() <= 2.0**-20 * largest).all())
            assert buffer[:, NUM_OUTPUTS:].isnan().all()
            if kernels.name.startswith(("native", "emulated")) and "torch" not in kernels.name:
                rounded = torch.empty(NUM_ROWS, NUM_OUTPUTS, dtype=BF16)
                kernels.linear(x, weight, b, rounded)
                assert torch.equal(out.to(BF16), rounded), "the same sums"


def test_rows_do_not_depend_on_the_batch(kernels) -> None:
    if "torch" in kernels.name:
        pytest.skip("torch's do")
    x, plain = randn(NUM_ROWS, 544), randn(NUM_OUTPUTS, 544, seed=1)
    for weight in forms(kernels, plain):
        whole = torch.empty(NUM_ROWS, NUM_OUTPUTS)
        kernels.linear(x, weight, None, whole)
        for size in (1, 2, 7, 13, 16, 17, 33, 65, 199):
            out = torch.empty(size, NUM_OUTPUTS)
            kernels.linear(x[-size:], weight, None, out)
            assert torch.equal(out, whole[-size:]), size


def test_what_rounding_would_make_equal_is_told_apart(kernels) -> None:
    """100 and 100.125, where numbers of bfloat16 are half a unit apart: rounded, the lower id would win."""
    plain = torch.full((NUM_OUTPUTS, 64), 0.5, dtype=BF16)
    plain[[7, 40]] = 100 / 64
    plain[40, 3] += 0.125
    x = torch.ones(3, 64, dtype=BF16)
    for weight in forms(kernels, plain):
        chosen = {}
        for dtype in (torch.float32, BF16):
            out, tokens = torch.empty(3, NUM_OUTPUTS, dtype=dtype), torch.empty(3, dtype=torch.int64)
            kernels.linear(x, weight, None, out)
            kernels.argmax(out, tokens)
            chosen[dtype] = tokens.tolist()
        assert chosen == {torch.float32: [40] * 3, BF16: [7] * 3}


@pytest.mark.parametrize(("operands", "sums"), [(BF16, torch.float64), (torch.float32, BF16),
                                                (torch.float64, torch.float32)])  # fmt: skip
def test_other_types_are_refused(kernels, operands: torch.dtype, sums: torch.dtype) -> None:
    with pytest.raises(ValueError, match="out: dtype"):
        kernels.linear(torch.ones(1, 8, dtype=operands), torch.ones(4, 8, dtype=operands), None,
                       torch.empty(1, 4, dtype=sums))  # fmt: skip


class Recording:
    """Kernels that keep what their unrounded sums should be."""

    def __init__(self, kernels) -> None:
        self._kernels = kernels
        self.exact: list[torch.Tensor] = []

    def __getattr__(self, name: str):
        return getattr(self._kernels, name)

    def linear(self, x, weight, bias, out) -> None:
        self._kernels.linear(x, weight, bias, out)
        if out.dtype != x.dtype:
            self.exact.append(x.double() @ weight.double().t())


@pytest.mark.parametrize("name", ["llama", "llama3-rope"])
def test_log_probabilities_are_those_of_unrounded_logits(name, tiny_models, new_runner, new_driver) -> None:
    token_ids = random.Random(1).choices(range(256), k=110)
    kernels = Recording(load_kernels("auto", BF16))
    runner = new_runner(tiny_models[name], BF16, kernels=kernels)
    driver = new_driver([(runner.run, LayerRange(0, runner.config.num_layers))], 256, with_logprobs=True)
    driver.add("a", token_ids)
    for chunk in (60, 50):
        driver.step({"a": chunk})
    told = torch.tensor([described.logprob for described in driver.requests["a"].prompt_logprobs])
    exact = torch.cat(kernels.exact)
    errors = {
        what: float((logits.double().log_softmax(1)[range(109), token_ids[1:]] - told).abs().max())
        for what, logits in (("exact", exact[:-1]), ("rounded", exact[:-1].to(BF16)))
    }
    assert errors["exact"] < 1e-4 < 1e-3 < errors["rounded"]
    assert driver.requests["a"].output == [int(exact[-1].argmax())]

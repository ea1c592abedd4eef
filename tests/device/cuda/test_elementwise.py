"""Each small kernel in Triton against ``torch_kernels`` on the CPU: same roundings, same edges.

On a GPU where there is one, in bfloat16; else in Triton's interpreter. Those marked ``cuda`` add something there: what
is fused, rounded and launched early.
"""

from __future__ import annotations

import math
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from jettison.device.cuda.kernels import CudaKernels
from jettison.device.kernels.layer import prepare_heads
from jettison.device.kernels.operands import LayerConstants, LayerWeights
from jettison.device.kernels.torch_kernels import TorchKernels

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, torch.bfloat16 if torch.cuda.is_available() else torch.float16]

pytestmark = [
    pytest.mark.parametrize("dtype", DTYPES), pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]  # fmt: skip


@pytest.fixture
def kernels(device: torch.device) -> CudaKernels:
    return CudaKernels("cuda-invariant", device)


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def assert_same(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, msg=lambda said: f"{what}: {said}")


def on(device: torch.device, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copies of their own; strides are kept."""
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t) for t in tensors]


@pytest.mark.cuda
@pytest.mark.parametrize("width", [1, 48, 130])
def test_norms(kernels: CudaKernels, device: torch.device, dtype: torch.dtype, width: int) -> None:
    x, residual = randn(5, 2 * width, dtype=dtype)[:, :width], randn(5, width, dtype=dtype, seed=1)
    weight = randn(width, dtype=dtype, seed=2)
    x_there, residual_there, weight_there = on(device, x, residual, weight)
    expected, out = torch.empty(5, width, dtype=dtype), torch.empty(5, width, dtype=dtype, device=device)
    TorchKernels().rms_norm(x, weight, 1e-3, expected)
    kernels.rms_norm(x_there, weight_there, 1e-3, out)
    assert_close(out, expected)
    one = torch.empty(1, width, dtype=dtype, device=device)
    kernels.rms_norm(x_there[3:4], weight_there, 1e-3, one)
    assert_same(one[0], out[3], "a row does not depend on the others")
    TorchKernels().add_rms_norm(x, residual, weight, 1e-3, x)
    kernels.add_rms_norm(x_there, residual_there, weight_there, 1e-3, x_there)
    assert torch.equal(residual_there.cpu(), residual)
    assert_close(x_there, x)


def exact_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
    """In float64, of whatever shape."""
    wide, gain = x.double(), weight.double()
    if kind == "layer":
        wide = wide - wide.mean(-1, keepdim=True)
    scaled = wide * (wide.square().mean(-1, keepdim=True) + 1e-3).rsqrt()
    made = scaled * (gain + 1 if kind == "rms_plus_one" else gain)
    return (made if bias is None else made + bias.double()).to(x.dtype)


def normed(kernels, x, weight, bias, kind: str, out) -> torch.Tensor:
    if kind == "layer":
        kernels.layer_norm(x, weight, bias, 1e-3, out)
    else:
        kernels.rms_norm(x, weight, 1e-3, out, kind)
    return out


@pytest.mark.cuda
@pytest.mark.parametrize("width", [1, 48, 130, 4608])
@pytest.mark.parametrize("kind", ["rms", "rms_once", "rms_plus_one", "layer", "layer with bias"])
def test_norms_of_every_kind_have_the_same_bits_in_every_batch(
    kernels: CudaKernels, device: torch.device, dtype: torch.dtype, kind: str, width: int
) -> None:
    """Among 1 to 16 rows, of which a card's own reductions sum each number in another order; in place, too."""
    x, weight = randn(16, 2 * width, dtype=dtype)[:, :width] + 2, randn(width, dtype=dtype, seed=2)
    kind, _, bias = kind.partition(" with ")
    bias = randn(width, dtype=dtype, seed=3) if bias else None
    x_there, weight_there = on(device, x, weight)
    bias_there = None if bias is None else bias.to(device)
    together = normed(kernels, x_there, weight_there, bias_there, kind, torch.empty_like(x_there))
    assert_close(together, exact_norm(x, weight, bias, kind))
    for rows in (1, 3, 8, 16):
        for first in {0, 16 - rows}:
            part = x_there[first : first + rows].clone()
            normed(kernels, part, weight_there, bias_there, kind, part)
            assert_same(part, together[first : first + rows], f"{rows} rows")


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["rms", "rms_once", "rms_plus_one"])
def test_norms_of_heads_of_every_kind_have_the_same_bits_in_every_batch(
    kernels: CudaKernels, device: torch.device, dtype: torch.dtype, kind: str
) -> None:
    fused, weight = on(device, randn(16, 7 * 48, dtype=dtype), randn(48, dtype=dtype, seed=2))
    before = fused.clone()
    heads = fused[:, 48 : 6 * 48].unflatten(1, (5, 48))
    expected = exact_norm(heads.cpu(), weight.cpu(), None, kind)
    kernels.head_rms_norm(heads, weight, 1e-3, kind)
    assert_close(heads, expected)
    assert torch.equal(fused[:, :48], before[:, :48]) and torch.equal(fused[:, 6 * 48 :], before[:, 6 * 48 :])
    for rows in (1, 3, 8):
        part = before.clone()[-rows:, 48 : 6 * 48].unflatten(1, (5, 48))
        kernels.head_rms_norm(part, weight, 1e-3, kind)
        assert_same(part, heads[-rows:], f"{rows} rows")


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (80, 80), (64, 32)])
def test_heads_by_themselves(
    kernels: CudaKernels, device: torch.device, dtype: torch.dtype, head_dim: int, rotary_dim: int
) -> None:
    fused, gain = randn(4, 7 * head_dim, dtype=dtype), randn(head_dim, dtype=dtype, seed=1)
    cos, sin = tables(50, rotary_dim)
    positions = np.array([0, 49, 7, 7], dtype=np.int32)
    (there, gain_there, cos_there, sin_there) = on(device, fused, gain, cos, sin)
    for kind, buffer, arguments in (
        (TorchKernels(), fused, (gain, cos, sin)), (kernels, there, (gain_there, cos_there, sin_there)),
    ):
        q, k = (heads.unflatten(1, (-1, head_dim)) for heads in buffer.split([5 * head_dim, 2 * head_dim], 1))
        kind.head_rms_norm(q, arguments[0], 1e-6)
        kind.rotary(q, k, *arguments[1:], positions)
    assert_close(there, fused)
    for bad in (-1, 50):
        with pytest.raises(IndexError, match="position"):
            kernels.rotary(q, k, cos_there, sin_there, np.array([0, 0, bad, 0], dtype=np.int32))


@pytest.mark.cuda
@pytest.mark.parametrize("norm", [None, "rms", "rms_once", "rms_plus_one"])
def test_heads_on_their_way_in_one_launch_or_in_several_have_the_same_bits(
    kernels: CudaKernels, device: torch.device, dtype: torch.dtype, norm: str | None
) -> None:
    """A layer with remote attention takes the second way, a step without it the first. Launched early or not."""
    heads, kv_heads, head_dim = 5, 2, 16
    width = (heads + 2 * kv_heads) * head_dim
    x, weight, bias, gain, residual = on(
        device, randn(3, 24, dtype=dtype), randn(width, 24, dtype=dtype, seed=1), randn(width, dtype=dtype, seed=2),
        randn(head_dim, dtype=dtype, seed=3), randn(heads * head_dim, heads * head_dim, dtype=dtype, seed=4),
    )  # fmt: skip
    cos, sin = on(device, *tables(32, head_dim))
    rows = np.array([[1, 0]], dtype=np.int32), np.array([3], dtype=np.int32), np.array([14], dtype=np.int32)
    parameters = {"input_norm": gain, "post_norm": gain, "qkv_weight": weight, "o_weight": residual,
                  "gate_up_weight": residual, "down_weight": residual}  # fmt: skip
    parameters |= {"qkv_bias": bias} if norm is None else {"q_norm": gain, "k_norm": gain}
    constants = LayerConstants(cos, sin, 1e-5, 0.25, norm=norm or "rms")
    found, can_launch_early = {}, kernels.launches_early
    for way in ("one launch", "several", "one launch, not early", "several, not early"):
        kernels.launches_early = can_launch_early and "not" not in way
        weights = LayerWeights(parameters, torch.zeros(2, 2, kv_heads, 16, head_dim, dtype=dtype, device=device))
        qkv = torch.empty(3, width, dtype=dtype, device=device)
        q, k, v = (t.unflatten(1, (-1, head_dim)) for t in qkv.split([heads * head_dim, *[kv_heads * head_dim] * 2], 1))
        buffers = SimpleNamespace(x=x, qkv=qkv, q=q, k=k, v=v)
        kernels.linear(x, weight, None, qkv)
        product = qkv.clone()
        if way.startswith("one"):
            kernels.linear(x, weight, None, qkv)
            kernels.prepare_and_write(weights, buffers, constants, kernels.rows(heads, weights.arena, *rows, 3))
        else:
            kernels.linear(x, weight, weights.qkv_bias, qkv)
            prepare_heads(kernels, weights, buffers, constants, np.array([14, 15, 16], dtype=np.int32))
            kernels.write_kv(k, v, weights.arena, *rows)
        found[way] = {"product": product, "q": q.clone(), "k": weights.arena[:, 0], "v": weights.arena[:, 1]}
    base = found.pop("several, not early")
    differences = {
        (way, what): f"{int((tensor != base[what]).sum())}, at most {float((tensor - base[what]).abs().max())}"
        for way, tensors in found.items() for what, tensor in tensors.items() if not torch.equal(tensor, base[what])
    }  # fmt: skip
    assert not differences


def tables(num_positions: int, rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(float(num_positions))[:, None] * torch.logspace(0, -3, rotary_dim // 2)
    angles = torch.cat((angles, angles), dim=1)
    return angles.cos(), angles.sin()


def test_silu(kernels: CudaKernels, device: torch.device, dtype: torch.dtype) -> None:
    gate_up = randn(3, 2 * 37, dtype=dtype) * 4
    gate_up[0, :6] = torch.tensor([-1e4, -100.0, -0.0, 0.0, 100.0, 1e4], dtype=dtype)
    gate_up[1, 3] = math.nan
    expected, out = torch.empty(3, 37, dtype=dtype), torch.empty(3, 37, dtype=dtype, device=device)
    TorchKernels().silu_mul(gate_up, expected)
    kernels.silu_mul(*on(device, gate_up), out)
    assert_close(out, expected)


ACTIVATED = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}  # fmt: skip


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("activation", "is_gated"), [*product(ACTIVATED, (True, False)), ("swiglu_clamped", True)]
)
def test_activations(
    kernels: CudaKernels, device: torch.device, dtype: torch.dtype, activation: str, is_gated: bool
) -> None:
    up = (randn(3, 2 * 1037 + 8, dtype=dtype) * 4)[:, : 1037 * (1 + is_gated)]  # more than a program has
    up[0, :6] = torch.tensor([-1e4, -100.0, -0.0, 0.0, 100.0, 1e4], dtype=dtype)
    up[1, 3] = math.nan
    wide = up.double()
    if activation == "swiglu_clamped":
        gate, value = wide[:, ::2].clamp(max=7.0), wide[:, 1::2].clamp(-7.0, 7.0)
        exact = (value + 1) * gate * torch.sigmoid(1.702 * gate)
    else:
        gate, *value = wide.split(1037, 1)
        exact = ACTIVATED[activation](gate) * (value[0] if value else 1.0)
    out = torch.full((3, 1037), torch.nan, dtype=dtype, device=device)
    kernels.activate(activation, *on(device, up), out)
    assert_close(out, exact.to(dtype))
    one = torch.empty(1, 1037, dtype=dtype, device=device)
    kernels.activate(activation, up[2:].to(device), one)
    assert_same(one[0], out[2], "a row does not depend on the others")
    with pytest.raises(ValueError, match="up"):
        kernels.activate(activation, up.to(device)[:, :-1], out)


class Computed(TorchDispatchMode):
    """Names of what PyTorch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.cuda
def test_norms_and_activations_take_no_memory_of_their_own(
    kernels: CudaKernels, device: torch.device, dtype: torch.dtype
) -> None:
    """A step's would be GiBs in the precision of sums, which no budget has."""
    x, wide, weight = on(device, *(randn(*shape, dtype=dtype) for shape in ((64, 96), (64, 192), (96,))))
    out, heads = torch.empty_like(x), x.view(64, 6, 16).clone()

    def compute() -> None:
        for kind in ("rms", "rms_once", "rms_plus_one"):
            kernels.rms_norm(x, weight, 1e-6, out, kind)
            kernels.head_rms_norm(heads, weight[:16], 1e-6, kind)
        kernels.layer_norm(x, weight, None, 1e-6, out)
        for activation in (*ACTIVATED, "swiglu_clamped"):
            kernels.activate(activation, wide, out)
            if activation in ACTIVATED:
                kernels.activate(activation, x, out)

    with Computed() as seen:
        compute()
    assert not seen.names & {"_to_copy", "mul", "add", "pow", "mean", "sigmoid", "clone"}, "what torch would make"
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.max_memory_allocated()
        compute()
        assert torch.cuda.max_memory_allocated() == before


def test_linear_with_and_without_bias(kernels: CudaKernels, device: torch.device, dtype: torch.dtype) -> None:
    x, weight, bias = randn(3, 48, dtype=dtype), randn(20, 48, dtype=dtype, seed=1) / 7, randn(20, dtype=dtype, seed=2)
    expected, out = torch.empty(3, 20, dtype=dtype), torch.empty(3, 20, dtype=dtype, device=device)
    for given in (None, bias):
        TorchKernels().linear(x, weight, given, expected)
        kernels.linear(*on(device, x, weight), None if given is None else on(device, given)[0], out)
        assert_close(out, expected)


def test_sums_that_are_not_rounded(kernels: CudaKernels, device: torch.device, dtype: torch.dtype) -> None:
    x, weight, bias = (randn(*size, dtype=dtype, seed=i) for i, size in enumerate(((3, 48), (20, 48), (20,))))
    exact, out = x.double() @ weight.double().t(), torch.empty(3, 20, device=device)
    for given in (None, bias):
        kernels.linear(*on(device, x, weight), None if given is None else on(device, given)[0], out)
        assert_close(out, (exact if given is None else exact + given.double()).float())


def test_rows_by_number(kernels: CudaKernels, device: torch.device, dtype: torch.dtype) -> None:
    table, ids = randn(9, 50, dtype=dtype), torch.tensor([8, 0, 0])
    out = torch.empty(3, 50, dtype=dtype, device=device)
    (there,) = on(device, table)
    kernels.gather_rows(there, ids, out)
    assert torch.equal(out.cpu(), table[ids])
    with pytest.raises(IndexError, match="outside"):
        kernels.gather_rows(there, torch.tensor([9, 0, 0]), out)


def test_the_likeliest_is_the_lowest_of_equals(kernels: CudaKernels, device: torch.device, dtype: torch.dtype) -> None:
    logits = randn(6, 9000, dtype=dtype).clamp_(-3, 2)[:, :8999]  # many equals, in every chunk
    logits[1, 8998] = 9
    logits[2, [4095, 4096]] = 9
    logits[3, 17], logits[4, 8998], logits[5, 0] = math.nan, math.inf, -math.inf
    expected = torch.empty(6, dtype=torch.int64)
    TorchKernels().argmax(logits, expected)
    assert expected.tolist()[1:] == [8998, 4095, -1, -1, -1]
    (there,), out = on(device, logits), torch.empty(6, dtype=torch.int64, device=device)
    kernels.argmax(there, out)
    assert out.tolist() == expected.tolist()


@pytest.mark.cuda
@pytest.mark.parametrize("has_norm", [False, True], ids=["bias", "norm of heads"])
def test_a_layer(kernels: CudaKernels, device: torch.device, dtype: torch.dtype, has_norm: bool) -> None:
    """Both halves, with what is fused on the way, against single kernels on the CPU."""
    hidden, heads, kv_heads, head_dim, inner = 48, 6, 2, 16, 40
    lens = np.array([3, 1], dtype=np.int32), np.array([0, 20], dtype=np.int32)
    block_tables = np.array([[2, 0], [4, 1]], dtype=np.int32)
    positions = np.array([0, 1, 2, 20], dtype=np.int32)
    shapes = {
        "input_norm": (hidden,), "post_norm": (hidden,), "o_weight": (hidden, heads * head_dim),
        "qkv_weight": ((heads + 2 * kv_heads) * head_dim, hidden), "gate_up_weight": (2 * inner, hidden),
        "down_weight": (hidden, inner),
    }  # fmt: skip
    if has_norm:
        shapes |= {"q_norm": (head_dim,), "k_norm": (head_dim,)}
    else:
        shapes |= {"qkv_bias": ((heads + 2 * kv_heads) * head_dim,), "o_bias": (hidden,)}
    parameters = {name: randn(*shape, dtype=dtype, seed=i) / 4 for i, (name, shape) in enumerate(shapes.items())}
    cos, sin = tables(32, head_dim)
    x, residual = randn(4, hidden, dtype=dtype, seed=31), randn(4, hidden, dtype=dtype, seed=32)
    arena = randn(5, 2, kv_heads, 16, head_dim, dtype=dtype, seed=33)
    results = []
    for kind, where in ((TorchKernels(), torch.device("cpu")), (kernels, device)):
        own = {name: on(where, value)[0] for name, value in parameters.items()}
        own_arena, own_x, own_residual, *rotary = on(where, arena, x, residual, cos, sin)
        qkv = torch.empty(4, (heads + 2 * kv_heads) * head_dim, dtype=dtype, device=where)
        q, k, v = (t.unflatten(1, (-1, head_dim)) for t in qkv.split([heads * head_dim, *[kv_heads * head_dim] * 2], 1))
        attention = torch.empty(4, heads, head_dim, dtype=dtype, device=where)
        buffers = SimpleNamespace(
            residual=own_residual, x=own_x, qkv=qkv, q=q, k=k, v=v, attention=attention,
            attention_flat=attention.view(4, -1), gate_up=torch.empty(4, 2 * inner, dtype=dtype, device=where),
            activated=torch.empty(4, inner, dtype=dtype, device=where), bound=None,
        )  # fmt: skip
        constants = LayerConstants(*rotary, 1e-5, head_dim**-0.5)
        weights = LayerWeights(own, own_arena)
        kind.attend_layer(weights, buffers, constants, block_tables, *lens, positions)
        kind.feed_forward(weights, buffers, constants)
        results.append((buffers.x, buffers.residual, own_arena))
    for actual, expected in zip(results[1], results[0], strict=True):
        tolerance = 4 * TOLERANCE[dtype]
        torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance)

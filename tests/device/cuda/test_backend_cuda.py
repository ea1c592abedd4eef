"""What a card's back end answers without a card: a controller asks it, and opens nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from jettison.device.choice import choose_back_end
from jettison.device.cuda.backend import CudaBackEnd
from jettison.errors import BudgetError, ConfigError
from jettison.memory.pagemap import PageSizes
from jettison.types import EMBED_SHARD, HEAD_SHARD, ModelShape, layer_shard

MIB = 1 << 20
SHARDS = {layer_shard(i): 9 * MIB for i in range(48)} | {EMBED_SHARD: MIB, HEAD_SHARD: MIB}
SHAPE = ModelShape(48, 5120, 40, 8, 128, 152064, 13824, 2, False, SHARDS)
SIZES = PageSizes.of(SHAPE, 16, 2 * MIB)


def test_kernels_have_names_without_a_card() -> None:
    back_end = choose_back_end("cuda")
    assert isinstance(back_end, CudaBackEnd)
    for name, resolved in (("auto", "cuda-invariant"), ("cuda", "cuda"), ("cuda-invariant", "cuda-invariant")):
        assert back_end.kind.resolve_kernels(name, "bfloat16") == resolved
    with pytest.raises(ConfigError, match="kernels must be auto, cuda or cuda-invariant, not 'native'"):
        back_end.kind.resolve_kernels("native", "bfloat16")
    with pytest.raises(ConfigError, match="a card computes in float32 or bfloat16, not in"):
        back_end.kind.resolve_kernels("auto", "float64")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_machine_without_a_card_says_so() -> None:
    with pytest.raises(ConfigError, match="CUDA device"):
        CudaBackEnd().load_kernels("auto", "bfloat16")


def test_addresses_are_counted() -> None:
    back_end = CudaBackEnd()
    back_end.kind.check_addresses(60 << 30, 64 * MIB, SHAPE, SIZES)
    with pytest.raises(BudgetError, match="a card has 70368744177664 bytes of addresses"):
        back_end.kind.check_addresses(2 << 40, 64 * MIB, SHAPE, SIZES)


def test_pages_must_be_whole_pages_of_the_host() -> None:
    for wrong in (0, -4096, 1000):
        with pytest.raises(ValueError, match="multiple of 4096"):
            CudaBackEnd().make_pool(1 << 30, wrong)


def test_asking_and_making_one_open_nothing() -> None:
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "from jettison.device.choice import choose_back_end, kind_of\n"
        "assert kind_of('cuda').resolve_kernels('auto', 'bfloat16') == 'cuda-invariant'\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "torch.cuda.init = torch.cuda.current_device = None\n"
        "back_end = choose_back_end('cuda')\n"
        "back_end.bytes, back_end.make_pool(1 << 30, 2 << 20), back_end.make_host_pool(4, 2, 64)\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr

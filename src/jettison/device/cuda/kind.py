"""NVIDIA cards, before one is opened: neither torch nor Triton is imported."""

from __future__ import annotations

from jettison.device.addresses import span_bytes
from jettison.device.dtypes import Dtype
from jettison.device.kernels.processor import Processor
from jettison.device.kernels.registry import CUDA_INVARIANT, find_kernels
from jettison.device.spec import CUDA
from jettison.errors import BudgetError, ConfigError
from jettison.memory.pagemap import PageSizes
from jettison.types import ModelShape

_ADDRESS_BYTES = 1 << 46
"""Half of the addresses that a card shares with its host (47 bits on x86-64)."""
_DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")


class CudaKind:
    """See ``DeviceKind``."""

    goes_ahead = True
    keeps_rows = False
    link_bytes_per_s = 2.4e9
    """The least that an H200 showed under load, of two workers in turns (`docs/gpu.md`). If less is assumed, a
    drop looks too dear to be tried, and none ever measures the link."""

    def check_addresses(self, budget_bytes: int, workspace_bytes: int, shape: ModelShape, sizes: PageSizes) -> None:
        """By counting them: the driver is not asked."""
        needed = span_bytes(budget_bytes, workspace_bytes, shape, sizes)
        if needed > _ADDRESS_BYTES:
            raise BudgetError(
                f"a card has {_ADDRESS_BYTES} bytes of addresses, and a memory budget of {budget_bytes} needs {needed}"
            )

    def resolve_kernels(self, name: str, dtype: Dtype, processor: Processor | None = None) -> str:
        """``auto`` is ``cuda-invariant``."""
        if dtype not in _DTYPES:
            raise ConfigError(f"a card computes in float32 or bfloat16, not in {dtype}")
        name = CUDA_INVARIANT if name == "auto" else name
        find_kernels(name, CUDA)
        return name

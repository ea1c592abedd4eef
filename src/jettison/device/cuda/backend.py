"""The back end of an NVIDIA card: its pages, kernels in Triton and cuBLAS, steps that the host does not wait for.

Making one, and asking it about addresses and kernels, opens no device and imports no Triton: a controller does both.
"""

from __future__ import annotations

from functools import cached_property
from typing import cast

import torch

from jettison.device.addresses import span_bytes
from jettison.device.cuda.bytes import CardBytes
from jettison.device.cuda.card import Card
from jettison.device.cuda.driver import Driver
from jettison.device.cuda.hostpool import PinnedPool
from jettison.device.cuda.pages import PagePool
from jettison.device.cuda.runner import CardKernels, CudaRunner, Limits
from jettison.device.kernels import Kernels, Processor
from jettison.device.kernels.base import CUDA_INVARIANT
from jettison.device.kernels.registry import KernelsUnavailableError, find_kernels
from jettison.device.model.decoder import ModelMemory
from jettison.device.model.hf_config import DecoderConfig
from jettison.device.spec import CUDA
from jettison.errors import BudgetError, ConfigError
from jettison.memory.pagemap import PageSizes
from jettison.types import ModelShape

_ADDRESS_BYTES = 1 << 46
"""Half of the addresses that a card shares with its host (47 bits on x86-64)."""
_PAGE_UNIT = 4096
"""The host's pages: the driver's granularity, which a started pool knows, is a multiple."""
_DTYPES = (torch.float32, torch.bfloat16)


class CudaBackEnd:
    """See ``BackEnd``."""

    computes_by_itself = True
    goes_ahead = True
    keeps_rows = False

    @cached_property
    def card(self) -> Card:
        """The process's first card (``CUDA_VISIBLE_DEVICES``)."""
        return Card()

    @cached_property
    def bytes(self) -> CardBytes:
        """Of tensors over its pages, once kernels are loaded."""
        return CardBytes(self.card)

    def check_addresses(self, budget_bytes: int, workspace_bytes: int, shape: ModelShape, sizes: PageSizes) -> None:
        """By counting them: the driver is not asked."""
        needed = span_bytes(budget_bytes, workspace_bytes, shape, sizes)
        if needed > _ADDRESS_BYTES:
            raise BudgetError(
                f"a card has {_ADDRESS_BYTES} bytes of addresses, and a memory budget of {budget_bytes} needs {needed}"
            )

    def resolve_kernels(self, name: str, dtype: torch.dtype, processor: Processor | None = None) -> str:
        """``auto`` is ``cuda-invariant``."""
        if dtype not in _DTYPES:
            raise ConfigError(f"a card computes in float32 or bfloat16, not in {dtype}")
        name = CUDA_INVARIANT if name == "auto" else name
        find_kernels(name, CUDA)
        return name

    def load_kernels(self, name: str, dtype: torch.dtype) -> Kernels:
        """Opens the card: its stream of steps is the calling thread's from now on."""
        kernels, _ = find_kernels(self.resolve_kernels(name, dtype), CUDA)
        self.card.start()
        try:
            loaded = kernels.load()
        except KernelsUnavailableError as error:
            raise ConfigError(str(error)) from error
        self.card.compile_copies()
        return loaded

    def make_pool(self, budget_bytes: int, page_bytes: int) -> PagePool:
        """Handles of the driver."""
        if page_bytes <= 0 or page_bytes % _PAGE_UNIT:
            raise ValueError(f"pages of {page_bytes} bytes: a card's are a multiple of {_PAGE_UNIT}")
        return PagePool(budget_bytes, page_bytes, self._driver())

    def _driver(self) -> Driver:
        return Driver()

    def make_runner(
        self, config: DecoderConfig, dtype: torch.dtype, memory: ModelMemory, kernels: Kernels, max_num_tokens: int,
        max_num_seqs: int,
    ) -> CudaRunner:
        """Steps run on the card, and are polled."""
        limits = Limits(max_num_tokens, max_num_seqs)
        return CudaRunner(config, dtype, memory, cast(CardKernels, kernels), limits, self.bytes, self.card)

    def make_host_pool(self, num_slots: int, num_layers: int, block_bytes: int) -> PinnedPool:
        """Pinned memory."""
        return PinnedPool(self.card, num_slots, num_layers, block_bytes)

"""The back end of an NVIDIA card: its pages, kernels in Triton and cuBLAS, steps that the host does not wait for.

Making one opens no device and imports no Triton. What a controller asks of cards is beside it (``kind``).
"""

from __future__ import annotations

from functools import cached_property
from typing import cast

import torch

from jettison.device.cuda.bytes import CardBytes
from jettison.device.cuda.card import Card
from jettison.device.cuda.driver import Driver
from jettison.device.cuda.hostpool import PinnedPool
from jettison.device.cuda.kind import CudaKind
from jettison.device.cuda.pages import PagePool
from jettison.device.cuda.runner import CardKernels, CudaRunner, Limits
from jettison.device.dtypes import Dtype
from jettison.device.kernels.base import Kernels
from jettison.device.kernels.registry import KernelsUnavailableError, find_kernels
from jettison.device.model.decoder import ModelMemory
from jettison.device.model.hf_config import DecoderConfig
from jettison.device.spec import CUDA
from jettison.errors import ConfigError

_PAGE_UNIT = 4096
"""The host's pages: the driver's granularity, which a started pool knows, is a multiple."""


class CudaBackEnd:
    """See ``BackEnd``."""

    computes_by_itself = True
    kind = CudaKind()

    @cached_property
    def card(self) -> Card:
        """The process's first card (``CUDA_VISIBLE_DEVICES``)."""
        return Card()

    @cached_property
    def bytes(self) -> CardBytes:
        """Of tensors over its pages, once kernels are loaded."""
        return CardBytes(self.card)

    def load_kernels(self, name: str, dtype: Dtype) -> Kernels:
        """Opens the card: its stream of steps is the calling thread's from now on."""
        kernels, _ = find_kernels(self.kind.resolve_kernels(name, dtype), CUDA)
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

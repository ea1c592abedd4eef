"""The back end of devices whose memory is the host's: pages of a memory file, kernels in C or torch."""

from __future__ import annotations

import torch

from jettison.device.addresses import check_addresses
from jettison.device.devicebytes_host import HostBytes
from jettison.device.hostpool import HostBuffers
from jettison.device.kernels import Kernels, Processor, load_kernels, resolve_kernels
from jettison.device.model.decoder import ModelMemory
from jettison.device.model.hf_config import DecoderConfig
from jettison.device.pages_host import PagePool
from jettison.device.runner import Runner
from jettison.memory.pagemap import PageSizes
from jettison.types import ModelShape


class HostBackEnd:
    """See ``BackEnd``."""

    bytes = HostBytes()
    computes_by_itself = False
    goes_ahead = False
    """Its steps run on the thread that would prepare the next one."""
    keeps_rows = True

    def check_addresses(self, budget_bytes: int, workspace_bytes: int, shape: ModelShape, sizes: PageSizes) -> None:
        """By reserving them, and giving them back."""
        check_addresses(self.make_pool(budget_bytes, sizes.page_bytes), workspace_bytes, shape, sizes)

    def resolve_kernels(self, name: str, dtype: torch.dtype, processor: Processor | None = None) -> str:
        """By loading them: an instruction set counts where it works."""
        return resolve_kernels(name, dtype, processor)

    def load_kernels(self, name: str, dtype: torch.dtype) -> Kernels:
        """See ``load_kernels``."""
        return load_kernels(name, dtype)

    def make_pool(self, budget_bytes: int, page_bytes: int) -> PagePool:
        """A memory file."""
        return PagePool(budget_bytes, page_bytes)

    def make_runner(
        self, config: DecoderConfig, dtype: torch.dtype, memory: ModelMemory, kernels: Kernels, max_num_tokens: int,
        max_num_seqs: int,
    ) -> Runner:
        """Steps run on the caller's thread, and are over when they have been started."""
        return Runner(config, dtype, memory, kernels, max_num_tokens, max_num_seqs, self.bytes)

    def make_host_pool(self, num_slots: int, num_layers: int, block_bytes: int) -> HostBuffers:
        """Pageable memory."""
        return HostBuffers(num_slots, num_layers, block_bytes)

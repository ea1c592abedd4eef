"""The back end of devices whose memory is the host's: pages of a memory file, kernels in C or torch."""

from __future__ import annotations

import torch

from jettison.device.devicebytes_host import HostBytes
from jettison.device.dtypes import Dtype
from jettison.device.hostpool import HostBuffers
from jettison.device.kernels.base import Kernels
from jettison.device.kernels.loading import load_kernels
from jettison.device.kind_host import HostKind
from jettison.device.model.decoder import ModelMemory
from jettison.device.model.hf_config import DecoderConfig
from jettison.device.pages_host import PagePool
from jettison.device.runner import Runner


class HostBackEnd:
    """See ``BackEnd``."""

    bytes = HostBytes()
    computes_by_itself = False
    kind = HostKind()

    def load_kernels(self, name: str, dtype: Dtype) -> Kernels:
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

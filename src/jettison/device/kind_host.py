"""Devices whose memory is the host's, before there is one."""

from __future__ import annotations

from jettison.device.addresses import check_addresses
from jettison.device.dtypes import Dtype
from jettison.device.kernels.choosing import resolve_kernels
from jettison.device.kernels.processor import Processor
from jettison.device.pages_host import PagePool
from jettison.memory.pagemap import PageSizes
from jettison.types import ModelShape


class HostKind:
    """See ``DeviceKind``."""

    goes_ahead = False
    """Its steps run on the thread that would prepare the next one."""
    keeps_rows = True
    link_bytes_per_s = 1e9

    def check_addresses(self, budget_bytes: int, workspace_bytes: int, shape: ModelShape, sizes: PageSizes) -> None:
        """By reserving them, and giving them back."""
        check_addresses(PagePool(budget_bytes, sizes.page_bytes), workspace_bytes, shape, sizes)

    def resolve_kernels(self, name: str, dtype: Dtype, processor: Processor | None = None) -> str:
        """An instruction set counts where it works."""
        return resolve_kernels(name, dtype, processor)

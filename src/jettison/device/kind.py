"""What a controller knows of a kind of device before there is one: no device is opened, and no torch is needed.

A kind is chosen by ``device.choice``; the devices themselves are made of what a back end brings (``device.backend``).
"""

from __future__ import annotations

from typing import Protocol

from jettison.device.dtypes import Dtype
from jettison.device.kernels.processor import Processor
from jettison.memory.pagemap import PageSizes
from jettison.types import ModelShape


class DeviceKind(Protocol):
    """One kind of device. ``tests/device/test_backend.py`` holds each of them to what stands here."""

    @property
    def goes_ahead(self) -> bool:
        """Whether the device is idle while the host plans, so that steps are planned ahead
        (``core.serving.stepsahead``) unless ``--step-ahead`` says otherwise."""
        ...

    @property
    def keeps_rows(self) -> bool:
        """Whether its steps can shed rows at a safepoint, and others go on with them (``StepInput.sheds_from``,
        ``resumes_step``)."""
        ...

    @property
    def link_bytes_per_s(self) -> float:
        """Bytes per second that a link between two workers of one machine is taken to carry while none is measured."""
        ...

    def check_addresses(self, budget_bytes: int, workspace_bytes: int, shape: ModelShape, sizes: PageSizes) -> None:
        """Raise BudgetError where no process here could reserve what such a device needs. What only a worker can tell
        is told at its start."""
        ...

    def resolve_kernels(self, name: str, dtype: Dtype, processor: Processor | None = None) -> str:
        """The kernels' own name of what a configuration calls ``name``, which all workers of a cluster load.
        ``processor``: what the host is taken for, where kernels depend on it. Raises ConfigError."""
        ...

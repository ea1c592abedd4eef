"""``DeviceBytes`` of tensors that lie in host memory: views wherever that can be."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jettison.device.bytesview import as_numpy_uint8, as_tensor_uint8, widened
from jettison.device.devicebytes import Bytes


class HostBytes:
    """See ``DeviceBytes``. It has no state."""

    def read(self, source: Tensor) -> Bytes:
        """A view."""
        return as_numpy_uint8(source)

    def copy_out(self, source: Tensor, out: Bytes) -> None:
        """One copy."""
        out[:] = as_numpy_uint8(source)

    def copy_in(self, data: Bytes, target: Tensor) -> None:
        """One copy."""
        as_numpy_uint8(target)[:] = data

    def writing(self, target: Tensor) -> AbstractContextManager[Tensor]:
        """``target`` itself."""
        return nullcontext(target)

    def tensor(self, data: Bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """A view where alignment allows."""
        flat = as_tensor_uint8(data)
        if flat.data_ptr() % dtype.itemsize or flat.storage_offset() % dtype.itemsize:
            flat = flat.clone()
        return flat.view(dtype).view(shape)

    @property
    def pin(self) -> None:
        """It is one memory."""
        return None

    def gather(self, tables: Sequence[Tensor], rows: npt.NDArray[np.int64], out: Tensor) -> None:
        """One copy of each row."""
        index = torch.from_numpy(rows).to(out.device)
        lines = widened(out.view(len(tables), len(rows), -1))
        for line, table in zip(lines, tables, strict=True):
            torch.index_select(table.view(lines.dtype), 0, index, out=line)

    def scatter(self, tables: Sequence[Tensor], rows: npt.NDArray[np.int64], data: Tensor) -> None:
        """One copy of each row."""
        index = torch.from_numpy(rows).to(data.device)
        lines = widened(data.view(len(tables), len(rows), -1))
        for line, table in zip(lines, tables, strict=True):
            table.view(lines.dtype).index_copy_(0, index, line)

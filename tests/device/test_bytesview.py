"""Bytes seen in wider units are the same bytes."""

from __future__ import annotations

import pytest
import torch

from jettison.device.bytesview import widened


@pytest.mark.parametrize(
    ("row_bytes", "offset", "width"), [(64, 0, 8), (12, 0, 4), (6, 0, 2), (7, 0, 1), (64, 4, 4), (64, 1, 1)]
)
def test_rows_are_viewed_in_the_widest_unit_that_divides_them(row_bytes, offset, width):
    flat = torch.arange(3 * row_bytes + 8, dtype=torch.int64).to(torch.uint8)
    rows = flat[offset : offset + 3 * row_bytes].view(3, row_bytes)
    wide = widened(rows)
    assert wide.dtype.itemsize == width
    assert torch.equal(wide.view(torch.uint8), rows)
    target = torch.zeros(5, row_bytes, dtype=torch.uint8)
    target.view(wide.dtype).index_copy_(0, torch.tensor([4, 0, 2]), wide)
    assert torch.equal(target[[4, 0, 2]], rows) and not target[[1, 3]].any()

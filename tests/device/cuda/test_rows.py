"""Rows of a step as arrays: buckets, padding, and what a list of work says of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jettison.device.cuda.rows import BUCKETS, NOWHERE, bucket_of, lay_out
from jettison.device.cuda.tiles import ONE_SIZE, tiles_for
from jettison.device.cuda.worklist import WorkShape
from jettison.device.step import StepInput

ARENA = torch.zeros(40, 2, 2, 4, 16)


def shape_of(most_tokens: int) -> WorkShape:
    return WorkShape(tiles_for(16, 4)[ONE_SIZE], 2, 2, 8)


def step(queries: list[int], **fields) -> StepInput:
    num_rows = len(queries)
    return StepInput(
        step_id=1, layer_lo=0, layer_hi=1, token_ids=np.zeros(sum(queries), np.int32),
        query_lens=np.array(queries, np.int32), context_lens=np.full(num_rows, 5, np.int32),
        block_tables=np.arange(8 * num_rows, dtype=np.int32).reshape(num_rows, 8) % 40,
        sample_rows=np.zeros(0, np.int32), **fields,
    )  # fmt: skip


def test_buckets_are_the_least_that_hold_the_rows() -> None:
    assert BUCKETS[:6] == [1, 2, 4, 8, 16, 32] and BUCKETS[-1] == 256
    sizes = {1: 1, 3: 4, 8: 8, 9: 16, 17: 32, 256: 256, 257: None}
    assert {rows: bucket_of(step([1] * rows), 512) for rows in sizes} == sizes
    assert bucket_of(step([1] * 9), 12) is None, "a bucket must fit the workspace"
    assert bucket_of(step([1, 2]), 512) is None


def test_padding_changes_no_row_and_what_graphs_read_has_one_place_for_each_bucket() -> None:
    laid = []
    for num_rows in (5, 8):
        asked = step([1] * num_rows)
        rows = lay_out(shape_of, ARENA, asked.block_tables, asked.query_lens, asked.context_lens, num_rows)
        padded = rows.padded(8)
        laid.append({name: array.shape for name, array in padded.arrays().items() if name in ("positions", "slots")})
        assert list(padded.arrays()) == ["positions", "slots", "work", "tables"]
        assert (padded.slots[:num_rows] == rows.slots).all() and (padded.slots[num_rows:] == NOWHERE).all()
        assert padded.work is rows.work and rows.work[0] == num_rows
        assert padded.tables is rows.tables
    assert laid[0] == laid[1]


def test_rows_beyond_their_tables_are_refused() -> None:
    asked = step([30])
    with pytest.raises(IndexError):
        lay_out(shape_of, ARENA, asked.block_tables, asked.query_lens, asked.context_lens, 30)

"""Rows of a step as arrays: buckets, padding, and what a list of work says of them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from jettison.device.cuda.rows import BUCKETS, MOST_ROWS, NOWHERE, bucket_of, buckets_for, lay_out
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


SEVEN_B = 233e6
"""Parameters of a layer."""


def test_buckets_are_the_least_that_hold_the_tokens() -> None:
    assert BUCKETS[:6] == [1, 2, 4, 8, 16, 32] and sorted(set(BUCKETS)) == BUCKETS
    assert all(after <= 1.125 * before for before, after in pairwise(b for b in BUCKETS if 256 <= b <= 1024))
    buckets = buckets_for(SEVEN_B, 8192)
    chunks = {(1,): 1, (1, 1, 1): 4, (8,): 8, (1, 7, 1): 9, (30, 1): 32, (1,) * 256: 256, (250, 1, 9): 288, (1025,): 0}
    assert {queries: bucket_of(step([*queries]), buckets) for queries in chunks} == {
        queries: next((b for b in BUCKETS if b >= sum(queries)), None) if size else None
        for queries, size in chunks.items()
    }
    assert bucket_of(step([1] * (MOST_ROWS + 1)), buckets) is None, "tables have no place for so many"


def test_graphs_end_where_a_card_computes_longer_than_a_host_launches() -> None:
    assert buckets_for(SEVEN_B, 8192)[-1] == 1024
    assert buckets_for(12 * SEVEN_B, 8192)[-1] == 256, "steps of decodes have graphs in every model"
    assert buckets_for(15e6, 1 << 20)[-1] == BUCKETS[-1]
    assert buckets_for(15e6, 2000)[-2:] == [1792, 2000], "full steps are frequent, and a bucket must fit the workspace"
    assert buckets_for(SEVEN_B, 12) == [1, 2, 4, 8, 12] and buckets_for(SEVEN_B, 1) == [1]


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

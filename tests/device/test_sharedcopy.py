"""A machine's copy of the parameters: what one worker wrote another reads, and nothing before it is complete."""

from __future__ import annotations

import os

import numpy as np
import pytest

from jettison.device import sharedcopy
from jettison.device.beside import open_shared_copy
from jettison.device.devicebytes_host import HostBytes
from jettison.device.model.identity import digest_of
from jettison.device.sharedcopy import SharedCopy
from jettison.types import ModelShape, layer_shard

SHARDS = {layer_shard(0): 10_000, layer_shard(1): 1, layer_shard(2): 4096}
SHAPE = ModelShape(3, 64, 4, 2, 24, 64, 64, 4, False, SHARDS)


def content(shard: str) -> np.ndarray:
    return np.random.default_rng(list(shard.encode())).integers(0, 256, SHARDS[shard], dtype=np.uint8)


@pytest.fixture
def ends():
    fd = open_shared_copy()
    ends = SharedCopy(fd, SHAPE, HostBytes()), SharedCopy(fd, SHAPE, HostBytes())
    os.close(fd)
    yield ends
    for end in ends:
        end.close()


def drained(pieces):
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value


def test_what_one_writes_the_other_reads(ends, monkeypatch):
    monkeypatch.setattr(sharedcopy, "PIECE_BYTES", 999)
    writer, reader = ends
    for shard in SHARDS:
        assert not reader.has(shard)
        drained(writer.writing(shard, content(shard)))
        assert reader.has(shard)
    for shard in SHARDS:
        slab = np.zeros(SHARDS[shard], dtype=np.uint8)
        assert drained(reader.reading(shard, slab)) == digest_of(content(shard))
        assert (slab == content(shard)).all()


def test_a_shard_that_was_written_in_part_is_not_there(ends, monkeypatch):
    monkeypatch.setattr(sharedcopy, "PIECE_BYTES", 999)
    writer, reader = ends
    pieces = writer.writing("layer:0", content("layer:0"))
    next(pieces)
    pieces.close()
    assert not reader.has("layer:0")


def test_a_copy_that_was_cut_short_is_an_error(ends):
    writer, reader = ends
    drained(writer.writing("layer:2", content("layer:2")))
    os.ftruncate(writer._fd, 100)
    with pytest.raises(OSError, match="cut short"):
        drained(reader.reading("layer:2", np.zeros(4096, dtype=np.uint8)))


def test_a_closed_end_has_nothing_and_closes_twice(ends):
    writer, reader = ends
    drained(writer.writing("layer:1", content("layer:1")))
    reader.close()
    reader.close()
    assert not reader.has("layer:1") and writer.has("layer:1")

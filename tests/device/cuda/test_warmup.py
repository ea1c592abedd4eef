"""What a card computes at its start: chunks of every size of tile, within what there is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jettison.device.cuda.tiles import choose_tile, tiles_for
from jettison.device.cuda.warmup import num_warm_blocks, warm_steps
from jettison.device.model.hf_config import read_config
from jettison.types import LayerRange


@pytest.mark.parametrize(("heads", "kv_heads"), [(28, 4), (8, 8), (32, 2)])
def test_each_size_of_tile_is_compiled(tiny_models, heads: int, kv_heads: int) -> None:
    config = replace(read_config(tiny_models["qwen2"]), num_heads=heads, num_kv_heads=kv_heads)
    group = heads // kv_heads
    steps = warm_steps(config, LayerRange(0, 4), 1000, 16)
    taken = {choose_tile(128, 2, group, step.num_tokens, is_one_size=False) for step in steps}
    assert taken == {tile for rows, tile in tiles_for(128, 2).items() if rows >= group}
    assert num_warm_blocks(steps) == -(-max(step.num_tokens for step in steps) // 16)


def test_stages_take_what_they_have(tiny_models) -> None:
    config = read_config(tiny_models["qwen2"])
    first, last = (warm_steps(config, layers, 3, 4) for layers in (LayerRange(0, 2), LayerRange(2, 4)))
    assert [len(step.token_ids) for step in first] == [1, 3] and not any(len(step.sample_rows) for step in first)
    assert not any(len(step.token_ids) for step in last) and all(len(step.sampling) == 1 for step in last)

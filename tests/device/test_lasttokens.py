"""Tokens that a step ahead begins with."""

from __future__ import annotations

import numpy as np
import pytest

from jettison.device.lasttokens import LastTokens
from jettison.device.step import StepInput, StepOutput
from jettison.errors import TokensLostError
from jettison.types import FAILED_TOKEN_ID, SampledToken


def step(tokens: list[int], follows_step: int | None) -> StepInput:
    ones = np.ones(len(tokens), dtype=np.int32)
    return StepInput(
        step_id=9, layer_lo=0, layer_hi=1, token_ids=np.array(tokens, dtype=np.int32), query_lens=ones,
        context_lens=ones, block_tables=ones[:, None], sample_rows=ones[:0], follows_step=follows_step,
    )  # fmt: skip


def test_a_name_stands_for_the_token_in_its_place() -> None:
    last = LastTokens()
    last.note(StepOutput(4, [SampledToken(token) for token in (70, FAILED_TOKEN_ID, 72)]))
    ahead = step([-3, 5, -1, -2, 0], 4)
    assert last.token_ids(ahead).tolist() == [72, 5, 70, 0, 0], "in place of one that failed any token does"
    assert ahead.token_ids.tolist() == [-3, 5, -1, -2, 0], "a step is not changed"
    assert last.token_ids(step([1, 2], None)).tolist() == [1, 2]


def test_only_the_last_step_is_followed() -> None:
    last = LastTokens()
    with pytest.raises(TokensLostError, match="step 4"):
        last.token_ids(step([-1], 4))
    last.note(StepOutput(4, [SampledToken(70)]))
    last.note(StepOutput(5, []))
    with pytest.raises(TokensLostError):
        last.token_ids(step([-1], 4))
    assert last.token_ids(step([3], 5)).tolist() == [3]
    with pytest.raises(IndexError):
        last.token_ids(step([-1], 5))

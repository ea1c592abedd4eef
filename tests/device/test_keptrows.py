"""Steps that shed rows at any layer, and go on with them later, behind other steps, have the bits of whole ones."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from jettison.device.dtypes import name_of
from jettison.device.kernels.choosing import rows_are_independent
from jettison.device.kernels.loading import load_kernels
from jettison.device.step import Shed, StepInput, StepOutput
from jettison.errors import RowsLostError
from jettison.types import LayerRange


class Shedding:
    """``Runner.run`` of steps that each shed rows from somewhere on, and then resume them, some layers at a time."""

    def __init__(self, runner, seed: int) -> None:
        self._runner = runner
        self._random = random.Random(seed)
        self._step_id = 1_000_000
        self.num_shed = 0

    def __call__(self, step: StepInput, hidden: torch.Tensor | None):
        draw, num_layers = self._random, step.layer_hi - step.layer_lo
        if step.layer_lo > 0 or draw.random() < 0.2:
            return self._runner.run(step, hidden)
        step.sheds_from, step.safepoint_layers = draw.randrange(len(step.query_lens)), 1
        stop, looks = draw.randrange(num_layers), iter(range(num_layers))
        shed = self._runner.run(step, hidden, gives_up=lambda: next(looks) == stop)
        if shed is None:
            assert stop == 0 and step.sheds_from == 0, "nothing was computed, so nothing is kept"
            step.sheds_from, step.safepoint_layers = None, 0
            return self._runner.run(step, hidden)
        assert isinstance(shed, Shed) and shed.num_layers == stop
        self.num_shed += 1
        self._disturb(step)
        return joined(shed.result, self._resumed(step), step.sheds_from)

    def _resumed(self, step: StepInput):
        """The rows that were shed, in several steps."""
        rest, before = trailing(step, step.sheds_from or 0), step.step_id
        while True:
            self._step_id += 1
            rest.step_id, rest.resumes_step, rest.sheds_from = self._step_id, before, 0
            joins = self._random.random() < 0.5
            part = self._behind_a_stranger(rest) if joins else rest
            part.resumes_step, part.most_layers = before, self._random.choice([None, 1, 2])
            part.safepoint_layers, stop, looks = 1, self._random.randrange(8), iter(range(99))
            result = self._runner.run(part, None, gives_up=lambda stop=stop, looks=looks: next(looks) == stop)
            if not isinstance(result, Shed):
                return self._take(result, rest) if joins else result
            if joins:
                self._take(result.result, rest)
            assert (result.result is None) is not joins
            before = self._step_id
            self._disturb(step)

    def _disturb(self, step: StepInput) -> None:
        """Another step of as many tokens, in blocks that no request has."""
        self._step_id += 1
        self._runner.run(self._stranger(step, self._step_id), None)

    def _stranger(self, step: StepInput, step_id: int) -> StepInput:
        """A prompt of its own."""
        tokens = np.arange(1, 1 + min(10, step.num_tokens), dtype=np.int32)
        return StepInput(
            step_id=step_id, layer_lo=step.layer_lo, layer_hi=step.layer_hi, token_ids=tokens,
            query_lens=np.array([len(tokens)], dtype=np.int32), context_lens=np.zeros(1, dtype=np.int32),
            block_tables=np.array([[NUM_BLOCKS, NUM_BLOCKS + 1, NUM_BLOCKS + 2]], dtype=np.int32),
            sample_rows=np.zeros(1, dtype=np.int32),
        )  # fmt: skip

    def _behind_a_stranger(self, rest: StepInput) -> StepInput:
        """The rows that were shed, joining those of another step."""
        first = self._stranger(rest, rest.step_id)
        width = max(first.block_tables.shape[1], rest.block_tables.shape[1])
        tables = [np.pad(t, ((0, 0), (0, width - t.shape[1]))) for t in (first.block_tables, rest.block_tables)]
        for row in (*rest.sampling, *rest.prompt_logprobs):
            row.row += 1
        return StepInput(
            step_id=rest.step_id, layer_lo=rest.layer_lo, layer_hi=rest.layer_hi, token_ids=first.token_ids,
            query_lens=np.concatenate([first.query_lens, rest.query_lens]),
            context_lens=np.concatenate([first.context_lens, rest.context_lens]), block_tables=np.concatenate(tables),
            sample_rows=np.concatenate([first.sample_rows, rest.sample_rows + 1]).astype(np.int32),
            sampling=rest.sampling, prompt_logprobs=rest.prompt_logprobs, sheds_from=1,
        )  # fmt: skip

    def _take(self, joined, rest: StepInput):
        """The share of the rows that were shed in what a joined step has made."""
        for row in (*rest.sampling, *rest.prompt_logprobs):
            row.row -= 1
        if isinstance(joined, torch.Tensor):
            return joined[min(10, len(joined) - rest.num_tokens) :]
        assert isinstance(joined, StepOutput)
        moved = {row - 1: entries for row, entries in joined.prompt_logprobs.items()}
        return StepOutput(joined.step_id, joined.tokens[1:], moved)


NUM_BLOCKS = 128
"""Of requests; a few more are there."""


def trailing(step: StepInput, first: int) -> StepInput:
    """A step of its rows from one on."""
    sampled = step.sample_rows[step.sample_rows >= first]
    for row in (*step.sampling, *step.prompt_logprobs):
        row.row -= first
    return StepInput(
        step_id=step.step_id, layer_lo=step.layer_lo, layer_hi=step.layer_hi, token_ids=np.zeros(0, dtype=np.int32),
        query_lens=step.query_lens[first:], context_lens=step.context_lens[first:],
        block_tables=step.block_tables[first:], sample_rows=(sampled - first).astype(np.int32),
        sampling=[row for row in step.sampling if row.row >= 0],
        prompt_logprobs=[row for row in step.prompt_logprobs if row.row >= 0],
    )  # fmt: skip


def joined(first, second, num_rows: int | None):
    """What both parts of a step have made, as the whole would."""
    if first is None:
        return second
    if isinstance(first, torch.Tensor):
        return torch.cat([first, second])
    moved = {row + (num_rows or 0): entries for row, entries in second.prompt_logprobs.items()}
    return StepOutput(second.step_id, first.tokens + second.tokens, first.prompt_logprobs | moved)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("split", [False, True])
def test_a_step_in_parts_has_the_bits_of_a_whole_one(tiny_models, new_runner, new_driver, dtype, split) -> None:
    kernels = load_kernels("auto", name_of(dtype))
    if dtype is not torch.float64 and not rows_are_independent(kernels.name, name_of(dtype)):
        pytest.skip("rows depend on the batch here")
    for name, folder in tiny_models.items():
        drivers = []
        for seed in (None, 1):
            runner = new_runner(folder, dtype, kernels=kernels, num_blocks=NUM_BLOCKS + 3)
            run = runner.run if seed is None else Shedding(runner, seed)
            whole, num = LayerRange(0, runner.config.num_layers), runner.config.num_layers
            layers = [LayerRange(0, num - 1), LayerRange(num - 1, num)] if split else [whole]
            driver = new_driver([(run, part) for part in layers], NUM_BLOCKS, with_logprobs=True)
            serve(driver)
            drivers.append((driver, run))
        (expected, _), (got, shedding) = drivers
        assert shedding.num_shed >= 6, name
        for request in expected.requests:
            one, other = expected.requests[request], got.requests[request]
            assert one.output == other.output, (name, request)
            if rows_are_independent(kernels.name, name_of(dtype)):
                assert one.logprobs == other.logprobs and one.prompt_logprobs == other.prompt_logprobs, (name, request)


def serve(driver) -> None:
    """Prompts in chunks beside decodes."""
    rng = random.Random(7)
    for i, length in enumerate((5, 17, 1, 9)):
        driver.add(f"r{i}", [rng.randrange(1, 200) for _ in range(length)])
    for _ in range(24):
        plan = {
            name: min(request.num_pending, rng.choice([1, 3, 8]))
            for name, request in driver.requests.items() if request.num_pending and len(request.output) < 8
        }
        if plan:
            driver.step(plan)


def test_rows_that_are_not_kept_any_more_are_refused(tiny_models, new_runner) -> None:
    runner = new_runner(tiny_models["llama"], kernels=load_kernels("auto"), max_num_tokens=16, max_num_seqs=2)

    def step(step_id: int, **changes) -> StepInput:
        values = {"token_ids": [1, 2, 3], "query_lens": [3], "context_lens": [0], "block_tables": [[2]],
                  "sample_rows": [0]}
        arrays = {key: np.array(value, dtype=np.int32) for key, value in values.items()}
        return StepInput(step_id=step_id, layer_lo=0, layer_hi=runner.config.num_layers, **(arrays | changes))

    none = np.zeros(0, dtype=np.int32)

    def shed(step_id: int) -> Shed:
        looks = iter((False, True))
        result = runner.run(step(step_id, safepoint_layers=1, sheds_from=0), None, gives_up=lambda: next(looks))
        assert result == Shed(1, None)
        return result

    shed(1)
    shed(2)
    with pytest.raises(RowsLostError, match="step 1"):
        runner.run(step(3, token_ids=none, resumes_step=1), None)
    assert isinstance(runner.run(step(4, token_ids=none, resumes_step=2), None), StepOutput)
    with pytest.raises(RowsLostError):
        runner.run(step(5, token_ids=none, resumes_step=2), None)
    assert runner.run(step(6, safepoint_layers=1, sheds_from=0), None, gives_up=lambda: True) is None

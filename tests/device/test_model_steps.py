"""What a step may and may not do to the device's memory, and the steps that are refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from jettison.device.dtypes import name_of
from jettison.device.kernels.loading import load_kernels
from jettison.device.model.workspace import Workspace
from jettison.device.model.workspaceplan import plan_workspace
from jettison.device.runner import Runner
from jettison.device.step import PromptLogprobsRow, StepInput, StepOutput

KERNELS = load_kernels("auto")


def make_step(num_layers: int, **changes) -> StepInput:
    values = {
        "step_id": 7,
        "layer_lo": 0,
        "layer_hi": num_layers,
        "token_ids": [1, 2, 3],
        "query_lens": [3],
        "context_lens": [0],
        "block_tables": [[2]],
        "sample_rows": [0],
        **changes,
    }
    arrays = {"token_ids", "query_lens", "context_lens", "block_tables", "sample_rows"}
    return StepInput(**{key: np.array(value, np.int32) if key in arrays else value for key, value in values.items()})


@pytest.fixture(scope="module")
def runner(tiny_models, new_runner) -> Runner:
    return new_runner(tiny_models["llama"], kernels=KERNELS, max_num_tokens=16, max_num_seqs=2)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"layer_lo": 2, "layer_hi": 2}, ValueError, "layers 2 to 2"),
        ({"layer_lo": 2, "layer_hi": 1}, ValueError, "layers 2 to 1"),
        ({"layer_hi": 9}, ValueError, "layers 0 to 9 of 3"),
        ({"query_lens": [17], "token_ids": [1] * 17, "block_tables": [[0, 1, 2, 3, 4]]}, ValueError, "17 tokens"),
        ({"query_lens": [0], "token_ids": []}, ValueError, "0 tokens"),
        ({"token_ids": [1, 2]}, ValueError, "takes 3 token ids"),
        ({"token_ids": [1, 2, 261]}, IndexError, "range"),
        ({"token_ids": [1, 2, -1]}, IndexError, "range"),
        ({"sample_rows": [0, 0, 0]}, ValueError, "samples 3"),
        ({"context_lens": [600], "block_tables": [list(range(151))]}, IndexError, "position"),
        ({"context_lens": [-1]}, IndexError, "position"),
        ({"block_tables": [[256]]}, IndexError, "block"),
        ({"prompt_logprobs": [PromptLogprobsRow(0, 1, (1, 2, 3, 4))]}, ValueError, "more prompt logprobs"),
        ({"layer_lo": 1, "token_ids": []}, ValueError, "expected torch.float64"),
    ],
)
def test_steps_that_do_not_fit_are_refused(runner, changes, error, message):
    with pytest.raises(error, match=message):
        runner.run(make_step(runner.config.num_layers, **changes), None)
    assert isinstance(runner.run(make_step(runner.config.num_layers), None), StepOutput)


def test_hidden_states_must_match(runner):
    step = make_step(runner.config.num_layers, layer_lo=1, token_ids=[])
    for hidden in (torch.zeros(2, 48, dtype=torch.float64), torch.zeros(3, 48)):
        with pytest.raises(ValueError, match="hidden states"):
            runner.run(step, hidden)
    with pytest.raises(ValueError, match="no hidden states"):
        runner.run(make_step(runner.config.num_layers), torch.zeros(3, 48, dtype=torch.float64))


def test_hidden_states_outlive_the_next_step(runner):
    """They are sent while the next microbatch runs."""
    first = runner.run(make_step(1), None)
    copy = first.clone()
    second = runner.run(make_step(1, token_ids=[9, 8, 7]), None)
    assert torch.equal(first, copy)
    assert not torch.equal(first, second)


def test_input_hidden_states_are_left_alone(runner):
    hidden = torch.randn(3, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    copy = hidden.clone()
    runner.run(make_step(runner.config.num_layers, layer_lo=1, token_ids=[]), hidden)
    assert torch.equal(hidden, copy)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_workspace_buffers_lie_inside_and_apart(runner, dtype):
    config = runner.config
    num_bytes = plan_workspace(config, name_of(dtype), 16, 2, keeps_rows=True).num_bytes
    memory = torch.zeros(num_bytes, dtype=torch.uint8)
    workspace = Workspace(memory, config, dtype, 16, 2, keeps_rows=True)
    assert workspace.logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    permanent = ["final_norm", "cos", "sin", "kept", "residual", "x"]
    sharing = [["qkv", "attention"], ["gate_up", "activated"], ["rows", "logits"]]
    for together in sharing:
        spans = []
        for name in permanent + together:
            tensor = getattr(workspace, name)
            start = tensor.data_ptr() - memory.data_ptr()
            assert start % 64 == 0
            spans.append((start, start + tensor.numel() * tensor.itemsize))
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert spans[-1][1] <= num_bytes
    with pytest.raises(RuntimeError):
        Workspace(memory[:-64], config, dtype, 16, 2, keeps_rows=True)

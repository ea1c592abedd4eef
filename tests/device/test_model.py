"""The decoder against transformers, whatever the architecture, the chunks, the batch and the split."""

from __future__ import annotations

import random

import pytest
import torch

from jettison.device.kernels import library
from jettison.device.kernels.loading import load_kernels
from jettison.types import LayerRange

NUM_BLOCKS = 256
NAMES = ["llama", "llama3-rope", "mistral", "qwen2", "qwen3"]
MIXED = ["native+torch-linear"] if library.supported_variants() else []


@pytest.fixture(params=["torch", "auto", *MIXED], scope="module")
def kernels(request):
    return load_kernels(request.param)


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def run_alone(run, num_layers, new_driver, token_ids, num_tokens):
    driver = new_driver([(run, LayerRange(0, num_layers))], NUM_BLOCKS)
    driver.add("a", token_ids)
    driver.step({"a": len(token_ids)})
    driver.decode(["a"], num_tokens - 1)
    return driver.requests["a"].output


def run_mixed(driver, num_tokens: int = 64) -> None:
    """Three requests in chunks at odd boundaries, prefill beside decode, and ``num_tokens`` for the first."""
    driver.add("a", prompt(21, 1))
    driver.add("b", prompt(37, 2))
    driver.add("c", prompt(1, 3))
    driver.step({"a": 5, "c": 1})
    driver.step({"c": 1, "b": 3, "a": 11})
    driver.step({"b": 17, "a": 5})
    driver.step({"a": 1, "b": 1, "c": 1})
    driver.step({"b": 16, "a": 1})
    driver.decode(["b", "a"], 8)
    driver.decode(["a", "c"], num_tokens - 11)


def assert_like_reference(request, logprobs: torch.Tensor, tolerance: float) -> None:
    """Every generated token is the reference's argmax, and all log-probabilities agree."""
    first = request.num_prompt_tokens - 1
    greedy = logprobs[first:-1].argmax(-1).tolist()
    assert request.output == greedy
    for position, described in enumerate(request.logprobs, start=first):
        ids, values = zip(*described.top)
        assert values == pytest.approx(logprobs[position, list(ids)].tolist(), abs=tolerance)
    prompt_ids = request.token_ids[1 : first + 1]
    expected = logprobs[range(first), prompt_ids].tolist()
    assert [described.logprob for described in request.prompt_logprobs] == pytest.approx(expected, abs=tolerance)
    assert [described.token_id for described in request.prompt_logprobs] == prompt_ids


@pytest.mark.parametrize("name", NAMES)
def test_double_agrees_with_transformers(name, tiny_models, kernels, new_runner, new_driver, reference_logprobs):
    runner = new_runner(tiny_models[name], kernels=kernels)
    driver = new_driver([(runner.run, LayerRange(0, runner.config.num_layers))], NUM_BLOCKS, with_logprobs=True)
    run_mixed(driver)
    assert len(driver.requests["a"].output) == 64
    for request in driver.requests.values():
        assert_like_reference(request, reference_logprobs(tiny_models[name], request.token_ids), 1e-9)


@pytest.mark.parametrize("name", ["qwen3", "llama3-rope"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_split_changes_no_bit(name, dtype, tiny_models, kernels, new_runner, new_driver):
    whole = new_runner(tiny_models[name], dtype, kernels=kernels)
    num_layers = whole.config.num_layers
    expected = new_driver([(whole.run, LayerRange(0, num_layers))], NUM_BLOCKS, with_logprobs=True)
    run_mixed(expected, 16)
    for boundary in range(1, num_layers):
        ranges = LayerRange(0, boundary), LayerRange(boundary, num_layers)
        stages = [(new_runner(tiny_models[name], dtype, kernels=kernels).run, layers) for layers in ranges]
        split = new_driver(stages, NUM_BLOCKS, with_logprobs=True, seed=boundary)
        run_mixed(split, 16)
        for request, same in zip(split.requests.values(), expected.requests.values()):
            assert (request.token_ids, request.logprobs, request.prompt_logprobs) == (
                same.token_ids,
                same.logprobs,
                same.prompt_logprobs,
            )


@pytest.mark.parametrize("name", ["llama3-rope", "qwen2"])
def test_a_batch_changes_no_token_in_double(name, tiny_models, kernels, new_runner, new_driver):
    runner = new_runner(tiny_models[name], kernels=kernels)
    mixed = new_driver([(runner.run, LayerRange(0, runner.config.num_layers))], NUM_BLOCKS)
    run_mixed(mixed, 24)
    for request in mixed.requests.values():
        prompt_ids = request.token_ids[: request.num_prompt_tokens]
        alone = run_alone(runner.run, runner.config.num_layers, new_driver, prompt_ids, len(request.output))
        assert request.output == alone


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 0.5)])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_lower_precisions_are_near(
    name, dtype, tolerance, tiny_models, kernels, new_runner, new_driver, reference_logprobs
):
    runner = new_runner(tiny_models[name], dtype, kernels=kernels)
    driver = new_driver([(runner.run, LayerRange(0, runner.config.num_layers))], NUM_BLOCKS, with_logprobs=True)
    run_mixed(driver)
    for request in driver.requests.values():
        reference = reference_logprobs(tiny_models[name], request.token_ids)
        positions = range(request.num_prompt_tokens - 1, len(request.token_ids) - 1)
        expected = reference[positions, request.output].tolist()
        assert [described.logprob for described in request.logprobs] == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_output_is_varied(name, tiny_models, new_runner, new_driver):
    """Otherwise comparing it proves nothing."""
    runner = new_runner(tiny_models[name], kernels=load_kernels("auto"))
    output = run_alone(runner.run, runner.config.num_layers, new_driver, prompt(12, 5), 64)
    assert len(set(output)) >= 24


def test_prompt_logprobs_without_sampling(tiny_models, new_runner, new_driver, reference_logprobs):
    """A chunk in the middle of a prompt yields them too."""
    runner = new_runner(tiny_models["llama"], kernels=load_kernels("auto"))
    driver = new_driver([(runner.run, LayerRange(0, runner.config.num_layers))], NUM_BLOCKS, with_logprobs=True)
    driver.add("a", prompt(40, 4))
    result = driver.step({"a": 30})
    assert result.tokens == []
    assert len(result.prompt_logprobs[0]) == 30
    logprobs = reference_logprobs(tiny_models["llama"], driver.requests["a"].token_ids)
    for position, described in enumerate(result.prompt_logprobs[0]):
        assert described.top[0][0] == logprobs[position].argmax()

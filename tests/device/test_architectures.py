"""Every architecture against transformers: tokens and log-probabilities in double, whatever the chunks, the batch and
the split; on the host, and on a card's runner."""

from __future__ import annotations

import random

import pytest
import torch
from cardbackend import RowKernels, card_runner

from jettison.device.kernels.loading import load_kernels
from jettison.device.model.families import FAMILIES
from jettison.device.model.samples import SAMPLES, make_sample
from jettison.device.reference import InDouble
from jettison.types import LayerRange
from longrun import part_of

NUM_BLOCKS, ALL = 128, LayerRange(0, 4)
SIZES = {"hidden": 64, "std": 0.15, "max_position_embeddings": 512, "dtype": "float64"}
NAMES = [sample.name for sample in SAMPLES]
PLAIN = {
    "Llama 2", "Llama 3", "Llama, YaRN", "Mistral", "Mistral, windows", "Qwen2", "Qwen2, windows", "Qwen3",
    "Phi-4-mini", "Phi-3, long", "GLM-4", "Seed-OSS",
}  # fmt: skip
"""What needs no layer of its own."""
FEW = part_of(
    NAMES, ["Gemma 2", "Gemma 3", "Phi-3, long", "Granite", "Cohere 2", "GLM-4-MoE", "Mixtral", "gpt-oss"]
)
"""For what is not each architecture's own: windows, scales, LayerNorm, experts and sinks are among them."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Name -> a folder, made when it is first asked for."""
    made = {}

    def folder_of(name: str):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name.replace(" ", "-")) / "model"
            make_sample(SAMPLES[NAMES.index(name)], made[name], 1, **SIZES)
        return made[name]

    return folder_of


@pytest.fixture(scope="module")
def expected(folders):
    """(name, token ids) -> transformers' log-probabilities [tokens, vocab], in double throughout."""
    transformers = pytest.importorskip("transformers")
    models = {}

    def compute(name: str, token_ids: list[int]) -> torch.Tensor:
        with InDouble(), torch.no_grad():
            if name not in models:
                models[name] = transformers.AutoModelForCausalLM.from_pretrained(
                    folders(name), dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
                ).eval()
            return models[name](torch.tensor([token_ids])).logits[0].log_softmax(-1)

    return compute


def run(new_driver, stages, num_blocks: int = NUM_BLOCKS, seed: int = 0):
    """Three requests in chunks at odd borders, prefill beside decode; longer than all windows and original contexts."""
    driver = new_driver(stages, num_blocks, with_logprobs=True, seed=seed)
    prompts = [random.Random(i).choices(range(256), k=length) for i, length in enumerate((33, 21, 1))]
    for name, prompt in zip("abc", prompts, strict=True):
        driver.add(name, prompt)
    driver.step({"a": 5, "c": 1})
    driver.step({"c": 1, "b": 3, "a": 11})
    driver.step({"b": 17, "a": 17})
    driver.step({"a": 1, "b": 1, "c": 1})
    driver.decode(["b", "a"], 6)
    return driver.requests


def assert_like(request, logprobs: torch.Tensor, tolerance: float = 1e-9) -> None:
    first = request.num_prompt_tokens - 1
    assert request.output == logprobs[first:-1].argmax(-1).tolist()
    for position, described in enumerate(request.logprobs, start=first):
        ids, values = zip(*described.top)
        assert values == pytest.approx(logprobs[position, list(ids)].tolist(), abs=tolerance)
    wanted = logprobs[range(first), request.token_ids[1 : first + 1]].tolist()
    assert [described.logprob for described in request.prompt_logprobs] == pytest.approx(wanted, abs=tolerance)


def card_like(config, dtype, memory, kernels, max_num_tokens, max_num_seqs, device_bytes):
    return card_runner(config, dtype, memory, RowKernels("cuda-invariant"), max_num_tokens, max_num_seqs, device_bytes)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_transformers(name, folders, expected, new_runner, new_driver):
    """In double, and log-probabilities with them. Where layers are an architecture's own, two stages give the same
    bits, and a card's runner with its graphs, and torch's kernels, the same tokens."""
    folder, kernels = folders(name), load_kernels("auto")

    def made(**more):
        return new_runner(folder, num_blocks=NUM_BLOCKS, **{"kernels": kernels, **more})

    whole = made()
    assert whole.config.is_plain == (name in PLAIN)
    requests = run(new_driver, [(whole.run, ALL)])
    for request in requests.values():
        assert_like(request, expected(name, request.token_ids))
    if name in PLAIN:
        return
    split = run(new_driver, [(made().run, layers) for layers in (LayerRange(0, 1), LayerRange(1, 4))], seed=1)
    card = made(build=card_like)
    others = [run(new_driver, [(lambda *step: card.start_step(*step).result(), ALL)])]
    if name in FEW:
        others.append(run(new_driver, [(made(kernels=load_kernels("torch")).run, ALL)]))
    for key, request in requests.items():
        assert (split[key].token_ids, split[key].logprobs) == (request.token_ids, request.logprobs)
        assert all(other[key].token_ids == request.token_ids for other in others)


@pytest.mark.parametrize("name", FEW)
def test_bfloat16_is_near(name, folders, new_runner, new_driver, expected):
    runner = new_runner(folders(name), torch.bfloat16, kernels=load_kernels("auto"), num_blocks=NUM_BLOCKS)
    for request in run(new_driver, [(runner.run, ALL)]).values():
        logprobs = expected(name, request.token_ids)
        positions = range(request.num_prompt_tokens - 1, len(request.token_ids) - 1)
        wanted = logprobs[positions, request.output].tolist()
        assert [described.logprob for described in request.logprobs] == pytest.approx(wanted, abs=0.7)


def test_what_stands_for_transformers_is_transformers_in_single(folders, expected):
    """``InDouble`` changes precision alone: stock float32 of each architecture is near it."""
    transformers = pytest.importorskip("transformers")
    token_ids = random.Random(5).choices(range(256), k=40)
    for name in FEW:
        stock = transformers.AutoModelForCausalLM.from_pretrained(
            folders(name), dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        with torch.no_grad():
            theirs = stock(torch.tensor([token_ids])).logits[0].double().log_softmax(-1)
        torch.testing.assert_close(theirs, expected(name, token_ids), rtol=0, atol=2e-3, msg=name)


def test_each_family_has_a_model_here():
    served = {family.model_type for family in FAMILIES.values() if not family.text_types}
    assert served == {sample.arch for sample in SAMPLES}

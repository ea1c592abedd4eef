"""lm-evaluation-harness against a running server: its scores are those that transformers computes from the same folder.

Log-likelihoods read the probabilities of *prompt* tokens (echo), which is the sharpest test of prefill and numbering;
generations compare whole texts.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import pytest
from e2e_server import MODEL, as_environment

TASKS = Path(__file__).parent / "tasks"
SCORING = {"jettison_choice": {"acc", "acc_norm"}, "jettison_last_words": {"acc", "perplexity"},
           "jettison_rolling": {"bits_per_byte", "word_perplexity"}}  # fmt: skip
GENERATING = {"jettison_answers": {"exact_match"}}
METRICS = SCORING | GENERATING

TOLERANCE = 1e-3
"""Of a log-likelihood, in float32: sums of up to 60 tokens."""

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def lm_eval():
    """The harness, told to stay off the network before its libraries are imported."""
    with as_environment({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}):
        module = pytest.importorskip("lm_eval", reason="lm_eval is not installed")
        for name in ("tenacity", "aiohttp", "requests", "tqdm", "datasets"):  # the harness's [api] extra
            pytest.importorskip(name, reason=f"lm_eval's API models need {name}")
        yield module


class Reference:
    """transformers on the CPU, in the served precision. What it has computed once it remembers."""

    def __init__(self, transformers, torch, model_dir: Path) -> None:
        self._torch = torch
        self.score = functools.cache(self._score)
        self.continue_greedily = functools.cache(self._continue_greedily)
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False).input_ids)

    def _score(self, context_ids: tuple[int, ...], continuation_ids: tuple[int, ...]) -> tuple[float, bool]:
        """(sum of log-probabilities, whether each token was the likeliest)."""
        ids = context_ids + continuation_ids
        with self._torch.inference_mode():
            logits = self._model(self._torch.tensor([ids])).logits[0, len(context_ids) - 1 : -1]
        logprobs = logits.double().log_softmax(-1)
        chosen = self._torch.tensor(continuation_ids)
        total = logprobs.gather(1, chosen[:, None]).sum().item()
        return total, bool((logprobs.argmax(-1) == chosen).all())

    def _continue_greedily(self, prompt: str, max_new_tokens: int) -> str:
        """Until an end-of-sequence token of ``generation_config.json``."""
        ids = self.encode(prompt)
        with self._torch.inference_mode():
            output = self._model.generate(
                self._torch.tensor([ids]), do_sample=False, max_new_tokens=max_new_tokens,
                attention_mask=self._torch.ones(1, len(ids), dtype=self._torch.long))
        return self._tokenizer.decode(
            output[0, len(ids):], skip_special_tokens=True, clean_up_tokenization_spaces=False)

    @property
    def bos_id(self) -> int:
        """What a text without context is scored after."""
        return self._tokenizer.bos_token_id


@pytest.fixture(scope="module")
def reference(lm_eval, model_dir):
    transformers = pytest.importorskip("transformers", reason="the reference needs transformers")
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the server needs the other cores
    yield Reference(transformers, torch, model_dir)
    torch.set_num_threads(num_threads)


@pytest.fixture(
    scope="module",
    params=[
        {"tokenizer_backend": "huggingface", "tokenized_requests": True, "batch_size": 1},
        {"tokenizer_backend": "huggingface", "tokenized_requests": False, "batch_size": 3},
        {"tokenizer_backend": "remote", "tokenized_requests": True, "batch_size": 4, "num_concurrent": 3},
    ],
    ids=["token-ids", "texts", "remote-tokenizer"],
)
def results(request, lm_eval, server, model_dir):
    """All tasks, run in the three ways in which the harness talks to a server."""
    from lm_eval.tasks import TaskManager

    options = {**request.param}
    if options["tokenizer_backend"] == "huggingface":
        options["tokenizer"] = str(model_dir)
    with as_environment({"NO_PROXY": "*", "no_proxy": "*"}):
        return lm_eval.simple_evaluate(
            model="local-completions",
            model_args={"model": MODEL, "base_url": f"{server.url}/v1/completions", "max_length": 1024, **options},
            tasks=list(METRICS),
            task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
            bootstrap_iters=0,
        )


def answers(results, task: str) -> list[tuple[tuple, object]]:
    """(arguments, response) of every request that a task made."""
    return [
        (arguments, response)
        for sample in results["samples"][task]
        for arguments, response in zip(sample["arguments"], flatten(sample["resps"]), strict=True)
    ]


def flatten(resps: list) -> list:
    """One response for each request: the harness keeps a list of repeats for each."""
    assert all(len(repeats) == 1 for repeats in resps)
    return [repeats[0] for repeats in resps]


@pytest.mark.parametrize("task", METRICS)
def test_scores_are_numbers(results, task):
    scores = {name.removesuffix(",none"): value for name, value in results["results"][task].items()}
    for metric in METRICS[task]:
        assert isinstance(scores[metric], float)
        assert math.isfinite(scores[metric]), metric
    assert results["n-samples"][task]["effective"] == 6


def test_log_likelihoods_are_those_of_transformers(results, reference):
    scored = [item for task in ("jettison_choice", "jettison_last_words") for item in answers(results, task)]
    assert len(scored) == 17 + 6
    for (context, continuation), (log_likelihood, is_greedy) in scored:
        context_ids = reference.encode(context)
        continuation_ids = reference.encode(context + continuation)[len(context_ids):]
        expected, expected_greedy = reference.score(context_ids, continuation_ids)
        assert log_likelihood == pytest.approx(expected, abs=TOLERANCE)
        assert is_greedy == expected_greedy
    assert len({round(log_likelihood, 3) for _, (log_likelihood, _) in scored}) > 15  # not one number for all


def test_rolling_log_likelihoods_are_those_of_transformers(results, reference):
    scored = answers(results, "jettison_rolling")
    assert len(scored) == 6
    for (text,), log_likelihood in scored:
        expected, _ = reference.score((reference.bos_id,), reference.encode(text))
        assert log_likelihood == pytest.approx(expected, abs=TOLERANCE)


def test_generations_are_those_of_transformers(results, reference):
    generated = answers(results, "jettison_answers")
    assert len(generated) == 6
    for (prompt, options), text in generated:
        expected = reference.continue_greedily(prompt, options["max_gen_toks"])
        for stop in options["until"]:
            expected = expected.partition(stop)[0]
        assert text == expected
    assert len({text for _, text in generated}) > 3


@pytest.mark.parametrize("options", [{}, {"num_concurrent": 3, "eos_string": "<|im_end|>"}], ids=["one by one", "many"])
def test_chats_are_what_a_client_gets(lm_eval, server, options):
    """``local-chat-completions``: messages in place of prompts, whole answers compared with the SDK's."""
    from lm_eval.tasks import TaskManager

    with as_environment({"NO_PROXY": "*", "no_proxy": "*", "OPENAI_API_KEY": "none"}):
        told = lm_eval.simple_evaluate(
            model="local-chat-completions",
            model_args={"model": MODEL, "base_url": f"{server.url}/v1/chat/completions", **options},
            tasks=["jettison_answers"], apply_chat_template=True,
            task_manager=TaskManager(include_path=str(TASKS), include_defaults=False), bootstrap_iters=0)
    generated = answers(told, "jettison_answers")
    assert len(generated) == 6
    for (prompt, asked), text in generated:
        messages = json.loads(prompt if isinstance(prompt, str) else prompt[0])  # JSON, as the harness wraps it
        expected = server.client().chat.completions.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=asked["max_gen_toks"], stop=asked["until"])
        assert text == expected.choices[0].message.content
    assert len({text for _, text in generated}) > 3

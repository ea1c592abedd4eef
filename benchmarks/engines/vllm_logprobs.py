"""What vLLM would have chosen at each token of given answers: by its log-probabilities of prompts.

Runs once, in vLLM's environment: ``{"model", "dtype", "max_model_len", "texts": [[prompt, answer], ...]}`` on standard
input, and on standard output for each text the chosen tokens and the log-probabilities of the answer's own. What vLLM
prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

TOP = 5
"""Likeliest tokens that are asked for: of equal ones the lowest id is chosen, as a greedy sampler does."""


def choices(entries: list[dict[int, Any]], answer: list[int]) -> dict[str, list[Any]]:
    """Of the entries of an answer's tokens."""
    tokens = []
    for entry in entries:
        most = max(each.logprob for each in entry.values())
        tokens.append(min(token for token, each in entry.items() if each.logprob == most))
    return {"tokens": tokens, "logprobs": [e[token].logprob for e, token in zip(entries, answer, strict=True)]}


def main() -> None:
    """See the module."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    told = json.load(sys.stdin)
    import vllm

    llm = vllm.LLM(
        told["model"], dtype=told["dtype"], max_model_len=told["max_model_len"], enable_prefix_caching=False,
        max_logprobs=TOP,
    )  # fmt: skip
    params = vllm.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=TOP, detokenize=False)
    prompts = [{"prompt_token_ids": [*prompt, *answer]} for prompt, answer in told["texts"]]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    found = [
        choices(output.prompt_logprobs[len(prompt) :], answer)
        for output, (prompt, answer) in zip(outputs, told["texts"], strict=True)
    ]
    replies.write(json.dumps({"version": vllm.__version__, "texts": found}))
    replies.close()


if __name__ == "__main__":  # vLLM starts its own processes by spawning: they import this file
    main()

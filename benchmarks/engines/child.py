"""The engine side of a comparison: one process, one engine, batches on request.

Standard library only, because each adapter beside this file runs in the environment of the engine it adapts, and
that engine may not share a single dependency with Jettison. The parent (``host.py``) sends one JSON line a command
and gets one back; everything that an engine prints goes to standard error.

    {"num_requests": 16, "prompt_len": 128, "max_tokens": 64, "seed": 3}  ->  {"seconds": 1.9, "output_tokens": 1024}

Prompts are drawn here from the seed, so that every engine gets the same ones and nothing large crosses the pipe.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import time
from typing import Any, Protocol

_PR_SET_PDEATHSIG = 1
PROMPT_VOCAB = 256
"""Prompts draw byte tokens: every model of these benchmarks has them."""


class Engine(Protocol):
    """What an adapter provides. ``settings`` is the JSON object that the parent gave."""

    def __init__(self, settings: dict[str, Any]) -> None: ...

    def start(self) -> dict[str, Any]:
        """Load. Returns facts for the report: version, dtype it computes in, kernels, ..."""
        ...

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[int]:
        """All prompts at once, greedy, end-of-sequence ignored. Returns the number of output tokens of each."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


def draw_prompts(num_requests: int, prompt_len: int, seed: int) -> list[list[int]]:
    """The same prompts for the same arguments, in every engine."""
    rng = random.Random(seed)
    return [[rng.randrange(PROMPT_VOCAB) for _ in range(prompt_len)] for _ in range(num_requests)]


def main(engine_class: type[Engine]) -> None:
    """Serve commands from standard input until it ends."""
    # An idle engine is stopped, and would stay so for ever if the parent were killed. The kernel hangs up what this
    # process, which leads its group, leaves behind stopped.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    settings: dict[str, Any] = json.loads(sys.argv[1])
    os.sched_setaffinity(0, settings["cores"])  # before any library counts them
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what an engine prints must not reach the parent's parser

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")

    engine = engine_class(settings)
    started = time.perf_counter()
    reply({"facts": {**engine.start(), "startup_s": round(time.perf_counter() - started, 1)}})
    for line in sys.stdin:
        reply(_run(engine, **json.loads(line)))
    engine.close()


def _run(engine: Engine, num_requests: int, prompt_len: int, max_tokens: int, seed: int) -> dict[str, Any]:
    prompts = draw_prompts(num_requests, prompt_len, seed)
    started = time.perf_counter()
    lengths = engine.run(prompts, max_tokens)
    seconds = time.perf_counter() - started
    wrong = [n for n in lengths if n != max_tokens]
    if wrong or len(lengths) != num_requests:
        return {"error": f"{len(lengths)} outputs, {len(wrong)} of them not of {max_tokens} tokens: {wrong[:3]}"}
    return {"seconds": seconds, "output_tokens": sum(lengths)}

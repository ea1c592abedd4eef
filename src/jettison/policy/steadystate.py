"""What a step of an instance is like where its memory is full and requests come as fast as they go. Pure."""

from __future__ import annotations

from typing import NamedTuple

from jettison.cost.stepwork import StepWork


class Traffic(NamedTuple):
    """Arriving requests, as means over some seconds."""

    requests_per_s: float
    prompt_tokens: float
    """Tokens to be computed: prefix hits are taken off."""
    output_tokens: float


class Room(NamedTuple):
    """What an instance has for requests."""

    kv_tokens: float
    """KV tokens, of all layers, that its memory holds."""
    max_rows: float


def steady_rows(traffic: Traffic, room: Room) -> float:
    """Requests that decode in a step of an instance whose memory is full."""
    by_memory = room.kv_tokens / max(1.0, mean_tokens(traffic))
    return max(1.0, min(by_memory, room.max_rows))


def mean_tokens(traffic: Traffic) -> float:
    """Tokens of a request half-way through its answer."""
    return traffic.prompt_tokens + max(1.0, traffic.output_tokens) / 2


def steady_step(traffic: Traffic, room: Room) -> StepWork:
    """A step of an instance in a steady state where memory is full: ``rows`` requests decode and, because a request
    stays for ``output_tokens`` steps, the prompts of ``rows / output_tokens`` new ones are computed."""
    rows = steady_rows(traffic, room)
    prompts = rows / max(1.0, traffic.output_tokens) * traffic.prompt_tokens
    decodes = StepWork.decodes(round(rows), round(rows * mean_tokens(traffic)))
    return decodes.with_prompts(round(prompts), max(1, round(traffic.prompt_tokens)))

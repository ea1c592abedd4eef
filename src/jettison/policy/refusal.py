"""Which requests are refused on arrival, in which words, and when to try again: each rule is here once, for all
callers.

Pure. Messages carry both numbers: the limit, and what was asked for.
"""

from __future__ import annotations

LEAST_RETRY_S = 1.0
MOST_RETRY_S = 60.0
"""Bounds of the hint for a client: sooner it would be refused again, and a hint beyond a minute is not heeded (OpenAI's
SDK tries again within seconds then)."""

PROCESSES_START_S = 4.0
DISK_BYTES_PER_S = 1e9
"""Assumptions about a start of which nothing has been seen yet: seconds until workers read parameters, and how fast."""


# --- too long


def why_too_long(
    num_prompt_tokens: int, max_tokens: int, max_model_len: int, max_request_tokens: int, prompt: str = "prompt"
) -> str | None:
    """Why no memory here could ever hold this request, all numbers in tokens; None where some could.

    ``max_model_len``: the longest context; ``max_request_tokens``: most tokens of one request that all memory could
    ever hold; ``prompt``: the client's word for its input.

    The words are part of the protocol, as OpenAI's API made it: gateways and agents take a longer model, or shorten the
    conversation, where an error says "this model's maximum context length is" (LiteLLM, and software built on it) or
    "please reduce the length of" (OpenHands), and read the numbers by these places.
    """
    total, longest = num_prompt_tokens + max_tokens, min(max_model_len, max_request_tokens)
    if total <= longest:
        return None
    told = (
        f"This model's maximum context length is {longest} tokens. However, you requested {shown(total)} tokens"
        f" ({num_prompt_tokens} in the {prompt}, {shown(max_tokens)} in the completion)."
        f" Please reduce the length of the {prompt} or completion."
    )
    if max_request_tokens < max_model_len:
        told += f" (The model itself has {max_model_len}; the memory here holds {longest} of one request.)"
    return told


def shown(value: float) -> str:
    """A number of any size, in a few characters."""
    if isinstance(value, int) and value.bit_length() > 128:  # Python refuses to write more than 4,300 digits
        return f"about {'-' * (value < 0)}2**{value.bit_length() - 1}"
    text = str(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


# --- too many


def why_queue_full(num_waiting: int, limit: int | None, num_own: int = 0, num_tenants: int = 1) -> str | None:
    """Why another request is not taken; None where it is. ``num_waiting``: requests on their way to the queue included.

    ``num_own`` of them are the asking tenant's, and ``num_tenants`` tenants have requests waiting once this one waits.
    A full queue still takes requests of a tenant that has less than an equal share of the limit, so that no tenant can
    shut the others out. With k tenants it can grow to the limit times 1 + 1/2 + ... + 1/k.
    """
    if limit is None or num_waiting < limit:
        return None
    if num_tenants > 1 and num_own < max(1, limit // num_tenants):
        return None
    return f"The queue is full: {num_waiting} requests wait, and {limit} may; retry later."


def why_over_share(num_active: int, num_asked: int, limit: int | None) -> str | None:
    """Why an API key gets no places for ``num_asked`` more choices; None where it does."""
    if limit is None or num_active + num_asked <= limit:
        return None
    return f"This key has {num_active} of {limit} choices under way, this request asks for {num_asked}; retry later."


def why_never_in_share(num_asked: int, limit: int | None) -> str | None:
    """Why one request asks for more choices than its key may ever have under way; None where it does not."""
    if limit is None or num_asked <= limit:
        return None
    return f"This request asks for {num_asked} choices (prompts times n); a key may have {limit} under way."


# --- not served


def why_not_offline(serves: bool) -> str | None:
    """Why no offline request is taken; None where offline requests are."""
    if serves:
        return None
    return "No offline requests are taken here: --offline is none."


# --- when to try again


def predicted_wait_s(queued_blocks: int, let_in_per_s: float, waited_s: float) -> float:
    """Seconds that the queue ahead takes: its blocks, at the rate at which requests were admitted of late.

    Where none was admitted, it takes at least as long again as it has stood still: ``waited_s``, since the queue was
    last empty.
    """
    return queued_blocks / let_in_per_s if let_in_per_s > 0.0 else waited_s


def predicted_end_s(age_s: float, mean_s: float | None) -> float:
    """Seconds until a request that has been under way for ``age_s`` ends, if it takes as long as the last ones of its
    kind.

    A request that has taken longer already may end at any moment, as may one for which no mean is known: 0.
    """
    return 0.0 if mean_s is None else max(0.0, mean_s - age_s)


def predicted_loading_s(
    elapsed_s: float, num_read_bytes: int, num_bytes: int, since_read_s: float | None, part_warm: float = 0.0
) -> float:
    """Seconds that a start goes on which has taken ``elapsed_s`` and read ``num_read_bytes`` of its parameters.

    Reading is assumed to go on as fast as it has gone since the start, the start of processes included. Before its
    first byte a plain disk is assumed. After its last byte (``since_read_s`` ago) weights are compared and first steps
    are run, the share ``part_warm`` of them by now. The others are assumed to take as long in proportion or, before the
    first has run, as long again.
    """
    if since_read_s is not None:
        return since_read_s * ((1.0 - part_warm) / part_warm if part_warm > 0.0 else 1.0)
    if num_read_bytes == 0:
        return max(0.0, PROCESSES_START_S - elapsed_s) + num_bytes / DISK_BYTES_PER_S
    return elapsed_s * max(0, num_bytes - num_read_bytes) / num_read_bytes


def retry_after_ms(predicted_s: float) -> int:
    """The hint for a client, within bounds."""
    return round(1000 * min(max(predicted_s, LEAST_RETRY_S), MOST_RETRY_S))

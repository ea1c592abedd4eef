"""Where the prompt of a newcomer is computed (beyond MELL, which places by memory alone). Pure.

A long prompt beside many decodes slows all of them, and whatever comes after it waits for it. In request-seconds, as in
``policy.forecast``, a place costs

    FIRST_TOKEN x   what the newcomer waits for its first token
    FIRST_TOKEN x   what requests behind it, and those that come there meanwhile, wait for its prompt
    +               what its prompt adds to the decodes there
    +               device-seconds, at as many request-seconds each as a device serves

A prompt takes a device's time wherever it is computed. Beside decodes, these stay by as much longer as they are slowed,
and the device is in use for longer. A device that packing could do without is in use until the prompt is computed and
the request can be moved to others. So a short prompt costs less where packing puts it, and a long one less on a device
of its own. What follows it, its decodes, costs about the same everywhere, and is not counted: the packing bounds them
(``policy.packing.types.Work``).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from jettison.policy.forecast import FIRST_TOKEN


class Host(NamedTuple):
    """A device as a newcomer finds it."""

    ahead_tokens: float = 0.0
    """What is computed of prompts before its own, in tokens that have none before them."""
    tokens_per_s: float = math.inf
    """Tokens of prompts that it computes a second beside its decodes; 0: they leave prompts no time."""
    num_decoding: int = 0
    slowed: float = 0.0
    """Share of the time of a step that prompts add to it, in 0 to 1."""
    coming_per_s: float = 0.0
    """Requests that will come there."""
    num_behind: int = 0
    """Requests that wait there already, and whose turn comes after its own."""
    opens_s: float = 0.0
    """Seconds until it serves; 0 unless it sleeps."""
    is_extra: bool = False
    """Packing could do without it."""

    @property
    def ahead_s(self) -> float:
        """Seconds until a newcomer's prompt is begun."""
        queued_s = self.ahead_tokens / self.tokens_per_s if self.ahead_tokens and self.tokens_per_s else 0.0
        return max(self.opens_s, queued_s if self.tokens_per_s else math.inf)


class DevicePrice(NamedTuple):
    """What a device is worth that packing could do without."""

    num_requests: float
    """Requests that a device serves: a device-second serves so many request-seconds."""
    kept_s: float
    """Seconds from a request's first token to its move."""


def place_cost(host: Host, prompt_tokens: float, price: DevicePrice) -> float:
    """Request-seconds that it costs to compute a prompt there, of so many tokens that have none before them; infinite
    where it would never be computed."""
    if not host.tokens_per_s:
        return math.inf
    ahead_s, own_s = host.ahead_s, prompt_tokens / host.tokens_per_s
    added_s = host.slowed * own_s
    behind_s = own_s * (host.num_behind + host.coming_per_s * (ahead_s + own_s / 2.0))
    cost = FIRST_TOKEN * (ahead_s + own_s + behind_s) + host.num_decoding * added_s
    device_s = host.opens_s + own_s + price.kept_s if host.is_extra else added_s
    return cost + max(1.0, price.num_requests) * device_s


def goes_elsewhere(host: Host, other: Host, prompt_tokens: float, price: DevicePrice) -> bool:
    """Whether a request that waits in one place is computed in the other: it opens before the request's turn has come,
    and costs less."""
    if other.opens_s and other.opens_s >= host.ahead_s:
        return False
    return place_cost(other, prompt_tokens, price) < place_cost(host, prompt_tokens, price)

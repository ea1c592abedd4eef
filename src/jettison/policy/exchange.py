"""How a stalled request gets to run again after a merge: its KV is sent, computed again, or attended to where it lies.

Pure. KunServe v3 sends (section 4.2), v1 attends remotely meanwhile; choosing for each request by predicted cost is our
own: a short request on a slow link is cheaper to prefill again, and on a fast one it is not worth the round trips of
remote attention. Costs are in seconds of progress that requests lose: the request itself, and where it is computed
again, all others of the group, whose steps its prefill takes. (What a transfer costs the requests behind it on the
link, and remote attention the rows beside it, is counted with those requests: each has its own wait.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from jettison.memory.kvtransfers import ExchangeMode
from jettison.types import WorkerId

LIVE_FROM_STEPS = 4.0
"""Transfers that take fewer steps than this are waited for: remote attention slows every row of the batch."""

LinkId = tuple[WorkerId, WorkerId]
"""Source and destination."""


class ExchangeCosts(NamedTuple):
    """Known prices. None = not known (yet)."""

    link_bytes_per_s: Callable[[LinkId], float | None] = lambda link: None
    recompute_s: Callable[[int], float | None] = lambda num_tokens: None
    """Seconds until so many tokens have been prefilled."""
    step_s: float | None = None
    """Seconds of a decode step of the merged group."""
    round_trip_s: float = 1e-3
    """Seconds of one layer's remote attention, beyond the attention itself."""


class StalledRequest(NamedTuple):
    """A request that cannot run until something has happened to its KV."""

    num_tokens: int
    """Tokens with KV: these are computed again if the KV is given up."""
    link_bytes: Mapping[LinkId, int]
    """Bytes that would have to be sent, by link."""
    tail_bytes: Mapping[LinkId, int]
    """The part of these bytes that must arrive before the request can run live."""
    num_remote_layers: int
    """Most layers of one stage whose attention would be computed on other workers."""
    can_run_live: bool
    """It has a full block."""


class ExchangeQueue(NamedTuple):
    """What goes before the request in question."""

    link_bytes: Mapping[LinkId, int]
    num_recompute_tokens: int
    waited_s: float = 0.0
    """Since the exchange began."""
    num_others: int = 0
    """Requests of the group that run, are stalled or wait behind the one in question."""


def choose_exchange(
    request: StalledRequest, queue: ExchangeQueue, costs: ExchangeCosts, mode: ExchangeMode
) -> ExchangeMode | None:
    """How a request's KV gets there; never ``AUTO``. None: not known before a first transfer has measured the links.

    If the first transfer takes longer than ``LIVE_FROM_STEPS`` steps, the link is too slow to stand still for: the
    others run live. A fixed mode is obeyed, except that a request without a full block cannot run live: it is
    transferred.
    """
    if mode is not ExchangeMode.AUTO:
        return ExchangeMode.TRANSFER if mode is ExchangeMode.LIVE and not request.can_run_live else mode
    transfer_s = _sending_s(request.link_bytes, queue.link_bytes, costs)
    if transfer_s is None:
        if not any(queue.link_bytes.values()):
            return ExchangeMode.TRANSFER
        is_slow = costs.step_s is not None and queue.waited_s > LIVE_FROM_STEPS * costs.step_s
        return ExchangeMode.LIVE if is_slow and request.can_run_live else None
    lost = {ExchangeMode.TRANSFER: transfer_s}
    recompute_s = costs.recompute_s(queue.num_recompute_tokens + request.num_tokens)
    alone_s = costs.recompute_s(request.num_tokens)
    if recompute_s is not None and alone_s is not None:
        lost[ExchangeMode.RECOMPUTE] = recompute_s + queue.num_others * alone_s
    if request.can_run_live and costs.step_s is not None and transfer_s > LIVE_FROM_STEPS * costs.step_s:
        live_step_s = costs.step_s + request.num_remote_layers * costs.round_trip_s
        # Urgent: tails wait for no other KV, but for each other, which is little.
        tail_s = _sending_s(request.tail_bytes, {}, costs) or 0.0
        lost[ExchangeMode.LIVE] = tail_s + transfer_s * (1.0 - costs.step_s / live_step_s)
    return min(lost, key=lambda choice: (lost[choice], choice is not ExchangeMode.TRANSFER))


def _sending_s(num_bytes: Mapping[LinkId, int], before: Mapping[LinkId, int], costs: ExchangeCosts) -> float | None:
    """Seconds until everything has arrived, behind the bytes ``before``; links work at the same time. None: a rate is
    unknown."""
    longest = 0.0
    for link, amount in num_bytes.items():
        rate = costs.link_bytes_per_s(link)
        if rate is None:
            return None
        longest = max(longest, (before.get(link, 0) + amount) / rate)
    return longest

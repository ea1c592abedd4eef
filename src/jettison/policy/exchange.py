"""How a stalled request gets to run again after a merge: its KV is sent, computed again, or attended to where it lies.

Pure. KunServe v3 sends (section 4.2), v1 attends remotely meanwhile; choosing for each request by predicted cost is our
own: a short request on a slow link is cheaper to prefill again, and on a fast one it is not worth the round trips of
remote attention. Costs are request-seconds of progress: what the request itself loses, and what others lose by it.
Computed again, its prefill takes the steps of all others. Sent, its bytes go beside their activations, and waiting
requests find no room while its KV lies at both ends. Live, its round trips lengthen every step of the batch. (What a
transfer costs the requests behind it on the link is counted with those: each has its own wait.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from jettison.memory.kvtransfers import ExchangeMode
from jettison.types import WorkerId

LIVE_FROM_STEPS = 4.0
"""Transfers that take fewer steps than this are waited for: remote attention slows every row of the batch."""

RECOMPUTED_WEIGHT = 3.0
"""Of the predicted seconds of computing again, which shares its steps with decodes and lengthens the queue for requests
that are not there yet. In simulated bursts (five cells, two seeds) the choice is within 1 % of sending everything on
links of 10, 25 and 100 MB/s, where computing everything is up to 10 % worse; with a weight of 1, 1 to 2 %."""

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
    """Seconds of one layer's remote attention, beyond the attention itself and what travels for it."""
    remote_layer_bytes: int = 0
    """Bytes that one layer's remote attention sends and receives for a step, where all requests of it run live."""
    piece_s: Callable[[LinkId], float] = lambda link: 0.0
    """Seconds that a step's activation waits where a link carries bulk: half a piece, on the mean."""


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
    num_kept_out: float = 0.0
    """Waiting requests that find no room for as long as its KV lies at its old home, too."""


class ExchangeQueue(NamedTuple):
    """What goes before the request in question."""

    link_bytes: Mapping[LinkId, int]
    num_recompute_tokens: int
    num_others: int = 0
    """Requests of the group that run, are stalled or wait behind the one in question."""


def choose_exchange(
    request: StalledRequest, queue: ExchangeQueue, costs: ExchangeCosts, mode: ExchangeMode
) -> ExchangeMode | None:
    """How a request's KV gets there; never ``AUTO``. None: not known before a first transfer has measured a link,
    which the others wait for, however long it takes: live meanwhile, they would slow every step until all of their KV
    has arrived. A fixed mode is obeyed, except that a request without a full block cannot run live: it is transferred.
    """
    if mode is not ExchangeMode.AUTO:
        return ExchangeMode.TRANSFER if mode is ExchangeMode.LIVE and not request.can_run_live else mode
    transfer_s = _sending_s(request.link_bytes, queue.link_bytes, costs)
    if transfer_s is None:
        rate = costs.link_bytes_per_s
        is_under_way = any(amount and rate(link) is None for link, amount in queue.link_bytes.items())
        return None if is_under_way else ExchangeMode.TRANSFER
    own_s = _sending_s(request.link_bytes, {}, costs) or 0.0
    wait_s = max((costs.piece_s(link) for link in request.link_bytes), default=0.0)
    kept_out_s = request.num_kept_out * transfer_s
    # Every step of the group has an activation behind bulk for as long as this request's bytes travel.
    beside_s = queue.num_others * own_s * _slowed(costs.step_s, wait_s)
    lost = {ExchangeMode.TRANSFER: transfer_s + kept_out_s + beside_s}
    recompute_s = costs.recompute_s(queue.num_recompute_tokens + request.num_tokens)
    alone_s = costs.recompute_s(request.num_tokens)
    if recompute_s is not None and alone_s is not None:
        lost[ExchangeMode.RECOMPUTE] = RECOMPUTED_WEIGHT * (recompute_s + queue.num_others * alone_s)
    if request.can_run_live and costs.step_s is not None and transfer_s > LIVE_FROM_STEPS * costs.step_s:
        layer_s = costs.round_trip_s + 2.0 * wait_s + _remote_bytes_s(request, costs)
        slowed = _slowed(costs.step_s, wait_s + request.num_remote_layers * layer_s)
        # Urgent: tails wait for no other KV, but for each other, which is little.
        tail_s = _sending_s(request.tail_bytes, {}, costs) or 0.0
        # One live request slows all steps of the group until its KV has arrived.
        lost[ExchangeMode.LIVE] = tail_s + kept_out_s + transfer_s * slowed * (1 + queue.num_others)
    return min(lost, key=lambda choice: (lost[choice], choice is not ExchangeMode.TRANSFER))


def _slowed(step_s: float | None, more_s: float) -> float:
    """Share of its time that a decode loses whose steps take ``more_s`` longer; 0 where steps are not known."""
    return more_s / (step_s + more_s) if step_s else 0.0


def _remote_bytes_s(request: StalledRequest, costs: ExchangeCosts) -> float:
    """Seconds that one layer's queries and answers of a step travel."""
    rates = (costs.link_bytes_per_s(link) for link in request.link_bytes)
    return max((costs.remote_layer_bytes / rate for rate in rates if rate), default=0.0)


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

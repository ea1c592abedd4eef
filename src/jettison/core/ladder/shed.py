"""Shed: online requests are refused on arrival while the queue is full. The last rung: nothing else helps in time.

The rule and its words are ``policy.refusal``'s; a front end asks before it accepts a request, and tells its client.
"""

from __future__ import annotations

from collections import Counter

from jettison.core.ladder.hooks import Refusal
from jettison.core.ladder.rung import Rung, register
from jettison.policy.refusal import retry_after_ms, why_queue_full


@register
class ShedRung(Rung):
    """Refuses an online request where the queue is full and its tenant has its share of it. It is asked on arrival, and
    never looks."""

    name = "shed"
    is_word = False
    rank = 100

    def why_refuse(self, tenant: str, limit: int | None, num_coming: int, now_ns: int) -> Refusal | None:
        """Why the tenant's next online request is refused; None: it is taken. Every request is taken while fewer than
        ``limit`` wait (``num_coming`` included) or ``limit`` is None; at a full queue only one of a tenant with less
        than an equal share."""
        if limit is None:
            return None
        state = self.means.state
        unplaced, queued = state.unplaced_online(), state.changes.queued_online
        num_waiting = num_coming + len(unplaced) + sum(len(state.groups[g].queues.waiting) for g in queued)
        if num_waiting < limit:
            return None
        waiting: Counter[str] = Counter(request.tenant for request in unplaced)
        for group_id in queued:
            waiting.update(state.groups[group_id].queues.waiting.num_by_tenant())
        num_tenants = len(waiting.keys() | {tenant})
        why = why_queue_full(num_waiting, limit, waiting[tenant], num_tenants)
        return None if why is None else Refusal(why, retry_after_ms(self.means.loads.predicted_wait_s(now_ns)))

"""Packed requests whose prompts would be computed sooner, and at less cost to others, by a sleeper: the rung ``wake``
asks. Once it serves, the rung ``pack`` sends the request there (``core.ladder.packing.places``)."""

from __future__ import annotations

from jettison.core.ladder.packing.newcomers import Newcomers
from jettison.core.ladder.rung import Means


class LatePrompts:
    """Finds requests that a sleeper should be woken for."""

    def __init__(self, means: Means) -> None:
        self._means = means
        self._newcomers = Newcomers(means.state, means.loads)

    def is_asked(self, now_ns: int) -> bool:
        """Whether online requests are packed and some wait, and no group without online requests is awake or being
        woken (and not overdue): such a group takes late requests as it is."""
        state = self._means.state
        if state.params.packing is None or not state.changes.queued_online or self._means.sleepers.coming_s(now_ns):
            return False
        return not self._means.ask_closed()

    def why(self, opens_s: float) -> dict[str, object] | None:
        """What a wake that takes ``opens_s`` seconds is decided by, for the event log; None: no request is worth it."""
        groups = self._means.state.groups
        queued = (groups[g] for g in sorted(self._means.state.changes.queued_online) if g in groups)
        late = next(self._newcomers.late((g for g in queued if len(g.stages) == 1), opens_s), None)
        if late is None:
            return None
        return {
            "request": late.state.request_id, "prompt_tokens": late.state.num_tokens, "ahead_s": late.ahead_s,
            "cost_request_s": late.elsewhere_s, "saved_request_s": late.cost_s,
        }  # fmt: skip

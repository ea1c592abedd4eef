"""Whether online requests kept their latency objectives, request by request and gap by gap, as clients saw it.

The engine gives the objectives (``policy.slo``); each request is judged by the objectives known at its first token.
"""

from __future__ import annotations

from jettison.policy.slo import Objectives


class Attainment:
    """Counts of one server."""

    __slots__ = ("num_gaps", "num_gaps_within", "num_requests", "num_requests_within")

    def __init__(self) -> None:
        self.num_requests = 0
        """Online requests that ended, without the ones that a client left or that asked for no token."""
        self.num_requests_within = 0
        """Of these, the requests with the first token and every gap within the objectives."""
        self.num_gaps = 0
        self.num_gaps_within = 0

    def counters(self) -> dict[str, float]:
        """The counts by the names under which they are exported."""
        return {
            "slo_online_requests": self.num_requests, "slo_online_requests_within": self.num_requests_within,
            "slo_online_gaps": self.num_gaps, "slo_online_gaps_within": self.num_gaps_within,
        }


class Verdict:
    """The judgement of one online request."""

    __slots__ = ("_counts", "_objectives", "is_within")

    def __init__(self, counts: Attainment, objectives: Objectives, ttft_s: float) -> None:
        """Made when the request has got its first token."""
        self._counts = counts
        self._objectives = objectives
        self.is_within = objectives.ttft_s is None or ttft_s <= objectives.ttft_s
        """Whether all latencies so far kept the objectives."""

    def note_gap(self, gap_s: float, num: int = 1) -> None:
        """Judge ``num`` equal gaps between tokens; without effect while no objective for gaps is known."""
        tpot_s = self._objectives.tpot_s
        if tpot_s is None:
            return
        self._counts.num_gaps += num
        if gap_s <= tpot_s:
            self._counts.num_gaps_within += num
        else:
            self.is_within = False

    @property
    def is_due(self) -> bool:
        """Whether an objective was known."""
        return self._objectives != (None, None)

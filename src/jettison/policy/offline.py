"""Parameters of offline requests beside online ones (ConServe; ``--offline``), and the latencies that bound them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FillRule = Literal["knee", "objective", "paper"]
"""How far a step with online requests is filled (``policy.slo.filler_s``)."""

TPOT_OVER_LONE_STEP = 9.0
"""Default of the TPOT objective, over a decode step of one request (ConServe section 6.2: 110 ms)."""
TTFT_OVER_TPOT = 14.0
"""Default of the TTFT objective, over that of TPOT (1500 ms)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SloParams:
    """Latency objectives of online requests, in seconds; None: worked out from the lone decode step."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    """Of every gap between two tokens of a request, not of their mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineParams:
    """Which parts of harvesting there are, and their numbers. ``--offline priority`` has ``serves`` alone."""

    serves: bool = True
    """False: offline requests are refused."""
    slo_aware: bool = True
    """Offline tokens fill a step only as far as the objectives allow; offline steps may be abandoned, and offline
    requests evicted one by one (ConServe sections 4.2, 4.3 and 4.5)."""
    checkpoints: bool = True
    """KV of offline requests is copied to host pools ahead of need (section 4.4)."""
    prefetches: bool = True
    """KV comes back from host pools beside steps, and not before them."""
    slo: SloParams = field(default_factory=SloParams)
    fill: FillRule = "knee"
    fills_after_eviction: bool = False
    """A step that has just evicted offline requests may be filled with others (as Algorithm 1 reads; the authors' code
    does not do it)."""
    safepoint_layers: int | None = None
    """Layers between two looks at the flag; None: from the predictor."""
    checkpoint_below_free: float = 0.5
    """Part of a worker's KV blocks that is free when checkpointing starts."""

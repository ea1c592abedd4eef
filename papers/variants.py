"""The systems that are compared: settings of a spec's cluster, and what no setting can say. Data alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Changes:
    """What a run differs in beyond its settings."""

    kv_scale: float = 1.0
    """Times the undropped KV memory."""
    num_merges: int = 0
    """Merges that are asked for at the start, and stay: static pipelines of any length."""
    host_link: float = 1.0
    """Times the rate of the link to the host's memory."""
    copy_engine: bool = True
    """False: a step waits for what is swapped before it, as vLLM's does, and it is swapped at once."""
    streamed_bytes: int = 0
    """Parameters that live in host memory and are streamed in at every step; KV takes their place."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a spec's cluster."""

    name: str
    policy: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    changes: Changes = field(default_factory=Changes)

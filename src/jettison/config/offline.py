"""Words of ``--offline``: how offline requests are served, and with which parts of harvesting."""

from __future__ import annotations

from jettison.config.values import did_you_mean

HARVEST_PARTS = ("scheduler", "checkpoint", "prefetch")
"""Parts of harvesting. Each builds on the one before it; ``harvest`` is all of them."""

MODES = ("harvest", "priority", "none")


def offline_mode(value: object) -> str:
    """``harvest``, ``priority``, ``none``, or harvesting's first parts with ``+``. Raises ValueError for others."""
    if isinstance(value, str):
        if value in MODES:
            return value
        words = tuple(part.strip() for part in value.split("+"))
        if words == HARVEST_PARTS:
            return "harvest"
        if words == HARVEST_PARTS[: len(words)]:
            return "+".join(words)
    hint = did_you_mean(value, (*MODES, *HARVEST_PARTS)) if isinstance(value, str) else ""
    raise ValueError(
        f"must be harvest, priority or none, or of harvesting's parts scheduler or scheduler+checkpoint, not {value!r}"
        f"{hint}"
    )


def harvest_parts(mode: str) -> tuple[str, ...]:
    """Parts of harvesting in a mode; empty for ``priority`` and ``none``."""
    if mode == "harvest":
        return HARVEST_PARTS
    return () if mode in MODES else tuple(mode.split("+"))

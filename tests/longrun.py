"""The long run: ``JETTISON_LONG=1`` runs all that was drawn, where the plain run takes a part that holds every kind."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

Drawn = TypeVar("Drawn")

LONG = os.environ.get("JETTISON_LONG", "0") not in ("", "0")


def part_of(drawn: Sequence[Drawn], part: Sequence[Drawn]) -> Sequence[Drawn]:
    """Everything in the long run, else the part, which must be of it."""
    assert all(one in drawn for one in part)
    return drawn if LONG else part

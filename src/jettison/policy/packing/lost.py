"""A packing with grips beside the same one without: how many devices do the refused moves cost. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jettison.policy.packing.mell import Packing
from jettison.policy.packing.types import Arrive, PackingParams
from jettison.types import RequestId


def devices_lost(placed: Sequence[Mapping[RequestId, int]], capacity: int) -> int:
    """Devices in use beyond those that the packing takes for the same requests if none is held. ``placed``: the
    requests on each device, with sizes in blocks. Shared prefixes are left out."""
    anew = Packing(PackingParams(capacity=capacity, shares_prefixes=False))
    anew.apply([Arrive(r, min(num, capacity)) for sizes in placed for r, num in sizes.items()])
    return max(0, len(placed) - len(anew.active))

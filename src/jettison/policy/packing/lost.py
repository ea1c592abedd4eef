"""A packing with grips beside the same one without: how many devices do the refused moves cost. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jettison.policy.packing.mell import Packing
from jettison.policy.packing.types import Arrive, Depart, Grip, Operation, PackingParams, Plan
from jettison.types import GroupId, RequestId


def devices_lost(placed: Sequence[Mapping[RequestId, int]], capacity: int) -> int:
    """Devices in use beyond those that the packing takes for the same requests if none is held. ``placed``: the
    requests on each device, with sizes in blocks. Shared prefixes are left out."""
    anew = Packing(PackingParams(capacity=capacity, shares_prefixes=False))
    anew.apply([Arrive(r, min(num, capacity)) for sizes in placed for r, num in sizes.items()])
    return max(0, len(placed) - len(anew.active))


class Compared:
    """A ``Packer`` whose plans say ``num_lost``: devices in use beyond those that the packing would need if every
    request could be moved at once, on as many devices as it likes. Takes twice the time."""

    def __init__(self, packing: Packing, params: PackingParams) -> None:
        self.packing = packing
        self._ideal = Packing(params)

    @property
    def active(self) -> tuple[GroupId, ...]:
        return self.packing.active

    def device_of(self, request_id: RequestId) -> GroupId:
        return self.packing.device_of(request_id)

    def requests_on(self, device: GroupId) -> dict[RequestId, int]:
        return self.packing.requests_on(device)

    def pin(self, request_id: RequestId, grip: Grip) -> None:
        self.packing.pin(request_id, grip)

    def set_taking(self, device: GroupId, is_taking: bool) -> None:
        self.packing.set_taking(device, is_taking)

    def apply(self, batch: Sequence[Operation]) -> Plan:
        plan = self.packing.apply(batch)
        self._ideal.apply([o._replace(device=None) if isinstance(o, Arrive) else o for o in batch])
        if plan.unplaced:
            self._ideal.apply([Depart(request_id) for request_id in plan.unplaced])
        return replace(plan, num_lost=max(0, len(self.packing.active) - len(self._ideal.active)))

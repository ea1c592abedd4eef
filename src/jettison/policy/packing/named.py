"""The packings by name, for experiments and flags."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jettison.policy.packing.fits import BestFit, LoadBalance, WorstFit
from jettison.policy.packing.mell import Packing
from jettison.policy.packing.types import Packer, PackingParams
from jettison.types import GroupId

PackerMaker = Callable[[PackingParams, Iterable[GroupId] | None], Packer]
"""From parameters and devices (None: as many as it takes)."""

PACKERS: dict[str, PackerMaker] = {
    "mell": Packing, "best-fit": BestFit, "worst-fit": WorstFit, "load-balance": LoadBalance,
}  # fmt: skip
"""By name: a packer's constructor, from parameters and devices (None: as many as it takes)."""

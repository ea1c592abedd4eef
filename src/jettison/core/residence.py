"""Where a request's KV is, apart from the request's own state.

A *residence* maps places (arenas or host pools of workers) to the layers with KV there, and says of how many leading
tokens. A request without KV has none. A running one has that of its group, which all requests of the group share and
which grows with the request's computed tokens. It has further residences while it is on its way, or kept elsewhere as
well:

    runs                  (arenas of its group)
    relocated, returned   (arenas of the source: runs) (arenas of the destination: what has arrived)
    exchanged             (arenas of the old group: all) (arenas of the merged group, once blocks are reserved)
    leaves for the host   (arenas: all) (host pools: what has been copied)
    stored                (host pools: all)
    comes back            (host pools: all) (arenas: what has arrived)
    checkpointed          (arenas: runs) (host pools: a prefix)

A mechanism that moves KV changes a request's residences, and nothing else about it. At most one of them runs.
Residences are values: nothing here allocates or sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from jettison.memory.kvtransfers import Place
from jettison.memory.stages import StagePlan
from jettison.types import LayerRange, WorkerId


@dataclass(frozen=True, slots=True, eq=False)
class Residence:
    """KV of one request, or of all requests that run in one group, at these places: arenas, or host pools."""

    places: Mapping[Place, LayerRange]
    num_tokens: int | None = None
    """Leading tokens with valid KV there; None: the request runs there, and all of its computed tokens have."""

    @property
    def runs(self) -> bool:
        """Steps read and write it."""
        return self.num_tokens is None

    @property
    def is_hosted(self) -> bool:
        """It is in host pools (all of its places are, or none)."""
        return next(iter(self.places)).is_host

    @property
    def worker_ids(self) -> tuple[WorkerId, ...]:
        """Workers that hold some of it."""
        return tuple(place.worker_id for place in self.places)

    def at(self, num_tokens: int) -> Residence:
        """The same places, with exactly ``num_tokens`` tokens: the request does not run there (yet, or any more)."""
        return replace(self, num_tokens=num_tokens)


Residences = tuple[Residence, ...]

NOWHERE: Residences = ()
"""The residences of a request without KV."""


def arenas_of(stages: Iterable[StagePlan]) -> Residence:
    """The residence in which the requests of a group with these stages run."""
    return Residence({Place(s.worker_id): s.layers for s in stages})


def pools_of(stages: Iterable[StagePlan]) -> Residence:
    """An empty residence in the host pools of a group's own workers."""
    return Residence({Place(s.worker_id, is_host=True): s.layers for s in stages}, 0)


def in_arenas(residences: Residences) -> Residence:
    """The residence in arenas: where a request runs, or has run last. Raises StopIteration for a request without KV in
    arenas."""
    return next(r for r in residences if not r.is_hosted)


def hosted_only(residences: Residences) -> Residences:
    """The residences in host pools, which a request keeps when it gives up its blocks. O(1) for a request without KV
    there."""
    if len(residences) <= 1 and not (residences and residences[0].is_hosted):
        return NOWHERE
    return tuple(r for r in residences if r.is_hosted)


def hosted_tokens(residences: Residences) -> int:
    """Leading tokens with KV in host pools. O(1) for a running request without KV there."""
    if len(residences) == 1 and residences[0].runs:
        return 0
    return max((r.num_tokens or 0 for r in residences if r.is_hosted), default=0)


def changed(residences: Residences, old: Residence | None, new: Residence | None) -> Residences:
    """The residences with ``new`` in the place of ``old``; either may be None. An ``old`` that is not among them is
    ignored."""
    kept = tuple(r for r in residences if r is not old)
    return kept if new is None else (*kept, new)


def check(
    residences: Residences, *, runs_in: Residence | None, num_computed: int,
    held_tokens: Callable[[Place], int],
) -> None:
    """Check one request's residences. Raises AssertionError on any broken invariant.

    ``runs_in``: its group's residence, where it is running. ``held_tokens``: for how many tokens a place's ledger or
    pool really holds blocks or slots of it.
    """
    running = [r for r in residences if r.runs]
    assert running == ([] if runs_in is None else [runs_in]), f"runs in {running}, not in {runs_in}"
    for residence in residences:
        assert len({place.is_host for place in residence.places}) == 1, residence
        num_tokens = num_computed if residence.num_tokens is None else residence.num_tokens
        assert 0 <= num_tokens <= num_computed, f"{residence} has more than the {num_computed} tokens that there are"
        for place in residence.places:
            assert held_tokens(place) >= num_tokens, f"{place} holds {held_tokens(place)} tokens of {num_tokens}"

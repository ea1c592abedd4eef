"""Lists of rungs, by the words of ``--overload``, and the rungs that other options add. A baseline is a list of rungs,
and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import jettison.core.ladder.drop
import jettison.core.ladder.free
import jettison.core.ladder.harvest
import jettison.core.ladder.migrate
import jettison.core.ladder.packing.pack
import jettison.core.ladder.pause
import jettison.core.ladder.restore
import jettison.core.ladder.scale
import jettison.core.ladder.shed
import jettison.core.ladder.swap
import jettison.core.ladder.waking.wake  # noqa: F401  # each registers its rung
from jettison.config.rungs import overload_words
from jettison.core.ladder.rung import rung_classes
from jettison.errors import ConfigError

ALWAYS = ("scale", "shed")
"""Rungs that every list has."""

OFFLINE = {"scheduler": ("harvest", "pause"), "checkpoint": ("free",)}
"""Rungs that harvesting's parts bring (``--offline``), whatever ``--overload`` says."""


PACKING = "pack"
"""The rung that ``--packing`` brings."""


class LadderSpec(NamedTuple):
    """Names of rungs, and whether groups are static pipelines from the start.

    In ``BASELINES``: what one word adds, in any order. From ``parse_overload``: a whole text with ``ALWAYS``, from free
    to dear.
    """

    rungs: tuple[str, ...]
    static_pipeline: bool = False


BASELINES: dict[str, LadderSpec] = {
    "drop": LadderSpec(("drop", "restore")),
    "recompute": LadderSpec(()),
    "pipeline": LadderSpec((), static_pipeline=True),
}
"""Names that mean something else than the rung of that name. ``recompute``: a request that finds no room is computed
again (``policy.batching``). ``pipeline``: static pipelines from the start."""


def parse_overload(text: str) -> LadderSpec:
    """The rungs that a text for ``--overload`` names, with those that every list has. The text is ``drop``,
    ``recompute``, ``swap``, ``migrate``, ``pipeline``, any other rung's word, or several words joined by ``+``.

    Raises ConfigError for a word that no rung has, for one that comes twice, and for a rung that merges groups beside
    ``pipeline``.
    """
    names = overload_words(text)
    if len(set(names)) != len(names):
        raise ConfigError(f"{text!r} names a rung twice")
    specs = [BASELINES.get(name, LadderSpec((name,))) for name in names]
    static_pipeline = any(spec.static_pipeline for spec in specs)
    rungs = {rung for spec in specs for rung in spec.rungs} | {*ALWAYS}
    classes = rung_classes(rungs, static_pipeline=static_pipeline)
    return LadderSpec(tuple(rung.name for rung in classes), static_pipeline)


def with_offline(rungs: tuple[str, ...], parts: Iterable[str]) -> tuple[str, ...]:
    """The names of these rungs and of those that the given parts of ``--offline`` bring, from free to dear; a part
    without rungs adds none. Raises ConfigError for a name that no rung has."""
    brought = [rung for part in parts for rung in OFFLINE.get(part, ())]
    return tuple(rung.name for rung in rung_classes({*rungs, *brought}, static_pipeline=False))


def with_wake(rungs: tuple[str, ...], static_pipeline: bool) -> tuple[str, ...]:
    """The names of these rungs and of ``wake``, from free to dear; these alone for static pipelines, where no worker
    sleeps. Raises ConfigError for a name that no rung has."""
    if static_pipeline:
        return rungs
    return tuple(rung.name for rung in rung_classes({*rungs, "wake"}, static_pipeline=False))


def with_packing(rungs: tuple[str, ...]) -> tuple[str, ...]:
    """The names of these rungs and of ``pack``, from free to dear. Raises ConfigError for a name that no rung has, and
    for a rung that spreads requests."""
    classes = rung_classes({*rungs, PACKING}, static_pipeline=False)
    for rung in classes:
        if rung.spreads:
            raise ConfigError(f"--packing keeps requests on few instances, and --overload {rung.name} spreads them")
    return tuple(rung.name for rung in classes)


def overload_name(rungs: tuple[str, ...], *, static_pipeline: bool) -> str:
    """The shortest text from which ``parse_overload`` makes this list of rungs, without rungs that other options bring;
    ``recompute`` where no other rung is left."""
    unnamed = {*ALWAYS, "wake", PACKING, *(rung for brought in OFFLINE.values() for rung in brought)}
    names = [name for name in rungs if name not in unnamed]
    brought = {r for word, spec in BASELINES.items() if {*spec.rungs} <= {*names} for r in spec.rungs if r != word}
    names = [name for name in names if name not in brought]
    if static_pipeline:
        names.insert(0, next(word for word, spec in BASELINES.items() if spec.static_pipeline))
    return "+".join(names) or "recompute"

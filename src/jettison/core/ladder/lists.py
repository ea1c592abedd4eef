"""Lists of rungs by the names under which ``--overload`` has them: a baseline is a list of rungs, and nothing else."""

from __future__ import annotations

from typing import NamedTuple

import jettison.core.ladder.drop
import jettison.core.ladder.migrate
import jettison.core.ladder.restore
import jettison.core.ladder.scale
import jettison.core.ladder.shed
import jettison.core.ladder.swap  # noqa: F401  # each registers its rung
from jettison.config.rungs import overload_words
from jettison.core.ladder.rung import in_order, rung_named
from jettison.errors import ConfigError

ALWAYS = ("scale", "shed")
"""Rungs that every list has."""

BASELINES: dict[str, tuple[str, ...]] = {
    "drop": ("drop", "restore"),
    "recompute": (),
    "pipeline": (),
}
"""Names that mean something else than the rung of that name. ``recompute``: a request that finds no room is computed
again (``policy.batching``). ``pipeline``: static pipelines from the start."""


class LadderSpec(NamedTuple):
    """What ``--overload`` says."""

    rungs: tuple[str, ...]
    static_pipeline: bool


def parse_overload(text: str) -> LadderSpec:
    """``drop``, ``recompute``, ``swap``, ``migrate``, ``pipeline``, any other rung's name, or several with ``+``.

    Raises ConfigError for a name that no rung has, and for lists that contradict themselves.
    """
    names = overload_words(text)
    if len(set(names)) != len(names):
        raise ConfigError(f"{text!r} names a rung twice")
    rungs = {rung for name in names for rung in BASELINES.get(name, (name,))} | {*ALWAYS}
    classes = list(in_order(rung_named(name) for name in rungs))
    static_pipeline = "pipeline" in names
    if static_pipeline and any(rung.forms_pipelines for rung in classes):
        raise ConfigError(f"{text!r}: static pipelines stay as they are, so no rung may merge groups")
    return LadderSpec(tuple(rung.name for rung in classes), static_pipeline)


def overload_name(rungs: tuple[str, ...], *, static_pipeline: bool) -> str:
    """The shortest text that ``parse_overload`` makes these of."""
    names = [name for name in rungs if name not in ALWAYS]
    if set(BASELINES["drop"]) <= set(names):
        names = [name for name in names if name != "restore"]
    if static_pipeline:
        names.insert(0, "pipeline")
    return "+".join(names) or "recompute"


def forms_pipelines(rungs: tuple[str, ...]) -> bool:
    """Some rung merges groups."""
    return any(rung_named(name).forms_pipelines for name in rungs)

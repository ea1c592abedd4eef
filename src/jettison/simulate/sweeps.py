"""Specs as plain mappings before they are parsed: single values set from outside, and sweeps multiplied out.

A place is dotted: ``workload.arrivals.rate_per_s``, ``variants.1.policy`` (or ``variants.NAME.policy``).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jettison.config.files import parse_yaml
from jettison.config.values import shown
from jettison.errors import ConfigError
from jettison.simulate.spec import DEFAULT_POLICY

MAX_POINTS = 10_000


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One combination of swept values, and the spec that has them."""

    raw: dict[str, Any]
    values: Mapping[str, Any] = field(default_factory=dict)
    """By place; empty without a sweep."""

    @property
    def label(self) -> str:
        """``instances=4 gbps=100``: the last part of each place, as far as they differ."""
        places = list(self.values)
        lasts = [place.rpartition(".")[2] for place in places]
        names = [last if lasts.count(last) == 1 else place for place, last in zip(places, lasts, strict=True)]
        return " ".join(f"{name}={_brief(self.values[place])}" for name, place in zip(names, places, strict=True))


def _brief(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def apply_settings(raw: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """``key=value`` texts over a spec, later ones over earlier ones; values are YAML. Raises ConfigError."""
    changed = copy.deepcopy(dict(raw))
    for assignment in assignments:
        place, sign, text = assignment.partition("=")
        if not sign or not place.strip():
            raise ConfigError(f"--set {shown(assignment)}: needs key=value")
        place = place.strip()
        set_at(changed, place, parse_yaml(text, f"--set {place}"))
    return changed


def set_at(raw: dict[str, Any], place: str, value: Any) -> None:
    """Set one value in a mapping of mappings and lists; mappings on the way are made. Raises ConfigError."""
    *way, last = place.split(".")
    node: Any = raw
    for depth, step in enumerate(way):
        where = ".".join(way[: depth + 1])
        if isinstance(node, list):
            index = _index(node, step, place)
            if node[index] is None or isinstance(node[index], str):
                node[index] = {} if node[index] is None else {"policy": node[index]}
            node = node[index]
        else:
            if isinstance(node.get(step), str) and step in _SHORTHANDS:
                node[step] = {_SHORTHANDS[step]: node[step]}
            if node.get(step) is None:
                node[step] = {}
            node = node[step]
        if not isinstance(node, dict | list):
            raise ConfigError(f"{place}: {where} is {shown(node)}, not a mapping")
    if isinstance(node, list):
        node[_index(node, last, place)] = value
    else:
        node[last] = value


_SHORTHANDS = {"cluster": "preset", "workload": "builtin", "lengths": "name"}
"""Sections that may be written as one word, and what that word is."""


def _index(items: list[Any], step: str, place: str) -> int:
    """A number from 0, or the name of an entry."""
    if step.isdigit() and int(step) < len(items):
        return int(step)
    for index, item in enumerate(items):
        if isinstance(item, dict):
            item = item.get("name") or item.get("policy")
        if (item or DEFAULT_POLICY) == step:
            return index
    raise ConfigError(f"{place}: there is no {step!r} among {len(items)} entries")


def expand_sweep(raw: Mapping[str, Any]) -> list[SweepPoint]:
    """Every combination of the values under ``sweep``, the last key running fastest; one point without it.

    Raises ConfigError for a sweep that is no mapping of places to lists, or is too large.
    """
    base = {key: value for key, value in raw.items() if key != "sweep"}
    sweep = raw.get("sweep")
    if sweep is None:
        return [SweepPoint(base)]
    if not isinstance(sweep, Mapping) or not sweep:
        raise ConfigError(f"sweep needs `place: [values]` lines, not {shown(sweep)}")
    for place, values in sweep.items():
        if not isinstance(place, str) or not isinstance(values, list) or not values:
            raise ConfigError(f"sweep.{place} needs a list of values, not {shown(values)}")
        if place.partition(".")[0] in ("sweep", "seeds", "name"):
            raise ConfigError(f"sweep.{place}: {place.partition('.')[0]} cannot be swept")
        if any(values.count(value) > 1 for value in values):
            raise ConfigError(f"sweep.{place} has a value twice")
    places = list(sweep)
    num_points = 1
    for place in places:
        num_points *= len(sweep[place])
    if num_points > MAX_POINTS:
        raise ConfigError(f"sweep has {num_points} combinations, {MAX_POINTS} at most are run at once")
    points = []
    for combination in itertools.product(*(sweep[place] for place in places)):
        changed = copy.deepcopy(base)
        for place, value in zip(places, combination, strict=True):
            set_at(changed, place, value)
        points.append(SweepPoint(changed, dict(zip(places, combination, strict=True))))
    return points

"""Figures by name."""

from __future__ import annotations

from jettison.config.values import did_you_mean
from jettison.errors import ConfigError
from papers.figure import Figure
from papers.figures import conserve, ladder, mell, v1, v3

FIGURES: dict[str, Figure] = {
    figure.name: figure for figure in (*v3.FIGURES, *v1.FIGURES, *conserve.FIGURES, *mell.FIGURES, *ladder.FIGURES)
}
"""In the order of the page."""


def figure_named(name: str) -> Figure:
    """The figure of this name. Raises ConfigError that lists the known ones."""
    if name not in FIGURES:
        hint = did_you_mean(name, tuple(FIGURES))
        raise ConfigError(f"unknown figure {name!r}{hint}; `jettison reproduce list` lists all")
    return FIGURES[name]

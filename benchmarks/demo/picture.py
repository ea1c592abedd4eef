"""README's picture from a demo run: memory by use over time, first tokens below it over the same seconds.

    jettison demo --scene burst
    python -m benchmarks demo picture demo/report.json docs/demo.png

The first run of the file and the runs that are compared with it are drawn, under the names of their policies. Prints
what the report of these runs opens with, for the words below the picture.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.shared import parse
from jettison.errors import ConfigError, JettisonError
from jettison.report.opening import opening_sentence
from jettison.report.plots import Shown, draw_story, to_png, to_svg
from jettison.report.results import read_results
from jettison.report.variants import loads_of, variants_of

WIDTH_IN = 8.0
DOTS_PER_INCH = 150
MOST_BYTES = 200_000


def draw_picture(results: Path, picture: Path) -> str:
    """Write the picture; returns the sentence that goes with it.

    Raises UserError where ``results`` is no result file, ConfigError where its runs lack memory or first tokens, where
    the picture's name ends in neither ``.png`` nor ``.svg``, and where it would be too large for a README.
    """
    drawers = {".png": lambda figure: to_png(figure, dpi=DOTS_PER_INCH), ".svg": to_svg}
    if picture.suffix not in drawers:
        raise ConfigError(f"{picture}: the name has to end in .png or .svg")
    first = loads_of(variants_of(read_results(results)))[0]
    shown = [Shown(variant.runs[0], variant.name.rpartition(": ")[2], variant.index) for variant in first]
    figure = draw_story(shown, width_in=WIDTH_IN)
    if figure is None:
        raise ConfigError(f"{results}: the runs have no series of memory, or no requests with a first token")
    data = drawers[picture.suffix](figure)
    if len(data) > MOST_BYTES:
        raise ConfigError(f"{picture}: {len(data):,} bytes are more than the {MOST_BYTES:,} that a README should load")
    picture.write_bytes(data)
    return opening_sentence([each.run for each in shown])


def main() -> None:
    arguments = parse(
        __doc__, results=(Path, "what a demo wrote: demo/report.json", {"positional": True}),
        picture=(Path, "PNG or SVG", {"positional": True}),
    )  # fmt: skip
    try:
        print(draw_picture(arguments.results, arguments.picture))
    except JettisonError as error:
        raise SystemExit(f"error: {error}") from error

"""Predicted against measured step times, as a picture and as a page (KunServe v3 Fig. 15).

Takes plain numbers and texts; measuring and fitting are done elsewhere.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

import matplotlib as mpl
from jinja2 import Environment, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jettison.report.plots import PLAIN, STYLE, WIDTH_IN, to_svg

MODEL_COLORS = ("#1f77b4", "#c0392b", "#b8860b")

Points = Sequence[tuple[float, float]]
"""(measured, predicted) seconds."""


def draw_predictions(panels: Mapping[str, Mapping[str, Points]]) -> Figure:
    """Panel -> model -> points: logarithmic axes, the diagonal is a perfect prediction."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, 4.2), layout="constrained")
        axes: list[Axes] = list(figure.subplots(1, len(panels), squeeze=False)[0])
        for axis, (title, models) in zip(axes, panels.items(), strict=True):
            for (name, points), color in zip(models.items(), MODEL_COLORS, strict=False):
                measured = [1e3 * point[0] for point in points]
                predicted = [1e3 * point[1] for point in points]
                axis.scatter(measured, predicted, s=14, color=color, alpha=0.75, linewidths=0, label=name)
            everything = [1e3 * value for points in models.values() for point in points for value in point if value > 0]
            if everything:
                ends = [min(everything) / 1.2, max(everything) * 1.2]
                axis.plot(ends, ends, color="#5d6873", linewidth=0.8, linestyle="--", zorder=0)
                axis.set_xlim(*ends)
                axis.set_ylim(*ends)
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.xaxis.set_major_formatter(PLAIN)
            axis.yaxis.set_major_formatter(PLAIN)
            axis.set_title(title)
            axis.set_xlabel("measured, ms (log)")
        axes[0].set_ylabel("predicted, ms (log)")
        axes[0].legend(loc="upper left")
    return figure


def render_cost_page(title: str, tables: Mapping[str, Sequence[Sequence[str]]], figure: Figure) -> str:
    """One self-contained page: tables (the first row is the heading) and the picture. Everything is escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    picture = "data:image/svg+xml;base64," + base64.b64encode(to_svg(figure)).decode("ascii")
    return environment.from_string(_PAGE).render(title=title, tables=tables, picture=picture)


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
body { margin: 0 auto; max-width: 1000px; padding: 24px 20px; color: #1d2329;
  font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
table { border-collapse: collapse; margin: 0 0 24px; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 18px 4px 0; text-align: right; border-bottom: 1px solid #e1e5e9; }
th:first-child, td:first-child { text-align: left; }
th { color: #5d6873; }
h2 { font-size: 17px; }
img { width: 100%; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% for caption, rows in tables.items() %}
<h2>{{ caption }}</h2>
<table>
<thead><tr>{% for cell in rows[0] %}<th>{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows[1:] %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table>
{% endfor %}
<img src="{{ picture }}" alt="Predicted against measured step times on held-out shapes">
</body>
</html>
"""

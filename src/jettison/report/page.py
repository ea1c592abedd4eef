"""The template of the HTML report (Jinja, autoescaped). Markup and style only; values come from ``html``."""

from __future__ import annotations

_STYLE = """
:root { --ink: #1d2329; --soft: #535e69; --line: #e1e5e9; --paper: #ffffff; --ground: #f5f6f8; --accent: #a3211a; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); overflow-wrap: anywhere;
  font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
main { max-width: 1060px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 15px; font-weight: 600; color: var(--soft); margin: 0 0 6px; }
h2 { font-size: 17px; margin: 0 0 10px; }
.opening { font-size: 21px; line-height: 1.42; margin: 0 0 20px; letter-spacing: -0.005em; }
h3 { font-size: 15px; margin: 18px 0 6px; }
.note { color: var(--soft); font-size: 13.5px; margin: 8px 0 0; }
section, main > details { background: var(--paper); border: 1px solid var(--line); border-radius: 10px;
  padding: 16px 20px; margin: 0 0 14px; }
main > details { padding: 0 20px; }
main > details > summary { padding: 12px 0; font-weight: 600; }
main > details[open] { padding-bottom: 18px; }
summary { cursor: pointer; }
summary:focus-visible, .scroll:focus-visible { outline: 3px solid #0072b2; outline-offset: 2px; }
details details { margin-top: 10px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 12px 5px 0; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; }
thead th { color: var(--soft); }
th:first-child, td:first-child, td.text { text-align: left; }
.scroll th, .scroll td { overflow-wrap: normal; }
.scroll td, td.term { white-space: nowrap; }
.scroll th:first-child, .scroll td:first-child { position: sticky; left: 0; background: var(--paper); }
.scroll td.text { white-space: normal; min-width: 220px; }
.meaning { display: block; color: var(--soft); font-size: 12.5px; font-weight: 400; line-height: 1.3; }
.ratio { color: var(--soft); font-size: 12.5px; margin-left: 6px; }
.dot { display: inline-block; width: 10px; height: 10px; border-radius: 50%; margin-right: 6px; }
figure { margin: 0 0 18px; }
figure:last-child { margin-bottom: 0; }
figure img { width: 100%; height: auto; display: block; }
figure img.wide { min-width: 620px; }
figcaption { font-weight: 600; margin-bottom: 6px; }
pre { white-space: pre-wrap; background: var(--ground); padding: 12px; border-radius: 8px; font-size: 12px; }
.failures { border: 2px solid var(--accent); }
.failures h2 { color: var(--accent); }
.failures p { margin: 0 0 4px; }
{% macro stacked(table) %}
{{ table }} thead { display: none; }
{{ table }}, {{ table }} tbody { display: block; }
{{ table }} tr { display: grid; grid-template-columns: repeat(auto-fill, minmax(140px, 1fr)); gap: 4px 14px;
  padding: 8px 0; border-bottom: 1px solid var(--line); }
{{ table }} th, {{ table }} td { display: block; text-align: left; border: 0; padding: 0; }
{{ table }} tbody th { grid-column: 1 / -1; }
{{ table }} td::before { content: attr(data-name); display: block; color: var(--soft); font-size: 12.5px;
  line-height: 1.3; }
{% endmacro %}
{{ stacked("table.many") }}
@media (max-width: 640px) {
main { padding: 14px 10px 40px; }
section { padding: 12px; }
main > details { padding: 0 12px; }
.opening { font-size: 18px; }
{{ stacked("table.several") }}
}
"""

_TABLE = """
{% macro own_table(table) %}
<div class="scroll" tabindex="0" role="region" aria-label="{{ table.title }}"><table class="several">
<thead><tr>{% for header in table.headers %}<th scope="col">{{ header }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in table.rows %}
<tr><th scope="row">{{ row[0] }}</th>
{% for cell in row[1:] %}<td data-name="{{ table.headers[loop.index] }}">{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% for note in table.notes %}
<p class="note">{{ note }}</p>
{% endfor %}
{% endmacro %}
{% macro picture(each) %}
<figure><figcaption>{{ each.caption }}</figcaption>
{% if each.narrow %}
<picture><source media="(max-width: 640px)" srcset="{{ each.narrow }}"><img src="{{ each.wide }}" alt="{{ each.alt }}">
</picture>
{% else %}
<div class="scroll" tabindex="0" role="region" aria-label="{{ each.caption }}">
<img class="wide" src="{{ each.wide }}" alt="{{ each.alt }}"></div>
{% endif %}
</figure>
{% endmacro %}
"""

_OPENING = """
<h1>{{ title }}</h1>
<p class="opening">{{ opening }}</p>

{% if failures %}
<section class="failures">
<h2>Requests that were not answered</h2>
{% for line in failures %}
<p>{{ line }}</p>
{% endfor %}
<p class="note">Figures are of what was answered.</p>
</section>

{% endif %}
{% for table in tables if not table.is_folded %}
<section>
<h2>{{ table.title }}</h2>
{{ own_table(table) }}
</section>

{% endfor %}
{% for each in front %}
<section>
{{ picture(each) }}
</section>
{% endfor %}

{% if offline_tables %}
<section>
<h2>Offline work</h2>
{% for each in offline_pictures %}
{{ picture(each) }}
{% endfor %}
{% for table in offline_tables %}
<h3>{{ table.title }}</h3>
{{ own_table(table) }}
{% endfor %}
</section>

{% endif %}
<section>
<h2>{{ "Eight" if key_rows | length == 8 else "Nine" }} figures</h2>
<table class="key{% if columns | length > 6 %} many{% elif columns | length > 1 %} several{% endif %}">
<thead><tr><td></td>{% for name, color in columns %}
<th scope="col"><span class="dot" style="background: {{ color }}"></span>{{ name }}</th>
{% endfor %}</tr></thead>
<tbody>
{% for row in key_rows %}
<tr><th scope="row">{{ row.label }}<span class="meaning">{{ row.meaning }}</span></th>
{% for figure, ratio in row.cells %}
<td data-name="{{ columns[loop.index0][0] }}">{{ figure }}
{% if ratio %}
<span class="ratio">{{ ratio }}</span>
{% endif %}
</td>
{% endfor %}</tr>
{% endfor %}
</tbody></table>
{% for note in notes %}
<p class="note">{{ note }}</p>
{% endfor %}
</section>
"""

_FOLDED = """
{% for table in tables if table.is_folded %}
<details><summary>{{ table.title }}</summary>
{{ own_table(table) }}
</details>
{% endfor %}
<details><summary>All figures</summary>
{% if num_runs > runs | length %}
<p class="note">The first {{ runs | length }} of {{ num_runs }} runs; the others are in the JSON file.</p>
{% endif %}
<div class="scroll" tabindex="0" role="region" aria-label="All figures"><table>
<thead><tr>{% for header in headers %}<th scope="col">{{ header }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% if zeros %}
<p class="note">0 in all runs: {{ zeros | join(", ") }}.</p>
{% endif %}
{% if runs | length > 1 %}
<p class="note">Ratios above 1 are better than what the column names.</p>
{% endif %}
<details><summary>What each figure means</summary>
<table><tbody>
{% for name, text in definitions.items() %}
<tr><td class="term">{{ name }}</td><td class="text">{{ text }}</td></tr>
{% endfor %}
</tbody></table></details>
</details>

<details><summary>Conditions</summary>
{% for name, lines in fairness %}
<table>
<thead><tr><th scope="col">{{ name }}</th><td></td></tr></thead>
<tbody>
{% for label, value in lines %}
<tr><td>{{ label }}</td><td class="text">{{ value }}</td></tr>
{% endfor %}
</tbody></table>
{% else %}
<p>No fairness header was recorded: ratios between these runs say little without one.</p>
{% endfor %}
</details>

{% if pictures %}
<details><summary>More pictures: queue, memory of each worker, tails</summary>
{% for each in pictures %}
{{ picture(each) }}
{% endfor %}
</details>
{% endif %}

{% for run in runs %}
<details>
<summary><span class="dot" style="background: {{ run.color }}"></span>{{ run.name }}: events, configuration</summary>
{% if run.lag %}
<p>Load generator's own lag: p50 {{ run.lag.p50 }}, p99 {{ run.lag.p99 }}, max {{ run.lag.max }}; part of TTFT.</p>
{% endif %}
{% for error, count in run.failures %}
<p>{{ count }} requests: {{ error }}</p>
{% endfor %}
{% if run.log %}
<details><summary>Events</summary>
<div class="scroll" tabindex="0" role="region" aria-label="Events of {{ run.name }}"><table>
<thead><tr><th scope="col">second</th><th scope="col">event</th><td></td></tr></thead>
<tbody>
{% for t, kind, text in run.log %}
<tr><td>{{ t }}</td><td class="text">{{ kind }}</td><td class="text">{{ text }}</td></tr>
{% endfor %}
</tbody></table></div>
{% if run.log_left_out %}<p>{{ run.log_left_out }} more are in the JSON file.</p>{% endif %}
</details>
{% endif %}
<details><summary>Configuration</summary><pre>{{ run.config }}</pre></details>
</details>
{% endfor %}
"""

PAGE = f"""{_TABLE}<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{{{ title }}}}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
{_OPENING}
{_FOLDED}
</main>
</body>
</html>
"""

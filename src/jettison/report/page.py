"""The template of the HTML report (Jinja, autoescaped). Markup and style only; values come from ``html``."""

from __future__ import annotations

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { --ink: #1d2329; --soft: #5d6873; --line: #e1e5e9; --paper: #ffffff; --ground: #f5f6f8; --accent: #b3261e; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
main { max-width: 1060px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 17px; margin: 0 0 10px; }
.lead { color: var(--soft); margin: 0 0 22px; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 10px;
  padding: 18px 20px; margin: 0 0 18px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 12px 4px 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
td.text { text-align: left; white-space: normal; }
th { color: var(--soft); font-weight: 600; }
.dot { display: inline-block; width: 9px; height: 9px; border-radius: 50%; margin-right: 6px; }
figure { margin: 0 0 18px; }
figure img { width: 100%; height: auto; display: block; }
figcaption { color: var(--soft); font-size: 13px; }
details { margin-top: 8px; }
summary { cursor: pointer; color: var(--soft); }
pre { overflow-x: auto; background: var(--ground); padding: 12px; border-radius: 8px; font-size: 12px; }
.failures { border: 2px solid var(--accent); }
.failures h2 { color: var(--accent); }
.bar { display: inline-block; width: 18px; border-top: 2px dashed; vertical-align: middle; margin: 0 5px 0 12px; }
</style>
</head>
<body>
<main>
<h1>{{ title }}</h1>
<p class="lead">
{% for run in runs %}
<span class="dot" style="background: {{ run.color }}"></span>{{ run.name }}&ensp;
{% endfor %}
{% for color, line, label in event_lines %}
<span class="bar" style="border-color: {{ color }}; border-top-style: {{ line }}"></span>{{ label }}
{% endfor %}
{% if runs | length > 1 %}
(in the colour of its run where a picture shows several)
{% endif %}
</p>

{% if failures %}
<section class="failures">
<h2>Requests that were not answered</h2>
{% for line in failures %}
<p>{{ line }}</p>
{% endfor %}
<p class="lead" style="margin: 0">Figures are of what was answered: the rows that count requests say of how many.</p>
</section>

{% endif %}
{% for table in tables %}
<section>
<h2>{{ table.title }}</h2>
<div class="scroll"><table>
<thead><tr>{% for header in table.headers %}<th>{{ header }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in table.rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% for note in table.notes %}
<p class="lead" style="margin: 8px 0 0">{{ note }}</p>
{% endfor %}
</section>

{% endfor %}
<section>
<h2>Figures</h2>
<div class="scroll"><table>
<thead><tr>{% for header in headers %}<th>{{ header }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% if zeros %}
<p class="lead" style="margin: 8px 0 0">0 in all runs: {{ zeros | join(", ") }}.</p>
{% endif %}
{% if runs | length > 1 %}
<p class="lead" style="margin: 8px 0 0">Ratios above 1 are better than {{ runs[0].name }}.</p>
{% endif %}
</section>

<section>
<h2>Conditions</h2>
{% for name, lines in fairness %}
<div class="scroll"><table>
<thead><tr><th>{{ name }}</th><th></th></tr></thead>
<tbody>
{% for label, value in lines %}
<tr><td>{{ label }}</td><td class="text">{{ value }}</td></tr>
{% endfor %}
</tbody></table></div>
{% else %}
<p>No fairness header was recorded: ratios between these runs say little without one.</p>
{% endfor %}
<details><summary>What each figure means</summary>
<table><tbody>
{% for name, text in definitions.items() %}
<tr><td>{{ name }}</td><td class="text">{{ text }}</td></tr>
{% endfor %}
</tbody></table></details>
</section>

{% if pictures %}
<section>
<h2>Pictures</h2>
{% for caption, uri in pictures %}
<figure><img src="{{ uri }}" alt="{{ caption }}"><figcaption>{{ caption }}</figcaption></figure>
{% endfor %}
</section>
{% endif %}

{% for run in runs %}
<section>
<h2><span class="dot" style="background: {{ run.color }}"></span>{{ run.name }}</h2>
{% if run.lag %}
<p>Load generator's own lag: p50 {{ run.lag.p50 }}, p99 {{ run.lag.p99 }}, max {{ run.lag.max }}; part of TTFT.</p>
{% endif %}
{% for error, count in run.failures %}
<p>{{ count }} requests: {{ error }}</p>
{% endfor %}
{% if run.log %}
<details><summary>Events</summary><div class="scroll"><table>
<thead><tr><th>second</th><th>event</th><th></th></tr></thead>
<tbody>
{% for t, kind, text in run.log %}
<tr><td>{{ t }}</td><td class="text">{{ kind }}</td><td class="text">{{ text }}</td></tr>
{% endfor %}
</tbody></table></div>
{% if run.log_left_out %}<p>{{ run.log_left_out }} more are in the JSON file.</p>{% endif %}
</details>
{% endif %}
<details><summary>Configuration</summary><pre>{{ run.config }}</pre></details>
</section>
{% endfor %}
</main>
</body>
</html>
"""

"""A comparison of plans as one HTML page: no script, nothing from a network, light and dark."""

from jinja2 import Environment, StrictUndefined

from sitsc.commands import plan_diff_view as view
from sitsc.core.diff.change import PlanDiff
from sitsc.core.diff_policy import Verdict

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Plan diff: {{ headline }}</title>
<style>
:root { color-scheme: light dark; --line: #d0d4da; --worse: #b3261e; --better: #146c2e }
@media (prefers-color-scheme: dark) {
  :root { --line: #3c4149; --worse: #ff8a80; --better: #7ddc93 }
}
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
h1 { font-size: 1.25rem } h2 { font-size: 1rem; margin: 1.5rem 0 .25rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; width: 100% }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .6rem; text-align: left }
td { overflow-wrap: anywhere; vertical-align: top } td.number { text-align: right }
.worse { color: var(--worse) } .better { color: var(--better) }
</style>
</head>
<body>
<h1>{{ headline }}</h1>
{% if verdict is not none -%}
<p class="{{ 'better' if verdict.within else 'worse' }}">
{{- 'Within the policy.' if verdict.within else 'Outside of the policy.' }}</p>
{% endif -%}
{% for name, changes in sections -%}
<h2>{{ name }}</h2>
<div class="wide"><table>
<tr><th>what</th><th>where</th><th>A</th><th>B</th></tr>
{% for change in changes -%}
<tr><td>{{ change.title }}</td><td>{{ change.where }}</td>
<td>{{ change.before }}</td><td>{{ change.after }}</td></tr>
{% endfor -%}
</table></div>
{% endfor -%}
{% if rows -%}
<h2>figures</h2>
<div class="wide"><table>
<tr><th>figure</th><th>A</th><th>B</th><th>change</th><th>error</th></tr>
{% for cells, word in rows -%}
<tr><td>{{ cells[0] }}</td>
{%- for cell in cells[1:] %}<td class="number{{ ' ' + word if loop.index == 3 }}">{{ cell }}</td>
{%- endfor %}</tr>
{% endfor -%}
</table></div>
{% endif -%}
<h2>remarks</h2>
<ul>
{% for text in remarks -%}
<li>{{ text }}</li>
{% endfor -%}
</ul>
</body>
</html>
"""


def page(diff: PlanDiff, verdict: Verdict | None) -> str:
    """The text of the page."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    return environment.from_string(_PAGE).render(
        headline=view.headline(diff),
        verdict=verdict,
        sections=view.sections(diff),
        rows=view.figure_rows(diff),
        remarks=view.remarks(diff, verdict),
    )

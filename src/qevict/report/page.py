"""One HTML page with everything in it: no network, no script, light and dark, fit to be printed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from qevict.report.load import Joined
from qevict.report.pictures import Picture
from qevict.report.render import to_html
from qevict.report.tables import Table
from qevict.report.values import SCORE

_CSS = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --soft: #6b6b6b; --line: #d8d8d8; --own: #fff3d6; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --paper: #161618; --soft: #a0a0a0; --line: #3a3a3d; --own: #3a2f14; }
}
@media print { :root { --ink: #000; --paper: #fff; --soft: #444; --line: #bbb; --own: #fff3d6; }
  nav { display: none; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 84rem; padding: 1.5rem; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .5rem; }
h3 { font-size: .95rem; margin: 1.2rem 0 .4rem; }
h2 { border-bottom: 1px solid var(--line); padding-bottom: .2rem; }
a { color: inherit; } nav a { margin-right: 1rem; }
figure { margin: 0 0 1.5rem; break-inside: avoid; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .86rem; }
th, td { padding: .2rem .55rem; text-align: right; vertical-align: top; white-space: nowrap; }
thead th { border-bottom: 1px solid var(--ink); font-weight: 600; vertical-align: bottom; }
thead th[colspan] { text-align: center; border-bottom: 0; color: var(--soft); font-weight: 400; }
thead th[rowspan]:first-child { text-align: left; }
tbody th { text-align: left; font-weight: 400; position: sticky; left: 0; background: var(--paper); }
tbody { border-bottom: 1px solid var(--line); }
tr.group th { font-style: italic; padding-top: .5rem; color: var(--soft); position: static; }
tr.own th, tr.own td { background: var(--own); }
small { display: block; color: var(--soft); font-size: .74rem; line-height: 1.15; }
u { text-underline-offset: .15em; }
.notes, .soft { color: var(--soft); font-size: .82rem; max-width: 60rem; } .notes p { margin: .3rem 0; }
.picture svg { max-width: 100%; height: auto; font-family: system-ui, sans-serif; }
details { margin: .5rem 0; } summary { cursor: pointer; }
pre { overflow-x: auto; font-size: .78rem; border: 1px solid var(--line); padding: .6rem; }
"""


def page(joined: Joined, chapters: Sequence[tuple[str, Sequence[Table], Sequence[Picture]]]) -> str:
    """The page.

    Args:
        chapters: a title with its tables and pictures each.
    """
    model = escape(joined.model)
    heads = [title.removeprefix(f"{joined.model}, ") for title, _, _ in chapters]
    links = "".join(f'<a href="#chapter-{n}">{escape(head)}</a> ' for n, head in enumerate(heads))
    facts = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in joined.settings.items() if name != "model")
    notes = "".join(f"<p>{escape(note)}</p>" for note in joined.notes)
    body = "".join(_chapter(n, *chapter) for n, chapter in enumerate(chapters))
    manifests = "".join(
        f"<details><summary>{escape(folder)}</summary><pre>"
        f"{escape(json.dumps(manifest, indent=1, ensure_ascii=False))}</pre></details>"
        for folder, manifest in joined.manifests.items()
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{model}: KV cache compression</title><style>{_CSS}</style></head><body>"
        f'<h1>{model}: KV cache compression</h1><p class="soft">{escape(facts)}</p><nav>{links}</nav>'
        f'<div class="notes">{notes}</div>{body}<h2>Runs</h2>{manifests}</body></html>\n'
    )


def _chapter(number: int, title: str, tables: Sequence[Table], pictures: Sequence[Picture]) -> str:
    shown = "".join(f'<figure class="picture">{picture.inline()}</figure>' for picture in pictures)
    first = "".join(to_html(table) for table in tables if table.metric is SCORE)
    more = "".join(to_html(table) for table in tables if table.metric is not SCORE)
    if more:
        more = f"<details><summary>Gold answers' likelihood, agreement with full KV</summary>{more}</details>"
    return f'<h2 id="chapter-{number}">{escape(title)}</h2>{first}{shown}{more}'

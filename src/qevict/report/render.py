"""A `Table` in the terminal, in Markdown, as CSV and in HTML."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from qevict.report.tables import Entry, Row, Table

_STYLES = {"": "", "best": "bold", "second": "underline", "clear": "bold"}
_LABELS = ("Method", "KV memory", "Protected")


def print_table(console: Console, table: Table) -> None:
    """Print it; a table that is too wide goes on below, its first columns repeated."""
    for part in _fitting(console, table):
        console.print(to_rich(part))
    for note in table.notes:
        console.print(Text(note, style="dim"))
    console.print()


def to_rich(table: Table) -> RichTable:
    """For the terminal; a number's uncertainty stands below it."""
    made = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD)
    made.add_column(_LABELS[0], no_wrap=True)
    for label in (*_LABELS[1:], *(column.name for column in table.columns)):
        made.add_column(label, justify="right", no_wrap=label not in _LABELS)
    for block in table.blocks:
        if block.title:
            made.add_row(Text(block.title, style="italic"))
        for row in block.rows:
            style = "yellow" if row.emphasis else ""
            made.add_row(Text(row.label, style=style), row.memory, row.protected, *map(_rich_entry, row.entries))
        made.add_section()
    return made


def to_markdown(table: Table) -> str:
    """A heading, the table and its notes. Markdown has no underlining, so the second best are in `<u>`."""
    heads = [*_LABELS, *(column.name for column in table.columns)]
    lines = [f"### {table.title}", "", _line(heads), _line(["---", *["---:"] * (len(heads) - 1)])]
    for block in table.blocks:
        if block.title:
            lines.append(_line([f"*{block.title}*", *[""] * (len(heads) - 1)]))
        lines += [
            _line([row.label, row.memory, row.protected, *map(_markdown_entry, row.entries)]) for row in block.rows
        ]
    return "\n".join([*lines, "", *itertools.chain.from_iterable((note, "") for note in table.notes)])


def to_csv(table: Table) -> str:
    """One line a row, numbers unrounded and unscaled; every task is followed by its error or its interval."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    sizes = [
        max((len(row.entries[i].error) for block in table.blocks for row in block.rows), default=0)
        for i in range(len(table.columns))
    ]
    suffixes: dict[int, list[str]] = {0: [], 1: ["standard error"], 2: ["low", "high"]}
    heads = ["Group", *_LABELS]
    for column, size in zip(table.columns, sizes, strict=True):
        heads += [column.name, *(f"{column.name} {suffix}" for suffix in suffixes[size]), f"{column.name} note"]
    writer.writerow(heads)
    for block in table.blocks:
        for row in block.rows:
            cells: list[object] = [block.title, row.label, row.memory, row.protected]
            for entry, size in zip(row.entries, sizes, strict=True):
                errors = entry.error or ("",) * size
                said = entry.note if entry.value is not None else entry.text
                cells += ["" if entry.value is None else entry.value, *errors, said]
            writer.writerow(cells)
    return out.getvalue()


def to_html(table: Table) -> str:
    """A `figure` with the table and its notes; nothing in it needs a script."""
    width = len(_LABELS) + len(table.columns)
    families = "".join(
        f'<th colspan="{len(columns)}" scope="colgroup">{escape(family)}</th>' for family, columns in _families(table)
    )
    names = "".join(f'<th scope="col">{escape(column.name)}</th>' for column in table.columns)
    labels = "".join(f'<th scope="col" rowspan="2">{label}</th>' for label in _LABELS)
    parts = [f"<thead><tr>{labels}{families}</tr><tr>{names}</tr></thead>"]
    for block in table.blocks:
        title = f'<tr class="group"><th colspan="{width}">{escape(block.title)}</th></tr>' if block.title else ""
        parts.append(f"<tbody>{title}{''.join(map(_html_row, block.rows))}</tbody>")
    notes = "".join(f"<p>{escape(note)}</p>" for note in table.notes)
    caption = f"<figcaption><h3>{escape(table.title)}</h3></figcaption>"
    body = f'<div class="wide"><table>{"".join(parts)}</table></div>'
    return f'<figure>{caption}{body}<div class="notes">{notes}</div></figure>'


def _families(table: Table) -> Iterator[tuple[str, list[str]]]:
    for family, columns in itertools.groupby(table.columns, key=lambda column: column.family):
        yield family, [column.name for column in columns]


def _fitting(console: Console, table: Table) -> Iterator[Table]:
    """The table, or as few slices of its columns as the terminal's width allows."""
    start, total = 0, len(table.columns)
    while start < total:
        end = total
        while end > start + 1 and _width(console, table.sliced(start, end)) > console.width:
            end -= 1
        part = table.sliced(start, end)
        yield part if start == 0 else replace(part, title=f"{table.title} (continued)")
        start = end


def _width(console: Console, table: Table) -> int:
    """Of the table where nothing has to be cut."""
    unlimited = console.options.update(max_width=10_000)
    return Measurement.get(console, unlimited, to_rich(replace(table, title=""))).maximum


def _rich_entry(entry: Entry) -> Text:
    text = Text(entry.text, style=_STYLES[entry.mark])
    for below in filter(None, (entry.spread, entry.note)):
        text.append(f"\n{below}", style="not bold not underline dim")
    return text


def _markdown_entry(entry: Entry) -> str:
    wrapped = {"best": f"**{entry.text}**", "clear": f"**{entry.text}**", "second": f"<u>{entry.text}</u>"}
    parts = [wrapped.get(entry.mark, entry.text), entry.spread, f"({entry.note})" if entry.note else ""]
    return " ".join(filter(None, parts))


def _html_row(row: Row) -> str:
    cells = "".join(map(_html_entry, row.entries))
    kind = ' class="own"' if row.emphasis else ""
    return (
        f'<tr{kind}><th scope="row">{escape(row.label)}</th><td>{escape(row.memory)}</td>'
        f"<td>{escape(row.protected)}</td>{cells}</tr>"
    )


def _html_entry(entry: Entry) -> str:
    tag = {"best": "strong", "clear": "strong", "second": "u"}.get(entry.mark)
    number = f"<{tag}>{escape(entry.text)}</{tag}>" if tag else escape(entry.text)
    below = "".join(f"<small>{escape(part)}</small>" for part in (entry.spread, entry.note) if part)
    return f"<td>{number}{below}</td>"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"

"""From folders of results to everything that a report consists of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qevict.report.floor import select
from qevict.report.heatmap import needle_pictures
from qevict.report.load import Joined, Section, join
from qevict.report.page import page
from qevict.report.pareto import pareto_picture
from qevict.report.pictures import Picture, require_matplotlib
from qevict.report.render import to_csv, to_markdown
from qevict.report.tables import Table, difference_table, result_tables
from qevict.report.values import AGREEMENT, GOLD_NLL, SCORE


@dataclass(frozen=True)
class Chapter:
    """A benchmark under one protocol at one length, or the needles of all lengths."""

    title: str
    tables: Sequence[Table]
    pictures: Sequence[Picture]


@dataclass(frozen=True)
class Report:
    """Tables and pictures of joined runs."""

    joined: Joined
    chapters: Sequence[Chapter]

    @property
    def tables(self) -> list[Table]:
        """Of all chapters."""
        return [table for chapter in self.chapters for table in chapter.tables]

    def brief(self) -> list[Table]:
        """What fits a terminal: scores, and the averaged differences in score."""
        return [
            table.sliced(table.average, table.average + 1) if table.against and table.average is not None else table
            for table in self.tables
            if table.metric is SCORE
        ]

    def write(self, folder: Path) -> list[Path]:
        """Everything as files: `report.html`, `tables.md`, `tables/*.csv`, `pictures/*.png` and `.svg`.

        Returns:
            The files that a person would open first.
        """
        pictures = [picture for chapter in self.chapters for picture in chapter.pictures]
        for name in ("tables", *(["pictures"] if pictures else [])):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for table in self.tables:
            (folder / "tables" / f"{table.slug}.csv").write_text(to_csv(table), encoding="utf8")
        for picture in pictures:
            picture.save(folder / "pictures")
        notes = "".join(f"- {note}\n" for note in self.joined.notes)
        markdown = "\n".join(to_markdown(table) for table in self.tables)
        (folder / "tables.md").write_text(f"{notes}\n{markdown}" if notes else markdown, encoding="utf8")
        html = page(self.joined, [(chapter.title, chapter.tables, chapter.pictures) for chapter in self.chapters])
        (folder / "report.html").write_text(html, encoding="utf8")
        return [folder / "report.html", folder / "tables.md"]


def build(folders: Sequence[Path], against: str = "qevict", plots: bool = True) -> Report:
    """Join runs and work everything out.

    Raises:
        ValueError: if the runs cannot be joined, `against` is in none of them, or matplotlib is needed and missing.
    """
    joined = join(folders)
    methods = list(dict.fromkeys(point.method for section in joined.sections for point in section.points))
    if against not in methods:
        raise ValueError(f"there is no result of {against!r} to compare with; there are {', '.join(methods)}")
    if plots:
        require_matplotlib()
    chapters = [_chapter(section, against, plots) for section in joined.sections]
    if plots and (needles := needle_pictures(joined.sections)):
        chapters.append(Chapter("Needles by depth and length", [], needles))
    return Report(joined, chapters)


def _chapter(section: Section, against: str, plots: bool) -> Chapter:
    selection = select(section)
    tables = [table for metric in (SCORE, GOLD_NLL, AGREEMENT) for table in result_tables(section, selection, metric)]
    differences = [difference_table(section, selection, metric, against) for metric in (SCORE, GOLD_NLL)]
    tables += [table for table in differences if table is not None]
    picture = pareto_picture(section, selection) if plots else None
    return Chapter(section.title, tables, [picture] if picture else [])

"""Pareto frontiers, needle grids, and the files that pictures become."""

from __future__ import annotations

import builtins
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qevict.report.floor import select
from qevict.report.heatmap import grid, needle_pictures
from qevict.report.load import Point, join
from qevict.report.pareto import OperatingPoint, frontier, operating_points, pareto_picture
from qevict.report.pictures import looks, require_matplotlib
from report.made import Folder, samples


def point(ratio: float, score: float, name: str = "m") -> OperatingPoint:
    return OperatingPoint(Point(name, ratio), ratio, score, 0.0)


def test_frontier_of_a_hand_worked_case() -> None:
    cheap, better, best = point(0.1, 0.5), point(0.2, 0.6), point(0.4, 0.9)
    dearer, worse = point(0.15, 0.5), point(0.4, 0.8)
    assert frontier([worse, best, dearer, cheap, better]) == [cheap, better, best]


def test_equal_points_do_not_dominate_each_other() -> None:
    twins = [point(0.2, 0.5, "a"), point(0.2, 0.5, "b")]
    assert frontier(twins) == twins


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=15))
def test_everything_off_the_frontier_is_beaten_by_something_on_it(pairs: list[tuple[int, int]]) -> None:
    points = [point(ratio, score, str(i)) for i, (ratio, score) in enumerate(pairs)]
    best = frontier(points)
    scores = [p.score for p in best]
    assert scores == sorted(scores)
    assert all(p in best or any(b.ratio <= p.ratio and b.score >= p.score for b in best) for p in points)


def test_operating_points_are_measured_and_whole(folder: Folder) -> None:
    (section,) = join(
        [
            folder(
                "run",
                [
                    *samples("full", None, [1.0, 1.0]),
                    *samples("snapkv", 0.2, [1.0, 0.0], ratio=0.19),
                    *samples("tova", 0.2, [1.0, None]),
                ],
            )
        ]
    ).sections
    (only,) = operating_points(section, section.tasks, section.evictors(0.2))
    assert (only.point.method, only.ratio, only.score) == ("snapkv", 0.19, 0.5)


def test_needles_by_length_and_depth(folder: Folder) -> None:
    def lines(length: int, *found: tuple[float | list[float], float]) -> list[dict[str, Any]]:
        made = []
        for index, (depth, score) in enumerate(found):
            depths = depth if isinstance(depth, list) else [depth]
            made += samples("full", None, [score], task="ruler/niah_single_1", length=length, extra={"depths": depths})
            made[-1]["sample"] = str(index)
        return made

    short = folder("a", lines(1024, (0.0, 1.0), (0.19, 0.0), (0.2, 1.0), (1.0, 1.0), ([0.1, 0.9], 1.0)))
    long = folder("b", lines(2048, (0.5, 1.0)), length=2048)
    cells = grid(join([short, long]).sections, Point("full", None))
    assert cells == {(1024, 0): (2, 1.0), (1024, 1): (1, 1.0), (1024, 4): (1, 1.0), (2048, 2): (1, 1.0)}


def test_pictures_are_files_and_parts_of_a_page(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (section,) = join([run]).sections
    pareto = pareto_picture(section, select(section))
    (needles,) = needle_pictures([section])
    assert pareto is not None
    for picture in (pareto, needles):
        picture.save(tmp_path)
        assert (tmp_path / f"{picture.slug}.png").read_bytes().startswith(b"\x89PNG")
        ET.parse(tmp_path / f"{picture.slug}.svg")
        inline = picture.inline()
        ET.fromstring(inline)
        assert "currentColor" in inline
        assert "query-aware" in inline
        assert "model" in inline
    assert "full KV" in pareto.svg
    assert pareto_picture(section, select(section)) == pareto  # the same bytes for the same results


def test_no_two_methods_look_alike() -> None:
    methods = ["qevict", "qevict-paper", *(f"m{i}" for i in range(40))]
    made = looks(methods)
    assert len(set(made.values())) == len(methods)
    assert {made[m].colour for m in methods[:2]}.isdisjoint(made[m].colour for m in methods[2:])


def test_a_missing_matplotlib_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ValueError, match=r"pip install 'qevict\[bench\]'.*--no-plots"):
        require_matplotlib()

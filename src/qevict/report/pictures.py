"""What every picture shares: matplotlib or a clear message, colours that all can tell apart, PNG and SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from qevict.report.load import is_qevict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette without its yellow, which is lost on white paper; vermillion is QEvict's alone.
_QEVICT = "#D55E00"
_OTHERS = ("#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
_MARKERS = "osD^vP*Xh<>"
_DASHES = ("-", "--", ":", "-.")
_DPI = 150
INK = "#010203"
"""Lines and text: near black in files, the page's own text colour in HTML."""
PAPER = "#fdfefd"
"""Inside of hollow markers: near white in files, the page's background in HTML."""

_STYLE: dict[Any, Any] = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 9,
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


class Look(NamedTuple):
    """How a method is drawn, everywhere in a report."""

    colour: str
    marker: str
    dashes: str
    width: float


class Picture(NamedTuple):
    """A picture.

    Attributes:
        slug: file name without an ending.
        description: what it shows, for those who cannot see it.
        svg: without a background.
    """

    slug: str
    description: str
    png: bytes
    svg: str

    def save(self, folder: Path) -> None:
        """As PNG and SVG, on white."""
        (folder / f"{self.slug}.png").write_bytes(self.png)
        background = re.sub(r"(<svg [^>]*>)", r'\1<rect width="100%" height="100%" fill="white"/>', self.svg, count=1)
        (folder / f"{self.slug}.svg").write_text(background, encoding="utf8")

    def inline(self) -> str:
        """For a page whose style sheet has `--paper`: drawn in the page's own colours of text and background."""
        svg = self.svg.replace(INK, "currentColor").replace(PAPER, "var(--paper)")
        return svg.replace("<svg ", f'<svg role="img" aria-label="{self.description}" ', 1)


def require_matplotlib() -> None:
    """Raise a ValueError that says what to do, if it is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(
            "pictures need matplotlib: pip install 'qevict[bench]', or leave them out with --no-plots"
        ) from error


def draw(slug: str, description: str, size: tuple[float, float], onto: Callable[[Figure], None]) -> Picture:
    """Have a figure of that size in inches drawn, and render it.

    Raises:
        ValueError: if matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    png, svg = io.BytesIO(), io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": slug}):
        figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
        onto(figure)
        figure.draw_without_rendering()  # lays it out, once for both formats
        figure.set_layout_engine("none")
        figure.savefig(png, format="png", dpi=_DPI, facecolor="white")
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    return Picture(slug, description, png.getvalue(), _small(svg.getvalue()))


def looks(methods: Sequence[str]) -> dict[str, Look]:
    """A look for each method. Colours come round; markers and then dashes tell those apart that share one."""
    made, count = {}, {True: 0, False: 0}
    for method in methods:
        own = is_qevict(method)
        index = count[own]
        count[own] += 1
        marker = _MARKERS[index % len(_MARKERS)]
        if own:
            made[method] = Look(_QEVICT, marker, _DASHES[index % len(_DASHES)], 2.2)
        else:
            dashes = _DASHES[index // len(_OTHERS) % len(_DASHES)]
            made[method] = Look(_OTHERS[index % len(_OTHERS)], marker, dashes, 1.2)
    return made


def wrapped(label: str) -> str:
    """A method's settings in a line of their own."""
    return label.replace("[", "\n[")


def _small(svg: str) -> str:
    """A third of the size: two digits after the point, as print needs; no white space, no font named in every text.

    Ids that other pictures on a page have as well go, too.
    """
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    for pattern, shorter in (
        (r' id="[a-zA-Z0-9.]+_\d+"', ""),
        (r"(\d\.\d\d)\d+", r"\1"),
        (r"font-family: [^;]*; ", ""),
        (r' transform="rotate\(-?0 [^)]*\)"', ""),
        (r"\s*\n\s*([LCQMz\"<])", r"\1"),
    ):
        svg = re.sub(pattern, shorter, svg)
    return svg.replace("<svg ", '<svg font-family="DejaVu Sans, sans-serif" ', 1)

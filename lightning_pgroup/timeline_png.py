"""A timeline as PNG, drawn by matplotlib on a canvas of its own, so that nothing of pyplot's global state is touched."""

import io
import itertools
import warnings
from typing import TYPE_CHECKING

from lightning_pgroup.timeline_layout import NARROW, Layout, lay_out
from lightning_pgroup.timeline_parts import Timeline
from lightning_pgroup.timeline_style import INK, PAPER, STYLES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDEST = 1900.0
LISTED = 20
_DPI = 100.0
_HATCHES = {"/": "////", "\\": "\\\\\\\\", "-": "---", "x": "xxx", ".": "..."}
_LINES = {
    "grid": ("#dddddd", 0.7, "solid", 0.0),
    "row": ("#cccccc", 0.7, "solid", 0.1),
    "launch": (INK, 1.0, "dashed", 0.2),
    "failure": ("#d55e00", 1.0, "dotted", 0.2),
    "cross": (INK, 2.0, "solid", 3.0),
}


def render(timeline: Timeline) -> bytes:
    """The PNG.

    Raises:
        ValueError: matplotlib is not installed.
    """
    figure = draw(lay_out(timeline, widest=WIDEST, listed=LISTED))
    target = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a letter that no font has is shown as a box
        figure.savefig(target, format="png", dpi=_DPI)
    return target.getvalue()


def draw(layout: Layout) -> "Figure":
    """Draw a layout; one unit of it is one pixel.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.collections import LineCollection, PolyCollection
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            f"a .png needs matplotlib, which can not be imported ({error}): pip install 'lightning-pgroup[plot]',"
            " or write a .html or .json, which need nothing"
        ) from error
    figure = Figure(figsize=(layout.width / _DPI, layout.height / _DPI), dpi=_DPI, facecolor=PAPER)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, layout.width)
    axes.set_ylim(layout.height, 0)
    axes.axis("off")
    for kind, (colour, width, dashes, order) in _LINES.items():
        segments = [((one.x1, one.y1), (one.x2, one.y2)) for one in layout.lines if one.kind == kind]
        axes.add_collection(
            LineCollection(segments, colors=colour, linewidths=width, linestyles=dashes, zorder=order), autolim=False
        )
    for name, is_narrow, on_top in itertools.product(STYLES, (True, False), (False, True)):
        corners = [
            ((box.x, box.y), (box.x + box.width, box.y), (box.x + box.width, box.y + box.height), (box.x, box.y + box.height))
            for box in layout.boxes
            if box.style == name and box.on_top == on_top and (box.width < NARROW) == is_narrow
        ]
        edges = "none" if is_narrow else "#00000080"
        bars = PolyCollection(corners, facecolors=STYLES[name].fill, edgecolors=edges, linewidths=0.5, zorder=1 + on_top)
        if STYLES[name].hatch and not is_narrow:
            bars.set_hatch(_HATCHES[STYLES[name].hatch])
            bars.set_hatchcolor("#000000a0")
        axes.add_collection(bars, autolim=False)
    for label in layout.labels:
        text = axes.text(
            label.x, label.y, label.text, color=STYLES[label.on].ink if label.on else INK, fontsize=label.size * 72 / _DPI,
            ha={"start": "left", "middle": "center", "end": "right"}[label.anchor], va="center_baseline", zorder=4,
            parse_math=False, family="DejaVu Sans",
        )  # fmt: skip
        if label.on and STYLES[label.on].hatch:
            text.set_bbox({"facecolor": STYLES[label.on].fill, "edgecolor": "none", "pad": 0.8})
    return figure

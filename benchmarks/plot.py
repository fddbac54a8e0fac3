"""The main figures as a picture, from ``results.json``. Needs the extra ``plot``.

To draw it once more::

    python benchmarks/plot.py benchmarks/results.json benchmarks/results.png
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#666666"
"""From the palette of Okabe and Ito, which those can tell apart who see colours differently; markers and hatches differ too."""

OURS = {"color": BLUE, "marker": "o"}
PLAIN = {"color": ORANGE, "marker": "s", "linestyle": "--"}


def draw_step(axes: Axes, figures: dict[str, Any]) -> None:
    """Ratios of speeds, with their quartiles."""
    labels = []
    for place, (model, found) in enumerate(figures.items()):
        for shift, (name, style) in enumerate({"DDPStrategy again": PLAIN, "PGroupDDPStrategy": OURS}.items()):
            ratio = found["ratio"][name]
            around = [[ratio["median"] - ratio["low"]], [ratio["high"] - ratio["median"]]]
            at = place + 0.2 * shift - 0.1
            label = name if place == 0 else None
            axes.errorbar([at], [ratio["median"]], around, **{**style, "linestyle": "none"}, capsize=4, label=label)
        labels.append(f"{model} model")
    axes.axhline(1, color=GREY, linewidth=0.8)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlim(-0.5, len(labels) - 0.5)
    axes.set_ylabel("steps/s, ratio to DDPStrategy")
    axes.set_title("Step: median and quartiles, 2 ranks")
    axes.legend(fontsize="small")


def draw_stage(axes: Axes, figures: dict[str, Any]) -> None:
    """What a stage takes more, as bars."""
    names = [name for name in figures["test"] if name != "DDPStrategy"]
    styles = {"fit": (BLUE, ""), "test": (ORANGE, "//")}
    for shift, (stage, (color, hatch)) in enumerate(styles.items()):
        places = [place + 0.4 * shift - 0.2 for place in range(len(names))]
        more = [figures[stage][name]["more_ms"] for name in names]
        around = [[one["median"] - one["low"] for one in more], [one["high"] - one["median"] for one in more]]
        medians = [one["median"] for one in more]
        axes.barh(places, medians, 0.38, xerr=around, color=color, hatch=hatch, edgecolor="white", label=stage, ecolor=GREY)
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.set_yticks(range(len(names)), [name.replace(", each stage a new one", ",\na new Trainer each") for name in names])
    axes.invert_yaxis()
    axes.set_xlabel("more than DDPStrategy, ms per stage")
    axes.set_title("Stage of one batch, 2 ranks")
    axes.legend(fontsize="small")


def _over_ranks(axes: Axes, what: str, lines: dict[str, tuple[dict[str, Any], dict[int, Any]]]) -> None:
    sizes = sorted({size for _, points in lines.values() for size in points})
    for name, (style, points) in lines.items():
        if points:
            around = [
                [one["median"] - one["low"] for one in points.values()],
                [one["high"] - one["median"] for one in points.values()],
            ]
            axes.errorbar(list(points), [one["median"] for one in points.values()], around, **style, capsize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("ranks")
    axes.set_ylabel(what)
    axes.legend(fontsize="small")


def draw_cycle(axes: Axes, figures: dict[str, Any]) -> None:
    """The time of a cycle over the number of ranks."""
    by_size = {int(size): found for size, found in figures.items() if size.isdecimal()}
    lines = {
        name: (style, {size: found[name]["ms"]["cycle"] for size, found in by_size.items() if found[name]["ms"]})
        for name, style in {"torch.distributed": PLAIN, "process_group()": OURS}.items()
    }
    _over_ranks(axes, "create, use, destroy, ms", lines)
    axes.set_title("Cycle: median and quartiles")


def draw_failure(axes: Axes, figures: dict[str, Any]) -> None:
    """How long a failure takes to be heard, over the number of ranks."""
    by_size = {int(size): found for size, found in figures.items()}
    lines = {
        f"{name}, {words}": (style, {size: found[name][what] for size, found in by_size.items() if found[name][what]})
        for name, what, words, style in (
            ("DDPStrategy", "peer_ms", "exception", PLAIN),
            ("PGroupDDPStrategy", "peer_ms", "exception", OURS),
            ("PGroupDDPStrategy", "step_ms", "next step", {"color": GREEN, "marker": "^", "linestyle": ":"}),
        )
    }
    _over_ranks(axes, "after the raise, ms", lines)
    axes.set_title("Failure of one rank")


def draw_counts(axes: Axes, figures: dict[str, Any]) -> None:
    """What rank 0 holds over the stages."""
    samples = figures["samples"]["on_teardown"][0]
    styles = {"descriptors": (BLUE, "-"), "keys": (ORANGE, "--"), "threads": (GREEN, "-."), "hooks": (GREY, ":")}
    for what, (color, line) in styles.items():
        axes.plot(samples["stage"], samples[what], color=color, linestyle=line, label=what)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("stages, each with a group of its own")
    axes.set_ylabel("held by rank 0")
    axes.set_title("Leaks: counts")
    axes.legend(fontsize="small")


def draw_memory(axes: Axes, figures: dict[str, Any]) -> None:
    """The memory of rank 0 over the stages."""
    ended = {"color": GREEN, "linestyle": ":"}
    for name, style in {"on_teardown": OURS, "DDPStrategy": PLAIN, "torch.distributed": ended}.items():
        samples = figures["samples"][name][0]
        more = [(value - samples["anonymous"][0]) / 1e6 for value in samples["anonymous"]]
        axes.plot(samples["stage"], more, **{**style, "marker": None}, label=name)
    axes.set_xlabel("stages, or groups of torch.distributed")
    axes.set_ylabel("memory of rank 0, MB more than at first")
    axes.set_title("Leaks: memory")
    axes.legend(fontsize="small")


PANELS: list[tuple[str, Callable[[Axes, dict[str, Any]], None]]] = [
    ("step", draw_step),
    ("stage", draw_stage),
    ("cycle", draw_cycle),
    ("failure", draw_failure),
    ("leaks", draw_counts),
    ("leaks", draw_memory),
]


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw what there is of the main figures."""
    panels = [(name, panel) for name, panel in PANELS if name in results["benchmarks"]]
    columns = min(3, max(1, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    figure, grid = plt.subplots(rows, columns, figsize=(5.2 * columns, 4.2 * rows), squeeze=False, layout="constrained")
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (name, panel) in zip(grid.flat, panels, strict=False):
        panel(axes, results["benchmarks"][name]["figures"])
        axes.spines[["top", "right"]].set_visible(False)
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    figure.suptitle(versions, fontsize="small", color=GREY)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Draw."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("results", type=Path)
    options.add_argument("picture", type=Path)
    told = options.parse_args()
    draw(json.loads(told.results.read_text()), told.picture)


if __name__ == "__main__":
    main()

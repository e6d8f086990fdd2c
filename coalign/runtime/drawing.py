"""How all pictures look."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STRONG = ("#3366cc", "#dd8833", "#2a9d6f", "#b04a8f", "#6b5bb0", "#8a8a3c", "#c0504d", "#4aa3a3")
_PALE = ("#9db4e8", "#f2c79b", "#9bd6bd", "#dfa9cb", "#b9b0e0", "#c9c98f", "#e5a9a7", "#a8d6d6")
_COLORS = _STRONG + _PALE


def figure(title: str, unit: str, height: float = 4.2) -> tuple:
    """(figure, axes) in the style of all pictures; ``height`` in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    drawing = Figure(figsize=(7.5, height))  # not pyplot: no global state, no display needed
    FigureCanvasAgg(drawing)
    axes: Axes = drawing.add_subplot()
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    return drawing, axes


def save(drawing, path: Path) -> Path:
    drawing.savefig(path, dpi=130, bbox_inches="tight")
    return path


def cycle(count: int) -> list[str]:
    return [_COLORS[i % len(_COLORS)] for i in range(count)]

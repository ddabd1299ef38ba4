"""The picture of a transfer: what it adds to the second token, by prompt length, a panel a link, a line a mode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = {"whole": "#999999", "chunk": "#d9761e", "layer": "#2463a8", "auto": "#2a8a4a"}
INK = "#333333"
LEAST_MS = 0.1  # the axis is logarithmic


class Measured(Protocol):
    @property
    def gbit_per_s(self) -> float: ...
    @property
    def chunks(self) -> int: ...
    @property
    def mode(self) -> str: ...
    @property
    def added_ms(self) -> float: ...
    @property
    def wire_ms(self) -> float: ...
    @property
    def whole_ms(self) -> float: ...
    @property
    def prefill_ms(self) -> float: ...


def plot_exposed(path: str, cells: Sequence[Measured], note: str) -> None:
    """Writes a PNG; the dotted line is what the link alone needs, the dashed one a tenth of what `whole` adds."""
    links = sorted({cell.gbit_per_s for cell in cells})
    columns = min(3, len(links))
    rows = -(-len(links) // columns)
    figure = Figure(figsize=(4.4 * columns, 3.4 * rows + 0.6), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, link in zip(panels, links, strict=False):
        _panel(axes, [cell for cell in cells if cell.gbit_per_s == link], link)
    panels[0].legend(fontsize=8, frameon=False)
    figure.suptitle("Transfer time that a request sees", fontsize=15, fontweight="bold", color=INK)
    figure.supxlabel(f"prompt length in prefill chunks   ({note})", fontsize=9, color="#777777")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _panel(axes: Axes, cells: Sequence[Measured], link: float) -> None:
    for mode, colour in COLOURS.items():
        own = sorted((cell for cell in cells if cell.mode == mode), key=lambda cell: cell.chunks)
        if own:
            axes.plot(
                [c.chunks for c in own], [max(LEAST_MS, c.added_ms) for c in own], "o-", color=colour, label=mode, lw=2
            )
    wire = sorted({(cell.chunks, cell.wire_ms) for cell in cells})
    axes.plot([x for x, _ in wire], [y for _, y in wire], ":", color=INK, lw=1, label="link alone")
    whole = sorted((cell.chunks, cell.whole_ms / 10) for cell in cells if cell.mode == "whole")
    axes.plot([x for x, _ in whole], [y for _, y in whole], "--", color=INK, lw=1, label="a tenth of whole")
    axes.set_title(f"{link:g} Gbit/s", fontsize=11, color=INK)
    axes.set_xscale("log", base=2)
    axes.set_xticks([x for x, _ in wire], [str(x) for x, _ in wire])
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.8 * LEAST_MS)
    axes.set_ylabel("added to the second token, ms", fontsize=9)
    axes.grid(True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)

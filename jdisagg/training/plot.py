"""Plots a run: training loss and held-out bits per byte over the tokens seen."""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jdisagg.training.run import TrainingReport


def plot_losses(reports: list[TrainingReport], path: Path) -> None:
    """Writes a PNG with the loss in nats per token (left axis) and bits per byte (right axis)."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left = figure.add_subplot()
    left.plot(_millions(reports), [report.loss for report in reports], color="tab:blue", linewidth=1)
    left.set_xlabel("tokens trained on, millions")
    left.set_ylabel("training loss, nats a token", color="tab:blue")
    left.grid(alpha=0.3)
    checked = [report for report in reports if report.held_out is not None]
    right = left.twinx()
    held_out = [report.held_out for report in checked if report.held_out is not None]
    right.plot(_millions(checked), held_out, "o-", color="tab:orange", markersize=3)
    right.set_ylabel("held-out bits per byte", color="tab:orange")
    figure.savefig(path, dpi=120)


def _millions(reports: list[TrainingReport]) -> list[float]:
    return [report.tokens / 1e6 for report in reports]

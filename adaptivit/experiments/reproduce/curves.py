"""Figures of the validation, or of training batches, over the epochs: one line a run, one panel a figure."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ...utils.plotting import DPI, FAINT, INK, MUTED

LABELS = {"top1": "top-1 % on validation", "mean_depth": "mean depth, blocks a patch", "gmacs": "GMACs an image"}
LABELS |= {"accuracy": "accuracy % of training batches, augmented"}
_COLOURS = ("#0f8b80", "#d9622b", "#4c6fb1", "#b0487e", "#8a8f1f", "#7d5fb2", "#2f9e44", "#c2410c")
_STYLES = ("-", "--", ":")


@dataclass(frozen=True)
class Curve:
    """One run."""

    name: str
    seed: int
    epochs: list[float]
    values: dict[str, list[float]]  # by figure, as many as epochs

    def rows(self) -> list[dict[str, str]]:
        """As rows of a CSV file."""
        columns = zip(*self.values.values(), strict=True)
        return [
            {"method": self.name, "seed": str(self.seed), "epoch": f"{epoch:.4g}"}
            | {name: f"{value:.6g}" for name, value in zip(self.values, values, strict=True)}
            for epoch, values in zip(self.epochs, columns, strict=True)
        ]


def draw(curves: Sequence[Curve], figures: Sequence[str], title: str) -> bytes:
    """A PNG; runs of one name have one colour."""
    names = list(dict.fromkeys(curve.name for curve in curves))
    figure = Figure(figsize=(5.2 * len(figures), 3.6 + 0.2 * (len(names) // (2 * len(figures)))), dpi=DPI)
    FigureCanvasAgg(figure)
    for number, name in enumerate(figures, start=1):
        axes = figure.add_subplot(1, len(figures), number)
        for curve in curves:
            place = names.index(curve.name)
            style = _STYLES[place // len(_COLOURS) % len(_STYLES)]
            first = next(other for other in curves if other.name == curve.name) is curve
            axes.plot(
                curve.epochs,
                curve.values[name],
                color=_COLOURS[place % len(_COLOURS)],
                linestyle=style,
                linewidth=1.4,
                marker="o" if len(curve.epochs) < 20 else None,
                markersize=3,
                label=curve.name if first else None,
            )
        axes.set_xlabel("epoch", fontsize=8, color=MUTED)
        axes.set_ylabel(LABELS[name], fontsize=8, color=MUTED)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(True, color=FAINT, linewidth=0.7)
        axes.tick_params(labelsize=8, colors=MUTED)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    columns = min(len(labels), 2 * len(figures))
    rows = -(-len(labels) // columns)
    room = (0.22 * rows + 0.08) / figure.get_figheight()
    figure.legend(handles, labels, loc="lower center", ncols=columns, fontsize=8, frameon=False, labelcolor=INK)
    figure.suptitle(title, fontsize=10, color=INK, x=0.02, ha="left")
    figure.tight_layout(rect=(0, room, 1, 1))
    out = io.BytesIO()
    figure.savefig(out, format="png", facecolor="white")
    return out.getvalue()

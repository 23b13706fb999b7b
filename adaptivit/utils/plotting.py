"""Figures as PNG bytes: where the image was worked on, and how many tokens each block saw.

Figures are drawn on canvases of their own, never through pyplot, so that nothing global is touched and no display
is needed.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from ..errors import UserError

DPI = 150
COLOURS = matplotlib.colormaps["viridis"]
ACCENT, INK, MUTED, FAINT, GREY = "#0f8b80", "#1c2024", "#667079", "#e4e7ea", "#b9c0c6"
DASHED = (0, (4, 3))
STEPS = [1, 2, 2.5, 5, 10]  # of ticks
# Policies without a colour of their own; runs of curves.
SPARE = ("#b3541e", "#7a9e9f", "#e36588", "#39375b", "#9a031e", "#606c38")

_TILE = 216  # width of one image in pixels
_GUTTER = 4  # between the input and its map
_GAP, _ROW_GAP = 44, 34  # between panels
_MARGIN = 36
_TITLE = 32  # room for a panel's title
_LEGEND = 116  # room for the colour bar
_TINT = 0.56  # how much of a patch's colour is its depth

Floats = NDArray[np.float64]


def halting_maps(
    images: ArrayLike,
    depths: ArrayLike,
    layers: int,
    *,
    titles: Sequence[str] | None = None,
    columns: int = 3,
) -> bytes:
    """Each image beside itself with every patch tinted by how many blocks computed it; halted patches are dimmed.

    images: [B, H, W, 3] in 0..1 (or [B, H, W, 1]). depths: [B, gh, gw] in 0..layers.
    """
    pixels, grid = _checked(images, depths, layers)
    if titles is not None and len(titles) != len(pixels):
        raise UserError(f"Expected one title per image: {len(pixels)} images, {len(titles)} titles.")
    if columns < 1:
        raise UserError(f"columns must be at least 1, not {columns}.")
    columns = min(columns, len(pixels))
    rows = math.ceil(len(pixels) / columns)
    tile_height = max(1, round(_TILE * pixels.shape[1] / pixels.shape[2]))
    head = _TITLE if titles is not None else 0
    panel_width, panel_height = 2 * _TILE + _GUTTER, head + tile_height
    width = 2 * _MARGIN + columns * panel_width + (columns - 1) * _GAP
    height = _MARGIN + rows * panel_height + (rows - 1) * _ROW_GAP + _LEGEND
    figure = new_figure(width, height)
    for i, (image, depth) in enumerate(zip(pixels, grid, strict=True)):
        row, column = divmod(i, columns)
        left = _MARGIN + column * (panel_width + _GAP)
        top = _MARGIN + row * (panel_height + _ROW_GAP) + head
        plain = _resized(image, _TILE, tile_height)
        bottom = height - top - tile_height
        figure.figimage(plain, left, bottom, origin="upper")
        figure.figimage(_tinted(plain, depth, layers), left + _TILE + _GUTTER, bottom, origin="upper")
        if titles is not None:
            _title(figure, titles[i], left, height - top + 10, panel_width)
    _colour_bar(figure, layers)
    return png_bytes(figure)


def layer_curve(
    live: ArrayLike,
    total: float,
    *,
    depths: ArrayLike | None = None,
    name: str = "adaptive",
    stacked: bool = False,
) -> bytes:
    """Mean tokens computed in each block, against the static model's flat line.

    live: [L] mean tokens per image. total: tokens of the static model. depths: whole numbers of any shape, blocks per
    patch; given, their histogram stands to the right (stacked: below, for narrow pages).
    """
    counts = np.asarray(live, dtype=np.float64)
    if counts.ndim != 1 or not counts.size:
        raise UserError(f"live must be one number per block, not an array of shape {counts.shape}.")
    if not (np.isfinite(counts).all() and counts.min() >= 0 and counts.max() <= total * (1 + 1e-6)) or total <= 0:
        raise UserError(f"live must lie between 0 and total ({total:g}).")
    shares = None if depths is None else _shares(depths, len(counts))
    left, right, below, height = 82, 36, 84, 310  # around one plot, and its own height
    whole = below + height + 108
    if shares is None or stacked:
        width = (580 if stacked else 1100) - left - right
        figure = new_figure(left + width + right, whole if shares is None else 2 * whole)
        live_bars(add_axes(figure, left, figure.bbox.height - whole + below, width, height), counts, total, name)
        if shares is not None:
            depth_bars(add_axes(figure, left, below, width, height), shares)
    else:
        figure = new_figure(1392, whole)
        live_bars(add_axes(figure, left, below, 700, height), counts, total, name)
        depth_bars(add_axes(figure, 892, below, 1392 - 892 - right, height), shares)
    return png_bytes(figure)


def _checked(images: ArrayLike, depths: ArrayLike, layers: int) -> tuple[Floats, NDArray[np.int64]]:
    pixels, grid = np.asarray(images, dtype=np.float64), np.asarray(depths)
    if pixels.ndim != 4 or pixels.shape[-1] not in (1, 3) or 0 in pixels.shape:
        raise UserError(f"images must be [B, H, W, 3] with B at least 1, not {list(pixels.shape)}.")
    if grid.ndim != 3 or 0 in grid.shape or len(grid) != len(pixels):
        raise UserError(f"depths must be [B, gh, gw] with B = {len(pixels)}, not {list(grid.shape)}.")
    if not np.array_equal(grid, np.floor(grid)):
        raise UserError("depths must be whole numbers: how many blocks computed each patch.")
    if layers < 1 or grid.min() < 0 or grid.max() > layers:
        raise UserError(f"depths must lie in 0..{layers} (layers), not {grid.min()}..{grid.max()}.")
    return np.broadcast_to(np.nan_to_num(pixels).clip(0, 1), (*pixels.shape[:3], 3)), grid.astype(np.int64)


def _resized(image: Floats, width: int, height: int) -> Floats:
    eight_bit = Image.fromarray(np.ascontiguousarray((image * 255).round().astype(np.uint8)))
    return np.asarray(eight_bit.resize((width, height), Image.Resampling.LANCZOS), dtype=np.float64) / 255


def _tinted(image: Floats, depth: NDArray[np.int64], layers: int) -> Floats:
    """The image with each patch of the grid in the colour of its depth; the sooner it halted, the darker."""
    height, width = image.shape[:2]
    rows = np.arange(height) * depth.shape[0] // height
    columns = np.arange(width) * depth.shape[1] // width
    share = (depth / layers)[np.ix_(rows, columns)]
    colour = np.asarray(COLOURS(share), dtype=np.float64)[..., :3]
    grey = image @ np.array([0.299, 0.587, 0.114])
    dark, bright = np.percentile(grey, (1, 99))  # stretched, so that the image shows through the colour
    grey = ((grey - dark) / max(bright - dark, 0.1)).clip(0, 1)[..., None]
    light = 0.55 + 0.45 * share[..., None]
    return (1 - _TINT) * light * grey + _TINT * colour


def new_figure(width: int, height: int) -> Any:
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor="white", edgecolor="white")
    figure.set_layout_engine("none")
    FigureCanvasAgg(figure)
    return figure


def add_axes(figure: Any, left: float, bottom: float, width: float, height: float) -> Any:
    """Axes at a place in pixels, with nothing but a base line."""
    full_width, full_height = figure.bbox.width, figure.bbox.height
    axes = figure.add_axes((left / full_width, bottom / full_height, width / full_width, height / full_height))
    axes.set_facecolor("white")
    axes.grid(False)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GREY)
    axes.tick_params(length=0, labelsize=8, labelcolor=MUTED, pad=6)
    return axes


def _title(figure: Any, text: str, left: float, bottom: float, width: float) -> None:
    """A panel's title, placed in pixels, made smaller where it is too long."""
    place = (left / figure.bbox.width, bottom / figure.bbox.height)
    text = " ".join(text.split())
    _fit(figure.text(*place, text, fontsize=8.5, color=INK, ha="left", va="bottom", parse_math=False), width)


def _fit(label: Any, width: float) -> None:
    taken = label.get_window_extent(label.get_figure().canvas.get_renderer()).width
    if taken > width:
        label.set_fontsize(label.get_fontsize() * width / taken)


def _colour_bar(figure: Any, layers: int) -> None:
    width = figure.bbox.width
    length = min(560, width - 2 * _MARGIN)
    axes = add_axes(figure, (width - length) / 2, 38, length, 14)
    axes.spines["bottom"].set_visible(False)
    axes.imshow(np.arange(layers + 1)[None], cmap=COLOURS, vmin=0, vmax=layers, aspect="auto", interpolation="nearest")
    axes.set_yticks([])
    axes.set_xticks(_ticks(layers))
    axes.tick_params(labelsize=7.5, pad=4)
    axes.set_title(f"blocks computed (of {layers})", fontsize=8, color=MUTED, pad=5)


def _ticks(layers: int) -> list[int]:
    step = max(1, math.ceil(layers / 16))
    return [*range(0, layers, step), layers] if layers % step == 0 else list(range(0, layers + 1, step))


def label_axes(axes: Any, x: str = "", y: str = "") -> None:
    for name, text in (("x", x), ("y", y)):
        if text:
            getattr(axes, f"set_{name}label")(text, fontsize=8, color=MUTED, labelpad=6)


def grid(axes: Any, axis: str = "y") -> None:
    """Faint lines behind the data at the ticks of an axis, or of `both`."""
    axes.grid(True, axis=axis, color=FAINT, linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)


def headline(axes: Any, title: str, detail: str) -> None:
    width = axes.get_window_extent().width
    place = {"xycoords": "axes fraction", "textcoords": "offset points", "annotation_clip": False, "parse_math": False}
    _fit(axes.annotate(title, (0, 1), xytext=(0, 30), fontsize=10, fontweight="bold", color=INK, **place), width)
    _fit(axes.annotate(detail, (0, 1), xytext=(0, 16), fontsize=8, color=MUTED, **place), width)


def live_bars(axes: Any, live: Floats, total: float, name: str) -> None:
    blocks = np.arange(1, len(live) + 1)
    axes.bar(blocks, total, width=0.78, color="#f0f2f4", zorder=1)
    axes.bar(blocks, live, width=0.78, color=ACCENT, zorder=2)
    axes.plot([0.4, len(live) + 0.6], [total, total], color=MUTED, linewidth=1.2, linestyle=DASHED, zorder=3)
    axes.annotate(
        "static",
        (len(live) + 0.6, total),
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color=MUTED,
    )
    if len(live) <= 16:
        for block, value in zip(blocks, live, strict=True):
            inside = value > 0.9 * total
            axes.annotate(
                f"{value:.0f}",
                (block, value),
                xytext=(0, -4 if inside else 3),
                textcoords="offset points",
                ha="center",
                va="top" if inside else "bottom",
                fontsize=7.5,
                color="white" if inside else INK,
                zorder=4,
            )
    axes.set_xlim(0.4, len(live) + 0.6)
    axes.set_ylim(0, total * 1.02)
    axes.set_xticks([t for t in _ticks(len(live)) if t])
    axes.set_yticks([0, total], ["0", f"{total:.4g}"])
    label_axes(axes, "block")
    share = 100 * float(live.mean()) / total
    headline(axes, "Tokens computed in each block", f"{name}: {live.mean():.1f} on average, {share:.0f} % of static")


def _shares(depths: ArrayLike, layers: int) -> Floats:
    values = np.asarray(depths).ravel().astype(np.int64)
    if not values.size or values.min() < 0 or values.max() > layers:
        raise UserError(f"depths must be whole numbers in 0..{layers}, one block count per patch.")
    return 100 * np.bincount(values, minlength=layers + 1) / values.size


def depth_bars(axes: Any, shares: Floats) -> None:
    layers = len(shares) - 1
    first = 0 if shares[0] else 1
    depth = np.arange(first, layers + 1)
    axes.bar(depth, shares[first:], width=0.78, color=COLOURS(depth / layers), zorder=2)
    axes.set_xlim(first - 0.6, layers + 0.6)
    axes.set_ylim(0, max(1.0, float(shares.max())) * 1.02)
    axes.set_xticks([t for t in _ticks(layers) if t >= first])
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0f} %")
    grid(axes)
    label_axes(axes, "blocks computed")
    mean = float((shares * np.arange(layers + 1)).sum() / 100)
    headline(axes, "How deep patches go", f"share of patches; mean depth {mean:.1f} of {layers}")


def png_bytes(figure: Any, dpi: int = DPI) -> bytes:
    figure.set_dpi(dpi)
    figure.canvas.draw()
    return image_bytes(Image.fromarray(np.asarray(figure.canvas.buffer_rgba())[..., :3].copy()))


def image_bytes(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()

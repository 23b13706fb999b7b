"""Pictures of patches over photographs, as PIL images: overlays, sheets of tiles, animations.

Shapes: L blocks, gh x gw patches. An overlay is RGBA and CELL pixels a patch; the report stretches the same overlays
over the images that a saved picture is composed of.
"""

from __future__ import annotations

import functools
import io
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ..errors import UserError
from ..utils.plotting import COLOURS, FAINT, INK, MUTED, halting_maps
from .collect import Array, Seen

CELL = 8
TILE = 224  # pixels across one image of a sheet
DIM = 0.6  # brightness of a halted patch's colour: live patches are bright
_VEIL, _HALTED, _TINT = 224, 178, 204  # opacity of 255 over a skipped, a halted, a planned patch
_SKIPPED = (206, 213, 223)  # pale, and neither the white nor the grey of a photograph
_DROPPED = (24, 26, 30)
_LINE = (255, 255, 255, 190)  # around merged regions

EXTREMES = ("Easiest: the fewest blocks", "Hardest: the most blocks")
VIEWS = {"groups": "Merged regions", "tokens": "Tokens at work", "plan": "Planned depth"}


# -- overlays -------------------------------------------------------------------------------------------------------
def views(seen: Seen) -> list[str]:
    """The kinds of overlay that this policy has; the report opens with the first."""
    has = {"groups": seen.groups is not None, "tokens": True, "plan": seen.plans is not None}
    return [view for view in VIEWS if has[view]]


def overlay(seen: Seen, index: int, layer: int, view: str = "tokens") -> Array:
    """[gh CELL, gw CELL, 4] uint8: what lies over an image while block `layer` (from 0) runs."""
    if view not in views(seen):
        raise UserError(f"view: {seen.policy} has {', '.join(views(seen))}, not {view!r}.")
    if not 0 <= layer < seen.layers:
        raise UserError(f"layer: expected 0..{seen.layers - 1}, got {layer}.")
    if view == "groups":
        return _groups(seen, index, layer)
    return _cells(seen, _plan(seen, index, layer) if view == "plan" else _tokens(seen, index, layer))


def shades(values: Array, layers: int, light: float = 1.0) -> Array:
    """Depths of any shape -> [..., 3] uint8."""
    colours = np.asarray(COLOURS(np.asarray(values, dtype=float) / layers))[..., :3]
    return (255 * light * colours).round().astype(np.uint8)


def _cells(seen: Seen, patches: Array) -> Array:
    """[P, 4] -> [gh CELL, gw CELL, 4]"""
    return patches.reshape(*seen.grid, 4).repeat(CELL, 0).repeat(CELL, 1)


def _tokens(seen: Seen, index: int, layer: int) -> Array:
    """[P, 4] patches that skip the block are veiled; those that have left have the colour of their depth."""
    out, absent = np.zeros((seen.attended.shape[-1], 4), np.uint8), ~seen.attended[layer, index]
    if seen.skips:
        out[absent] = (*_SKIPPED, _VEIL)
    else:
        out[absent, :3] = shades(seen.depth[index][absent], seen.layers, DIM)
        out[absent, 3] = _HALTED
    return out


def _plan(seen: Seen, index: int, layer: int) -> Array:
    """[P, 4] the newest plan; patches that had halted by then are dark."""
    assert seen.plans is not None
    made = [s for s, stage in enumerate(seen.plans.stages) if stage <= layer + 1]
    if not made:
        return np.zeros((seen.attended.shape[-1], 4), np.uint8)
    plan, live = seen.plans.values[made[-1], index], seen.plans.live[made[-1], index]
    return _tinted(np.where(live[:, None], shades(plan, seen.layers), _DROPPED))


def _tinted(colours: Array) -> Array:
    """[P, 3] -> [P, 4]"""
    return np.insert(colours, 3, _TINT, axis=1).astype(np.uint8)


def _groups(seen: Seen, index: int, layer: int) -> Array:
    """Merged patches in the mean colour of their region, with a line around it; patches by themselves stay clear."""
    assert seen.groups is not None
    group = seen.groups[layer, index]
    photo = Image.fromarray(seen.pixels(index)).resize(seen.grid[::-1], Image.Resampling.BOX)
    colours = np.asarray(photo, dtype=np.float64).reshape(-1, 3)  # [P, 3] mean colour of every patch
    out, merged = np.zeros((len(group), 4), np.uint8), np.zeros(len(group), bool)
    for number in np.unique(group):
        members = group == number
        if number < 0:
            out[members] = (*_DROPPED, _TINT)
        elif members.sum() > 1:
            out[members] = (*colours[members].mean(0).round().astype(np.uint8), 255)
            merged |= members
    cells = _cells(seen, out)
    group, merged = group.reshape(seen.grid), merged.reshape(seen.grid)
    for top, left in CELL * np.argwhere((group[:-1] != group[1:]) & (merged[:-1] | merged[1:])):
        cells[top + CELL - 1, left : left + CELL] = _LINE
    for top, left in CELL * np.argwhere((group[:, :-1] != group[:, 1:]) & (merged[:, :-1] | merged[:, 1:])):
        cells[top : top + CELL, left + CELL - 1] = _LINE
    return cells


# -- single images --------------------------------------------------------------------------------------------------
def plain(seen: Seen, index: int, width: int = TILE) -> Image.Image:
    """An image as the model saw it."""
    photo = Image.fromarray(seen.pixels(index))
    height = max(1, round(width * photo.height / photo.width))
    return photo.resize((width, height), Image.Resampling.LANCZOS)


def painted(seen: Seen, index: int, layer: int, view: str = "tokens", width: int = TILE) -> Image.Image:
    """An image with its patches as they are while block `layer` (from 0) runs."""
    return _laid(plain(seen, index, width), overlay(seen, index, layer, view))


def through(seen: Seen, index: int, width: int = TILE) -> Image.Image:
    """An image with every patch white that was not in all blocks (A-ViT Fig. 6)."""
    cells = np.where(seen.depth[index] < seen.layers, 255, 0)[:, None].repeat(4, 1).astype(np.uint8)
    return _laid(plain(seen, index, width), _cells(seen, cells))


def _laid(photo: Image.Image, cells: Array) -> Image.Image:
    over = Image.fromarray(cells).resize(photo.size, Image.Resampling.NEAREST)
    return Image.alpha_composite(photo.convert("RGBA"), over).convert("RGB")


# -- sheets ---------------------------------------------------------------------------------------------------------
def sheet(
    rows: Sequence[Sequence[tuple[Image.Image, str]]],
    *,
    headings: Sequence[str] = (),
    layers: int = 0,
    light: float = DIM,
) -> Image.Image:
    """Rows of pictures with their captions on white; `headings` one a row; with `layers` the colours of depths."""
    gap, caption, head, margin = 14, 34, 40 if any(headings) else 0, 28
    columns = max(len(row) for row in rows)
    tile, high = rows[0][0][0].size
    width = max(2 * margin + columns * tile + (columns - 1) * gap, 420)
    height = 2 * margin + len(rows) * (head + high + caption) + (len(rows) - 1) * gap + (76 if layers else 0)
    page = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(page)
    top = margin
    for number, row in enumerate(rows):
        if head:
            _write(draw, (margin, top), headings[number], width - 2 * margin, 20, INK, True)
            top += head
        for column, (picture, words) in enumerate(row):
            left = margin + column * (tile + gap)
            page.paste(picture, (left, top))
            draw.rectangle((left - 1, top - 1, left + tile, top + high), outline=FAINT)
            _write(draw, (left, top + high + 8), words, tile, 15, MUTED, False)
        top += high + caption + gap
    if layers:
        _legend(draw, (margin, top + 4), min(width - 2 * margin, 620), layers, light)
    return page


@functools.lru_cache(maxsize=16)
def _font(size: int, bold: bool = False) -> Any:
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return ImageFont.truetype(str(folder / f"DejaVuSans{'-Bold' if bold else ''}.ttf"), size)


def _write(draw: Any, place: tuple[int, int], text: str, width: int, size: int, colour: str, bold: bool) -> None:
    """Text that is made smaller, and at last cut, where it would be wider than its place."""
    text = " ".join(text.split())
    while size > 11 and draw.textlength(text, font=_font(size, bold)) > width:
        size -= 1
    while len(text) > 1 and draw.textlength(text, font=_font(size, bold)) > width:
        text = text[:-2].rstrip(" .,·") + "…"
    draw.text(place, text, font=_font(size, bold), fill=colour)


def _legend(draw: Any, place: tuple[int, int], width: int, layers: int, light: float) -> None:
    """The colours of depths 0..layers with their numbers."""
    (left, top), label = place, "blocks computed"
    draw.text((left, top + 2), label, font=_font(15), fill=MUTED)
    start = left + round(draw.textlength(label, font=_font(15))) + 14
    each = (left + width - start) / (layers + 1)
    step = max(1, math.ceil(26 / each))
    for depth, colour in enumerate(shades(np.arange(layers + 1), layers, light).tolist()):
        x, end = round(start + depth * each), round(start + (depth + 1) * each) - 1
        draw.rectangle((x, top, end, top + 20), fill=tuple(colour))
        if depth % step == 0:
            middle = x + each / 2 - draw.textlength(str(depth), font=_font(13)) / 2
            draw.text((middle, top + 25), str(depth), font=_font(13), fill=MUTED)


def strip(seen: Seen, index: int, view: str = "tokens", layers: Sequence[int] | None = None) -> Image.Image:
    """An image and its patches block by block; for policies that skip, the routed blocks alone (A-MoD Fig. 5)."""
    tiles = [(plain(seen, index), seen.titles[index])]
    for layer in changing(seen) if layers is None else layers:
        words = f"{'after ' if view == 'groups' else ''}block {layer + 1} · {_counted(seen, index, layer, view)}"
        tiles.append((painted(seen, index, layer, view), words))
    columns = len(tiles) if len(tiles) <= 7 else math.ceil(len(tiles) / 2) if len(tiles) <= 16 else 8
    rows = [tiles[i : i + columns] for i in range(0, len(tiles), columns)]
    depths = view == "plan" or (view == "tokens" and not seen.skips)
    return sheet(rows, layers=seen.layers if depths else 0, light=1.0 if view == "plan" else DIM)


def routes(several: Sequence[Seen], index: int) -> Image.Image:
    """The patches of one image that models compute in each routed block, a model below the other (A-MoD Fig. 5)."""
    rows = [
        [(plain(seen, index), seen.method)]
        + [(painted(seen, index, b), f"block {b + 1} · {_counted(seen, index, b, 'tokens')}") for b in changing(seen)]
        for seen in several
    ]
    return sheet(rows)


def _counted(seen: Seen, index: int, layer: int, view: str) -> str:
    """Patches that a block computes; for regions, the tokens that are left after it."""
    if view == "groups" and seen.groups is not None:
        return f"{len(set(seen.groups[layer, index].tolist()) - {-1})} tokens"
    return f"{int(seen.attended[layer, index].sum())} of {seen.attended.shape[-1]}"


def changing(seen: Seen) -> list[int]:
    """Blocks worth a picture: all, or for policies that skip those in which a patch skips."""
    return [layer for layer in range(seen.layers) if not (seen.skips and seen.attended[layer].all())]


def maps(seen: Seen, indices: Sequence[int], columns: int = 3) -> Image.Image:
    """Every image beside itself with the depth of each patch as a colour (AHT-ViT Fig. 1, A-ViT Fig. 3)."""
    chosen = list(indices)
    if not chosen:
        raise UserError("Expected at least one image to draw.")
    pixels = np.stack([seen.pixels(i) for i in chosen]) / 255
    share = 100 * seen.macs / seen.static_macs
    titles = [f"{seen.titles[i]} · {share[i]:.0f} % of the work" for i in chosen]
    depths = seen.depth[chosen].reshape(-1, *seen.grid)
    made = halting_maps(pixels, depths, seen.layers, titles=titles, columns=columns)
    return Image.open(io.BytesIO(made)).convert("RGB")


def halted(seen: Seen, indices: Sequence[int], columns: int = 3) -> Image.Image:
    """Every image beside itself with an overlay on the patches that left before the last block (AHT-ViT Fig. 1)."""
    tiles = []
    for index in indices:
        left = int((~seen.attended[-1, index]).sum())
        words = f"{left} of {seen.attended.shape[-1]} patches left early"
        tiles.append([(plain(seen, index), seen.titles[index]), (painted(seen, index, seen.layers - 1), words)])
    if not tiles:
        raise UserError("Expected at least one image to draw.")
    rows = [list(itertools.chain(*tiles[i : i + columns])) for i in range(0, len(tiles), columns)]
    return sheet(rows, layers=0 if seen.skips else seen.layers)


def plans_of(seen: Seen, index: int) -> list[tuple[str, str, Array]]:
    """(name, mean depth, overlay) of an image's plan at each stage, and of the executed depth."""
    if seen.plans is None:
        raise UserError(f"{seen.policy} plans no depths; AHT-ViT (aht) with planners does.")
    made = []
    for s, stage in enumerate(seen.plans.stages):
        depths = seen.plans.values[s, index][seen.plans.live[s, index]]
        mean = f"{depths.mean():.1f}" if len(depths) else "none live"
        made.append((f"plan after block {stage}", mean, overlay(seen, index, stage - 1, "plan")))
    done = seen.plans.halt[index]
    return [*made, ("executed", f"{done.mean():.1f}", _cells(seen, _tinted(shades(done, seen.layers))))]


def plan_sheet(seen: Seen, indices: Sequence[int]) -> Image.Image:
    """Every image, the plan of its planners at each stage, and what was executed."""
    rows = []
    for index in indices:
        photo = plain(seen, index)
        tiles = [(_laid(photo, over), f"{name} · mean {mean}") for name, mean, over in plans_of(seen, index)]
        rows.append([(photo, seen.titles[index]), *tiles])
    return sheet(rows, layers=seen.layers, light=1.0)


def extremes(seen: Seen, count: int = 6) -> tuple[list[int], list[int]]:
    """The images with the least and with the greatest mean depth, correctly classified ones where labels are known."""
    order = np.argsort(seen.mean_depth, kind="stable")
    if seen.correct is not None and seen.correct.sum() >= 2:
        order = order[seen.correct[order]]
    count = min(count, len(order) // 2)
    return order[:count].tolist(), order[::-1][:count].tolist()


def easy_and_hard(seen: Seen, count: int = 6) -> Image.Image:
    """The images that need the fewest and the most blocks (A-ViT Fig. 5)."""
    if seen.equal:
        raise UserError(f"{seen.policy} goes equally deep in every image here: there are no easy and hard ones.")
    rows = [
        [(painted(seen, i, seen.layers - 1), f"{seen.titles[i]} · depth {seen.mean_depth[i]:.1f}") for i in chosen]
        for chosen in extremes(seen, count)
    ]
    return sheet(rows, headings=EXTREMES, layers=seen.layers)


# -- animations -----------------------------------------------------------------------------------------------------
def frames(seen: Seen, index: int, view: str = "tokens", width: int = TILE) -> list[Image.Image]:
    """One picture a block: the image beside itself with the patches that are left, and which block runs."""
    margin, gap, foot = 16, 8, 62
    first, made = plain(seen, index, width), []
    colours = shades(np.arange(1, seen.layers + 1), seen.layers, DIM).tolist()
    for layer in range(seen.layers):
        page = Image.new("RGB", (2 * margin + 2 * width + gap, margin + first.height + foot), "white")
        page.paste(first, (margin, margin))
        page.paste(painted(seen, index, layer, view, width), (margin + width + gap, margin))
        draw, top = ImageDraw.Draw(page), margin + first.height + 10
        draw.text((margin, top), f"block {layer + 1} of {seen.layers}", font=_font(15, True), fill=INK)
        words = _counted(seen, index, layer, view) + ("" if view == "groups" else " patches")
        right = page.width - margin - draw.textlength(words, font=_font(15))
        draw.text((right, top), words, font=_font(15), fill=MUTED)
        each = (page.width - 2 * margin) / seen.layers
        for number, colour in enumerate(colours):  # a cell a block; those to come are empty
            x, end = margin + round(number * each), margin + round((number + 1) * each) - 3
            draw.rectangle((x, top + 27, end, top + 36), fill=tuple(colour) if number <= layer else FAINT)
        made.append(page)
    return made


def animation(seen: Seen, index: int, view: str = "tokens", width: int = TILE, milliseconds: int = 450) -> bytes:
    """A GIF of tokens leaving block by block; it rests at the end."""
    made = frames(seen, index, view, width)
    # one palette for all frames, or colours would flicker
    every = Image.new("RGB", (made[0].width, made[0].height * 2))
    every.paste(made[0], (0, 0))
    every.paste(made[-1], (0, made[0].height))
    palette = every.quantize(255, method=Image.Quantize.MEDIANCUT)
    flat = [f.quantize(palette=palette, dither=Image.Dither.NONE) for f in made]
    times = [milliseconds] * (len(flat) - 1) + [4 * milliseconds]
    out = io.BytesIO()
    flat[0].save(out, "GIF", save_all=True, append_images=flat[1:], duration=times, loop=0, optimize=False)
    return out.getvalue()

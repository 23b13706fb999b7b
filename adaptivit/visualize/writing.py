"""report: run a model over images and leave a folder with everything that there is to see."""

from __future__ import annotations

import functools
import platform
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import __version__
from ..errors import UserError
from ..model import AdaptiveViT
from ..utils.atomic_io import write_bytes, write_text
from ..utils.csv import csv_text
from . import charts, paint
from .classes import by_class
from .collect import look
from .importance import Importance, leave_one_out
from .page import Found, page
from .seen import Seen

Step = Callable[[str, int, int], None]  # what is being done, how much of it, of how much


def report(
    model: AdaptiveViT,
    images: Any,
    out: str | Path,
    *,
    labels: Sequence[int] | None = None,
    static: AdaptiveViT | None = None,
    class_names: Sequence[str] | None = None,
    name: str = "",
    shown: int = 8,
    tokens: int = 0,
    batch_size: int = 32,
    seed: int = 0,
    command: str = "",
    progress: Step | None = None,
) -> Path:
    """Write report.html, its pictures as PNG and GIF, and its figures as CSV into the folder `out`.

    images: a path, several, PIL images, a normalised tensor [B, 3, H, W] or a labelled set (seen.data_set).
    static: a static model to compare with. shown: images with pictures of their own. tokens: with a number >= 3, leave
    so many patches out one at a time at every scored block of the shown images (slow); 0 for none of it.
    Returns the path of report.html.
    """
    _check(model, static, shown, tokens, batch_size)
    step = progress or (lambda what, done, total: None)
    seen = look(
        model,
        images,
        labels=labels,
        class_names=class_names,
        name=name,
        batch_size=batch_size,
        progress=lambda done, total: step("looking", done, total),
    )
    if shown > 0 and seen.labels is not None:
        chosen = [i * len(seen) // min(shown, len(seen)) for i in range(min(shown, len(seen)))]
    else:
        chosen = list(range(min(shown, len(seen))))
    other = _static(static, images, labels, seen, batch_size, step) if static is not None else None
    important = None
    if tokens and seen.scores is not None:
        important = leave_one_out(
            model,
            seen,
            tokens=tokens,
            images=chosen,
            seed=seed,
            batch_size=batch_size,
            progress=lambda done, total: step("leaving one out", done, total),
        )
    rows = by_class(seen, other) if seen.labels is not None and len(np.unique(seen.labels)) > 1 else []
    found = Found(seen, chosen, other, rows, important)
    return write(found, out, command=command, progress=step)


def _check(model: AdaptiveViT, static: AdaptiveViT | None, shown: int, tokens: int, batch_size: int) -> None:
    if model.policy_name == "static" and not (model.settings["depth"] or model.settings["share"]):
        raise UserError(
            "A static model computes every patch in every block: there are no depths to see. Give an adaptive model, "
            "and the static one to compare with as --static (static=)."
        )
    if static is not None and static.vit.num_classes != model.vit.num_classes:
        counts = f"{static.vit.num_classes}, not {model.vit.num_classes}"
        raise UserError(f"static: expected a model of the same classes; it has {counts}.")
    for name, value, least in (("shown", shown, 1), ("tokens", tokens, 0), ("batch_size", batch_size, 1)):
        if value < least:
            raise UserError(f"{name}: expected at least {least}, got {value}.")
    if 0 < tokens < 3:
        raise UserError(f"tokens: a correlation takes at least 3 patches, got {tokens}; 0 for none of it.")


def _static(
    static: AdaptiveViT, images: Any, labels: Sequence[int] | None, seen: Seen, batch_size: int, step: Step
) -> Seen:
    other = look(
        static,
        images,
        labels=labels,
        batch_size=batch_size,
        progress=lambda done, total: step("looking (static)", done, total),
    )
    if other.names != seen.names:
        raise UserError("The static model could not read the same images.")
    return other


def write(found: Found, out: str | Path, *, command: str = "", progress: Step | None = None) -> Path:
    """Write what was found; the report itself comes last."""
    out, seen = Path(out), found.seen
    if out.exists() and not out.is_dir():
        raise UserError(f"Cannot write to {out}: it is a file, and a folder is expected.")
    made = list(_pictures(found))
    for number, (name, draw) in enumerate(made):
        write_bytes(out / name, draw())
        if progress:
            progress("drawing", number + 1, len(made) + 1)
    write_text(out / "images.csv", csv_text(_rows(seen)))
    if found.classes:
        write_text(out / "classes.csv", csv_text(found.classes))
    if found.importance is not None:
        write_text(out / "importance.csv", csv_text(_importance(found.importance)))
    write_text(out / "report.html", page(found, command, environment()))
    if progress:
        progress("drawing", len(made) + 1, len(made) + 1)
    return out / "report.html"


def environment() -> dict[str, object]:
    return {
        "adaptivit": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _pictures(found: Found) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """(file, what draws it) of every picture."""
    seen, shown = found.seen, list(found.shown)

    def chart(make: Callable[..., Any], *given: Any) -> Callable[[], bytes]:
        return lambda: charts.png(make(*given))

    def picture(make: Callable[..., Any], *given: Any) -> Callable[[], bytes]:
        return lambda: paint.png(make(*given))

    yield "maps.png", picture(paint.maps, seen, shown, min(3, len(shown)))
    yield "live.png", chart(charts.live, seen)
    yield "depths.png", chart(charts.depths, seen)
    yield "positions.png", chart(charts.positions, seen)
    if seen.scores is not None:
        yield "scores.png", chart(charts.scores, seen)
    if seen.plans is not None:
        yield "plans.png", picture(paint.plan_sheet, seen, shown[:4])
        for s, stage in enumerate(seen.plans.stages):
            yield f"plan_{stage}.png", chart(charts.planned, seen, s)
    if found.importance is not None:
        yield "importance.png", chart(charts.importance, found.importance)
    if not seen.equal and len(seen) > 1:
        if all(paint.extremes(seen)):
            yield "easy_and_hard.png", picture(paint.easy_and_hard, seen)
        yield "confidence.png", chart(charts.confidence, seen)
        if seen.correct is not None and len(seen) >= 20:
            yield "accuracy.png", chart(charts.accuracy, seen)
    for number, index in enumerate(shown, start=1):
        stem = f"images/{number:02d}_{_safe(seen.titles[index])}"
        for view in paint.views(seen):
            yield f"{stem}_{view}.png", picture(paint.strip, seen, index, view)
        first = "groups" if seen.groups is not None else "tokens"
        yield f"{stem}.gif", functools.partial(paint.animation, seen, index, first)


def _safe(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name)[:60].strip("._") or "image"


def _rows(seen: Seen) -> list[dict[str, Any]]:
    rows = []
    for i, name in enumerate(seen.names):
        row: dict[str, Any] = {"image": name, "predicted": seen.class_name(int(seen.predicted[i]))}
        row |= {"confidence": f"{seen.confidence[i]:.6f}"}
        if seen.labels is not None and seen.correct is not None:
            row |= {"label": seen.class_name(int(seen.labels[i])), "correct": int(seen.correct[i])}
        row |= {"mean_depth": f"{seen.mean_depth[i]:.4f}", "gmacs": f"{seen.macs[i] / 1e9:.6f}"}
        rows.append(row | {"of_static": f"{seen.macs[i] / seen.static_macs:.4f}"})
    return rows


def _importance(found: Importance) -> list[dict[str, Any]]:
    return [
        {"block": block + 1, "image": int(image), "pearson": f"{found.pearson[s, b]:.6f}"}
        | {"spearman": f"{found.spearman[s, b]:.6f}", "patches": int((found.chosen[s, b] >= 0).sum())}
        for s, block in enumerate(found.blocks)
        for b, image in enumerate(found.images)
    ]

"""report: run a model over images and write a folder with pictures, figures as CSV, and an HTML report."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..model import AdaptiveViT
from ..utils.atomic_io import write_bytes, write_text
from ..utils.coerce import at_least
from ..utils.console import left_out
from ..utils.csv import csv_text
from ..utils.environment import summary
from ..utils.lock import writing
from ..utils.plotting import image_bytes, png_bytes
from . import charts, pictures
from .architecture import architecture, svg
from .collect import Seen, look
from .importance import Importance, leave_one_out
from .report_page import ReportData, report_page
from .statistics import by_class

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

    images: a path, several, PIL images, a normalised tensor [B, 3, H, W] or a labelled set (visualize.data_set).
    static: a static model to compare with. shown: images with pictures of their own. tokens: with a number >= 3, leave
    so many patches out one at a time at every scored block of the shown images (slow); 0 for none of it.
    Returns the path of report.html.
    """
    _check(model, static, shown, tokens, batch_size)
    with writing(out):
        step = progress or (lambda what, done, total: None)
        common: dict[str, Any] = {"labels": labels, "batch_size": batch_size}
        seen = look(model, images, class_names=class_names, name=name, progress=partial(step, "looking"), **common)
        other = None
        if static is not None:
            other = look(static, images, progress=partial(step, "looking (static)"), **common)
        count = min(shown, len(seen))
        chosen = [i * len(seen) // count if seen.labels is not None else i for i in range(count)]
        important = None
        if tokens and seen.scores is not None and seen.predicted is not None:
            shared: dict[str, Any] = {
                "seed": seed,
                "batch_size": batch_size,
                "progress": partial(step, "leaving one out"),
            }
            important = leave_one_out(model, seen, tokens=tokens, images=chosen, **shared)
        rows = by_class(seen, other) if seen.labels is not None and len(np.unique(seen.labels)) > 1 else []
        return write(ReportData(seen, chosen, other, rows, important), out, command=command, progress=step)


def _check(model: AdaptiveViT, static: AdaptiveViT | None, shown: int, tokens: int, batch_size: int) -> None:
    if model.policy_name == "static" and not (model.settings["depth"] or model.settings["share"]):
        raise UserError(
            "A static model computes every patch in every block: there are no depths to see. Give an adaptive model, "
            "and the static one to compare with as --static (static=)."
        )
    if static is not None and static.shape.outputs != model.shape.outputs:
        counts = f"{static.shape.outputs}, not {model.shape.outputs}"
        raise UserError(f"static: expected a model of the same classes; it has {counts}.")
    for name, value, least in (("shown", shown, 1), ("tokens", tokens, 0), ("batch_size", batch_size, 1)):
        at_least(name, value, least)
    if 0 < tokens < 3:
        raise UserError(f"tokens: a correlation takes at least 3 patches, got {tokens}; 0 for none of it.")


def write(data: ReportData, out: str | Path, *, command: str = "", progress: Step | None = None) -> Path:
    """Write a report's files; the report itself comes last."""
    out, seen, step = Path(out), data.seen, progress or (lambda what, done, total: None)
    if out.exists() and not out.is_dir():
        raise UserError(f"Cannot write to {out}: it is a file, and a folder is expected.")
    made = list(_pictures(data))
    for number, (name, draw) in enumerate(made, start=1):
        write_bytes(out / name, draw())
        step("drawing", number, len(made) + 1)
    write_text(out / "images.csv", csv_text(_rows(seen)))
    if data.classes:
        write_text(out / "classes.csv", csv_text(data.classes))
    if data.importance is not None:
        write_text(out / "importance.csv", csv_text(_importance(data.importance)))
    left_out(seen.left_out, out / "left_out.txt")
    write_text(out / "report.html", report_page(data, command, summary()))
    step("drawing", len(made) + 1, len(made) + 1)
    return out / "report.html"


def _pictures(data: ReportData) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """(file, what draws it) of every picture."""
    seen, shown = data.seen, list(data.shown)

    def picture(name: str, make: Callable[..., Any], *given: Any) -> tuple[str, Callable[[], bytes]]:
        return f"{name}.png", lambda: image_bytes(make(*given))

    yield picture("maps", pictures.maps, seen, shown, min(3, len(shown)))
    yield picture("halted", pictures.halted, seen, shown)
    yield "architecture.svg", lambda: svg(architecture(seen))
    yield "architecture.png", lambda: png_bytes(architecture(seen), charts.SHARP)
    for _, name, draw in charts.every(seen, data.importance):
        yield f"{name}.png", lambda draw=draw: png_bytes(draw(), charts.SHARP)  # type: ignore[misc]
    if seen.plans is not None:
        yield picture("plans", pictures.plan_sheet, seen, shown[:4])
    if not seen.equal and all(pictures.extremes(seen)):
        yield picture("easy_and_hard", pictures.easy_and_hard, seen)
    for number, index in enumerate(shown, start=1):
        safe = re.sub(r"[^\w.-]+", "_", seen.titles[index])[:60].strip("._") or "image"
        stem = f"images/{number:02d}_{safe}"
        for view in pictures.views(seen):
            yield picture(f"{stem}_{view}", pictures.strip, seen, index, view)
        yield f"{stem}.gif", partial(pictures.animation, seen, index, pictures.views(seen)[0])


def _rows(seen: Seen) -> list[dict[str, Any]]:
    rows = []
    for i, name in enumerate(seen.names):
        row: dict[str, Any] = {"image": name}
        if seen.predicted is None or seen.confidence is None:
            row["answer"] = seen.captions[i]
        else:
            row |= {"predicted": seen.class_name(int(seen.predicted[i])), "confidence": f"{seen.confidence[i]:.6f}"}
        if seen.labels is not None and seen.predicted is not None:
            row["label"] = seen.class_name(int(seen.labels[i]))
            row["correct"] = int(seen.predicted[i] == seen.labels[i])
        row["mean_depth"], row["gmacs"] = f"{seen.mean_depth[i]:.4f}", f"{seen.macs[i] / 1e9:.6f}"
        rows.append(row | {"of_static": f"{seen.macs[i] / seen.static_macs:.4f}"})
    return rows


def _importance(found: Importance) -> list[dict[str, Any]]:
    p, rank_p = found.p_values(found.pearson), found.p_values(found.spearman)
    return [
        {"block": block + 1, "image": int(image), "patches": int((found.chosen[s, b] >= 0).sum())}
        | {"pearson": f"{found.pearson[s, b]:.6f}", "pearson_p": f"{p[s, b]:.3g}"}
        | {"spearman": f"{found.spearman[s, b]:.6f}", "spearman_p": f"{rank_p[s, b]:.3g}"}
        for s, block in enumerate(found.blocks)
        for b, image in enumerate(found.images)
    ]

"""The outcome of a sweep: the best trial, the front, the hypervolume, and the files with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from ...utils.atomic_io import write_bytes, write_json, write_text
from ...utils.console import screen_table
from ...utils.csv import csv_text
from ...utils.plotting import (
    ACCENT,
    DASHED,
    GREY,
    INK,
    MUTED,
    add_axes,
    grid,
    headline,
    label_axes,
    new_figure,
    png_bytes,
)
from .config import SweepConfig
from .trials import Record

PENALTY = 1000.0  # points of top-1 for a share of 1 over the budget: a hundredth of static's MACs costs 10 points


def finished(records: Iterable[Record]) -> list[Record]:
    return [r for r in records if r.status == "finished"]


def score(config: SweepConfig, top1: float, share: float) -> float:
    """What is to be large. hypervolume: the area that the trial alone has between itself and the reference point."""
    if config.objective == "budget":
        return top1 - PENALTY * max(share - config.max_share, 0.0)
    return hypervolume([(top1, share)]) if config.objective == "hypervolume" else top1


def objectives(config: SweepConfig, top1: float, share: float) -> list[float]:
    """The values that Optuna sees."""
    return [top1, share] if config.objective == "hypervolume" else [score(config, top1, share)]


def best(config: SweepConfig, records: Sequence[Record]) -> Record | None:
    """The trial of the highest score; one within the budget before any over it, the cheaper of two equal ones."""

    def rank(r: Record) -> tuple[bool, float, float]:
        return within(config, r), score(config, r.top1, r.share), -r.gmacs

    return max(finished(records), key=rank, default=None)


def within(config: SweepConfig, record: Record) -> bool:
    return config.objective != "budget" or record.share <= config.max_share


def front(records: Sequence[Record]) -> list[Record]:
    """Trials that no other one beats in top-1 and GMACs, from cheap to dear."""
    kept: list[Record] = []
    for record in sorted(finished(records), key=lambda r: (r.gmacs, -r.top1)):
        if not kept or record.top1 > kept[-1].top1:
            kept.append(record)
    return kept


def hypervolume(points: Iterable[tuple[float, float]]) -> float:
    """Area in % that (top-1 in %, share of static's MACs) cover against the point (0 %, share 1): 100 is the most."""
    area, top = 0.0, 0.0
    for top1, share in sorted(points, key=lambda p: (p[1], -p[0])):
        if share < 1 and top1 > top:
            area += (top1 - top) * (1 - share)
            top = top1
    return area


def covered(records: Sequence[Record]) -> float:
    """The hypervolume of all trials."""
    return hypervolume((r.top1, r.share) for r in finished(records))


def keys(config: SweepConfig) -> list[str]:
    """The settings that vary."""
    return [text.partition("=")[0].strip() for text in config.space]


def setting(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def table(config: SweepConfig, records: Sequence[Record]) -> Table:
    """The front, the best trial marked."""
    chosen, varied = best(config, records), keys(config)
    rows = front(records)
    if chosen is not None and chosen not in rows:
        rows.append(chosen)
    cells = []
    for r in rows:
        figures = (f"{r.top1:.2f}", f"{r.gmacs:.4f}", f"{100 * r.share:.1f} %", f"{r.figure('mean_depth'):.2f}")
        mark = "best" if r is chosen else ""
        cells.append([*(setting(r.params[k]) for k in varied), str(r.number), *figures, mark])
    names = (*varied, "trial", "top-1 %", "GMACs", "of static", "mean depth", "")
    return screen_table("front (validation)", cells, names, left=len(varied))


def write(config: SweepConfig, records: Sequence[Record]) -> None:
    """OUT/trials.csv and OUT/best.json."""
    out = Path(config.train.out)
    write_text(out / "trials.csv", _csv(config, records))
    chosen = best(config, records)
    if chosen is not None:
        write_json(out / "best.json", recipe(config, chosen))


def recipe(config: SweepConfig, record: Record) -> dict[str, Any]:
    """A recipe file for `train --recipe FILE`, and where it comes from."""
    whole = {
        "recipe": record.facts["recipe"],
        "from": {"sweep": str(config.train.out), "trial": record.number, "params": record.params},
        "objective": config.objective,
        "validation": record.facts["result"],
        "date": record.facts["date"],
        "versions": record.facts["versions"],
    }
    if config.objective == "budget":
        whole |= {"max_share": config.max_share, "within_budget": within(config, record)}
    return whole


def _csv(config: SweepConfig, records: Sequence[Record]) -> str:
    figures = ["top1", "gmacs", "gmacs_static", "mean_depth", "share", "score"]
    about = ["policy", "seed", "seconds", "date", "adaptivit", "torch", "optuna", "python", "reason"]
    names, rows = ["trial", "status", *keys(config), *figures, *about], []
    for r in records:
        facts, recipe = r.facts, r.facts.get("recipe", {})
        row: dict[str, Any] = {"trial": r.number, "status": r.status, **facts.get("versions", {}), **facts, **recipe}
        row |= r.params
        if r.status == "finished":
            row |= {name: r.figure(name) for name in figures[:4]}
            row |= {"share": r.share, "score": score(config, r.top1, r.share)}
        rows.append({name: row.get(name, "") for name in names})
    return csv_text(rows, names, digits=8)


def draw(config: SweepConfig, records: Sequence[Record]) -> None:
    """OUT/front.png: every trial as a dot, the front as steps."""
    done, steps, chosen = finished(records), front(records), best(config, records)
    assert chosen is not None
    figure = new_figure(1100, 720)
    axes = add_axes(figure, 96, 84, 1100 - 96 - 40, 720 - 84 - 110)
    costs, hits = [r.gmacs for r in done], [r.top1 for r in done]
    left, right = min(costs), max(costs)
    statics = {round(r.figure("gmacs_static"), 9) for r in done}
    marks = {"static": statics.pop()} if len(statics) == 1 else {}
    if marks and config.objective == "budget" and config.max_share < 1:
        marks["budget"] = config.max_share * marks["static"]
    for text, x in marks.items():
        left, right = min(left, x), max(right, x)
        axes.axvline(x, color=MUTED, linewidth=1.1, linestyle=DASHED, zorder=1)
        place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "ha": "right", "va": "bottom"}
        axes.annotate(text, (x, 0), xytext=(-5, 5), fontsize=8, color=MUTED, **place)
    room, margin = max(0.15 * (max(hits) - min(hits)), 0.5), max(0.06 * (right - left), 0.02 * right)
    axes.set(xlim=(left - margin, right + margin), ylim=(min(hits) - room, max(hits) + room))
    axes.scatter(costs, hits, s=34, color=GREY, linewidths=0, zorder=3)
    xs, ys = [r.gmacs for r in steps], [r.top1 for r in steps]
    axes.step([*xs, right + margin], [*ys, ys[-1]], where="post", color=ACCENT, linewidth=1.8, zorder=4)
    axes.scatter(xs, ys, s=46, color=ACCENT, linewidths=0, zorder=5)
    axes.scatter([chosen.gmacs], [chosen.top1], s=190, facecolors="none", edgecolors=INK, linewidths=1.4, zorder=6)
    grid(axes)
    label_axes(axes, "GMACs an image", "top-1 %")
    detail = f"{len(done)} trials, {len(steps)} on the front; the ring is the best by {config.objective}: "
    detail += f"trial {chosen.number}, {chosen.top1:.2f} % at {chosen.gmacs:.3g} GMACs"
    headline(axes, "Validation top-1 against work", detail)
    write_bytes(Path(config.train.out) / "front.png", png_bytes(figure))

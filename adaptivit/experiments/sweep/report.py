"""What came out of a sweep: the best trial, the front, the hypervolume, and the files that say so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from ...utils.atomic_io import write_bytes, write_json, write_text
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
from .store import Record

PENALTY = 1000.0  # points of top-1 for a share of 1 over the budget: a hundredth of static's MACs costs 10 points


def finished(records: Iterable[Record]) -> list[Record]:
    return [r for r in records if r.status == "finished"]


def score(config: SweepConfig, top1: float, share: float) -> float:
    """What is to be large. hypervolume: the area that the trial alone has between itself and the reference point."""
    if config.objective == "budget":
        return top1 - PENALTY * max(share - config.max_share, 0.0)
    if config.objective == "hypervolume":
        return hypervolume([(top1, share)])
    return top1


def values(config: SweepConfig, top1: float, share: float) -> list[float]:
    """What Optuna is told."""
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


def setting(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def table(config: SweepConfig, records: Sequence[Record]) -> Table:
    """The front, the best trial marked."""
    keys = [text.partition("=")[0].strip() for text in config.space]
    shown = Table(title="front (validation)", title_justify="left")
    chosen = best(config, records)
    for name in ("trial", *keys, "top-1 %", "GMACs", "of static", "mean depth", ""):
        shown.add_column(name, justify="left" if name in ("", *keys) else "right")
    rows = front(records)
    if chosen is not None and chosen not in rows:
        rows.append(chosen)
    for r in rows:
        figures = (f"{r.top1:.2f}", f"{r.gmacs:.4f}", f"{100 * r.share:.1f} %", f"{r.figure('mean_depth'):.2f}")
        mark = "best" if r is chosen else ""
        shown.add_row(f"{r.number}", *(setting(r.params[k]) for k in keys), *figures, mark)
    return shown


def write(config: SweepConfig, records: Sequence[Record]) -> None:
    """OUT/trials.csv and OUT/best.json."""
    out = Path(config.train.out)
    write_text(out / "trials.csv", _csv(config, records))
    chosen = best(config, records)
    if chosen is not None:
        write_json(out / "best.json", recipe(config, chosen))


def recipe(config: SweepConfig, record: Record) -> dict[str, Any]:
    """What `train --recipe FILE` takes, and where it comes from."""
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
    keys = [text.partition("=")[0].strip() for text in config.space]
    figures = ["top1", "gmacs", "gmacs_static", "share", "mean_depth", "score"]
    about = ["policy", "seed", "seconds", "date", "adaptivit", "torch", "optuna", "python", "reason"]
    names = list(dict.fromkeys(["trial", "status", *keys, *figures, *about]))
    rows = []
    for r in records:
        facts = r.facts
        row: dict[str, Any] = {"trial": r.number, "status": r.status, "reason": facts.get("reason", "")}
        row |= {name: facts.get(name, "") for name in ("seconds", "date")} | facts.get("versions", {})
        row |= {name: facts.get("recipe", {}).get(name, "") for name in ("policy", "seed")} | r.params
        if r.status == "finished":
            row |= {name: r.figure(name) for name in ("top1", "gmacs", "gmacs_static", "mean_depth")}
            row |= {"share": r.share, "score": score(config, r.top1, r.share)}
        rows.append({name: row.get(name, "") for name in names})
    return csv_text(rows, names, digits=8)


def draw(config: SweepConfig, records: Sequence[Record]) -> None:
    """OUT/front.png: every trial as a dot, the front as steps."""
    done, steps, chosen = finished(records), front(records), best(config, records)
    assert chosen is not None
    figure = new_figure(1100, 720)
    axes = add_axes(figure, 96, 84, 1100 - 96 - 40, 720 - 84 - 110)
    statics = {round(r.figure("gmacs_static"), 9) for r in done}
    left, right = min(r.gmacs for r in done), max(r.gmacs for r in done)
    if len(statics) == 1:
        static = statics.pop()
        right = max(right, static)
        _mark(axes, static, "static")
        if config.objective == "budget" and config.max_share < 1:
            left = min(left, config.max_share * static)
            _mark(axes, config.max_share * static, "budget")
    low, high = min(r.top1 for r in done), max(r.top1 for r in done)
    room = max(0.15 * (high - low), 0.5)
    axes.set_ylim(low - room, high + room)
    margin = max(0.06 * (right - left), 0.02 * right)
    axes.set_xlim(left - margin, right + margin)
    axes.scatter([r.gmacs for r in done], [r.top1 for r in done], s=34, color=GREY, linewidths=0, zorder=3)
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


def _mark(axes: Any, x: float, text: str) -> None:
    axes.axvline(x, color=MUTED, linewidth=1.1, linestyle=DASHED, zorder=1)
    place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "ha": "right", "va": "bottom"}
    axes.annotate(text, (x, 0), xytext=(-5, 5), fontsize=8, color=MUTED, **place)

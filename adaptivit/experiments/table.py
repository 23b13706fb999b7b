"""Rows for people: a table on the screen, parts of a Markdown page, points for the Pareto plot."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.table import Table

from ..utils.console import screen_table
from ..utils.text import markdown_table
from ..visualize.pareto import FEW, Point
from ..visualize.statistics import wilson
from .store import Row

_MISSING = "—"
_WIDEST = 40  # characters of a method on the screen, so that the table fits 120 columns


def interval(top1: float, images: int) -> tuple[float, float]:
    """The 95 % interval of an accuracy in %."""
    low, high = wilson(top1 / 100, images)
    return 100 * low, 100 * high


def headings(rows: Sequence[Row]) -> list[str]:
    names = ["method", "top-1 %", "against static", "GMACs", "share", "depth"]
    if any(row["timed"] for row in rows):
        names += ["images/s", "speed"]
    return ["method", "seed", *names[1:]] if len({row["seed"] for row in rows}) > 1 else names


def lines(rows: Sequence[Row]) -> list[dict[str, str]]:
    """One line a row, cheapest first, failed ones at the end."""
    chosen = headings(rows)
    ordered = sorted(rows, key=lambda r: (r["status"] != "ok", float(r["gmacs"] or "inf"), r["method"], int(r["seed"])))
    return [{name: _line(row).get(name, "") for name in chosen} for row in ordered]


def _line(row: Row) -> dict[str, str]:
    line = {"method": row["method"], "seed": row["seed"]}
    if row["status"] != "ok":
        return line | {"top-1 %": "failed"}
    low, high = interval(float(row["top1"]), int(row["images"]))
    line |= {
        "top-1 %": f"{float(row['top1']):.2f} ± {(high - low) / 2:.2f}",
        "against static": _MISSING,
        "GMACs": _digits(float(row["gmacs"])),
        "share": f"{100 * float(row['gmacs_share']):.1f} %",
        "depth": f"{float(row['mean_depth']):.2f}",
    }
    if row["difference"]:
        line["against static"] = f"{float(row['difference']) + 0.0:+.2f} ± {float(row['difference_ci95']):.2f}"
    if row["timed"]:
        rate, ratio = float(row["images_per_second_compact"]), row["speed_compact"]
        line["images/s"] = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
        line["speed"] = f"{float(ratio):.2f}x" if ratio else _MISSING
    return line


def _digits(value: float) -> str:
    return f"{value:.3g}" if value < 0.1 else f"{value:.3f}"


def shortened(text: str, width: int) -> str:
    """The text; where it is longer than width, with its lists shortened, and then with … in its middle."""
    text, tail = text if len(text) <= width else _lists(text), (width - 1) // 2
    return text if len(text) <= width else f"{text[: width - 1 - tail]}…{text[-tail:]}"


def screen(rows: Sequence[Row], title: str = "every method under the same recipe, cheapest first") -> Table:
    """The table for 120 columns, without the intervals of top-1 alone; in fewer only methods wrap."""
    cells = []
    for line in lines(rows):
        line |= {"method": shortened(line["method"], _WIDEST), "top-1 %": line["top-1 %"].partition(" ±")[0]}
        cells.append(list(line.values()))
    return screen_table(title, cells, headings(rows), failed=lambda row: "failed" in row[1:3])


# -- Markdown -------------------------------------------------------------------------------------------------------
def failures(rows: Sequence[Row]) -> list[str]:
    """Why rows have no figures, a line each."""
    failed = [row for row in rows if row["status"] != "ok"]
    return [f"{row['method']}, seed {row['seed']}, failed: {row['reason']}" for row in failed]


def body(rows: Sequence[Row], papers: Mapping[str, str] = {}) -> list[str]:
    """The table and its failures; `papers`: method -> what its paper reports, a last column."""
    more = ["paper"] if papers else []
    cells = [[*line.values(), *(papers[line["method"]] for _ in more)] for line in lines(rows)]
    text, failed = [*markdown_table([*headings(rows), *more], cells), ""], failures(rows)
    return [*text, *(f"- {line}" for line in failed), ""] if failed else text


def several(rows: Sequence[Row], column: str) -> str:
    """The different values of a column."""
    return ", ".join(dict.fromkeys(row[column] for row in rows if row[column]))


def caption(rows: Sequence[Row], what: str, reference: str) -> str:
    """What the columns are; `what` are the images."""
    against = f", and of the paired difference from `{reference}` of the same seed" if reference else ""
    return (
        f"{several(rows, 'images')} images {what}. Share is that of the static model's MACs, depth the mean number of "
        f"blocks a patch sees. ± are 95 % intervals: of top-1 alone{against}. Epochs since the first weights: "
        f"{several(rows, 'epochs')}."
    )


def provenance(rows: Sequence[Row]) -> str:
    """Seeds, date, device, versions."""
    versions = ", ".join(f"{name} {several(rows, name)}" for name in ("adaptivit", "torch", "timm"))
    commit = f", commit {several(rows, 'commit')}" if several(rows, "commit") else ""
    where = "; ".join(several(rows, name) for name in ("date", "device"))
    return (
        f"Seeds {several(rows, 'seed')}; {where}; {versions}, Python {several(rows, 'python')}{commit}. "
        "Raw figures: [results.csv](results.csv)."
    )


def by_method(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows that ended well, by their method."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["status"] == "ok":
            groups.setdefault(row["method"], []).append(row)
    return groups


def mean_table(rows: Sequence[Row]) -> list[str]:
    """Mean and spread of every method that has several seeds, cheapest first."""
    found = []
    for method, group in by_method(rows).items():
        cells = [method, str(len(group))]
        for name in ("top1", "difference", "gmacs", "mean_depth"):
            values = [float(row[name]) for row in group if row[name]]
            mean, spread = (statistics.mean(values), max(values) - min(values)) if values else (0.0, 0.0)
            if name == "gmacs":
                cells.append(f"{_digits(mean)} ({_digits(spread)})")
            else:
                signed = "+" if name == "difference" else ""
                cells.append(f"{mean + 0.0:{signed}.2f} ({spread:.2f})" if values else _MISSING)
        if len(group) > 1:
            found.append((statistics.mean(float(row["gmacs"]) for row in group), cells))
    if not found:
        return []
    names = ["method", "seeds", "top-1 %", "against static", "GMACs", "depth"]
    head = ["", "Mean over the seeds, with the largest minus the smallest in brackets:", ""]
    return [*head, *markdown_table(names, [cells for _, cells in sorted(found)])]


# -- the plot -------------------------------------------------------------------------------------------------------
def points(rows: Sequence[Row]) -> list[Point]:
    """One point a method, the mean over its seeds."""
    groups, found = by_method(rows), []
    references = {row["compared_to"] for row in rows}
    policies = {method: group[0]["policy"] for method, group in groups.items()}
    names, curves = labels(policies), curves_of(policies)
    for method, group in groups.items():
        costs, hits = ([float(row[name]) for row in group] for name in ("gmacs", "top1"))
        top1 = statistics.mean(hits)
        low, high = interval(top1, int(group[0]["images"]))
        halves = [float(row["difference_ci95"]) for row in group if row["difference_ci95"]]
        if halves or method in references:
            half = statistics.mean(halves) if halves else 0.0
            low, high = top1 - half, top1 + half
        speeds = [float(row["images_per_second_compact"]) for row in group if row["images_per_second_compact"]]
        found.append(
            Point(
                label=method,
                policy=policies[method],
                top1=top1,
                low=low,
                high=high,
                gmacs=statistics.mean(costs),
                speed=statistics.mean(speeds) if speeds else None,
                seeds=tuple(zip(costs, hits, strict=True)) if len(group) > 1 else (),
                paired=bool(halves),
                short=names[method],
                curve=curves[method],
            )
        )
    return found


def labels(policies: Mapping[str, str]) -> dict[str, str]:
    """The labels of methods: names of a few; of many the settings that differ within their policy."""
    if len(policies) <= FEW:
        return {method: shortened(_lists(method), 40) for method in policies}
    found = {}
    for method, policy in policies.items():
        others = [_settings(other) for other in policies if policies[other] == policy]
        own = {k: v for k, v in _settings(method).items() if any(other.get(k) != v for other in others)}
        text = ", ".join(f"{k}={_lists(v)}" if k else v for k, v in own.items())
        found[method] = shortened(text or method.partition(":")[0], 30)
    return found


def curves_of(policies: Mapping[str, str]) -> dict[str, str]:
    """The curve of each method: its policy and settings without the one that has most values within the policy."""
    found = {}
    for method, policy in policies.items():
        pairs = {pair for other in policies if policies[other] == policy for pair in _settings(other).items()}
        counts = Counter(key for key, _ in sorted(pairs))
        varied = counts.most_common(1)[0][0] if counts else ""
        rest = sorted(f"{k}={v}" for k, v in _settings(method).items() if k != varied)
        found[method] = ",".join([policy, *rest])
    return found


def _settings(method: str) -> dict[str, str]:
    """policy:recipe,a=1,b=2 as {"": "recipe", "a": "1", "b": "2"}."""
    parts = [part.strip().rpartition("=") for part in method.partition(":")[2].split(",") if part.strip()]
    return {key.strip(): value.strip() for key, _, value in parts}


def _lists(text: str) -> str:
    """Lists of more than three, such as 12+13+12+13, as 12…13."""

    def ends(found: re.Match[str]) -> str:
        parts = found[0].split("+")
        if parts[0] == parts[-1]:
            parts.sort(key=lambda part: (len(part), part))
        return parts[0] if parts[0] == parts[-1] else f"{parts[0]}…{parts[-1]}"

    return re.sub(r"[\w.]+(\+[\w.]+){3,}", ends, text)

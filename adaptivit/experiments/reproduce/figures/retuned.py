"""A weight that is tuned again on validation images, and what it was tuned for beside it (AHT-ViT Table 5).

options: like = the row that the others are to cost as much as; batch as for throughput; full, without = top-1 / GMACs
and images/s as printed, of that row and of the others. Of the others the one counts whose validation cost is nearest;
of equals the more accurate one.
"""

from __future__ import annotations

from dataclasses import replace

from ....evaluation.report import measure as evaluated
from . import Found, Given, throughput


def measure(given: Given) -> Found:
    like: str = given.option("like", given.names[0])
    chosen_on = {name: evaluated(given.model(name), given.choosing, given.device) for name in given.names}
    goal = chosen_on[like].gmacs
    others = [name for name in given.names if name != like]
    chosen = min(others, key=lambda name: (round(abs(chosen_on[name].gmacs / goal - 1), 2), -chosen_on[name].score))
    kept = replace(given, jobs={name: given.jobs[name] for name in (like, chosen)})
    paper = {like: given.option("full", ("", "")), chosen: given.option("without", ("", ""))}
    options = {**given.table.options, "paper": {name: rate for name, (_, rate) in paper.items()}}
    timed = throughput.measure(replace(kept, table=replace(given.table, options=options)))
    rows = [
        {"row": name, "chosen": int(name == chosen), "validation_top1": found.score, "validation_gmacs": found.gmacs}
        | {"validation_images": found.images, "top1": given.rows[name]["top1"], "gmacs": given.rows[name]["gmacs"]}
        for name, found in chosen_on.items()
    ]
    compared = [
        {"what": f"{name}, top-1 % / GMACs", "ours": _figures(given, name), "paper": paper[name][0]}
        for name in (like, chosen)
    ]
    note = f"{chosen} was chosen of {len(others)} on validation images, for costing as much as {like}."
    return Found([*rows, *timed.rows], timed.pictures, [*compared, *timed.compared], [note, *timed.notes])


def _figures(given: Given, name: str) -> str:
    row = given.rows[name]
    return f"{float(row['top1']):.2f} / {float(row['gmacs']):.3g}"

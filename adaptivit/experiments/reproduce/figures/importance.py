"""Correlation of routing scores with leave-one-out importance by block, with p-values (A-MoD Fig. 4).

options: images = how many of the report's, tokens = patches of each that are left out, one at a time
"""

from __future__ import annotations

import numpy as np

from ....utils.plotting import png_bytes
from ....visualize import charts, pareto
from ....visualize.importance import leave_one_out
from . import Found, Given


def measure(given: Given) -> Found:
    images, tokens = given.option("images", 8), given.option("tokens", 196)
    found, colours, rows, compared = {}, [], list[dict[str, object]](), []
    for name in given.names:
        model = given.model(name)
        seen = given.look(model, images)
        one = found[seen.method] = leave_one_out(model, seen, tokens=tokens, images=len(seen), seed=given.seed)
        colours.append(pareto.colour_of(seen.policy))
        p, rank_p = one.p_values(one.pearson), one.p_values(one.spearman)
        rows += [
            {"method": name, "block": block + 1, "image": seen.names[i], "patches": int((one.chosen[s, b] >= 0).sum())}
            | {"pearson": one.pearson[s, b], "pearson_p": p[s, b]}
            | {"spearman": one.spearman[s, b], "spearman_p": rank_p[s, b]}
            for s, block in enumerate(one.blocks)
            for b, i in enumerate(one.images)
        ]
        for s, block in enumerate(one.blocks):
            known = np.isfinite(one.pearson[s])
            words = (
                f"{one.pearson[s, known].mean():+.2f}, p {np.median(p[s, known]):.2g}" if known.any() else "undefined"
            )
            paper = given.option("papers", {}).get(name, "")
            compared.append({"what": f"{name}, block {block + 1}: r, median p", "ours": words, "paper": paper})
    return Found(rows, {"importance.png": png_bytes(charts.importances(found, colours))}, compared)

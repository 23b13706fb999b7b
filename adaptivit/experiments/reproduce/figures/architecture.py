"""A model's planners, supervisors and live tokens by block (AHT-ViT Fig. 2).

options: images = how many the tokens are counted on
"""

from __future__ import annotations

from ....utils.plotting import png_bytes
from ....visualize.architecture import architecture, svg
from ....visualize.charts import SHARP
from . import Found, Given


def measure(given: Given) -> Found:
    seen = given.look(given.model(given.names[-1]), given.option("images", 256))
    stages = seen.plans.stages if seen.plans is not None else []
    rows = [
        {"block": layer + 1, "tokens": float(seen.live[layer].mean()), "decides": seen.decisions.get(layer, "")}
        | {"planner": int(layer + 1 in stages), "images": len(seen)}
        for layer in range(seen.layers)
    ]
    deciding = [row["block"] for row in rows if row["decides"]]
    ends = f"{deciding[0]} to {deciding[-1]}" if deciding else "none"
    compared = [
        {"what": "planners after blocks", "ours": ", ".join(map(str, stages)) or "none", "paper": "3, 6, 9 of 12"},
        {"what": "supervisors in blocks", "ours": ends, "paper": "every block"},
    ]
    drawn = {"architecture.png": png_bytes(architecture(seen), SHARP), "architecture.svg": svg(architecture(seen))}
    return Found(rows, drawn, compared)

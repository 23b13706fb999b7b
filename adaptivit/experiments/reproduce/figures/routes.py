"""The patches that routed blocks compute, one model below the other (A-MoD Fig. 5).

options: images = how many of the report's
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any

from ....utils.plotting import image_bytes
from ....visualize.pictures import changing, routes
from . import Found, Given


def measure(given: Given) -> Found:
    seen = {name: given.look(given.model(name), given.option("images", 4)) for name in given.names}
    first = seen[given.names[0]]
    rows, shared = list[dict[str, Any]](), list[float]()
    for i, (name, one) in itertools.product(range(len(first)), seen.items()):
        for b in changing(one):
            both = int((one.attended[b, i] & first.attended[b, i]).sum())
            count = int(one.attended[b, i].sum())
            rows.append({"image": one.names[i], "method": name, "block": b + 1, "patches": count, "in_the_first": both})
            shared += [both / max(count, 1)] if one is not first else []
    pictures = {f"routes_{i + 1}.png": image_bytes(routes(list(seen.values()), i)) for i in range(len(first))}
    words = f"{100 * statistics.mean(shared):.0f} %" if shared else ""
    compared = [{"what": "patches that both routings choose", "ours": words, "paper": "a picture"}]
    return Found(rows, pictures, compared)

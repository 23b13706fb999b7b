"""Images beside their halted patches (AHT-ViT Fig. 1).

options: images = how many
"""

from __future__ import annotations

from ....utils.plotting import image_bytes
from ....visualize.pictures import halted
from . import Found, Given


def measure(given: Given) -> Found:
    name = given.names[-1]
    seen = given.look(given.model(name), given.option("images", 9))
    rows = [
        {"image": title, "patches": seen.attended.shape[-1], "left_early": int((~seen.attended[-1, i]).sum())}
        | {"mean_depth": float(seen.mean_depth[i]), "of_static": float(seen.macs[i] / seen.static_macs)}
        for i, title in enumerate(seen.titles)
    ]
    early = 100 * sum(row["left_early"] for row in rows) / sum(row["patches"] for row in rows)
    compared = [{"what": "patches that halt before the last block", "ours": f"{early:.0f} %", "paper": "a picture"}]
    return Found(rows, {"halted.png": image_bytes(halted(seen, range(len(seen))))}, compared)

"""Parameters and GMACs of backbones, counted on the meta device (A-MoD Table 2).

options: backbones = {timm name = "parameters in millions / GMACs as printed"}, sizes = {name = pixels}
"""

from __future__ import annotations

import torch

from ....backbones.build import build_backbone
from ....backbones.families import family_of
from ....cost import CostModel
from . import Found, Given


def measure(given: Given) -> Found:
    rows, compared = [], []
    sizes = given.option("sizes", {})
    for name, paper in given.option("backbones", {}).items():
        with torch.device("meta"):
            module = build_backbone(name, img_size=sizes.get(name))
        shape = family_of(module)(module).inspect()
        millions = sum(p.numel() for p in module.parameters()) / 1e6
        gmacs = CostModel(shape, shape.tokens).static / 1e9
        its = paper.partition(" / ")
        rows.append(
            {"backbone": name, "img_size": sizes.get(name, 224), "parameters_m": millions, "gmacs": gmacs}
            | {"paper_parameters_m": its[0], "paper_gmacs": its[2]}
        )
        compared.append({"what": f"{name}, M / GMACs", "ours": f"{millions:.2f} / {gmacs:.2f}", "paper": paper})
    return Found(rows, compared=compared, notes=given.option("notes", []))

"""Mean depth, GMACs and accuracy of every row beside the depth that the paper prints (A-ViT Table 2).

options: paper = {row = "as printed"}
"""

from __future__ import annotations

from . import Found, Given


def measure(given: Given) -> Found:
    paper, compared, rows = given.option("paper", {}), [], []
    for name in given.names:
        row = given.rows[name]
        rows.append({"row": name, **{key: row[key] for key in ("mean_depth", "gmacs", "top1")}})
        depth = f"{float(row['mean_depth']):.2f}"
        compared.append({"what": f"{name}, mean depth", "ours": depth, "paper": paper.get(name, "")})
    return Found(rows, compared=compared, notes=given.option("notes", []))

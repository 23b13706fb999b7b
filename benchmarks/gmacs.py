"""GMACs of every method at 224 px: what the papers count, and what the method itself spends on top of it.

    python benchmarks/gmacs.py --csv docs/results/raw/gmacs.csv

Random weights: a method that keeps a fixed number of tokens costs the same on every image.
"""

from __future__ import annotations

import argparse
import csv
import io
from pathlib import Path

import torch

import adaptivit
from adaptivit.policies.spec import parse
from adaptivit.utils.atomic_io import write_text

METHODS = (
    "static",
    *("mod:capacity=0.5", "mod:capacity=0.125", "amod:capacity=0.5", "amod:capacity=0.125", "amod:capacity=0.7"),
    *("dynamicvit:keep=0.7", "spvit:select=count", "evit:keep=0.7", "evit:keep=0.7,fuse=false"),
    *("patch_slimming:counts=161+161+151+151+141+141+131+131+131+131+131", "tome:r=8", "tome:r=13", "fold:budget=0.67"),
)
NAMES = ("backbone", "method", "gmacs_blocks", "policy", "evidence", "gmacs", "tokens_in_mlp")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args()
    rows = []
    for backbone in ("deit_tiny_patch16_224", "deit_small_patch16_224"):
        vit = adaptivit.create(backbone, "static").vit
        for method in METHODS:
            policy, values = parse(method)
            out = adaptivit.create(vit, policy, **values)(torch.randn(1, 3, 224, 224))
            figures = (out.macs_blocks, out.parts["policy"], out.parts["evidence"], out.macs)
            tokens = " ".join(str(int(n)) for n in out.trace.live_mlp[:, 0])
            rows.append((backbone, method, *(f"{float(f[0]) / 1e9:.4f}" for f in figures), tokens))
            print("  ".join(f"{cell:<{width}}" for cell, width in zip(rows[-1], (22, 24, 7, 7, 7, 7, 1), strict=True)))
    if given.csv:
        out_text = io.StringIO()
        writer = csv.writer(out_text, lineterminator="\n")
        writer.writerow(NAMES)
        writer.writerows(rows)
        write_text(given.csv, out_text.getvalue())


if __name__ == "__main__":
    main()

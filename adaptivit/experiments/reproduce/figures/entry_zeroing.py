"""Accuracy of static models with one random entry of every token set to zero (A-ViT Sec. 4.3).

options: repeats; paper = {row = "as printed"}. The entry is zero wherever a gate could read or write it: in the
embedding and after every block. The same entries are taken for all rows of a width.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ....data import dataset
from ....model import AdaptiveViT
from ....visualize.importance import logits_of
from . import Found, Given


def measure(given: Given) -> Found:
    rows, compared, paper = [], [], given.option("paper", {})
    for name in given.names:
        model = given.model(name)
        if model.policy_name != "static":
            continue
        repeats = min(given.option("repeats", 10), model.shape.dim)
        entries = np.random.default_rng(given.seed).permutation(model.shape.dim)[:repeats].tolist()
        right = np.array(list(_right(given, model, entries)), float).T  # [1 + repeats, images]
        top1 = 100 * right.mean(1)
        drops = (top1[1:] - top1[0]).tolist()
        for entry, accuracy, drop in zip(entries, top1[1:].tolist(), drops, strict=True):
            rows.append(
                {"row": name, "entry": entry, "images": right.shape[1], "top1_whole": float(top1[0])}
                | {"top1_zeroed": accuracy, "change": drop}
            )
        ours = f"{statistics.mean(drops):+.2f} ± {statistics.stdev(drops):.2f}"
        compared.append({"what": f"{name}, points", "ours": ours, "paper": paper.get(name, "")})
    where = "The paper does not say where; here the entry is zero in the embedding and after every block."
    return Found(rows, compared=compared, notes=[f"± is the s.d. over the entries. {where}"])


@torch.inference_mode()
def _right(given: Given, model: AdaptiveViT, entries: list[int]) -> Iterator[list[bool]]:
    """Image by image, whether the whole model is right, and the model without each entry."""
    images = dataset.Images(given.images.for_model(model), model.preprocessing.evaluation())
    for batch in dataset.batches(images, dataset.in_order(len(images), 64)):
        pixels, labels = batch.images.to(given.device), batch.labels.to(given.device)
        answers = [_logits(model, pixels, entry).argmax(-1) == labels for entry in (None, *entries)]
        yield from torch.stack(answers, 1).tolist()


def _logits(model: AdaptiveViT, pixels: Tensor, entry: int | None) -> Tensor:
    rows = model.backbone.embed(pixels)  # [B, N, D]
    for block in (None, *model.backbone.blocks):
        rows = rows if block is None else block(rows)
        if entry is not None:
            rows[..., entry] = 0
    return logits_of(model, rows)

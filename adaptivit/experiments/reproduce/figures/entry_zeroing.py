"""Accuracy of static models with one random entry of every token set to zero (A-ViT Sec. 4.3).

options: repeats; paper = {row = "as printed"}. The paper does not say where: the entry is zero in the embedding alone,
and in the embedding and after every block. The same entries are taken for all rows of a width.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ....data import dataset
from ....model import AdaptiveViT
from ....visualize.importance import logits_of
from . import Found, Given

_NOTE = "± is the s.d. over the entries; in brackets 95 % over the images. The paper does not say where."
PLACES = ("embedding", "embedding and every block")


def measure(given: Given) -> Found:
    rows, compared, paper = [], [], given.option("paper", {})
    for name in given.names:
        model = given.model(name)
        if model.policy_name != "static":
            continue
        repeats = min(given.option("repeats", 10), model.shape.dim)
        entries = np.random.default_rng(given.seed).permutation(model.shape.dim)[:repeats].tolist()
        cases = list(itertools.product(PLACES, entries))
        right = np.array(list(_right(given, model, cases)), float).T  # [1 + cases, images]
        whole, *zeroed = (100 * right.mean(1)).tolist()
        own = [
            {"row": name, "where": where, "entry": entry, "images": right.shape[1]}
            | {"top1_whole": whole, "top1_zeroed": top1, "change": top1 - whole}
            for (where, entry), top1 in zip(cases, zeroed, strict=True)
        ]
        for place in PLACES:
            change = [row["change"] for row in own if row["where"] == place]
            here = [case + 1 for case, (where, _) in enumerate(cases) if where == place]
            each = 100 * (right[here].mean(0) - right[0])  # [images] points, mean of the entries
            half = 1.96 * each.std(ddof=1) / len(each) ** 0.5
            ours = f"{statistics.mean(change):+.2f} ± {statistics.stdev(change):.2f} (± {half:.2f})"
            compared.append({"what": f"{name}, zero in {place}, points", "ours": ours, "paper": paper.get(name, "")})
        rows += own
    return Found(rows, compared=compared, notes=[_NOTE])


@torch.inference_mode()
def _right(given: Given, model: AdaptiveViT, cases: list[tuple[str, int]]) -> Iterator[list[bool]]:
    """Image by image, whether the whole model is right, and so in every case."""
    images = dataset.Images(given.images.for_model(model), model.preprocessing.evaluation())
    for batch in dataset.batches(images, dataset.in_order(len(images), 64)):
        pixels, labels = batch.images.to(given.device), batch.labels.to(given.device)
        answers = [logits.argmax(-1) == labels for logits in _cases(model, pixels, cases)]
        yield from torch.stack(answers, 1).tolist()


def _cases(model: AdaptiveViT, pixels: Tensor, cases: list[tuple[str, int]]) -> Iterator[Tensor]:
    """[B, C] logits of the whole model, and of each case."""
    embedded = model.backbone.embed(pixels)  # [B, N, D]
    for where, entry in (("", -1), *cases):
        rows = embedded.clone()
        for number, block in enumerate((torch.nn.Identity(), *model.backbone.blocks)):
            rows = block(rows)
            if where == PLACES[1] or (where and not number):
                rows[..., entry] = 0
        yield logits_of(model, rows)

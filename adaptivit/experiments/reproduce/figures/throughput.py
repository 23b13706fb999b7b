"""Images a second of a table's rows beside the best static model, timed in turn.

options: batch; paper = {row = "as printed"}; accuracy = true plots it against images/s, too. Rows of one backbone take
turns with its static baselines, as in `adaptivit benchmark`, which has the dtype and layouts too; every row is first
checked against its own decisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

from ....data import dataset
from ....errors import UserError
from ....factory import create
from ....model import AdaptiveViT
from ....visualize.pareto import pareto
from ...benchmark.charts import bars
from ...benchmark.config import BenchmarkConfig
from ...benchmark.contenders import BEST, Setting
from ...benchmark.rows import Row, rate
from ...benchmark.run import configuration, head_of
from ...table import points
from . import Found, Given

_COLUMNS = ("contender", "backbone", "img_size", "batch", "dtype", "layout", "static_mode", "gmacs", "mac_share")
_TIMES = ("ms_p20", "ms_p50", "ms_p80", "images_per_s", "speed_vs_best_static", "threads", "repeats")


def measure(given: Given) -> Found:
    tiny: dict[str, Any] = {"skip_compiled": True, "repeats": 3, "warm_up": 1, "inner": 1} if given.stand_in else {}
    config = BenchmarkConfig(batch_sizes=(min(given.option("batch", 64), 8 if given.stand_in else 2**16),), **tiny)
    models: dict[Any, dict[str, AdaptiveViT]] = {}
    for name in given.names:
        model = given.model(name)
        own = replace(model.whole or model.shape, classes=0, num_classifiers=0)
        models.setdefault((own, model.backbone_name), {})[name] = model
    head, rows = head_of(config, given.device), list[Row]()
    for group in models.values():
        rows += configuration(config, _setting(config, given, group), head, Console(stderr=True))
    if failed := [f"{row['contender']}: {row['reason']}" for row in rows if row["status"] != "ok"]:
        raise UserError(f"Expected every row to be timed; these failed: {'; '.join(failed)}.")
    paper, own_rows = given.option("paper", {}), [row for row in rows if row["contender"] in given.names]
    compared = [
        {
            "what": f"{row['contender']}, images/s (× best static)",
            "ours": f"{rate(row)} ({float(row['speed_vs_best_static']):.2f})",
            "paper": paper.get(row["contender"], ""),
        }
        for row in own_rows
    ]
    modes = sorted({f"{row['backbone']} {row['static_mode']}" for row in rows if row["contender"] == BEST})
    note = f"images/s at batch {rows[0]['batch']}, {rows[0]['dtype']}; best static: {', '.join(modes)}"
    kept = [{name: row[name] for name in (*_COLUMNS, *_TIMES)} for row in rows]
    pictures = {"throughput.png": bars(rows)}
    if given.option("accuracy", False):
        speeds = {row["contender"]: float(row["images_per_s"]) for row in own_rows}
        named = [given.rows[name] | {"method": name} for name in given.names]
        dots = [replace(p, speed=speeds[p.label], curve=p.policy) for p in points(named)]
        pictures["accuracy.png"] = pareto(dots, detail=f"{given.table.name}, batch {rows[0]['batch']}", reference="")
    return Found(kept, pictures, compared, [note])


def _setting(config: BenchmarkConfig, given: Given, models: Mapping[str, AdaptiveViT]) -> Setting:
    """The rows of one backbone, with a batch of the report's images in the dtype of a benchmark."""
    first = next(iter(models.values()))
    uncut = next((model for model in models.values() if model.whole is None), None)
    size = first.preprocessing.size[-1]
    base = AdaptiveViT(uncut.vit, "static", {}) if uncut else create(first.backbone_name or "", "static", img_size=size)
    dtype, batch = config.dtypes_on(given.device.type)[0], config.batch_sizes[0]
    some = given.images.spread(batch)
    loaded = next(dataset.batches(dataset.Images(some, first.preprocessing.evaluation()), [list(range(len(some)))]))
    images = loaded.images[torch.arange(batch) % len(loaded.images)]
    place: Any = (given.device, getattr(torch, dtype))
    cast = {name: model.to(*place) for name, model in models.items()}
    name = first.backbone_name or "ViT"
    return Setting(name, dtype, images.to(*place), base.to(*place).eval(), {}, cast)

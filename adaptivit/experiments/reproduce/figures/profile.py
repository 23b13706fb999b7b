"""CPU and device time of attention and MLP by the PyTorch profiler, a bar a row (A-MoD Fig. 11).

options: batch = on a GPU, cpu_batch = without one
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ....data import dataset
from ....execution.parts import PARTS, part_times
from ....utils.plotting import INK, add_axes, grid, headline, label_axes, new_figure, png_bytes
from . import Found, Given

_COLOURS = dict(zip(PARTS, ("#4c6fb1", "#e08e1b", "#0f8b80", "#c3c9ce"), strict=True))


def measure(given: Given) -> Found:
    cuda = given.device.type == "cuda"
    batch = given.option("batch", 100) if cuda else given.option("cpu_batch", 8)
    times: dict[str, dict[str, dict[str, float]]] = {}
    for name in given.names:
        model, some = given.model(name), given.images.spread(batch)
        images = dataset.Images(some, model.preprocessing.evaluation())
        loaded = next(dataset.batches(images, [list(range(len(some)))])).images
        loaded = loaded[torch.arange(batch) % len(loaded)].to(given.device)
        found = part_times(model, loaded, repeats=2 if given.stand_in else 5)
        times[name] = {"CPU": found.cpu} | ({"device": found.device} if cuda else {})
    rows = [
        {"row": name, "clock": clock, "batch": batch, "backbone": given.rows[name]["model"]}
        | {f"{part}_ms": each[part] for part in PARTS}
        for name, clocks in times.items()
        for clock, each in clocks.items()
    ]
    compared = [
        {"what": f"{row['row']}, {row['clock']}, attention / MLP / routing, ms", "paper": "a picture"}
        | {"ours": f"{row['attention_ms']:.3g} / {row['MLP_ms']:.3g} / {row['routing_ms']:.3g}"}
        for row in rows
    ]
    note = f"Batch {batch}. Routing is what the policy decides and moves; its paper has attention and MLP alone."
    return Found(rows, {"profile.png": _bars(times, f"{given.table.name}, batch {batch}")}, compared, [note])


def _bars(times: Mapping[str, Mapping[str, Mapping[str, float]]], detail: str) -> bytes:
    """A panel a clock with stacked bars, a bar a row."""
    clocks = list(next(iter(times.values())))
    left, wide, high, below, above = 100, 110 * len(times), 360, 100, 104
    figure = new_figure(len(clocks) * (left + wide) + 160, below + high + above)
    for number, clock in enumerate(clocks):
        axes = add_axes(figure, left + number * (left + wide), below, wide, high)
        bottom = [0.0] * len(times)
        for part in PARTS:
            values = [clocks_of[clock][part] for clocks_of in times.values()]
            axes.bar(range(len(times)), values, 0.66, bottom, color=_COLOURS[part], label=part, zorder=2)
            bottom = [b + v for b, v in zip(bottom, values, strict=True)]
        names = ["\n".join(name.replace("static-isoflop", "isoFLOP").rsplit("-", 2)) for name in times]
        axes.set_xticks(range(len(times)), names, fontsize=8, color=INK)
        grid(axes)
        label_axes(axes, y=f"{clock} time, ms a pass")
        headline(axes, "Time of the parts of a pass" if not number else "", f"{detail}; {clock} time")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=8)
    return png_bytes(figure)

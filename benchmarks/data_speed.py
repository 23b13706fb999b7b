"""Training from arrays against random tensors on the device: python3 benchmarks/data_speed.py --out FILE.csv

Each contender takes the steps of `adaptivit train` (train.Trainer.step). `random` has normalised tensors of the model's
size on the device already; `device` takes its batches from the arrays through the device's way, `cpu` through PIL with
--workers processes. Data: --data (an .npz or mosaics), or random 32-pixel images where it is not given. Contenders take
turns, and whoever comes first changes; the ratio is that of times within a turn. `host_ms` is the time that the host
takes to put one batch's preparation into the queue, `prepare_ms` until the device has done it, both without training.
Prints a table and appends rows to FILE.csv.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

import adaptivit
from adaptivit.data import dataset
from adaptivit.data.dataset import Labelled, Loaded
from adaptivit.data.gpu_pipeline import Source, training_images
from adaptivit.training.config import TrainConfig
from adaptivit.training.processes import accelerator_for
from adaptivit.training.run import Trainer, _trainer
from adaptivit.utils.csv import append_csv
from adaptivit.utils.environment import commit
from adaptivit.utils.settings import changed

PER_EPOCH = 1000  # steps, for the learning rate alone


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass
class Contender:
    trainer: Trainer
    batches: Iterator[Loaded]
    done: int = 0
    times: list[float] = field(default_factory=list)  # seconds a step, one entry a turn

    def run(self, steps: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(steps):
            self.trainer.step(next(self.batches), self.done, PER_EPOCH)
            self.done += 1
        wait()
        return time.perf_counter() - start


def images_of(options: argparse.Namespace) -> Labelled:
    if options.data:
        return dataset.for_training(options.data, 0.1, 0)[0]
    pixels: Any = np.random.default_rng(0).integers(0, 256, (5000, 32, 32, 3), dtype=np.uint8)
    return Labelled("random 32 px", pixels, [i % 100 for i in range(5000)], tuple(map(str, range(100))))


def endless(source: Source, batch: int, workers: int) -> Iterator[Loaded]:
    """Epoch after epoch, in a shuffled order."""
    while True:
        order = torch.randperm(len(source), generator=torch.Generator().manual_seed(source.epoch)).tolist()
        yield from dataset.batches(
            source, [order[i : i + batch] for i in range(0, len(order) - batch + 1, batch)], workers
        )
        source.epoch += 1


def fixed(batch: int, size: tuple[int, int], classes: int, device: torch.device) -> Iterator[Loaded]:
    g = torch.Generator(device).manual_seed(1)
    found = [
        Loaded(
            torch.randn(batch, 3, *size, device=device, generator=g),
            torch.randint(classes, (batch,), device=device, generator=g),
            torch.arange(batch),
            [],
        )
        for _ in range(2)
    ]
    while True:
        yield from found


def preparation(batches: Iterator[Loaded], count: int) -> tuple[float, float]:
    """Milliseconds a batch: of the host, and until the device is done."""
    next(batches)
    wait()
    start = time.perf_counter()
    for _ in range(count):
        next(batches)
    host = time.perf_counter() - start
    wait()
    return 1e3 * host / count, 1e3 * (time.perf_counter() - start) / count


def measure(batch: int, options: argparse.Namespace) -> None:
    torch._dynamo.reset()
    labelled = images_of(options)
    classes = len(labelled.classes)
    base = TrainConfig(data="", policy="static", device=options.device, precision=options.precision)
    changes = {
        "run.compile": options.compile,
        "augment.kind": options.augment,
        "augment.erasing": options.random_erasing,
    }
    base = changed(base, changes)
    accelerator = accelerator_for(base)
    device = accelerator.device
    contenders: dict[str, Contender] = {}
    times: dict[str, tuple[float, float]] = {}
    for name in ("random", *options.ways):
        torch.manual_seed(0)
        model = adaptivit.create(options.backbone, "static", num_classes=classes, img_size=options.img_size).to(device)
        trainer = _trainer(base, model, accelerator)
        if name == "random":
            batches = fixed(batch, model.preprocessing.size, classes, device)
        else:
            source = training_images(labelled, model.preprocessing, replace(base.augment, on=name), base.seed, device)
            batches = endless(source, batch, options.workers)
        times[name] = preparation(batches, options.steps)
        contenders[name] = Contender(trainer, batches)
        contenders[name].run(options.warm_up)
    names = list(contenders)
    for turn in range(options.turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            contenders[name].times.append(contenders[name].run(options.steps) / options.steps)
    for name in names:
        report(name, contenders, times[name], labelled, batch, device, options)


def report(
    name: str,
    contenders: dict[str, Contender],
    preparation: tuple[float, float],
    labelled: Labelled,
    batch: int,
    device: torch.device,
    options: argparse.Namespace,
) -> None:
    own, random = contenders[name].times, contenders["random"].times
    ratio = statistics.median(b / a for a, b in zip(own, random, strict=True))
    row: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "backbone": options.backbone,
        "data": options.data or labelled.source,
        "batch": batch,
        "way": name,
        "augment": options.augment,
        "random_erasing": options.random_erasing,
        "images_per_second": round(batch / statistics.median(own), 1),
        "median_ms": round(1e3 * statistics.median(own), 3),
        "min_ms": round(1e3 * min(own), 3),
        "max_ms": round(1e3 * max(own), 3),
        "speed_over_random": round(ratio, 4),
        "host_ms": round(preparation[0], 3),
        "prepare_ms": round(preparation[1], 3),
        "compile": options.compile,
        "precision": options.precision,
        "workers": options.workers,
        "turns": options.turns,
        "steps_a_turn": options.steps,
        "seed": 0,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "adaptivit": adaptivit.__version__,
        "commit": commit(),
    }
    append_csv(options.out, row)
    print(
        f"{options.backbone} b{batch:<4} {name:7}{row['images_per_second']:9.1f} images/s  {row['median_ms']:8.2f} ms "
        f"({row['min_ms']:.2f} to {row['max_ms']:.2f})  {ratio:.3f} of random's speed  "
        f"preparation {row['prepare_ms']:.2f} ms, host {row['host_ms']:.2f} ms",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--data", help="an .npz file or a folder of mosaics; default: random 32-pixel images")
    parser.add_argument("--backbone", default="deit_tiny_patch16_224")
    parser.add_argument("--img-size", type=int)
    parser.add_argument("--batch", nargs="+", type=int, default=[256])
    parser.add_argument("--augment", default="rand", choices=["none", "flip", "pad", "crop", "rand"])
    parser.add_argument("--random-erasing", type=float, default=0.25)
    parser.add_argument("--ways", nargs="+", default=["device"], choices=["device", "cpu"])
    parser.add_argument("--workers", type=int, default=0, help="processes of the way `cpu`")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20, help="a turn")
    parser.add_argument("--warm-up", type=int, default=10, help="steps")
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"])
    chosen = parser.parse_args()
    for images in chosen.batch:
        measure(images, chosen)

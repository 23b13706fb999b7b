"""Training steps of AHT-ViT against static, on a GPU: python3 benchmarks/training_speed.py --out FILE.csv

What runs is what `adaptivit train` runs (train.Trainer.step: autocast, losses, backward, clipping, fused AdamW), on
random images that are on the GPU already. AHT-ViT has the losses of the recipe aht-budget without its teacher, whose
forward pass static's training would need as well; --teacher adds it as contenders of its own. Contenders take turns,
and whoever comes first changes. The ratio is that of times within a turn, to static of the same kind. Recompilations
are graphs that were compiled after the warm-up; there should be none. Prints a table and appends rows to FILE.csv.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

import adaptivit
from adaptivit.data.dataset import Loaded
from adaptivit.kernels import weighted_attention
from adaptivit.policies import spec
from adaptivit.training.config import TrainConfig
from adaptivit.training.processes import accelerator_for
from adaptivit.training.recipes import get
from adaptivit.training.run import Trainer, _trainer, build_objective
from adaptivit.utils.csv import append_csv
from adaptivit.utils.environment import commit
from adaptivit.utils.settings import changed

KINDS = ("compiled", "eager")
PER_EPOCH = 1000  # steps, for the learning rate alone


def graphs() -> int:
    """Graphs that torch.compile has made so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass
class Contender:
    trainer: Trainer
    batches: list[Loaded]
    done: int = 0  # steps
    warm_up: float = 0.0  # seconds of the first steps, compilation included
    own: int = 0  # bytes that stay allocated between steps
    peak: int = 0  # bytes at the worst moment of a step, the other contenders' aside
    compiled: int = 0  # graphs during the warm-up
    recompiled: int = 0  # and after it
    times: list[float] = field(default_factory=list)  # seconds a step, one entry a turn
    loss: float = 0.0

    def run(self, steps: int) -> float:
        """Seconds for so many steps."""
        wait()
        start = time.perf_counter()
        for _ in range(steps):
            losses, _output = self.trainer.step(self.batches[self.done % len(self.batches)], self.done, PER_EPOCH)
            self.done += 1
        wait()
        seconds = time.perf_counter() - start
        self.loss = float(losses.total.detach())
        return seconds

    def turn(self, steps: int) -> None:
        before = graphs()
        self.times.append(self.run(steps) / steps)
        self.recompiled += graphs() - before

    def prepare(self, steps: int, before: int) -> None:
        """Warm up, and look at the memory; `before` bytes were allocated before this contender was built."""
        known = graphs()
        self.warm_up = self.run(steps)
        self.compiled = graphs() - known
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self.run(2)
            self.own = torch.cuda.memory_allocated() - before
            self.peak = torch.cuda.max_memory_allocated() - before


def configuration(method: str, kind: str, options: argparse.Namespace) -> TrainConfig:
    """The recipe aht-budget without its teacher, and the same without adaptivity for static."""
    config = replace(get("aht-budget"), precision="bf16", device=options.device)
    config = changed(config, {"loss.distill": 0.0, "run.compile": kind == "compiled"})
    if method == "static":
        config = changed(config, {"policy": "static", "loss.target_depth": 0.0, "loss.cost": 0.0})
    return config


def build(method: str, kind: str, batches: list[Loaded], options: argparse.Namespace) -> Contender:
    config = configuration(method, kind, options)
    policy, given = spec.parse(config.policy)
    torch.manual_seed(0)
    accelerator = accelerator_for(config)
    model = adaptivit.create(options.backbone, policy, num_classes=options.classes, **given).to(accelerator.device)
    model.policy.init_gate(model, batches[0].images[:64])
    trainer = _trainer(config, model, accelerator)
    if "teacher" in method:
        teacher = adaptivit.create(options.backbone, "static", num_classes=options.classes).to(accelerator.device)
        trainer.teacher = teacher.requires_grad_(False).eval()
        trainer.objective = build_objective(changed(config, {"loss.distill": 1.0}))
    return Contender(trainer, batches)


def measure(batch: int, options: argparse.Namespace) -> None:
    torch._dynamo.reset()
    device = torch.device(options.device if torch.cuda.is_available() else "cpu")
    size = adaptivit.create(options.backbone, "static").preprocessing.size
    g = torch.Generator(device).manual_seed(1)
    batches = [
        Loaded(
            torch.randn(batch, 3, *size, device=device, generator=g),
            torch.randint(options.classes, (batch,), device=device, generator=g),
            torch.arange(batch),
            [],
        )
        for _ in range(2)
    ]
    methods = ("static", "aht", *(("aht, teacher",) if options.teacher else ()))
    contenders: dict[tuple[str, str], Contender] = {}
    for kind in options.kinds:
        for method in methods:
            before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
            contender = build(method, kind, batches, options)
            contender.prepare(options.warm_up, before)
            contenders[method, kind] = contender
            print(f"  {method}, {kind}: warm-up {contender.warm_up:.1f} s, {contender.compiled} graphs", flush=True)
    names = list(contenders)
    for turn in range(options.turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            contenders[name].turn(options.steps)
    for (method, kind), contender in contenders.items():
        report(method, kind, contender, contenders["static", kind], batch, device, options)


def report(
    method: str,
    kind: str,
    contender: Contender,
    static: Contender,
    batch: int,
    device: torch.device,
    options: argparse.Namespace,
) -> None:
    ratio = statistics.median(a / b for a, b in zip(contender.times, static.times, strict=True))
    row: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "backbone": options.backbone,
        "batch": batch,
        "method": method,
        "kind": kind,
        "images_per_second": round(batch / statistics.median(contender.times), 1),
        "median_ms": round(1e3 * statistics.median(contender.times), 3),
        "min_ms": round(1e3 * min(contender.times), 3),
        "max_ms": round(1e3 * max(contender.times), 3),
        "time_over_static": round(ratio, 4),
        "peak_gib": round(contender.peak / 2**30, 3),
        "resident_gib": round(contender.own / 2**30, 3),
        "graphs": contender.compiled,
        "recompilations": contender.recompiled,
        "warm_up_s": round(contender.warm_up, 1),
        "last_loss": round(contender.loss, 4),
        "kernels": weighted_attention.usable(torch.empty(1, 64, device=device)),
        "turns": options.turns,
        "steps_a_turn": options.steps,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "triton": getattr(weighted_attention.triton, "__version__", ""),
        "adaptivit": adaptivit.__version__,
        "commit": commit(),
        "seed": 0,
    }
    append_csv(options.out, row)
    print(
        f"{options.backbone} b{batch:<4} {method:13} {kind:9}{row['images_per_second']:9.1f} images/s  "
        f"{row['median_ms']:8.2f} ms ({row['min_ms']:.2f} to {row['max_ms']:.2f})  {ratio:.3f} of static's time  "
        f"{row['peak_gib']:.2f} GiB  {row['recompilations']} recompilations",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--backbone", default="deit_small_patch16_224")
    parser.add_argument("--batch", nargs="+", type=int, default=[128, 256])
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--teacher", action="store_true", help="AHT-ViT with distillation as well")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10, help="a turn")
    parser.add_argument("--warm-up", type=int, default=8, help="steps")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: to see that it runs")
    chosen = parser.parse_args()
    for images in chosen.batch:
        measure(images, chosen)

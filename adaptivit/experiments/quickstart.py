"""The quickstart: train a static ViT on handwritten digits and an AHT-ViT from it, compare them, show the result."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from torch import Tensor, nn

from ..backbones.build import DIGITS_VIT
from ..backbones.preprocessing import Preprocessing
from ..data.dataset import Loaded
from ..data.digits import MEAN, PATCH, SIZE, STD, Digits, visible
from ..evaluation.evaluate import Result, evaluate, paired_difference
from ..execution.timing import Timing, interleaved
from ..factory import create
from ..model import AdaptiveViT
from ..policies import spec
from ..training.config import LossConfig, OptimConfig, TrainConfig
from ..training.optim import adamw
from ..training.run import build_objective
from ..training.step import Trainer
from ..utils.atomic_io import write_bytes, write_json
from ..utils.console import Step, bars, fitted, screen_table
from ..utils.environment import summary
from ..utils.hardware import device_name
from ..utils.lock import writing
from ..utils.plotting import halting_maps, layer_curve
from ..utils.settings import changed
from ..visualize.html import Picture, write_report

STATIC = TrainConfig(
    data="digits",
    policy="static",
    epochs=12,
    batch_size=32,
    device="cpu",
    optim=OptimConfig(lr=2e-3, min_lr=0.0, warmup_epochs=1.2),
)
ADAPTIVE = replace(
    STATIC,
    policy="aht:straight_through=true",
    epochs=9,
    optim=replace(STATIC.optim, lr=1e-3),
    loss=LossConfig(distill=1.0, cost=10.0, cost_target=0.4, target_depth=0.1),
)


@dataclass
class Row:
    """One line of the table."""

    name: str
    result: Result
    time: Timing

    @property
    def cells(self) -> dict[str, Any]:
        macs = self.result.gmacs_static if self.name.endswith("masked") else self.result.gmacs
        return {
            "model": self.name,
            "top-1 %": round(self.result.score, 2),
            "MMACs": round(1e3 * macs, 2),
            "mean depth": round(self.result.mean_depth, 2),
            "ms/image": round(1e3 / self.time.images_per_second, 3),
        }


def quickstart(out: str | Path, seed: int = 0, fast: bool = False) -> None:
    """Train both models, compare them, and write checkpoints, pictures and a report."""
    with writing(out):
        _quickstart(Path(out), seed, fast)


def _quickstart(out: Path, seed: int, fast: bool) -> None:
    console, begun = Console(), time.perf_counter()
    digits = Digits.load(few=fast)
    console.print("[bold]adaptivit quickstart[/]: handwritten digits on a noisy canvas, 64 patches a picture\n")
    changes = {"seed": seed, "epochs": 1} if fast else {"seed": seed}
    with bars(console, keep=True) as progress:
        static = _train_static(changed(STATIC, changes), digits, progress)
        adaptive = _train_adaptive(changed(ADAPTIVE, changes), digits, progress, static)
        test = digits.testing()
        rows = _measure(static, adaptive, test, progress, repeats=2 if fast else 15)
    seconds = time.perf_counter() - begun
    forms = {"top-1 %": ".2f", "MMACs": ".1f", "mean depth": ".2f", "ms/image": ".3f"}
    speeds = ["", *(f"{row.time.speed(rows[0].time):.2f}x" for row in rows[1:])]
    lines = [
        [row.name, *(format(row.cells[name], form) for name, form in forms.items()), speed]
        for row, speed in zip(rows, speeds, strict=True)
    ]
    table = screen_table("test digits, every one at four places", lines, ("model", *forms, "speed"))
    console.print(fitted(table, console.width))
    difference, half, n = paired_difference(rows[2].result, rows[0].result)
    console.print(
        f"AHT-ViT does [bold]{100 * rows[2].result.saved:.0f} % less[/] work than static at "
        f"{difference:+.2f} ± {half:.2f} points of accuracy (paired, 95 %, {n} pictures) and takes "
        f"[bold]{1 / rows[2].time.speed(rows[0].time):.2f}[/] of its time. Masking alone saves nothing: it computes "
        "every token."
    )
    static.save_pretrained(out / "static")
    adaptive.save_pretrained(out / "aht")
    _write(out, seed, rows, adaptive, test[0], seconds)
    console.print(f"\nreport        {out / 'report.html'}  (open it in a browser)")
    console.print(f"halting maps  {out / 'halting_maps.png'}\ncheckpoints   {out / 'static'}, {out / 'aht'}")
    console.print(f"done in {time.perf_counter() - begun:.0f} s")


def _train_static(recipe: TrainConfig, digits: Digits, progress: Step) -> AdaptiveViT:
    torch.manual_seed(recipe.seed)
    model = create(DIGITS_VIT, "static")
    nn.init.normal_(model.vit.pos_embed, std=0.2)  # places must be told apart from the first step on
    return _train("static ViT", model, recipe, digits, progress, None)


def _train_adaptive(recipe: TrainConfig, digits: Digits, progress: Step, static: AdaptiveViT) -> AdaptiveViT:
    policy, values = spec.parse(recipe.policy)
    torch.manual_seed(recipe.seed)
    model = create(DIGITS_VIT, policy, **values)
    model.vit.load_state_dict(static.vit.state_dict())
    first = next(digits.training(recipe.seed, 0, 64))
    model.policy.init_gate(model, first.images)
    teacher = static.requires_grad_(False).eval()
    trained = _train("AHT-ViT", model, recipe, digits, progress, teacher)
    static.requires_grad_(True)
    return trained


def _train(
    name: str, model: AdaptiveViT, recipe: TrainConfig, digits: Digits, progress: Step, teacher: AdaptiveViT | None
) -> AdaptiveViT:
    model.class_names = [str(i) for i in range(10)]
    model.preprocessing = Preprocessing((SIZE, SIZE), (MEAN,) * 3, (STD,) * 3, 1.0, "bilinear")
    trainer = Trainer(
        model, build_objective(recipe), adamw(model, recipe), recipe, Accelerator(cpu=True), model, teacher
    )
    per_epoch = len(digits.train_x) // recipe.batch_size
    weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
    facts = (
        f"{len(digits.train_x):,} images of 10 classes, {per_epoch} steps an epoch, {device_name(torch.device('cpu'))}"
    )
    print(f"train {name}: {facts}, trained: {weights / 1e6:.2g} M weights", flush=True)
    seen: list[float] = []
    step, total = 0, recipe.epochs * per_epoch
    for epoch in range(recipe.epochs):
        for batch in digits.training(recipe.seed, epoch, recipe.batch_size):
            losses, output = trainer.step(batch, step, per_epoch)
            step += 1
            seen.append(float((output.logits.detach().argmax(1) == batch.labels).double().mean()))
            if step % 8 and step < total:
                continue
            recent = sum(seen[-per_epoch:]) / len(seen[-per_epoch:])
            figures = [
                f"loss {float(losses.total.detach()):.2f}",
                f"acc {100 * recent:4.1f} %",
                f"{float(output.macs_deployed.mean()) / 1e6:.1f} MMACs",
                f"depth {float(output.trace.mean_depth.mean()):.1f}",
            ]
            progress(name, step, total, figures)
    return model.eval()


def _measure(static: AdaptiveViT, adaptive: AdaptiveViT, test: list[Any], progress: Step, repeats: int) -> list[Row]:
    """Accuracy on the test digits, and time in turn on one batch of them."""
    contenders = {
        "static": (static, "packed"),
        "AHT-ViT, masked": (adaptive, "masked"),
        "AHT-ViT, packed": (adaptive, "packed"),
    }
    results = {name: evaluate(model, test, layout=layout) for name, (model, layout) in contenders.items()}
    images = test[0].images
    note = [f"{len(images)} images a batch"]
    times = interleaved(contenders, images, repeats, progress=lambda n: progress("timing", n, repeats, note))
    return [Row(name, results[name], times[name]) for name in contenders]


def _write(out: Path, seed: int, rows: list[Row], model: AdaptiveViT, batch: Loaded, seconds: float) -> None:
    images, labels = batch.images, batch.labels
    with torch.inference_mode():
        output = model(images)
    side = SIZE // PATCH
    depth = output.trace.depth[:, model.shape.num_prefix_tokens :].reshape(-1, side, side)
    share = output.macs_deployed / output.costs.static
    guess, chosen = output.logits.argmax(1), _one_of_each(labels, 12)
    titles = [
        f"digit {int(labels[i])}, predicted {int(guess[i])} · {100 * float(share[i]):.0f} % of the work" for i in chosen
    ]
    pictures, layers = visible(images[chosen]).numpy(), model.shape.layers
    maps = halting_maps(pictures, depth[chosen].numpy(), layers, titles=titles)
    narrow = halting_maps(pictures[:6], depth[chosen[:6]].numpy(), layers, titles=titles[:6], columns=1)
    packed, static = rows[2], rows[0]
    live, total = packed.result.live, model.shape.tokens
    every = depth.flatten().numpy()
    environment = summary(**{"CPU threads": torch.get_num_threads(), "seed": seed})
    table = [row.cells for row in rows]
    write_bytes(out / "halting_maps.png", maps)
    write_json(out / "results.json", {"rows": table, "seconds": seconds, "environment": environment})
    write_report(
        out / "report.html",
        title="A Vision Transformer that looks where the digit is",
        lead=f"Trained on this machine in {seconds / 60:.1f} minutes. Every patch stops being computed when the model "
        "has seen enough of it.",
        summary=[
            (f"−{100 * packed.result.saved:.0f} %", "work, against the static model"),
            (f"{packed.result.metrics['top1']:.1f} %", f"top-1; static has {static.result.metrics['top1']:.1f} %"),
            (f"{packed.time.speed(static.time):.2f}×", "as fast as static on this CPU"),
            (f"{packed.result.mean_depth:.1f} of {layers}", "blocks a patch goes through"),
        ],
        table=table,
        table_caption=f"{packed.result.images} test pictures. Time: median of interleaved batches of {len(images)}.",
        pictures=[
            Picture(
                maps,
                f"Left: the input. Right: how many of the {layers} blocks computed each patch. Bright patches were "
                "worked on to the end, dark ones stopped early.",
                "Twelve digits beside the depth at which each of their patches stopped",
                narrow,
            ),
            Picture(
                layer_curve(live, total, depths=every, name="AHT-ViT"),
                "Tokens leave as the depth grows; the area above the bars is work that was not done.",
                "Bars of the tokens computed in each block, and of the depths of patches",
                layer_curve(live, total, depths=every, name="AHT-ViT", stacked=True),
            ),
        ],
        notes=[
            f"The static model was trained for {STATIC.epochs} epochs. AHT-ViT goes on from it for {ADAPTIVE.epochs} "
            "more, taught by it, so that a part of any gain in accuracy is the longer training.",
            "The digits are scikit-learn's 8 × 8 scans, enlarged and put at a random place of a noisy canvas. They "
            "show that the mechanism works, not how well it does on photographs.",
            "“Masked” computes every token and only pretends; it is the reference that the packed path is tested "
            "against. “Packed” keeps the rows of live tokens alone, so its time falls with its work.",
        ],
        command=f"adaptivit quickstart --seed {seed}",
        environment=environment,
    )


def _one_of_each(labels: Tensor, count: int) -> list[int]:
    """Indices of pictures with as many different digits as there are."""
    first: dict[int, list[int]] = {}
    for i, label in enumerate(labels.tolist()):
        first.setdefault(label, []).append(i)
    turns = [group[k] for k in range(2) for _, group in sorted(first.items()) if len(group) > k]
    return turns[:count]

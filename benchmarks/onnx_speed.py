"""ONNX static against ONNX masked and ragged on a CPU: python3 benchmarks/onnx_speed.py --images DIR --out FILE.csv

AHT-ViT is given the shift at which so many tokens are live (--share, mean over blocks and images): nothing is trained,
so who halts where is not what a trained model would choose, but images differ. Each file is exported and compared with
its model on these images first. Contenders take turns in onnxruntime on one thread, on batches that follow each other;
the ratio is that of times within a turn. `rows` is the share of rows that ragged computes, padding included: the
longest image of a batch decides. Prints a table and appends rows to FILE.csv.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

import onnxruntime

import adaptivit
from adaptivit.checkpoint.export import Run, run_onnx
from adaptivit.checkpoint.model_card import pictures_for
from adaptivit.evaluation.predict import find_images
from adaptivit.utils.csv import append_csv


def with_share(args: Any, images: Tensor) -> tuple[Any, Tensor]:
    """An AHT-ViT whose tokens are live in that share of the blocks, and who was [L, B, N]."""
    model = adaptivit.create(args.backbone, "aht", weights=args.weights)
    low, high = -20.0, 10.0
    for _ in range(args.steps):
        model.policy.beta.data.fill_((low + high) / 2)
        with torch.inference_mode():
            attended = torch.cat([model(part).trace.attended for part in images.split(16)], 1)
        share = float(attended.double().mean())
        low, high = ((low + high) / 2, high) if share > args.share else (low, (low + high) / 2)
    return model, attended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="deit_tiny_patch16_224")
    parser.add_argument("--weights", default=None, help="timm's keys; default: random weights of seed 0")
    parser.add_argument("--images", required=True, help="folder of images")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--share", type=float, default=0.65)
    parser.add_argument("--steps", type=int, default=12, help="of the bisection")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    static = adaptivit.create(args.backbone, "static", weights=args.weights)
    paths = find_images((args.images,))
    chosen = [paths[i * len(paths) // args.count] for i in range(args.count)]
    images = pictures_for(static, chosen)
    model, attended = with_share(args, images)
    print(f"live share {float(attended.double().mean()):.3f} at beta {model.policy.beta.item():.3f}", flush=True)
    runs: dict[str, tuple[Run, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, who, kind in (("static", static, "topk"), ("masked", model, "masked"), ("ragged", model, "ragged")):
            done = adaptivit.export(who, f"{folder}/{name}.onnx", kind=kind, images=images[:8])
            runs[name] = run_onnx(Path(done.path).read_bytes(), threads=1), done
            print(done, flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    for size in args.batch_sizes:
        seconds = measure({name: run for name, (run, _) in runs.items()}, images, size, args.turns)
        longest = attended.sum(-1).unflatten(1, (-1, size)).amax(2).double().mean() / attended.shape[-1]
        for name, (_, done) in runs.items():
            times = seconds[name]
            ratios = sorted(a / b for a, b in zip(seconds["static"], times, strict=True))
            low, high = statistics.quantiles(ratios, n=4)[0], statistics.quantiles(ratios, n=4)[2]
            row = {
                "backbone": args.backbone,
                "contender": f"onnx {name}",
                "batch": size,
                "live": 1.0 if name == "static" else round(float(attended.double().mean()), 4),
                "rows": round(float(longest), 4) if name == "ragged" else 1.0,
                "ms_image": round(1000 * statistics.median(times) / size, 3),
                "speed": round(statistics.median(ratios), 3),
                "speed_p25": round(low, 3),
                "speed_p75": round(high, 3),
                "turns": args.turns,
                "difference": f"{done.difference:.2g}",
                "flipped": done.flipped,
                "weights": "given" if args.weights else "random",
                "threads": 1,
                "cpu": _cpu(),
                "torch": torch.__version__,
                "onnxruntime": onnxruntime.__version__,
                "python": platform.python_version(),
                "commit": commit.stdout.strip(),
                "date": datetime.date.today().isoformat(),
                "seed": 0,
            }
            append_csv(args.out, row)
            print(
                f"batch {size:3} onnx {name:7} {row['ms_image']:8.2f} ms/image  {row['speed']:.2f}x static "
                f"(quartiles {low:.2f} to {high:.2f}), rows {row['rows']}",
                flush=True,
            )


def measure(runs: dict[str, Run], images: Tensor, size: int, turns: int) -> dict[str, list[float]]:
    """Seconds a batch, one entry a turn; whoever comes first changes."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    batches = images.split(size)
    for run in runs.values():
        run(batches[0])
    for turn in range(turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            begun = time.perf_counter()
            runs[name](batches[turn % (len(images) // size)])
            seconds[name].append(time.perf_counter() - begun)
    return seconds


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


if __name__ == "__main__":
    main()

"""A small table and its jobs for the tests of reproduce."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adaptivit.experiments.reproduce import Run, Table
from adaptivit.experiments.reproduce.plan import Job, ReproduceConfig, plan

# Recipes of ours, under other names, or of related work: in no table of the three papers.
ELSEWHERE = {"aht-budget", "aht-merge", "avit-tiny", "avit-small", "spvit", "patch-slimming", "evit", "amod", "mod"}
ELSEWHERE |= {"pondernet"}

TINY = Table(
    "tiny",
    "A table for tests",
    "Everything goes on from static.",
    (
        Run("static", "static", change={"loss.distill": 0.0}, paper="50 / 0.1"),
        Run("trained on", "static", start="static"),
        Run("EViT", "evit:keep=0.5", start="static"),
        Run("AHT-ViT", "aht:budget", start="static"),
        Run("AHT-ViT, 70 %", "aht:budget", start="AHT-ViT", train=False, share=0.7),
        Run("broken", "aht:planner_blocks=99", start="static"),
        Run("goes on from broken", "aht", start="broken"),
    ),
    "a small .npz",
    shared={"epochs": 2, "optim.lr": 1e-5, "augment.kind": "none", "loss.distill": 1.0, "batch_size": 8}
    | {"backbone": "test_vit", "img_size": 32},
    reference="trained on",
    pairs=(("AHT-ViT", "EViT"), ("EViT", "broken")),
    curves=("top1", "mean_depth"),
)


class Done:
    """A process that has ended."""

    stdin = None

    def __init__(self, code: int = 0) -> None:
        self.returncode = code

    def poll(self) -> int:
        return self.returncode


def words(table: str, small: Path, where: Path) -> tuple[Any, ...]:
    return ("reproduce", table, "--data", small, "--weights", "none", "--out", where / "out", "--work", where / "work")


def planned(table: str, **given: Any) -> dict[str, Job]:
    jobs = plan(ReproduceConfig(**{"table": table, "data": "d.npz", "weights": "none"} | given))
    return {job.name: job for job in jobs if job.seed == jobs[0].seed}

"""The command line in this process, and what a training run leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import adaptivit
from adaptivit.cli.main import main

SMALL = ("--backbone", "test_vit", "--img-size", 32, "--batch-size", 8, "--epochs", 1, "--run.log-steps", 1)


def run(*words: Any) -> int:
    """The command line in this process; returns the exit code."""
    try:
        main([str(w) for w in words])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def train(where: Path, out: Path, *more: Any) -> int:
    return run("train", "--data", where, "--out", out, "--device", "cpu", *SMALL, *more)


def refused(capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    """The command is refused with code 2 and one line on stderr, after that on random weights; returns the line."""
    capsys.readouterr()
    code = run(*words)
    lines = capsys.readouterr().err.splitlines(keepends=True)
    message = "".join(lines[bool(lines) and "random weights" in lines[0] and lines[0].startswith("note: ") :])
    assert code == 2, message
    assert message.startswith("adaptivit: "), message
    assert message.count("\n") == 1, message
    return message


def static(path: Path, classes: int = 3) -> Path:
    """A checkpoint of an untrained static model."""
    torch.manual_seed(classes)
    adaptivit.create("test_vit", "static", img_size=32, num_classes=classes).save_pretrained(path)
    return path


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model" / "model.safetensors")


def assert_same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    differ = [k for k in a if not torch.equal(a[k], b[k])]
    assert not differ, f"other weights: {differ}"


def log(out: Path) -> list[dict[str, Any]]:
    path = out / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]

"""The command line in this process, and what a training run leaves behind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
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


WITHOUT_TORCH = """
import contextlib, io, json, sys, time
class Refused:
    def find_spec(name, path, target=None):
        if name == "torch":
            raise ImportError(name)
sys.meta_path.insert(0, Refused)
from adaptivit.cli.main import main
found = []
for words in json.load(sys.stdin):
    begun = time.monotonic()
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.suppress(SystemExit, ImportError):
        main(words)
    found.append([said.getvalue(), time.monotonic() - begun])
print(json.dumps(found))
"""


def without_torch(commands: Sequence[Sequence[Any]]) -> list[str]:
    """What each command says in a process that cannot import torch: nothing where it would have to."""
    asked = json.dumps([[str(word) for word in words] for words in commands])
    process = [sys.executable, "-c", WITHOUT_TORCH]
    done = subprocess.run(process, input=asked, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for words, (said, seconds) in zip(commands, found, strict=True):
        assert seconds < 2, words
        assert not said or (said.startswith("adaptivit: ") and said.count("\n") == 1), (words, said)
    return [said for said, _ in found]


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

"""Tiny data and a tiny model in place of a paper's: an experiment's whole code path in seconds on a CPU.

Tinted digits on 64 x 64 pixels and ViTs of 6 blocks of 64. What comes out says that the code works, nothing of a
method.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

WORK = "runs/reproduce/stand-in"
WORDS = "stand-in: 64 digits, a ViT of 6 blocks, 1 epoch"
BACKBONE = "digits_vit"
SETTINGS: dict[str, Any] = {
    "epochs": 1,
    "batch_size": 16,
    "img_size": None,
    "workers": 0,
    "optim.warmup_epochs": 0.0,
    "optim.freeze_epochs": 0.0,
    "run.log_steps": 1,
}
_EPOCHS, _LR = 6, 2e-3  # of the static model that rows start from
_IMAGES, _HELD = 64, 32  # to train on, to choose on


def backbone(name: str) -> str:
    """The tiny model in place of a backbone."""
    return f"{BACKBONE}_distilled" if "distilled" in name else BACKBONE


def data(work: str) -> Path:
    return Path(work) / "stand-in" / "data.npz"


def weights(work: str, name: str) -> Path:
    return Path(work) / "stand-in" / f"{name}.safetensors"


def prepare(work: str) -> None:
    """Write data and weights where they are not there yet."""
    if not data(work).exists():
        _write_data(data(work))
    for name in (BACKBONE, f"{BACKBONE}_distilled"):
        if not weights(work, name).exists():
            _train(work, name)


def _write_data(path: Path) -> None:
    import numpy as np
    import torch

    from ...data.digits import Digits, placed
    from ...utils.atomic_io import write_bytes

    digits = Digits.load(few=True)
    arrays: dict[str, Any] = {}
    tints = torch.cartesian_prod(*[torch.tensor([0.25, 0.6, 1.0])] * 3)[::2][:10]  # a class a colour: quickly learned
    x, y = digits.train_x, digits.train_y
    parts = {"train": (x[:_IMAGES], y[:_IMAGES]), "val": (x[_IMAGES:][:_HELD], y[_IMAGES:][:_HELD])}
    for name, (ink, labels) in (parts | {"test": (digits.test_x, digits.test_y)}).items():
        pictures = placed(ink, 1, 1, distort=False) * tints[labels][:, :, None, None]
        pictures = (pictures * 255).round().byte()
        arrays[f"{name}_x"], arrays[f"{name}_y"] = pictures.permute(0, 2, 3, 1).numpy(), labels.numpy()
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_bytes(path, buffer.getvalue())


def _train(work: str, name: str) -> None:
    """A static model of the digits, so that what goes on from it has something to halt on."""
    import torch
    import torch.nn.functional as F
    from safetensors.torch import save

    from ...backbones.build import build_backbone
    from ...data import dataset
    from ...data.digits import normalise
    from ...utils.atomic_io import write_bytes

    train = dataset.splits(data(work))["train"]
    torch.manual_seed(0)
    model = build_backbone(name).eval()  # of two heads the mean
    images = normalise(torch.tensor(train.items).permute(0, 3, 1, 2) / 255)
    labels = torch.tensor(train.labels)
    optimizer = torch.optim.AdamW(model.parameters(), _LR)
    for _ in range(_EPOCHS):
        for chosen in torch.randperm(len(labels)).split(16):
            optimizer.zero_grad()
            F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
    write_bytes(weights(work, name), save(model.state_dict()))

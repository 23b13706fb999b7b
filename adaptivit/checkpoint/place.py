"""Where a checkpoint lies. Nothing here imports torch, so that a wrong path is an error at once."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..errors import UserError, WeightsError, first_line
from ..utils.atomic_io import recover
from ..utils.coerce import require

LARGEST = 8 * 2**20  # bytes of a config.json


def checkpoint_at(path: str | Path) -> Path:
    """The checkpoint directory that a path means: itself, or `model` in the directory of a training run."""
    place = Path(path)
    for cut_off in (place, place / "model"):  # between the two moves of a save
        if not cut_off.exists():
            recover(cut_off)
    if place.is_file():
        raise WeightsError(f"A checkpoint is a directory with a config.json, and {path} is a file.")
    if not place.is_dir():
        raise WeightsError(
            f"No such directory, so no config.json: {path}. Names on the Hugging Face Hub load by from_pretrained."
        )
    if all((place / name).is_file() for name in ("config.json", "model.safetensors")):
        return place
    if (place / "model" / "config.json").is_file():
        return place / "model"
    if (place / "environment.json").is_file():
        raise WeightsError(f"The training run in {path} has not ended, so it has no model yet: go on with --resume.")
    if not (place / "config.json").is_file():
        inside = sorted(p.parent for p in place.glob("*/config.json"))
        hint = f" Did you mean {inside[0]}?" if len(inside) == 1 else ""
        raise WeightsError(f"Not a checkpoint of adaptivit: {path} has no config.json.{hint}")
    return place


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object of a file that anybody may have written."""
    size = path.stat().st_size
    if size > LARGEST:
        raise UserError(f"expected at most {LARGEST >> 20} MiB of JSON, got {size >> 20}.")
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{type(error).__name__}: {first_line(error)}.") from None
    require(isinstance(found, dict), "the file", "an object", found)
    return dict(found)


def header_of(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Type and shape of every tensor in a .safetensors file."""
    if not path.is_file():
        raise WeightsError(f"Weights not found: {path}.")
    try:
        with safe_open(str(path), "np") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (part.get_dtype(), part.get_shape()) for name, part in parts.items()}
    except (SafetensorError, OSError, RuntimeError) as error:
        raise WeightsError(f"Damaged or unreadable weights file: {path} ({first_line(error)}).") from None


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def has_random_weights(weights: str | None, backbone: str | None = None) -> bool:
    """True without weights (hf-hub:, local-dir: bring them), and for what `adaptivit apply` wrote without any."""
    if weights is None or not Path(weights).is_dir():
        return weights is None and not all(":" in name for name in (backbone or "").split() or [""])
    try:
        return read_object(checkpoint_at(weights) / "config.json").get("random_weights") is True
    except (OSError, UserError):  # the reader has the message
        return False

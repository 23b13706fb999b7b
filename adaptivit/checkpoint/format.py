"""Checkpoints: a directory with model.safetensors, config.json and README.md. Nothing executes on load."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from .. import __version__
from ..backbones import family_of
from ..backbones.build import describe_backbone, rebuild
from ..errors import UserError, WeightsError, first_line
from ..model import AdaptiveViT
from ..policies.renamed import upgraded
from ..utils.atomic_io import new_directory, write_bytes, write_text
from ..utils.sharded import like, whole
from . import model_card

FORMAT = 3  # 1 had no digest of the weights, 1 and 2 other names of policies' settings
FILES = ("model.safetensors", "config.json", "README.md", model_card.PICTURE)
HEADS = ("head.weight", "head.bias", "head_dist.weight", "head_dist.bias")
# What config.json says of the model itself; the rest are notes (results, calibration, ...).
_OWN = (
    *("format", "adaptivit", "backbone", "policy", "settings", "task", "preprocessing", "class_names"),
    *("whole", "weights", "calibration", "max_macs"),
)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def tensors(model: AdaptiveViT) -> dict[str, Tensor]:
    """The model's state: timm's own keys for the backbone, `policy.` before the policy's. Of a sharded model every
    process has to ask."""
    return {k.removeprefix("vit."): whole(v.detach()).contiguous() for k, v in model.state_dict().items()}


def save(model: AdaptiveViT, directory: str | Path, extra: dict[str, Any], images: Any = None, name: str = "") -> None:
    """Write a checkpoint in one step. `images` are shown in its card as halting maps; `name` is what it is called."""
    if model.policy_name == "replay":
        raise UserError("A replay belongs to one batch and is not a checkpoint; save the trace with save_trace.")
    if odd := sorted(set(extra) & set(_OWN)):
        raise UserError(f"save_pretrained: {odd[0]!r} is said by the model itself; give the note another name.")
    if model.shape.num_classifiers and model.class_names and len(model.class_names) != model.shape.classes:
        raise UserError(
            f"save_pretrained: class_names has {len(model.class_names)} names for {model.shape.classes} classes."
        )
    place = Path(directory)
    others = _others(place)
    weights = to_bytes({k: v.cpu().clone() for k, v in tensors(model).items()})
    digest = hashlib.sha256(weights).hexdigest()
    config = {
        "format": FORMAT,
        "adaptivit": __version__,
        "backbone": describe_backbone(model.backbone, model.backbone_name),
        "policy": model.policy_name,
        "settings": model.settings,
        "task": model.task,
        "preprocessing": model.preprocessing.to_config(),
        "class_names": model.class_names,
        "whole": None if model.whole is None else asdict(model.whole),
        "weights": {"sha256": digest},
        "calibration": None if model.calibration is None else model.calibration.to_config(model.budget),
        "max_macs": model.max_macs,
    }
    try:
        config |= (model.notes if model.noted == identity(model, digest) else {}) | extra
        text = json.dumps(config, indent=2) + "\n"
    except (TypeError, ValueError) as error:
        raise UserError(f"config.json cannot hold what was given: {error}.") from None
    picture = None if images is None else model_card.maps(model, images)
    with new_directory(place) as new:
        for other in others:
            (shutil.copytree if other.is_dir() else shutil.copy2)(other, new / other.name)
        write_bytes(new / "model.safetensors", weights)
        write_text(new / "config.json", text)
        if picture is not None:
            write_bytes(new / model_card.PICTURE, picture)
        if not (new / "README.md").exists():
            write_text(new / "README.md", model_card.text(json.loads(text), name, images))


def _others(place: Path) -> list[Path]:
    """What lies where a checkpoint is to be and stays there; what is no checkpoint is not replaced."""
    if place.exists() and not place.is_dir():
        raise UserError(f"Cannot write {place}: a checkpoint is a directory, and this is a file.")
    inside = sorted(place.iterdir()) if place.is_dir() else []
    others = [p for p in inside if p.name not in FILES]
    if others and '"adaptivit"' not in _text(place / "config.json"):
        raise UserError(
            f"{place} holds other things than a checkpoint ({others[0].name}); nothing was written. "
            "Choose a new or empty directory."
        )
    own = place / "README.md"
    return [*others, own] if own.is_file() and model_card.MARK not in _text(own) else others


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""


def identity(model: AdaptiveViT, digest: str) -> str:
    """What results and other notes hold for: these weights under these settings."""
    return digest + json.dumps([model.policy_name, model.settings], sort_keys=True)


@dataclass(frozen=True)
class Stored:
    """What a checkpoint directory holds."""

    place: Path
    config: dict[str, Any]
    state: dict[str, Tensor]
    digest: str  # of model.safetensors

    @property
    def source(self) -> str:
        return str(self.place / "model.safetensors")

    def check_digest(self) -> None:
        """Said after shapes and names have been checked, which tells more where they are wrong."""
        wanted = self.config["weights"]["sha256"]
        if self.digest != wanted:
            raise WeightsError(
                f"Damaged checkpoint: {self.source} is not the file that config.json beside it was saved with "
                f"(sha256 {self.digest[:12]}..., expected {wanted[:12]}...). Copy both from one checkpoint; weights "
                f"alone load by create(..., weights='{self.source}')."
            )


def read(directory: str | Path) -> Stored:
    """A checkpoint directory, with what is wrong said in one line."""
    config = read_config(directory)
    place = Path(directory)
    state = read_weights(place / "model.safetensors")
    digest = _digest(place)
    return Stored(place, config, state, digest)


def _digest(place: Path) -> str:
    with (place / "model.safetensors").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def notes(config: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k not in _OWN}


def read_config(directory: str | Path) -> dict[str, Any]:
    """config.json of a checkpoint directory, with what is wrong said in one line."""
    path = Path(directory) / "config.json"
    if path.parent.is_file():
        raise WeightsError(f"A checkpoint is a directory with a config.json, and {directory} is a file.")
    if not path.parent.is_dir():
        raise WeightsError(
            f"No such directory, so no config.json: {directory}. Names on the Hugging Face Hub load by from_pretrained."
        )
    if not path.is_file():
        inside = sorted(p.parent for p in path.parent.glob("*/config.json"))
        hint = f" Did you mean {inside[0]}?" if len(inside) == 1 else ""
        raise WeightsError(f"Not a checkpoint of adaptivit: {directory} has no config.json.{hint}")
    try:
        config = json.loads(path.read_text())
        version = config["format"]
        if type(version) is not int or version < 1:
            raise TypeError(f"format {version!r}")
        if version <= FORMAT:
            _check(config)
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        if isinstance(error, KeyError) and isinstance(config, dict) and "adaptivit" not in config:
            raise WeightsError(f"Not a checkpoint of adaptivit: {path} was written by something else.") from None
        raise WeightsError(f"Damaged checkpoint: {path} ({type(error).__name__}: {error}).") from None
    if version > FORMAT:
        raise WeightsError(f"{directory} was saved by a newer adaptivit (format {version}); upgrade adaptivit.")
    assert isinstance(config, dict)
    if version < 3:
        _upgrade(config, path)
    return config


def _upgrade(config: dict[str, Any], path: Path) -> None:
    """Turn what format 1 or 2 says into today's."""

    def layers() -> int:
        with torch.device("meta"):
            return family_of(vit := rebuild(config["backbone"]))(vit).inspect().layers

    try:
        config["policy"], config["settings"] = upgraded(config["policy"], config["settings"], layers)
    except UserError as error:
        raise WeightsError(f"{path} (saved by adaptivit {config.get('adaptivit', '?')}): {error}") from None
    if "weights" not in config and (path.parent / "model.safetensors").is_file():
        config["weights"] = {"sha256": _digest(path.parent)}
    config["format"] = FORMAT


def _check(config: dict[str, Any]) -> None:
    """Raise KeyError or TypeError unless the parts are what save writes."""
    parts: dict[str, Any] = {"backbone": dict, "policy": str, "settings": dict, "preprocessing": dict}
    parts |= {"weights": dict} if config["format"] >= 2 else {}
    wrong = [name for name, kind in parts.items() if not isinstance(config[name], kind)]
    backbone, names = config["backbone"], config.get("class_names")
    # nothing else may get into what builds the backbone: `pretrained` there would start a download
    if not isinstance(backbone["changes"], dict) or not set(backbone["changes"]) <= {"num_classes", "img_size"}:
        wrong.append("backbone")
    if names is not None and not (isinstance(names, list) and all(isinstance(n, str) for n in names)):
        wrong.append("class_names")
    if not isinstance(config.get("whole"), (dict, type(None))):
        wrong.append("whole")
    if config["format"] >= 2 and not isinstance(config["weights"]["sha256"], str):
        wrong.append("weights")
    if not isinstance(config.get("task", ""), str):
        wrong.append("task")
    if wrong:
        raise TypeError(f"{', '.join(wrong)} is not what was written")


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """A state dict from a .safetensors or a .pth file; a pickle that wants to run code is refused."""
    path = Path(path)
    if not path.is_file():
        raise WeightsError(f"Weights not found: {path}.")
    try:
        if path.suffix == ".safetensors":
            state: Any = load_file(str(path))
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can raise anything
        if isinstance(error, pickle.UnpicklingError) and ("GLOBAL" in str(error) or "REDUCE" in str(error)):
            raise WeightsError(
                f"{path} holds more than weights and would run code on loading; it was not loaded. "
                "Save a plain state dict, best as .safetensors."
            ) from None
        raise WeightsError(f"Damaged or unreadable weights file: {path} ({first_line(error)}).") from None
    for wrapper in ("state_dict", "model", "state_dict_ema", "model_ema"):
        if isinstance(state, dict) and wrapper in state and isinstance(state[wrapper], dict):
            state = state[wrapper]
    if not isinstance(state, dict) or not state or not all(isinstance(v, Tensor) for v in state.values()):
        raise WeightsError(f"{path} holds no state dict (expected a mapping of names to tensors).")
    return {k.removeprefix("module."): v for k, v in state.items()}


def fit_backbone(vit: VisionTransformer, state: dict[str, Tensor], source: str, *, replace_head: bool) -> None:
    """Load timm-keyed weights: the position embedding is resized to the model's, the head replaced if asked to."""
    state = {k: v for k, v in state.items() if not k.startswith("policy.")}
    own = vit.state_dict()
    if replace_head:
        state = {k: v for k, v in state.items() if k not in HEADS} | {k: own[k] for k in HEADS if k in own}
    position = state.get("pos_embed")
    if position is not None and vit.pos_embed is not None and position.shape != vit.pos_embed.shape:
        prefix = 0 if vit.no_embed_class else vit.num_prefix_tokens
        patches = position.shape[1] - prefix
        if (
            position.ndim == 3
            and position.shape[-1] == vit.embed_dim
            and int(max(patches, 0) ** 0.5) ** 2 == patches > 0
        ):
            state["pos_embed"] = resample_abs_pos_embed(
                position.float(), list(vit.patch_embed.grid_size), num_prefix_tokens=prefix
            )
    check_fit(own, state, source)
    vit.load_state_dict({k: v.to(own[k].dtype) for k, v in state.items()})


def check_fit(own: dict[str, Tensor], state: dict[str, Tensor], source: str) -> None:
    """An error that says which keys and shapes do not fit."""
    missing = [k for k in own if k not in state]
    foreign = [k for k in state if k not in own]
    shapes = [
        f"{k} (expected {list(own[k].shape)}, got {list(v.shape)})"
        for k, v in state.items()
        if k in own and own[k].shape != v.shape
    ]
    kinds = [f"{k} ({v.dtype})" for k, v in state.items() if k in own and v.dtype not in _FLOATS]
    problems = [
        f"{what}: {', '.join(names[:4])}" + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        for what, names in (("missing", missing), ("unknown", foreign), ("other shape", shapes), ("no weights", kinds))
        if names
    ]
    if problems:
        raise WeightsError(f"The weights in {source} do not fit the model; " + "; ".join(problems) + ".")


def load_tensors(model: AdaptiveViT, directory: str | Path) -> None:
    """Fill a model with the weights of a directory, in the model's own precision."""
    path = Path(directory) / "model.safetensors"
    fill(model, read_weights(path), str(path))


def fill(model: AdaptiveViT, state: dict[str, Tensor], source: str, *, exact: bool = False) -> None:
    """Put stored tensors into a model; `exact`: in the precision in which they were stored."""
    own = {k.removeprefix("vit."): v for k, v in model.state_dict().items()}
    check_fit(own, state, source)
    if exact:
        for name, p in (*model.named_parameters(), *model.named_buffers()):
            p.data = p.data.to(state[name.removeprefix("vit.")].dtype)
    refill(model, {(k if k.startswith("policy.") else f"vit.{k}"): v for k, v in state.items()})


def refill(model: AdaptiveViT, state: Mapping[str, Tensor]) -> None:
    """Give a model, sharded or not, the weights of a whole state dict."""
    own = model.state_dict()
    model.load_state_dict({k: like(own[k], v.to(own[k].dtype)) for k, v in state.items()})

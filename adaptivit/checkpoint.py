"""Checkpoints: a directory with config.json and model.safetensors. Nothing executes on load."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from . import __version__
from .errors import UserError, WeightsError, first_line
from .files import new_directory, write_bytes, write_json
from .model import AdaptiveViT
from .sharding import like, whole

FORMAT = 1
HEADS = ("head.weight", "head.bias", "head_dist.weight", "head_dist.bias")


def tensors(model: AdaptiveViT) -> dict[str, Tensor]:
    """The model's state: timm's own keys for the backbone, `policy.` before the policy's. Of a sharded model every
    process has to ask."""
    return {k.removeprefix("vit."): whole(v.detach()).contiguous() for k, v in model.state_dict().items()}


def save(model: AdaptiveViT, directory: str | Path, extra: dict[str, Any]) -> None:
    from .factory import describe_backbone

    if model.policy_name == "replay":
        raise UserError("A replay belongs to one batch and is not a checkpoint; save the trace with save_trace.")
    config = {
        "format": FORMAT,
        "adaptivit": __version__,
        "backbone": describe_backbone(model),
        "policy": model.policy_name,
        "settings": model.settings,
        "preprocessing": model.preprocessing.to_config(),
        "class_names": model.class_names,
        "whole": None if model.whole is None else asdict(model.whole),
        "calibration": None if model.calibration is None else model.calibration.to_config(model.budget),
        "max_macs": model.max_macs,
    } | extra
    with new_directory(directory) as place:
        write_bytes(place / "model.safetensors", to_bytes({k: v.cpu().clone() for k, v in tensors(model).items()}))
        write_json(place / "config.json", config)


def read_config(directory: str | Path) -> dict[str, Any]:
    """config.json of a checkpoint directory, with what is wrong said in one line."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise WeightsError(f"Not a checkpoint of adaptivit: {directory} has no config.json.")
    try:
        config = json.loads(path.read_text())
        version = int(config["format"])
        if version <= FORMAT:
            parts = {"backbone": dict, "policy": str, "settings": dict, "preprocessing": dict}
            wrong = [name for name, kind in parts.items() if not isinstance(config[name], kind)]
            if wrong or not isinstance(config["backbone"]["changes"], dict):
                raise TypeError(f"{', '.join(wrong) or 'backbone'} is not what was written")
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise WeightsError(f"Damaged checkpoint: {path} ({type(error).__name__}: {error}).") from None
    if version > FORMAT:
        raise WeightsError(f"{directory} was saved by a newer adaptivit (format {version}); upgrade adaptivit.")
    assert isinstance(config, dict)
    return config


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
    problems = [
        f"{what}: {', '.join(names[:4])}" + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        for what, names in (("missing", missing), ("unknown", foreign), ("other shape", shapes))
        if names
    ]
    if problems:
        raise WeightsError(f"The weights in {source} do not fit the model; " + "; ".join(problems) + ".")


def load_tensors(model: AdaptiveViT, directory: str | Path) -> None:
    """Fill a model with the weights of a checkpoint directory, exactly."""
    path = Path(directory) / "model.safetensors"
    state = read_weights(path)
    own = model.state_dict()
    named = {(k if k.startswith("policy.") else f"vit.{k}"): v for k, v in state.items()}
    check_fit({k.removeprefix("vit."): v for k, v in own.items()}, state, str(path))
    fill(model, named)


def fill(model: AdaptiveViT, state: Mapping[str, Tensor]) -> None:
    """Give a model, sharded or not, the weights of a whole state dict."""
    own = model.state_dict()
    model.load_state_dict({k: like(own[k], v.to(own[k].dtype)) for k, v in state.items()})

"""Weights: read from files without running code, checked against a model, put into it."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ..backbones.families import family_of
from ..errors import WeightsError, first_line
from ..model import AdaptiveViT
from ..utils.sharded import like, whole
from .place import header_of

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_KINDS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_KINDS |= {"I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
State = dict[str, Tensor]


def tensors(model: AdaptiveViT) -> State:
    """The model's state: timm's own keys for the backbone, `policy.` before the policy's. For a sharded model, every
    process must call it."""
    return {k.removeprefix("vit."): whole(v.detach()).contiguous() for k, v in model.state_dict().items()}


def read_weights(path: str | Path, allow_nonfinite: bool = False) -> State:
    """A state dict from a .safetensors or a .pth file; a pickle that would run code is refused."""
    path = Path(path)
    if not path.is_file():
        raise WeightsError(f"Weights not found: {path}.")
    if path.suffix == ".safetensors":
        try:
            state: Any = load_file(str(path))
        except (SafetensorError, OSError, RuntimeError) as error:
            raise WeightsError(f"Damaged or unreadable weights file: {path} ({first_line(error)}).") from None
    else:
        state = read_pickle(path)
    for wrapper in ("state_dict", "model", "state_dict_ema", "model_ema"):
        if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
            state = state[wrapper]
    if not isinstance(state, dict) or not state or not all(isinstance(k, str) and _plain(v) for k, v in state.items()):
        raise WeightsError(f"{path} holds no state dict (expected a mapping of names to tensors).")
    if not allow_nonfinite:
        check_finite(state, str(path))
    return {k.removeprefix("module."): v for k, v in state.items()}


def read_pickle(path: str | Path) -> Any:
    """What torch.save wrote, where it is tensors and plain values; nothing is run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other protocols
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # whose text is advice to trust the file
        if "GLOBAL" in str(error) or "REDUCE" in str(error):
            raise WeightsError(
                f"{path} holds more than weights and would run code on loading; it was not loaded. "
                "Save a plain state dict, best as .safetensors."
            ) from None
        raise WeightsError(f"Damaged or unreadable weights file: {path} (torch.save did not write it).") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise WeightsError(f"Damaged or unreadable weights file: {path} ({first_line(error)}).") from None


def _plain(value: object) -> bool:
    """Whether it is a tensor that holds all its numbers, not a view larger than its storage."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.device.type != "cpu":
        return False
    return not value.is_quantized and value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def read_shapes(path: str | Path) -> State:
    """The tensors of a .safetensors file on the device "meta": shapes and types, from its header alone."""
    header = header_of(Path(path))
    return {
        k: torch.empty(shape, dtype=_KINDS.get(kind, torch.int64), device="meta") for k, (kind, shape) in header.items()
    }


def check_finite(state: Mapping[str, Tensor], source: str) -> None:
    """Refuse NaN and infinity."""
    odd = [k for k, v in state.items() if v.dtype in _FLOATS and not bool(v.isfinite().all())]
    if odd:
        more = f" and {len(odd) - 1} more" * (len(odd) > 1)
        raise WeightsError(
            f"{source} has values that are not finite (NaN or infinity) in {odd[0]}{more}, so its answers would mean "
            "nothing; take another file. To look at it nonetheless: --allow-nonfinite, in Python allow_nonfinite=True."
        )


def check_fit(own: Mapping[str, Tensor], state: Mapping[str, Tensor], source: str) -> None:
    """An error with the keys and shapes that do not fit."""
    both = [(k, own[k], v) for k, v in state.items() if k in own]
    found = {
        "missing": [k for k in own if k not in state],
        "unknown": [k for k in state if k not in own],
        "other shape": [f"{k} (expected {[*a.shape]}, got {[*b.shape]})" for k, a, b in both if a.shape != b.shape],
        "no weights": [f"{k} ({v.dtype})" for k, a, v in both if v.dtype not in _FLOATS and v.dtype != a.dtype],
    }
    problems = [
        f"{what}: {', '.join(names[:4])}" + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        for what, names in found.items()
        if names
    ]
    if problems:
        raise WeightsError(f"The weights in {source} do not fit the model; " + "; ".join(problems) + ".")


def fit_backbone(vit: nn.Module, state: State, source: str, *, replace_head: bool) -> None:
    """Load weights in the module's keys: timm's position embedding is resized, the head replaced if asked to."""
    own = vit.state_dict()
    left_out = family_of(vit).head_keys if replace_head else ()
    state = {k: v for k, v in state.items() if not k.startswith("policy.") and k not in left_out}
    state |= {k: own[k] for k in left_out if k in own}
    position = state.get("pos_embed")
    if position is not None and isinstance(vit, VisionTransformer):
        state["pos_embed"] = _resized(position, vit)
    check_fit(own, state, source)
    vit.load_state_dict({k: v.to(own[k].dtype) for k, v in state.items()})


def _resized(position: Tensor, vit: VisionTransformer) -> Tensor:
    """timm's position embedding for the model's grid; as it is where it fits, or could not."""
    if vit.pos_embed is None or position.shape == vit.pos_embed.shape:
        return position
    prefix = 0 if vit.no_embed_class else vit.num_prefix_tokens
    patches = max(position.shape[1] - prefix, 0)
    if position.ndim != 3 or position.shape[-1] != vit.embed_dim or not int(patches**0.5) ** 2 == patches > 0:
        return position
    resized: Tensor = resample_abs_pos_embed(
        position.float(), list(vit.patch_embed.grid_size), num_prefix_tokens=prefix
    )
    return resized


def fit_policy(model: AdaptiveViT, state: State, source: str) -> None:
    """Load the policy's own weights."""
    own = model.policy.state_dict()
    check_fit(own, state, f"{source} (policy)")
    model.policy.load_state_dict({k: v.to(own[k].dtype) for k, v in state.items()})


def fill(model: AdaptiveViT, state: State, source: str, *, exact: bool = False) -> None:
    """Put stored tensors into a model; `exact`: in the precision in which they were stored."""
    check_fit({k.removeprefix("vit."): v for k, v in model.state_dict().items()}, state, source)
    if exact:
        for name, p in (*model.named_parameters(), *model.named_buffers()):
            p.data = p.data.to(state[name.removeprefix("vit.")].dtype)
    refill(model, {(k if k.startswith("policy.") else f"vit.{k}"): v for k, v in state.items()})


def refill(model: AdaptiveViT, state: Mapping[str, Tensor]) -> None:
    """Give a model, sharded or not, the weights of a whole state dict."""
    own = model.state_dict()
    model.load_state_dict({k: like(own[k], v.to(own[k].dtype)) for k, v in state.items()})

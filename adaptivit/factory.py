"""create and load: from a timm name, a timm model or a directory to an adaptive ViT."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import policies
from .backbones.build import build_backbone, rebuild
from .backbones.families import FAMILIES, family_of
from .backbones.preprocessing import Preprocessing
from .backbones.slim import narrow
from .checkpoint import format as checkpoint
from .checkpoint.config import check_known, check_sizes
from .checkpoint.weights import State, check_fit, fill, fit_backbone, fit_policy, read_weights
from .cost import Shape
from .errors import UserError, WeightsError, first_line
from .model import AdaptiveViT
from .policies.spec import make
from .policies.spec import spec as settings_text
from .utils.hardware import without_memory


def create(
    backbone: str | nn.Module | Mapping[str, Any],
    policy: str,
    *,
    weights: str | Path | bool | None = None,
    num_classes: int | None = None,
    img_size: int | tuple[int, int] | None = None,
    drop_path_rate: float = 0.0,
    allow_nonfinite: bool = False,
    **policy_settings: Any,
) -> AdaptiveViT:
    """Make a ViT adaptive.

    backbone: a timm name, a module of a family (used as it is, not copied), or arguments of timm's VisionTransformer.
    timm's hf-hub:USER/NAME and local-dir:PATH bring their weights, unless weights=False.
    weights: a .safetensors or .pth file in the module's keys, a directory saved by us, or True for timm's own download.
    A num_classes other than the weights' replaces the head; an img_size other than theirs resizes the position
    embedding. allow_nonfinite takes weights with NaN or infinity, which are refused. The rest are the policy's settings
    (adaptivit.settings).
    """
    source = isinstance(backbone, str) and ":" in backbone  # hf-hub:, local-dir:
    weights = True if source and weights is None else weights
    make(policy, policy_settings)  # a bad setting is an error before anything is built or downloaded
    if isinstance(weights, (str, Path)) and Path(weights).is_dir():
        changes = {"num_classes": num_classes, "img_size": img_size, "drop_path_rate": drop_path_rate}
        return _from_directory(backbone, policy, checkpoint.read(weights, allow_nonfinite), changes, policy_settings)
    state = read_weights(weights, allow_nonfinite) if isinstance(weights, (str, Path)) else {}
    classes, keep_head = _classes(num_classes, backbone, state)
    vit = build_backbone(backbone, classes, img_size, drop_path_rate, pretrained=weights is True)
    name = vit.pretrained_cfg.get("architecture") if source else backbone if isinstance(backbone, str) else None
    model = AdaptiveViT(vit, policy, policy_settings, name)
    if state:
        _adopt(model, state, str(weights))
        fit_backbone(vit, state, str(weights), replace_head=not keep_head)
    return _narrowed(model).eval()


def _classes(asked: int | None, backbone: Any, state: State) -> tuple[int | None, bool]:
    """Outputs of the head, those of the weights where no others are asked for; and whether the weights' head stays."""
    weights = [family.head_keys[0] for family in FAMILIES if family.head_keys]
    stored = next((state[key].shape[0] for key in weights if key in state), None)
    if asked is None and isinstance(backbone, Mapping):
        asked = backbone.get("num_classes")
    return (stored, True) if asked is None else (asked, asked == stored)


def _adopt(model: AdaptiveViT, state: State, source: str) -> None:
    """Take the policy's own parameters out of a file with them beside the backbone's, as authors publish them."""
    wanted = model.policy.state_dict()
    named = {k: k.removeprefix("policy.") for k in state}
    own = {named[k]: state.pop(k) for k in list(state) if named[k] in wanted}
    if own:
        fit_policy(model, own, source)


def _narrowed(model: AdaptiveViT) -> AdaptiveViT:
    """A static model of smaller width, where its settings ask for one."""
    settings: Any = model.policy.settings
    if model.policy_name != "static" or (settings.width is None and (settings.share is None or settings.by == "depth")):
        return model
    share = settings.share if settings.width is None else settings.width
    small = AdaptiveViT(narrow(model.vit, share, of_macs=settings.width is None), "static", model.settings)
    small.task, small.class_names, small.preprocessing = model.task, model.class_names, model.preprocessing
    small.whole = model.shape if small.shape != model.shape else None
    return small


def load(directory: str | Path, *, allow_nonfinite: bool = False) -> AdaptiveViT:
    """The model of a checkpoint directory, or of a training run's, as it was saved, precision included.

    allow_nonfinite takes weights with NaN or infinity, which are refused."""
    stored = checkpoint.read(directory, allow_nonfinite)
    config, path = stored.config, stored.place / "config.json"
    check_known(config, path)
    _check_shapes(stored)
    with _explained(path):
        described = config["backbone"]
        model = AdaptiveViT(rebuild(described), config["policy"], config["settings"], described.get("name"))
        _describe(model, config)
        model.budget_state.restore(config.get("calibration"), config.get("max_macs"))
    fill(model, stored.state, stored.source, exact=True)
    stored.check_digest()
    if wrong := checkpoint.class_name_mismatch(model):
        raise WeightsError(f"Damaged checkpoint: {path} has {wrong}.")
    model.notes, model.noted = stored.notes, checkpoint.identity(model, stored.digest)
    return model.eval()


def _check_shapes(stored: checkpoint.Stored) -> None:
    """Refuse a description whose weights are not those in the file, before anything of its size is allocated."""
    config, shapes = stored.config, stored.shapes
    check_sizes(config["backbone"], {name: list(value.shape) for name, value in shapes.items()}, stored.source)
    with _explained(stored.place / "config.json"), without_memory():
        vit = rebuild(config["backbone"])
        if config["policy"] in policies.BUILT_IN:
            own = AdaptiveViT(vit, config["policy"], config["settings"]).state_dict()
        else:  # one that is not made to be built without memory
            own, shapes = vit.state_dict(), {k: v for k, v in shapes.items() if not k.startswith("policy.")}
    check_fit({k.removeprefix("vit."): v for k, v in own.items()}, shapes, stored.source)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Errors about values of config.json, in one line."""
    try:
        yield
    except WeightsError:
        raise
    except UserError as error:
        raise WeightsError(f"{path}: {error}") from None
    except Exception as error:  # what a file asks for can fail in any way
        raise WeightsError(f"Damaged checkpoint: {path} ({type(error).__name__}: {first_line(error)}).") from error


def _describe(model: AdaptiveViT, config: dict[str, Any]) -> None:
    """What a checkpoint knows of a model beside its weights and settings."""
    model.task, model.class_names = config["task"], config.get("class_names")
    model.whole = Shape(**config["whole"]) if config.get("whole") else None
    model.preprocessing = Preprocessing.from_config(config["preprocessing"])


def _from_directory(
    backbone: Any, policy: str, stored: checkpoint.Stored, changes: dict[str, Any], settings: dict[str, Any]
) -> AdaptiveViT:
    """Weights of a checkpoint of ours. The same policy keeps its own weights; `static` ones start any policy."""
    config, directory, is_narrow = stored.config, stored.place, bool(stored.config.get("whole"))
    same = _is_same(backbone, policy, config, directory)
    if same or is_narrow:  # otherwise nothing is built by what it says
        _check_shapes(stored)
    if is_narrow:
        backbone = _narrow_backbone(backbone, policy, settings, stored)
    changes["num_classes"], keep_head = _classes(changes["num_classes"], backbone, stored.state)
    if changes["img_size"] is None:
        changes["img_size"] = config["backbone"]["changes"].get("img_size")
    vit = build_backbone(backbone, **changes)
    model = AdaptiveViT(vit, policy, (config["settings"] if same else {}) | settings, config["backbone"].get("name"))
    size = model.preprocessing.size
    _describe(model, config)
    model.preprocessing = replace(model.preprocessing, size=size)
    if not keep_head:
        model.class_names = None
    if model.whole is not None and model.shape.num_classifiers:
        model.whole = replace(model.whole, classes=model.shape.classes)
    fit_backbone(vit, stored.state, str(directory), replace_head=not keep_head)
    if same:
        _check_settings(model, config["settings"], settings, directory)
        fit_policy(model, stored.policy_state(), str(directory))
        if keep_head and model.policy.settings == make(policy, config["settings"]):  # it is what was measured
            with _explained(directory / "config.json"):
                model.budget_state.restore_at_other_size(config.get("calibration"), config.get("max_macs"))
    stored.check_digest()
    return model.eval() if is_narrow else _narrowed(model).eval()


def _is_same(backbone: Any, policy: str, config: dict[str, Any], directory: Path) -> bool:
    """Whether a checkpoint is of the same policy; one of another backbone or of a third policy is refused."""
    name, held = config["backbone"].get("name"), config["policy"]
    if isinstance(backbone, str) and name not in (None, backbone) and ":" not in backbone:
        raise WeightsError(f"{directory} holds the backbone {name!r}, but {backbone!r} was asked for.")
    if held not in ("static", policy) and policy != "static":
        raise WeightsError(f"{directory} holds the policy {held!r}, but {policy!r} was asked for.")
    if held == policy:
        check_known(config, directory / "config.json")
    return bool(held == policy)


def _check_settings(model: AdaptiveViT, stored: dict[str, Any], asked: dict[str, Any], directory: Path) -> None:
    """Refuse settings that the stored weights contradict: those that give a policy other parameters, or other starting
    values. What acts beside the weights (a threshold, a ratio) may be asked for."""
    name, was, now = model.policy_name, make(model.policy_name, stored), model.policy.settings
    changed = [k for k in asked if getattr(was, k) != getattr(now, k)]
    if changed and _fresh(model, stored) != _fresh(model, stored | asked):
        before, after = (", ".join(f"{k}={getattr(made, k)}" for k in changed) for made in (was, now))
        raise WeightsError(
            f"{directory} holds {name} with {before}, but {after} was asked for, and the weights of the policy do not "
            "fit that. Leave it out, or start from a static checkpoint."
        )


def _fresh(model: AdaptiveViT, settings: dict[str, Any]) -> list[Any]:
    """The parameters of a fresh policy."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = policies.build(model.policy_name, model.shape, settings)
        return [(k, v.tolist()) for k, v in made.state_dict().items()]


def _narrow_backbone(backbone: Any, policy: str, settings: dict[str, Any], stored: checkpoint.Stored) -> Any:
    """The arguments of a narrow checkpoint's backbone, if it was cut as is asked, out of the backbone asked for."""
    config, directory = stored.config, stored.place
    held = asdict(make("static", config["settings"] if config["policy"] == "static" else {}))
    for key, value in asdict(make("static", settings)).items() if policy == "static" else ():
        if key in ("width", "share") and value not in (None, held[key]):
            raise WeightsError(
                f"{directory} holds a narrow backbone ({settings_text('static', make('static', held))}), but "
                f"{key}={value} was asked for. Leave it out, or start from the whole model."
            )
    with without_memory():
        given = backbone if isinstance(backbone, nn.Module) else build_backbone(backbone)
        asked, whole = family_of(given)(given).inspect(), Shape(**config["whole"])
    arguments = config["backbone"]["kwargs"]
    if asked.dim == arguments["embed_dim"]:  # the narrow one itself was asked for
        return backbone
    free: Any = dict.fromkeys(("tokens", "head_tokens", "classes", "num_classifiers"), 0)  # sizes and heads may differ
    if replace(asked, **free) != replace(whole, **free):
        cut, wanted = (f"width {s.dim} with {s.layers} blocks and {s.heads} heads" for s in (whole, asked))
        raise WeightsError(f"{directory} holds a backbone cut out of one of {cut}, but one of {wanted} was asked for.")
    return arguments

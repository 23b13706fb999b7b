"""create and load: from a timm name, a timm model or a directory to an adaptive ViT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import __version__, policies, tasks
from .backbones import family_of
from .backbones.build import build_backbone, rebuild
from .backbones.preprocessing import Preprocessing
from .backbones.slim import narrow
from .budget import control
from .checkpoint import format as checkpoint
from .cost import Shape
from .errors import UserError, WeightsError
from .model import AdaptiveViT
from .policies.spec import make
from .policies.spec import spec as settings_text


def create(
    backbone: str | nn.Module | Mapping[str, Any],
    policy: str,
    *,
    weights: str | Path | bool | None = None,
    num_classes: int | None = None,
    img_size: int | tuple[int, int] | None = None,
    drop_path_rate: float = 0.0,
    **policy_settings: Any,
) -> AdaptiveViT:
    """Make a ViT adaptive.

    backbone: a timm name, a timm VisionTransformer (used as it is, not copied), or keyword arguments of one.
    weights: a .safetensors or .pth file in timm's keys, a directory saved by us, or True for timm's own download.
    A num_classes other than the weights' replaces the head; an img_size other than theirs resizes the position
    embedding. The rest are the policy's settings (adaptivit.settings).
    """
    make(policy, policy_settings)  # a bad setting is said before anything is built or downloaded
    if isinstance(weights, (str, Path)) and Path(weights).is_dir():
        changes = {"num_classes": num_classes, "img_size": img_size, "drop_path_rate": drop_path_rate}
        return _from_directory(backbone, policy, Path(weights), changes, policy_settings)
    state = checkpoint.read_weights(weights) if isinstance(weights, (str, Path)) else None
    stored = None if state is None or "head.weight" not in state else state["head.weight"].shape[0]
    if num_classes is None and isinstance(backbone, Mapping):
        num_classes = backbone.get("num_classes")
    classes = num_classes if num_classes is not None else stored
    vit = build_backbone(backbone, classes, img_size, drop_path_rate, pretrained=weights is True)
    name = backbone if isinstance(backbone, str) else None
    model = AdaptiveViT(vit, policy, policy_settings, name)
    if state is not None:
        replace_head = num_classes is not None and num_classes != stored
        _adopt(model, state, str(weights))
        checkpoint.fit_backbone(vit, state, str(weights), replace_head=replace_head)
    return _narrowed(model).eval()


def _adopt(model: AdaptiveViT, state: dict[str, Any], source: str) -> None:
    """Take the policy's own parameters out of a file that has them beside the backbone's, as authors publish them."""
    wanted = model.policy.state_dict()
    named = {k: k.removeprefix("policy.") for k in state}
    own = {named[k]: state.pop(k) for k in list(state) if named[k] in wanted}
    if own:
        checkpoint.check_fit(wanted, own, f"{source} (policy)")
        model.policy.load_state_dict({k: v.to(wanted[k].dtype) for k, v in own.items()})


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


def load(directory: str | Path) -> AdaptiveViT:
    """The model of a checkpoint directory, exactly as it was saved, precision included."""
    stored = checkpoint.read(directory)
    config, path = stored.config, Path(directory) / "config.json"
    _check_policy(config, path)
    try:
        described = config["backbone"]
        vit = rebuild(described)
        model = AdaptiveViT(vit, config["policy"], config["settings"], described.get("name"))
        _describe(model, config)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise WeightsError(f"Damaged checkpoint: {path} ({error!r}).") from None
    _restore(model, config.get("calibration"), config.get("max_macs"), path)
    checkpoint.fill(model, stored.state, stored.source, exact=True)
    stored.check_digest()
    if model.shape.num_classifiers and model.class_names and len(model.class_names) != model.shape.classes:
        raise WeightsError(
            f"Damaged checkpoint: {path} has {len(model.class_names)} class names for {model.shape.classes} classes."
        )
    model.notes, model.noted = checkpoint.notes(config), checkpoint.identity(model, stored.digest)
    return model.eval()


def _check_policy(config: dict[str, Any], path: Path) -> None:
    """Say what to do where a stored policy is not one of this version's."""
    policy, version = config["policy"], config.get("adaptivit", "?")
    if policy not in policies.names():
        raise WeightsError(
            f"{path} names the policy {policy!r}, which is unknown here (saved by adaptivit {version}, this is "
            f"{__version__}). Register your own before loading: adaptivit.register_policy({policy!r})."
        )
    try:
        make(policy, config["settings"])
        tasks.get(config.get("task", tasks.DEFAULT))
    except UserError as error:
        raise WeightsError(
            f"{path} (saved by adaptivit {version}, this is {__version__}): {error} Correct it there, or use the "
            "version that saved it."
        ) from None


def _describe(model: AdaptiveViT, config: dict[str, Any]) -> None:
    """What a checkpoint knows of a model beside its weights and settings."""
    model.task = config.get("task", tasks.DEFAULT)
    model.class_names = config.get("class_names")
    model.whole = Shape(**config["whole"]) if config.get("whole") else None
    model.preprocessing = Preprocessing.from_config(config["preprocessing"])


def _restore(model: AdaptiveViT, calibration: Any, max_macs: Any, path: Path) -> None:
    """The curve, the budget and the limit of a checkpoint."""
    try:
        control.restore(model, calibration, max_macs)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise WeightsError(f"Damaged checkpoint: {path} ({error!r}).") from None
    except UserError as error:
        raise WeightsError(f"{path}: {error}") from None


def _from_directory(
    backbone: Any, policy: str, directory: Path, changes: dict[str, Any], settings: dict[str, Any]
) -> AdaptiveViT:
    """Weights of a checkpoint of ours. The same policy keeps its own weights; `static` ones start any policy."""
    stored = checkpoint.read(directory)
    config, narrowed = stored.config, bool(stored.config.get("whole"))
    same = _check_asked(backbone, policy, config, directory)
    if narrowed:
        _check_narrow(config, policy, directory, settings)
        backbone = _narrow_backbone(backbone, config, directory)
    keep_head = _fill_changes(changes, backbone, stored)
    vit = build_backbone(backbone, **changes)
    stored_settings = config["settings"] if same else {}
    model = AdaptiveViT(vit, policy, stored_settings | settings, config["backbone"].get("name"))
    size = model.preprocessing.size
    _describe(model, config)
    model.preprocessing = replace(model.preprocessing, size=size)
    if not keep_head:
        model.class_names = None
    if model.whole is not None and model.shape.num_classifiers:
        model.whole = replace(model.whole, classes=model.shape.classes)
    checkpoint.fit_backbone(vit, stored.state, str(directory), replace_head=not keep_head)
    if same:
        _check_settings(model, config["settings"], settings, directory)
        _take_policy(model, stored, directory, keep_head)
    stored.check_digest()
    return model.eval() if narrowed else _narrowed(model).eval()


def _check_asked(backbone: Any, policy: str, config: dict[str, Any], directory: Path) -> bool:
    """Refuse a checkpoint of another backbone or policy; True if it is of the same policy."""
    name, held = config["backbone"].get("name"), config["policy"]
    if isinstance(backbone, str) and name is not None and backbone != name:
        raise WeightsError(f"{directory} holds the backbone {name!r}, but {backbone!r} was asked for.")
    if held not in ("static", policy) and policy != "static":
        raise WeightsError(f"{directory} holds the policy {held!r}, but {policy!r} was asked for.")
    if held == policy:
        _check_policy(config, directory / "config.json")
    return bool(held == policy)


def _fill_changes(changes: dict[str, Any], backbone: Any, stored: checkpoint.Stored) -> bool:
    """Take classes and image size from the checkpoint where none are asked for; True if its head is kept."""
    head = stored.state.get("head.weight")
    rows = None if head is None else head.shape[0]
    if changes["num_classes"] is None and isinstance(backbone, Mapping):
        changes["num_classes"] = backbone.get("num_classes")
    keep_head = changes["num_classes"] in (None, rows)
    if keep_head:
        changes["num_classes"] = rows
    if changes["img_size"] is None:
        changes["img_size"] = stored.config["backbone"]["changes"].get("img_size")
    return keep_head


def _take_policy(model: AdaptiveViT, stored: checkpoint.Stored, directory: Path, keep_head: bool) -> None:
    """The policy's own weights, and its cost curve where the model is still the one that was measured."""
    config, own = stored.config, {k: v for k, v in stored.state.items() if k.startswith("policy.")}
    own = {k.removeprefix("policy."): v for k, v in own.items()}
    checkpoint.check_fit(model.policy.state_dict(), own, f"{directory} (policy)")
    model.policy.load_state_dict(own)
    if model.policy.settings == make(model.policy_name, config["settings"]) and keep_head:
        held = control.fitting(model, config.get("calibration"), config.get("max_macs"))
        _restore(model, *held, directory / "config.json")


def _check_settings(model: AdaptiveViT, stored: dict[str, Any], asked: dict[str, Any], directory: Path) -> None:
    """Refuse asked settings that stored weights contradict: the policy would have other parameters, or other starting
    values of those that the weights bring. What acts beside the weights (a threshold, a ratio) may be asked for."""
    name, shape = model.policy_name, model.shape
    was, now = make(name, stored), model.policy.settings
    changed = [k for k in asked if getattr(was, k) != getattr(now, k)]
    if not changed or _start(name, shape, stored) == _start(name, shape, stored | asked):
        return
    before, after = (", ".join(f"{k}={getattr(made, k)}" for k in changed) for made in (was, now))
    raise WeightsError(
        f"{directory} holds {name} with {before}, but {after} was asked for, and the weights of the policy do not fit "
        "that. Leave it out, or start from a static checkpoint."
    )


def _start(policy: str, shape: Shape, settings: dict[str, Any]) -> list[Any]:
    """The parameters of a fresh policy."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [(k, v.tolist()) for k, v in policies.build(policy, shape, settings).state_dict().items()]


def _check_narrow(config: dict[str, Any], policy: str, directory: Path, asked: dict[str, Any]) -> None:
    """A checkpoint that is narrow already is not cut again."""
    held = make("static", config["settings"] if config["policy"] == "static" else {})
    wanted = make("static", asked) if policy == "static" else held
    for key in ("width", "share"):
        if getattr(wanted, key) not in (None, getattr(held, key)):
            raise WeightsError(
                f"{directory} holds a narrow backbone ({settings_text('static', held)}), but {key}={asked[key]} was "
                "asked for. Leave it out, or start from the whole model."
            )


def _narrow_backbone(backbone: Any, config: dict[str, Any], directory: Path) -> Any:
    """What a narrow checkpoint's backbone is made of, once it is clear that it was cut out of the one asked for."""
    with torch.device("meta"):
        given = backbone if isinstance(backbone, nn.Module) else build_backbone(backbone)
        asked = family_of(given)(given).inspect()
    whole = Shape(**config["whole"])
    if asked.dim == config["backbone"]["kwargs"]["embed_dim"]:  # the narrow one itself was asked for
        return backbone
    free: Any = dict.fromkeys(("tokens", "head_tokens", "classes", "num_classifiers"), 0)  # sizes and heads may differ
    if replace(asked, **free) != replace(whole, **free):
        raise WeightsError(
            f"{directory} holds a backbone cut out of one of width {whole.dim} with {whole.layers} blocks and "
            f"{whole.heads} heads, but one of width {asked.dim} with {asked.layers} blocks and {asked.heads} heads was "
            "asked for."
        )
    return config["backbone"]["kwargs"]

"""Conformance in one call: `check_policy("mine", setting=...)` of a policy, `check_backbone(module)` of a family.

What every policy must hold to, whatever its method, on small models: the same decisions, outputs and costs on
every layout; the same for an image alone as in a batch; a cost that agrees with torch's own count; finite outputs and
gradients; and nothing of a forward pass left behind on the module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from .decision import Trace
from .errors import UserError
from .factory import create
from .model import AdaptiveViT
from .output import Output

_SMALL: dict[str, Any] = {
    "img_size": 40,
    "patch_size": 8,
    "embed_dim": 24,
    "depth": 6,
    "num_heads": 3,
    "num_classes": 7,
}
BACKBONES: dict[str, dict[str, Any]] = {
    "class token": {},
    "distilled": {"distilled": True},
    "registers, LayerScale": {"reg_tokens": 4, "no_embed_class": True, "init_values": 0.3},
    "average pooling": {"class_token": False, "global_pool": "avg"},
}


def check_policy(name: str, **settings: Any) -> None:
    """Raise AssertionError, naming what does not hold, unless the registered policy conforms.

    A policy may refuse a kind of backbone with a UserError that says why, but not all of them.
    """
    refused = []
    for kind, change in BACKBONES.items():
        try:
            model = random_model(name, _SMALL | change, settings)
        except UserError as error:
            refused.append(f"{kind}: {error}")
            continue
        check_model(model, f"policy {name!r} on a backbone with {kind}")
    assert len(refused) < len(BACKBONES), f"policy {name!r} refuses every backbone: {'; '.join(refused)}"


def check_backbone(module: nn.Module, whole: Callable[[Tensor], Tensor] | None = None) -> None:
    """Raise AssertionError, naming what does not hold, unless the module's family conforms.

    `static` must give the logits of `whole`, by default the module itself, on every layout; policies whose tokens
    merge, stop and skip must hold to what `check_policy` asks. Give a small module whose weights make tokens differ.
    """
    kind, model = type(module).__name__, create(module, "static")
    images = _images(model)
    with torch.no_grad():
        expected = (whole or module)(images)
        for layout in ("masked", "packed", "gathered"):
            logits = model(images, layout=layout).logits
            _close(logits, expected, 1e-4, f"{kind}: logits of static on {layout} against the module's own")
    policies: dict[str, dict[str, Any]] = {"fold": {}, "aht": {"gamma": 2.0, "beta": -1.5}, "amod": {}}
    for name, settings in policies.items():
        check_model(create(module, name, **settings), f"{name} on {kind}")


def random_model(name: str, backbone: dict[str, Any], settings: dict[str, Any], seed: int = 0) -> AdaptiveViT:
    """A small model with weights wild enough to make tokens differ."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = create(backbone, name, **settings)
        for parameter in model.vit.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.35)
    return model


def _images(model: AdaptiveViT) -> Tensor:
    shape = (4, model.backbone.in_chans, *model.backbone.image_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def check_model(model: AdaptiveViT, what: str = "model") -> None:
    """Raise AssertionError, which begins with `what`, unless this model conforms; its gradients are cleared."""
    images = _images(model)
    before = copy.deepcopy(list(vars(model.policy)))
    with torch.no_grad():
        masked, packed = model(images, layout="masked"), model(images, layout="packed")
        same_outputs(masked, packed, f"{what}: masked against packed")
        if model.policy.traits.fixed_counts:
            same_outputs(masked, model(images, layout="gathered"), f"{what}: masked against gathered")
        same_outputs(packed, model(images, layout="packed"), f"{what}: two calls", exact=True)
        for i in range(len(images)):
            _alone(packed, model(images[i : i + 1], layout="packed"), i, f"{what}: image {i} alone")
        _replayed(model, images, masked, f"{what}: replayed")
        _cost(model, images, f"{what}: cost")
    assert list(vars(model.policy)) == before, f"{what}: a forward pass left something behind on the policy"
    _gradients(model, images, what)


def same_outputs(first: Output, second: Output, what: str, exact: bool = False) -> None:
    """The same decisions, and the same logits, features and costs to rounding."""
    _same_trace(first.trace, second.trace, what)
    tolerance = 0.0 if exact else 1e-4
    for name in ("logits", "features", "macs", "macs_blocks"):
        _close(getattr(first, name), getattr(second, name), tolerance, f"{what}: {name}")


def _same_trace(first: Trace, second: Trace, what: str) -> None:
    for name in ("attended", "updated"):
        assert torch.equal(getattr(first, name), getattr(second, name)), f"{what}: {name} differs"


def _close(a: Tensor, b: Tensor, tolerance: float, what: str) -> None:
    assert all(bool(t.isfinite().all()) for t in (a, b)), f"{what} is not finite"
    difference = float((a - b).abs().max() / a.abs().max().clamp_min(1.0))
    assert difference <= tolerance, f"{what} differs by {difference:.2g} (relative)"


def _alone(batch: Output, alone: Output, index: int, what: str) -> None:
    assert torch.equal(batch.trace.attended[:, index], alone.trace.attended[:, 0]), f"{what}: decisions differ"
    _close(batch.logits[index], alone.logits[0], 1e-4, f"{what}: logits")


def _replayed(model: AdaptiveViT, images: Tensor, recorded: Output, what: str) -> None:
    again = AdaptiveViT(model.vit, "replay", {"trace": recorded.trace}).eval()
    for layout in ("masked", "packed", "gathered") if model.policy.traits.fixed_counts else ("masked", "packed"):
        output = again(images, layout=layout)
        _same_trace(recorded.trace, output.trace, f"{what} on {layout}")
        _close(recorded.logits, output.logits, 1e-4, f"{what} on {layout}: logits")


def _cost(model: AdaptiveViT, images: Tensor, what: str) -> None:
    for layout in ("packed", "gathered") if model.policy.traits.fixed_counts else ("packed",):
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            output = model(images, layout=layout)
        counted, ran = counter.get_total_flops() / 2, float(output.macs_ran.sum())
        assert abs(counted - ran) <= 1e-9 * counted, f"{what}: {ran:.0f} MACs against torch's count of {counted:.0f}"


def _gradients(model: AdaptiveViT, images: Tensor, what: str) -> None:
    model.train()
    model.zero_grad()
    output = model(images, layout="masked", aux=model.policy.traits.optional_aux)
    output.logits.float().pow(2).mean().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert bool(parameter.grad.isfinite().all()), f"{what}: the gradient of {name} is not finite"
    model.zero_grad()
    model.eval()

"""Fingerprints of what adaptivit computes, to prove that a refactoring changes nothing, bit for bit on one machine.

    python benchmarks/snapshot.py --out before.json                   # about 2 minutes on one core
    python benchmarks/snapshot.py --interpret --out before_i.json     # the Triton kernels, in Triton's interpreter
    PYTHONPATH=OTHER_TREE python benchmarks/snapshot.py --out after.json
    python benchmarks/snapshot.py --compare before.json after.json    # exit 1 where something differs or is missing

For every policy and layout, on seeded weights and images: logits, features, traces, MACs, budgets, losses, gradients.
Keys are "case/quantity" in neutral names, so files of trees with other names can be compared (snapshot_names.py). Add
--only PATTERN to run some cases. A key that is missing on purpose gets a line in GONE.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import functools
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

if "--interpret" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import snapshot_names as names
import torch
from torch import Tensor, nn

# Keys that a later tree leaves out or has otherwise on purpose: pattern (fnmatch) of "case/quantity" -> why.
GONE: dict[str, str] = {
    **dict.fromkeys(
        (
            *("*class: aht, gelu/*", "table: ablation-feature: feature gelu/*", "*class: aht, the plan acts/*"),
            *("*class: aht, planner of the class token/*", "*class: aht, plan range/*", "*class: aht, mean field/*"),
            *("*class: aht, plan against image/*", "*: aht, zeroed/*", "*class: aht, gates fixed/*"),
            "table: cifar100-ingredients: AHT-ViT, the plan acts*",
        ),
        "brought nothing (docs/results/cifar100.md); a planner of the class token had an acting plan",
    ),
    **{
        f"*: {case}/*fact features": "a fact of aht_merge alone: what aht reads is evidence"
        for case in ("aht", *(f"aht, {c}" for c in ("T", "defaults", "stages", "no stages", "straight-through")))
    },
    "*: aht, planner of the token/*fact features": "a fact of aht_merge alone",
    "recipe: aht-fold/*": "aht-merge centres per image as the tables do; compared as cifar100-ingredients: sharp gates",
    "kernels: norms in products: *": "LayerNorms inside products brought less than 5 % (docs/results/log.md)",
    "table: digits: AHT-ViT/*": "its halting blocks are written for the 6 blocks of digits_vit",
}

TINY: dict[str, Any] = {"img_size": 64, "patch_size": 16, "embed_dim": 64, "depth": 6, "num_heads": 4}
TINY |= {"num_classes": 10}
DEEP: dict[str, Any] = TINY | {"patch_size": 8, "img_size": 48, "embed_dim": 32, "depth": 12, "num_heads": 2}
SMALL: dict[str, Any] = TINY | {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2}
BACKBONES: dict[str, dict[str, Any]] = {
    "class": {},
    "registers": {"reg_tokens": 4, "no_embed_class": True, "init_values": 0.1},
    "average": {"class_token": False, "global_pool": "avg", "fc_norm": True},
    "distilled": {"distilled": True},
}
BATCH = 4

# Policies with settings, in the names of b85ff43; the recipe whose losses train it.
HALTING = {"gamma": 2.0, "beta": -1.5}
ATTENTION = {"gamma": 4.0, "beta": -5.0}  # for features that attention shows
NEURON = {"gate_scale": 2.0, "gate_center": 1.0}
POLICIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "static": ("static", {}, "amod"),
    "static, fewer blocks": ("static", {"depth": 3}, "amod"),
    "static, narrower": ("static", {"width": 0.5}, "amod"),
    "static, share by width": ("static", {"share": 0.67, "by": "width"}, "amod"),
    "static, share by depth": ("static", {"share": 0.67}, "amod"),
    "aht, defaults": ("aht", {}, "aht-budget"),
    "aht": ("aht", HALTING, "aht-budget"),
    "aht, T": ("aht", HALTING | {"threshold": 0.8, "eps": 0.0}, "aht-balanced"),
    "aht, straight-through": ("aht", HALTING | {"straight_through": True}, "aht-budget"),
    "aht, surrogate of the logit": (
        "aht",
        HALTING | {"straight_through": True, "slope": "logit", "tau": 0.5},
        "aht-budget",
    ),
    "aht, stages": ("aht", HALTING | {"stages": (2, 4)}, "aht-balanced"),
    "aht, no stages": ("aht", HALTING | {"stages": ()}, "aht-no-target-depth"),
    "aht, the plan acts": ("aht", HALTING | {"plan_weight": 0.7}, "aht-balanced"),
    "aht, planner of the class token": (
        "aht",
        HALTING | {"planner_context": "class", "planner_width": 0.25, "plan_weight": 0.7},
        "aht-balanced",
    ),
    "aht, planner of the token": ("aht", HALTING | {"planner_context": "none"}, "aht-balanced"),
    "aht, plan range": ("aht", HALTING | {"plan_range": "s..L"}, "aht-balanced"),
    "aht, plan against image": ("aht", HALTING | {"plan_weight": 0.7, "plan_against": "image"}, "aht-balanced"),
    "aht, mean field": ("aht", HALTING | {"class_token": "mean_field"}, "aht-balanced"),
    "aht, zeroed": ("aht", HALTING | {"halted": "zeroed"}, "aht-balanced"),
    "aht, gelu": ("aht", HALTING | {"feature": "gelu", "index": 3}, "aht-balanced"),
    "aht, residual": ("aht", HALTING | {"feature": "residual"}, "aht-balanced"),
    "aht, received": ("aht", ATTENTION | {"beta": -1.0} | {"feature": "received"}, "aht-balanced"),
    "aht, class row": ("aht", ATTENTION | {"beta": -1.0} | {"feature": "class_row"}, "aht-balanced"),
    "aht, relative": ("aht", HALTING | {"relative": 0.5}, "aht-balanced"),
    "aht, gates fixed": ("aht", HALTING | {"learn_gate": False}, "aht-balanced"),
    "aht, gate a layer": ("aht", HALTING | {"gate": "layer"}, "aht-balanced"),
    "aht, supervised": ("aht", HALTING | {"gamma": 6.0, "beta": 0.5} | {"supervised": (2, 4)}, "aht-balanced"),
    "aht, folds": ("aht", HALTING | {"leave": "fold"}, "aht-balanced"),
    "aht, worth": ("aht", ATTENTION | {"feature": "worth", "leave": "fold"}, "aht-budget"),
    "aht, worth, drops": ("aht", ATTENTION | {"feature": "worth"}, "aht-budget"),
    "aht, improved": (
        "aht",
        {
            "feature": "worth",
            "leave": "fold",
            "decide": "between",
            "spare": 1,
            "gate": "layer",
            "gamma": 4.0,
            "beta": 0.5,
            "straight_through": True,
            "slope": "logit",
            "tau": 0.5,
            "relative": 1.0,
        },
        "aht-fold",
    ),
    "avit, defaults": ("avit", {}, "avit-paper"),
    "avit": ("avit", NEURON, "avit-paper"),
    "avit, network": ("avit", NEURON | {"gate": "network"}, "avit-paper"),
    "avit, folds": ("avit", NEURON | {"leave": "fold"}, "avit-paper"),
    "avit, finishes": ("avit", NEURON | {"finish_with_class": True}, "avit-paper"),
    "avit, index": ("avit", NEURON | {"index": 5, "eps": 0.05}, "avit-tiny"),
    "mod": ("mod", {}, "mod"),
    "mod, mlp": ("mod", {"router": "mlp", "capacity": 0.3}, "mod"),
    "mod, sigmoid": ("mod", {"gate": "sigmoid", "blocks": (2, 4)}, "mod"),
    "mod, no gate": ("mod", {"gate": "none"}, "mod"),
    "amod": ("amod", {}, "amod"),
    "amod, multiplied": ("amod", {"multiply": True, "capacity": 0.7}, "amod"),
    "amod, first": ("amod", {"first": 4, "capacity": 0.125}, "amod"),
    "dynamicvit": ("dynamicvit", {}, "dynamicvit"),
    "dynamicvit, folds": ("dynamicvit", {"leave": "fold", "stages": (2, 4)}, "dynamicvit"),
    "evit": ("evit", {}, "evit"),
    "evit, not fused": ("evit", {"fuse": False, "keep": 0.5, "stages": (1, 3)}, "evit"),
    "evit, warm": ("evit", {"warm_epochs": 10.0, "shrink_epochs": 15.0}, "evit"),
    "tome": ("tome", {"r": 2}, "amod"),
    "tome, defaults": ("tome", {}, "amod"),
    "tome, rising": ("tome", {"r": 2, "inflection": 1.0}, "amod"),
    "tome, list": ("tome", {"r": [3, 0, 2, 1, 4, 0]}, "amod"),
    "tome, not by size": ("tome", {"r": 3, "prop_attn": False}, "amod"),
    "fold": ("fold", {}, "amod"),
    "fold, budget": ("fold", {"budget": 0.67}, "amod"),
    "fold, stages": ("fold", {"stages": (2, 4), "keep": 0.7}, "amod"),
    "fold, by all queries": ("fold", {"keep": 0.6, "evidence": "column", "power": 1.0, "value": 0.0}, "amod"),
    "act, defaults": ("act", {}, "act"),
    "act": ("act", {"bias": -1.0}, "act"),
    "confidence": ("confidence", {"threshold": 0.4}, "confidence"),
    "confidence, patience": ("confidence", {"threshold": 0.3, "patience": 2}, "confidence"),
    "similarity": ("similarity", {"threshold": 0.3}, "similarity"),
    "similarity, token": ("similarity", {"threshold": 0.5, "of": "token", "patience": 2}, "similarity"),
    "pondernet": ("pondernet", NEURON, "pondernet"),
    "pondernet, tokens": ("pondernet", NEURON | {"unit": "token"}, "pondernet-tokens"),
    "pondernet, sampled": ("pondernet", NEURON | {"sample": 3}, "pondernet"),
}
ASKED = {"aht": ("plan", "features"), "avit": ("raw_scores",)} | dict.fromkeys(
    ("confidence", "similarity", "pondernet"), ("exits",)
)
ELSEWHERE = ("static", "aht", "aht, zeroed", "aht, improved", "avit", "mod", "amod", "dynamicvit", "evit", "tome")
ELSEWHERE += ("fold", "confidence", "pondernet, tokens")  # on the other backbones
# One of every different method among the recipes and the rows of our tables.
RECIPES = (
    *("aht-high-accuracy", "aht-balanced", "aht-no-target-depth", "static-aht", "dynamicvit-aht", "avit-aht"),
    *("aht-budget", "aht-fold", "avit-paper", "avit-no-prior", "avit-prior-only", "avit-network", "avit-tiny"),
    *("static-sharp", "dynamicvit", "evit", "amod", "mod", "mod-tiny-12.5", "amod-tiny-12.5", "amod-multiply"),
    *("amod-cars-later-small", "act", "confidence", "similarity", "pondernet", "pondernet-tokens"),
)
ROWS: dict[str, tuple[str, ...]] = {
    "digits": ("AHT-ViT", "A-ViT", "EViT", "fold"),
    "cifar100-main": ("AHT-ViT -17 %", "AHT-ViT -33 %", "AHT-ViT -48 %", "fold -33 %"),
    "cifar100-peers": (
        *("A-ViT -33 %", "A-MoD -33 %", "MoD -33 %", "DynamicViT -33 %", "EViT -33 %", "ToMe -33 %", "ACT -33 %"),
        *("PonderNet -33 %", "static, 8 blocks", "static, narrower -33 %"),
    ),
    "cifar100-one-checkpoint": ("AHT-ViT, one checkpoint",),
    "cifar100-ingredients": (
        *("AHT-ViT, the paper's", "AHT-ViT, straight-through", "AHT-ViT, reads class attention"),
        *("AHT-ViT, reads worth", "AHT-ViT, folds", "AHT-ViT, decides inside the block"),
        *("AHT-ViT, starts at the budget", "AHT-ViT, sharp gates", "AHT-ViT, gates that do not learn"),
        *("AHT-ViT, the plan acts and learns 3 times as fast", "AHT-ViT, three supervisors", "fold in three blocks"),
    ),
    "ablation-threshold": ("T 0.8", "T 1.2"),
    "ablation-sigma": ("sigma 0.5",),
    "ablation-stages": ("stages 3", "stages 2+4+6+8+10"),
    "ablation-planner": ("planner_width 0.25", "planner_context class", "planner_context none"),
    "ablation-feature": (
        *("feature class_row", "feature received", "feature fc1", "feature gelu", "feature residual"),
    ),
    "ablation-mass": ("mass hazard", "mass crossing"),
    "ablation-kl": ("kl target_actual", "detach target", "detach actual"),
    "ablation-target-depth": ("lambda_t 0.0",),
}
INTERPRETED = ("static", "aht", "aht, mean field", "aht, folds", "aht, worth", "aht, the plan acts", "avit", "amod")
INTERPRETED += ("aht, improved", "mod", "dynamicvit", "evit", "tome", "fold", "fold, by all queries", "avit, folds")


# -- fingerprints ---------------------------------------------------------------------------------------------------
def fingerprint(value: Any) -> str:
    """Bytes, type and shape of a tensor, with a sum to read; the text of anything else."""
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        total = float(plain.double().nansum())
        kind = str(plain.dtype).removeprefix("torch.")
        return f"{kind}{list(plain.shape)} sum={total:.9g} {hashlib.sha256(raw).hexdigest()[:20]}"
    if isinstance(value, float):
        return value.hex()
    return repr(value)


def joint(values: Any) -> str:
    """One fingerprint of many values."""
    text = "\n".join(fingerprint(value) for value in values)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


class Record:
    """Fingerprints by "case/quantity"."""

    def __init__(self, only: str) -> None:
        self.found: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.only, self.case = only, ""

    def __call__(self, key: str, value: Any) -> None:
        key = f"{self.case}/{key}"
        assert key not in self.found, key
        self.found[key] = value if isinstance(value, str) else fingerprint(value)

    @contextlib.contextmanager
    def part(self, key: str) -> Iterator[None]:
        """What is refused is recorded as refused; other errors are recorded as failed."""
        try:
            yield
        except (names.home("UserError"), NotImplementedError) as error:
            self(f"{key}/refused", "NotImplementedError" if isinstance(error, NotImplementedError) else "UserError")
        except Exception as error:
            self.failed[f"{self.case}/{key}"] = f"{type(error).__name__}: {error}"
            traceback.print_exc()

    def run(self, case: str, work: Callable[[], None]) -> None:
        if not fnmatch.fnmatch(case, self.only):
            return
        self.case, begun = case, time.perf_counter()
        with self.part("case"):
            work()
        self.seconds[case] = time.perf_counter() - begun


# -- models ---------------------------------------------------------------------------------------------------------
@torch.no_grad()
def randomise(model: Any) -> None:
    """Weights of ordinary size; timm's start is so small that all tokens would behave alike. The backbone's are seeded
    by name, those of the policy's layers by shape and order; gates keep what the settings say."""

    def noise(p: Tensor, seed: str) -> Tensor:
        return torch.randn(p.shape, generator=torch.Generator().manual_seed(zlib.crc32(seed.encode())))

    for name, p in names.get(model, "vit").named_parameters():
        if name.endswith("gamma") or (p.ndim == 1 and "norm" in name and name.endswith("weight")):
            p.copy_(1 + 0.2 * noise(p, name))
        elif p.ndim >= 2 and name.endswith("weight"):
            p.copy_(noise(p, name) / p[0].numel() ** 0.5)
        else:
            p.copy_(0.3 * noise(p, name))
    met: Counter[str] = Counter()
    for module in model.policy.modules():
        if isinstance(module, nn.Linear):
            for kind, p in module.named_parameters():
                seed = f"{kind} {list(p.shape)}"
                met[seed] += 1
                scale = 1 / p.shape[1] ** 0.5 if p.ndim == 2 else 0.3
                p.copy_(scale * noise(p, f"{seed} {met[seed]}"))


def build(backbone: Any, policy: str, settings: Mapping[str, Any]) -> Any:
    import adaptivit

    torch.manual_seed(0)
    model = adaptivit.create(backbone, policy, **settings)
    randomise(model)
    return model.eval()


def pictures(backbone: Any, batch: int = BATCH, seed: int = 0) -> Tensor:
    size = backbone["img_size"] if isinstance(backbone, Mapping) else 224
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


# -- what is recorded -----------------------------------------------------------------------------------------------
def record_output(record: Record, key: str, output: Any) -> None:
    trace = output.trace
    for name in ("logits", "features", "tokens", "patches"):
        if getattr(output, name) is not None:
            record(f"{key}/{name}", getattr(output, name))
    record(f"{key}/attended", trace.attended)
    record(f"{key}/updated", trace.updated)
    record(f"{key}/prefix", names.get(trace, "num_prefix_tokens"))
    record(f"{key}/pooled", names.POOLED.get(trace.pooled, trace.pooled))
    record(f"{key}/layout", names.LAYOUT_NAMES.get(output.layout, output.layout))
    for name, value in trace.facts.items():
        record(f"{key}/fact {names.FACTS.get(name, name)}", value)
    for name, value in output.parts.items():
        record(f"{key}/macs of {names.PARTS.get(name, name)}", value)
    for name in ("macs", "macs_ran", "macs_deployed", "macs_blocks"):
        record(f"{key}/{name}", getattr(output, name))
    fields: dict[str, list[Any]] = {}
    for step in trace.steps:
        decision = step.decision
        place = f"{step.layer} {step.when} {type(decision).__name__}"
        fields.setdefault("kinds", []).append(place)
        for field in dataclasses.fields(decision):
            value = getattr(decision, field.name)
            if field.name not in names.NOT_RECORDED and value is not None:
                fields.setdefault(names.DECISION_FIELDS.get(field.name, field.name), []).extend((place, value))
    for name, values in fields.items():
        record(f"{key}/steps {name}", joint(values))


def record_passes(record: Record, model: Any, images: Tensor, policy: str, full: bool) -> None:
    """Evaluation: every layout, on the path for CPUs (no gradients) and with timm's modules; what can be asked for."""
    model.eval()
    for layout in ("masked", "packed", "gathered") if full else ("masked", "packed"):
        with record.part(layout), torch.inference_mode():
            record_output(record, layout, model(images, layout=layout))
    if not full:
        return
    with torch.inference_mode():
        output = model(images)
        record("auto/layout", names.LAYOUT_NAMES.get(output.layout, output.layout))
        record("auto/logits", output.logits)
    for layout in ("packed", "gathered"):
        with record.part(f"{layout}, timm"), torch.enable_grad():
            record_output(record, f"{layout}, timm", model(images, layout=layout))
    ask = names.asks(("tokens", "patches", "keep_scores", *ASKED.get(policy, ())))
    for layout in ("masked", "packed", "gathered"):
        with record.part(f"{layout}, asked"), torch.inference_mode():
            record_output(record, f"{layout}, asked", names.asked_pass(model, images, layout, ask))
    with record.part("dense features"), torch.inference_mode():
        import adaptivit

        record("dense features", adaptivit.features(model, images))


def record_export(record: Record, model: Any, images: Tensor) -> None:
    """The program that export writes, on its layouts."""
    for kind in ("ragged", "topk"):
        with record.part(f"export {kind}"), torch.no_grad():
            logits, depth = names.home("Program")(model, kind)(images)
            record(f"export {kind}/logits", logits)
            record(f"export {kind}/depth", depth)


def record_budgets(record: Record, model: Any, images: Tensor) -> None:
    """Limits, the curve of costs, budgets for all images and for each."""
    with record.part("limit"), torch.inference_mode():
        for layout in ("masked", "packed"):
            record_output(record, f"limit, {layout}", model(images, layout=layout, max_macs="-15%"))
    with record.part("calibration"):
        curve = model.calibrate(images, "-20%")
        record("calibration/macs", joint(p.macs for p in curve.points))
        record("calibration/positions", joint(names.get(p, "knob") for p in curve.points))
        record("calibration/settings", curve.settings.macs)
        with torch.inference_mode():
            for layout in ("masked", "packed"):
                record_output(record, f"budget, {layout}", model(images, layout=layout))
            several = ["-10%", "-20%", "none", "-15%"]
            record_output(record, "budgets", model(images, layout="packed", budget=several))
            record_output(record, "budget and limit", model(images, layout="packed", max_macs="-10%"))
        model.budget = None


def record_training(record: Record, model: Any, images: Tensor, config: Any, layouts: tuple[str, ...]) -> None:
    """Losses and gradients of the recipe's objective, with a teacher where it has one."""
    objective = names.home("objective")(config)
    vit = names.get(model, "vit")
    targets = torch.arange(len(images)) % 10
    backbone = getattr(model, "_snapshot_backbone")  # noqa: B009
    teacher = build(backbone, "static", {})
    epochs = (0.0, 12.0, 25.0) if getattr(model.policy.settings, "warm_epochs", 0) else (0.0,)
    for layout in layouts:
        for epoch in epochs:
            key = f"training, {layout}" + (f", epoch {epoch:g}" if len(epochs) > 1 else "")
            with record.part(key), torch.enable_grad():
                model.train()
                model.policy.schedule(epoch)
                model.zero_grad(set_to_none=True)
                torch.manual_seed(1)
                run = model if layout == "auto" else functools.partial(model, layout=layout)
                losses, output = names.losses(run, teacher, objective, images, targets)
                record_output(record, key, output)
                record(f"{key}/loss", losses.total)
                for name, value in losses.terms.items():
                    record(f"{key}/loss {names.LOSS_TERMS.get(name, name)}", value)
                losses.total.backward()
                record_gradients(record, key, vit, model.policy)
    model.zero_grad(set_to_none=True)
    model.eval()


def record_gradients(record: Record, key: str, vit: nn.Module, policy: nn.Module) -> None:
    """The backbone's by block, the policy's by parameter."""
    groups: dict[str, list[Tensor | None]] = {}
    for name, p in vit.named_parameters():
        block = re.match(r"blocks\.\d+", name)
        groups.setdefault(f"backbone {block.group() if block else name}", []).append(p.grad)
    for name, p in policy.named_parameters():
        groups[f"policy {name}"] = [p.grad]
    for name, grads in groups.items():
        norm = sum(float(grad.double().square().sum()) for grad in grads if grad is not None) ** 0.5
        record(f"{key}/gradient of {name}", f"norm={norm:.9g} {joint(grads)}")


def record_gate(record: Record, model: Any, images: Tensor, share: float | None) -> None:
    """Where the gate starts in training."""
    start = names.get(model.policy, "gate_init")
    start(model, images, share)
    for kind, values in (("parameter", model.policy.named_parameters()), ("buffer", model.policy.named_buffers())):
        for name, value in values:
            if "weight" not in name and "bias" not in name:
                record(f"gate/{kind} {name}", value)


# -- cases ----------------------------------------------------------------------------------------------------------
def make(backbone: Mapping[str, Any], name: str) -> tuple[Any, str, Any]:
    """A model of POLICIES, the policy's old name, and the training config of its recipe."""
    policy, settings, recipe = POLICIES[name]
    model = build(backbone, *names.policy_spec(policy, settings, backbone["depth"]))
    model._snapshot_backbone = backbone
    return model, policy, names.recipe(recipe)


def cases_of_policies(record: Record) -> None:
    for kind, change in BACKBONES.items():
        backbone = TINY | change
        for name in POLICIES if kind == "class" else ELSEWHERE:

            def work(backbone: Any = backbone, name: str = name, kind: str = kind) -> None:
                model, policy, config = make(backbone, name)
                images = pictures(backbone)
                record_passes(record, model, images, policy, True)
                record_training(record, model, images, config, ("masked", "gathered"))
                record_export(record, model, images)
                if kind in ("class", "average"):
                    record_budgets(record, model, images)

            record.run(f"{kind}: {name}", work)
    record.run("recomputed: aht", lambda: recomputed(record))
    record.run("replay", lambda: replayed(record))
    for name in ("static", "aht", "aht, improved", "avit", "mod", "dynamicvit", "evit", "tome", "fold"):
        record.run(f"bf16: {name}", functools.partial(bf16, record, name))


def recomputed(record: Record) -> None:
    model, _, config = make(TINY, "aht, straight-through")
    setattr(model, names.attribute(model, "recompute"), True)
    record_training(record, model, pictures(TINY), config, ("masked",))


def replayed(record: Record) -> None:
    import adaptivit

    for name in ("aht", "aht, folds", "mod", "tome", "avit, finishes"):
        model, _, _ = make(TINY, name)
        with torch.no_grad():
            trace = model(pictures(TINY), layout="masked").trace
            again = adaptivit.create(names.get(model, "vit"), "replay", trace=trace).eval()
            for layout in ("masked", "packed"):
                record_output(record, f"{name}, {layout}", again(pictures(TINY), layout=layout))


def bf16(record: Record, name: str) -> None:
    model, policy, _ = make(TINY, name)
    record_passes(record, model.to(torch.bfloat16), pictures(TINY).to(torch.bfloat16), policy, True)


def cases_of_training(record: Record) -> None:
    """Recipes and rows of tables by their names, with policies and losses as they stand there."""

    def work(read: Callable[[], Any], train: bool = True) -> None:
        config = read()
        policy, settings = names.home("parse")(config.policy)
        model = build(DEEP, policy, settings)
        model._snapshot_backbone = DEEP
        images = pictures(DEEP)
        record_gate(record, model, images, names.config_value(config, "budget_share"))
        record_passes(record, model, images, policy, False)
        record_training(record, model, images, config, ("auto",))

    for name in RECIPES:
        record.run(f"recipe: {name}", lambda name=name: work(lambda: names.recipe(name)))
    for table, rows in ROWS.items():
        for row in rows:
            record.run(f"table: {table}: {row}", lambda table=table, row=row: work(lambda: method_of(table, row)))


def method_of(table: str, row: str) -> Any:
    tables = names.home("tables")
    found = next((t for t in (tables.values() if isinstance(tables, dict) else tables) if t.name == table), None)
    rows = (row, names.TABLE_ROWS.get(row, row))
    run = next((r for r in found.runs if r.name in rows), None) if found else None
    if run is None:
        raise names.Missing(f"no row {row!r} in the table {table!r}")
    return names.method_config(run.method)


def cases_of_deit(record: Record) -> None:
    """DeiT-T at 224 px."""
    deit = "deit_tiny_patch16_224"
    for name in ("static", "aht", "aht, improved", "fold, budget", "tome", "evit", "avit", "mod"):

        def work(name: str = name) -> None:
            policy, settings, _ = POLICIES[name]
            model = build(deit, *names.policy_spec(policy, settings, 12))
            images = pictures(deit, 2)
            record_passes(record, model, images, policy, False)

        record.run(f"deit: {name}", work)


def cases_of_kernels(record: Record) -> None:
    """Whole passes through the Triton kernels, in Triton's interpreter."""
    names.prepare_interpreter()
    for kind in BACKBONES:
        backbone = SMALL | BACKBONES[kind]
        some = ("static", "aht", "fold", "amod") if kind != "class" else INTERPRETED
        for name in some:
            record.run(f"kernels: {kind}: {name}", functools.partial(interpreted, record, backbone, name, kind))
    for name in ("static", "aht", "aht, folds", "amod"):
        record.run(f"kernels: planned: {name}", functools.partial(planned, record, name))
    record.run("kernels: float16: aht", lambda: half(record, "aht"))
    record.run("kernels: float16: fold", lambda: half(record, "fold"))


def interpreted(record: Record, backbone: Any, name: str, kind: str) -> None:
    model, policy, _ = make(backbone, name)
    images = pictures(backbone, 2)
    ask = names.asks(("tokens", *ASKED.get(policy, ())))
    with names.kernels_on_cpu(), torch.inference_mode():
        for layout in ("packed", "gathered"):
            with record.part(layout):
                record_output(record, layout, model(images, layout=layout))
        if kind == "class":
            with record.part("asked"):
                record_output(record, "asked", names.asked_pass(model, images, "packed", ask))
            with record.part("limit"):
                record_output(record, "limit", model(images, layout="packed", max_macs="-15%"))


def planned(record: Record, name: str) -> None:
    model, _, _ = make(SMALL, name)
    plan = names.home("Plan")
    plans = {"still": plan(frozenset()), "once": plan(frozenset({1}), (34, 34, 20, 20)), "always": plan(None)}
    with names.kernels_on_cpu(), torch.inference_mode():
        for key, one in plans.items():
            with record.part(key):
                record_output(record, key, names.planned_pass(model, pictures(SMALL, 2), "packed", one))


def half(record: Record, name: str) -> None:
    model, _, _ = make(SMALL, name)
    with names.kernels_on_cpu(), torch.inference_mode(), record.part("packed"):
        record_output(record, "packed", model.half()(pictures(SMALL, 2).half(), layout="packed"))


# -- files ----------------------------------------------------------------------------------------------------------
def capture(out: Path, only: str, interpret: bool) -> int:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    import adaptivit

    record, begun = Record(only), time.perf_counter()
    for cases in (cases_of_kernels,) if interpret else (cases_of_policies, cases_of_training, cases_of_deit):
        cases(record)
    tree = Path(adaptivit.__file__).parents[1]
    commit = subprocess.run(["git", "-C", str(tree), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    meta = {
        "tree": str(tree),
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": processor(),
        "interpret": interpret,
        "seconds": round(time.perf_counter() - begun, 1),
        "slowest": dict(sorted(record.seconds.items(), key=lambda item: -item[1])[:8]),
    }
    out.write_text(json.dumps({"meta": meta, "failed": record.failed, "values": record.found}, indent=0) + "\n")
    print(f"{out}: {len(record.found)} values of {len(record.seconds)} cases in {meta['seconds']} s, {tree}")
    failed = {key: error for key, error in record.failed.items() if not is_gone(key)}
    for key, error in failed.items():
        print(f"FAILED {key}: {error}")
    return 1 if failed else 0


def is_gone(key: str) -> bool:
    return any(fnmatch.fnmatch(key, pattern) for pattern in GONE)


def processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def compare(before_file: Path, after_file: Path, show: int, only: str) -> int:
    """Counts of equal, renamed, differing and missing values of the cases `only`; 1 where one differs or is missing
    without a reason."""
    files = [json.loads(path.read_text()) for path in (before_file, after_file)]
    for label, file in zip(("before", "after"), files, strict=True):
        meta = file["meta"]
        print(f"{label}: {meta['commit'][:9]} {meta['tree']} torch {meta['torch']} on {meta['machine']}")
    if len({(f["meta"]["torch"], f["meta"]["machine"]) for f in files}) > 1:
        print("note: other versions or machines; values may differ for that reason alone")
    before, after = (
        {k: v for k, v in f["values"].items() if fnmatch.fnmatch(k.partition("/")[0], only)} for f in files
    )
    gone = {key for key in before if is_gone(key)} - after.keys()
    differing = sorted(k for k in before.keys() & after.keys() if before[k] != after[k] and not is_gone(k))
    missing, new = sorted(before.keys() - after.keys() - gone), after.keys() - before.keys()
    renamed = _renamed(missing, new, before, after)
    missing = [key for key in missing if key not in renamed]
    equal = len(before.keys() & after.keys()) - len(differing)
    failed = {key: error for key, error in files[1]["failed"].items() if not is_gone(key)}
    print(
        f"equal {equal}, renamed with equal values {len(renamed)}, differing {len(differing)}, missing {len(missing)}, "
        f"gone {len(gone)}, new {len(new) - len(set(renamed.values()))}, failed {len(failed)}"
    )
    for title, keys in (("differing", differing), ("missing", missing)):
        for case, count in Counter(key.partition("/")[0] for key in keys).items():
            print(f"  {title}: {case} ({count})")
        for key in keys[:show]:
            print(f"    {title}: {key}\n      before {before[key]}\n      after  {after.get(key, '-')}")
    for key, error in list(failed.items())[:show]:
        print(f"    failed: {key}: {error}")
    for pattern, why in GONE.items():
        print(f"  gone: {pattern}: {why}")
    for pair in sorted({(a.rpartition("/")[2], b.rpartition("/")[2]) for a, b in renamed.items()})[:show]:
        print("  renamed: {} -> {}".format(*pair))
    return 1 if differing or missing or failed else 0


def _renamed(missing: list[str], new: set[str], before: dict[str, str], after: dict[str, str]) -> dict[str, str]:
    """Missing keys whose value is there under another last name, in the same case and pass."""
    free: dict[tuple[str, str], list[str]] = {}
    for key in sorted(new):
        free.setdefault((key.rpartition("/")[0], after[key]), []).append(key)
    found = {}
    for key in missing:
        candidates = free.get((key.rpartition("/")[0], before[key]))
        if candidates:
            found[key] = candidates.pop(0)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the fingerprints of the tree that is imported")
    parser.add_argument("--interpret", action="store_true", help="the Triton kernels, in Triton's interpreter")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases to run or to compare (fnmatch)")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--show", type=int, default=20, help="how many names to print of each kind")
    given = parser.parse_args()
    if given.compare:
        return compare(*given.compare, given.show, given.only)
    if not given.out:
        parser.error("one of --out and --compare is needed")
    return capture(given.out, given.only, given.interpret)


if __name__ == "__main__":
    sys.exit(main())

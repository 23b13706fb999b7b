"""Names that differ between versions of adaptivit, for scripts that run on the trees before and after a refactoring.

Everything that depends on a name is here. Each table lists the newest name first. Where a tree renames something, add
the new name in front. snapshot.py and refactor_speed.py import this file; it imports torch and adaptivit only when a
function is called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# Objects: "module:attribute", or "module"; the first that can be imported.
HOMES: dict[str, tuple[str, ...]] = {
    "make": ("policies.spec:make", "settings:make"),
    "parse": ("policies.spec:parse", "settings:parse"),
    "launch": ("kernels.launch", "ops.kernels"),
    "recipe": ("training.recipes:get", "recipes:get"),
    "tables": ("experiments.reproduce.tables:TABLES", "experiments.reproduce.tables:OURS", "reproduce.tables:OURS"),
    "parse_method": ("training.methods:parse_method", "methods:parse_method"),
    "TrainConfig": ("training.config:TrainConfig", "config:TrainConfig"),
    "objective": (
        "training.run:build_objective",
        "training.losses:build_objective",
        "training.losses:objective",
        "training.run:objective",
        "train:objective",
    ),
    "compute_losses": ("training.step:compute_losses", "training.step:judged", "trainer:judged"),
    "Program": ("checkpoint.export:Program", "execution.export:Program", "exporting:Program"),
    "Plan": ("layouts:RowSchedule", "layouts:Plan"),
    "UserError": ("errors:UserError",),
}

# Attributes and keyword arguments: neutral name -> names to try.
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "vit": ("vit", "backbone"),
    "choose": ("choose", "_choose"),  # of a model
    "run": ("run", "_run"),
    "gate_init": ("gate_init", "init_gate", "start_gate", "calibrate"),  # of a policy
    "recompute": ("recompute", "checkpoint_activations", "checkpointed"),  # of a model
    "budget_share": ("cost_target", "budget_share", "share"),  # of a training config or its losses
    "num_prefix_tokens": ("num_prefix_tokens", "prefix"),  # of a trace
    "knob": ("position", "knob"),  # of a point of a calibration curve
}

# What is recorded: name in a tree -> neutral name. Names that are not listed are kept.
DECISION_FIELDS = {
    "share": "readout_weight",
    "weight": "key_weight",
    "own": "self_key_grad",
    "zeroed": "zero_on_exit",
    "sitting": "skipped",
    "into": "target",
    "scale": "source_weight",
    "count": "tokens_left",
}
NOT_RECORDED = {"stays", "left", "alive", "remaining"}  # fields of decisions that a trace leaves out
FACTS: dict[str, str] = {}  # facts of a trace
PARTS: dict[str, str] = {"aux": "asked"}  # parts of the MACs
LOSS_TERMS = {"cost": "budget"}  # names of loss terms
LAYOUT_NAMES: dict[str, str] = {"padded": "cropped"}  # what Output.layout says
POOLED: dict[str, str] = {"alive": "remaining"}  # Trace.pooled

# Facts to ask for: neutral name -> every name that it has had. Unknown ones are not asked for where that is an error.
ASKS: dict[str, tuple[str, ...]] = {}

# Policies: settings and values, old -> new names to try where the old name is not a field of the settings.
SETTINGS: dict[str, tuple[str, ...]] = {
    "stages": ("planner_blocks", "blocks"),
    "first": ("first_block",),
    "start": ("start_at",),
    "supervised": ("halting_blocks",),
    "sample": ("train_budget_range",),
    "decide": ("halt_point",),
    "relative": ("center_per_image",),
    "halted": ("pooled_value",),
    "slope": ("surrogate",),
    "tau": ("surrogate_width",),
    "leave": ("removal",),
}
VALUES: dict[tuple[str, Any], tuple[Any, ...]] = {
    ("feature", "worth"): ("merge_score",),
    ("leave", "fold"): ("merge",),
    ("decide", "between"): ("before_mlp",),
    ("gate", "layer"): ("block",),
}
POLICY_NAMES: dict[str, tuple[str, ...]] = {  # where the first does not have the settings
    "aht": ("aht", "aht_merge"),
}
# Defaults of b85ff43's aht that aht_merge has otherwise.
DEFAULTS: dict[str, dict[str, Any]] = {
    "aht_merge": {"decide": "after", "feature": "fc1", "gate": "shared", "relative": 0.0, "slope": "score", "tau": 0.25}
    | {"start": "depth", "leave": "drop", "gamma": 1.0, "straight_through": False, "spare": 0}
}
RECIPE_NAMES = {"aht-fold": "aht-merge"}  # where the first is not there
TABLE_ROWS = {"feature worth": "feature merge_score"}


class Missing(Exception):
    """This tree has no such name: add it to the tables of snapshot_names.py, or to GONE in snapshot.py."""


@functools.cache
def home(name: str) -> Any:
    """An object of HOMES."""
    for place in HOMES[name]:
        module, _, attribute = place.partition(":")
        with contextlib.suppress(ImportError, AttributeError):
            found = importlib.import_module(f"adaptivit.{module}")
            return getattr(found, attribute) if attribute else found
    raise Missing(f"none of {', '.join(HOMES[name])}")


def attribute(of: Any, name: str) -> str:
    """The name that an attribute has in this tree."""
    for candidate in ATTRIBUTES.get(name, (name,)):
        if hasattr(of, candidate):
            return candidate
    raise Missing(f"{type(of).__name__} has none of {', '.join(ATTRIBUTES.get(name, (name,)))}")


def get(of: Any, name: str) -> Any:
    return getattr(of, attribute(of, name))


def config_value(config: Any, name: str) -> Any:
    """A field of a training config, wherever it is grouped."""
    for candidate in ATTRIBUTES.get(name, (name,)):
        if hasattr(config, candidate):
            return getattr(config, candidate)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            with contextlib.suppress(Missing):
                return config_value(value, name)
    raise Missing(f"{type(config).__name__} has no field {name}")


def _fields(policy: str) -> set[str]:
    return {field.name for field in dataclasses.fields(home("make")(policy, {}))}


def _translated(policy: str, settings: Mapping[str, Any], depth: int) -> dict[str, Any] | None:
    """The settings in this tree's names, or None where this policy cannot say them."""
    fields, error = _fields(policy), home("UserError")
    given = DEFAULTS.get(policy, {}) | settings
    if "spare" in given and "spare" not in fields:  # the blocks behind the spared ones, but for the last
        first = given.pop("spare")
        given.setdefault("supervised", tuple(range(first, depth - 1)))
    made: dict[str, Any] = {}
    for name, value in given.items():
        names = (name, *SETTINGS.get(name, ()))
        known = next((n for n in names if n in fields), None)
        if known is None:
            return None
        for candidate in (value, *VALUES.get((name, value) if not isinstance(value, (list, dict)) else ("", ""), ())):
            try:
                home("make")(policy, made | {known: candidate})
            except error:
                continue
            made[known] = candidate
            break
        else:
            made[known] = value  # it may be valid only together with one that follows
    try:
        home("make")(policy, made)
    except error:
        return None
    return made


def policy_spec(policy: str, settings: Mapping[str, Any], depth: int) -> tuple[str, dict[str, Any]]:
    """A policy and its settings, in the names of b85ff43, as this tree says them; `depth` is the backbone's."""
    error = home("UserError")
    for name in POLICY_NAMES.get(policy, (policy,)):
        with contextlib.suppress(error):
            made = _translated(name, settings, depth)
            if made is not None:
                return name, made
    raise Missing(f"policy {policy} with {dict(settings)}")


def recipe(name: str) -> Any:
    """The training config of a recipe."""
    error = home("UserError")
    with contextlib.suppress(error):
        return home("recipe")(name)
    return home("recipe")(RECIPE_NAMES[name])


def asks(names: Iterable[str]) -> set[str]:
    return {name for neutral in names for name in ASKS.get(neutral, (neutral,))}


def asked_pass(model: Any, images: Any, layout: str, names: set[str]) -> Any:
    """A pass that is asked for facts."""
    try:
        return model(images, layout=layout, aux=names)
    except TypeError:
        return model(images, layout=layout, ask=names)


def method_config(method: str) -> Any:
    """The training config of a method as a table writes it."""
    config = home("TrainConfig")
    try:
        shared = config(data="")
    except TypeError:
        shared = config()
    return home("parse_method")(method, shared)


def losses(model: Any, teacher: Any, objective: Any, images: Any, targets: Any) -> tuple[Any, Any]:
    """(losses, output) of a step in training mode."""
    return home("compute_losses")(model, teacher, objective, images, targets)  # type: ignore[no-any-return]


@contextlib.contextmanager
def kernels_on_cpu() -> Any:
    """Triton kernels run in Triton's interpreter, with TRITON_INTERPRET=1."""
    launch = home("launch")
    before, launch.on_cpu = launch.on_cpu, True
    try:
        yield
    finally:
        launch.on_cpu = before


def planned_pass(model: Any, images: Any, layout: str, plan: Any) -> Any:
    """A pass with a schedule of moves, as capture makes it."""
    return get(model, "run")(get(model, "choose")(layout, images.device), images, plan=plan)


def prepare_interpreter() -> None:
    """Let Triton's interpreter prepare its language once a function: it does so at every call, for most of its time."""
    from triton.runtime import interpreter

    prepare: Callable[..., Any] = interpreter._patch_lang

    class Stays:
        def restore(self) -> None:
            pass

    @functools.cache
    def once(fn: Callable[..., Any]) -> Stays:
        prepare(fn)
        return Stays()

    interpreter._patch_lang = once

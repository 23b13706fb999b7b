"""A method as one word of a command line: a policy, perhaps a recipe, perhaps settings. Nothing here imports torch.

    policy[:item,item,...]      aht   aht:balanced   avit:paper,loss.ponder=1e-3   dynamicvit:keep=0.7

An item without `=` names the recipe whose losses the method trains with. An item with `=` is a setting of the policy
or one of config.LOSSES.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from typing import Any

from ..errors import UserError, unknown
from ..policies import get
from ..policies import spec as settings
from ..utils.settings import defaults, flat
from . import recipes
from .config import LOSSES, TrainConfig, with_settings, wrong_name


def parse_method(spec: str, shared: TrainConfig) -> TrainConfig:
    """The shared recipe with this method's policy and losses; nothing else differs between two methods.

    The losses are those of the recipe that the method names, else of the policy's default recipe, else TrainConfig's.
    A recipe's settings of the policy come along; what the method itself says overrides them.
    """
    policy, _, rest = spec.strip().partition(":")
    record = get(policy)
    if policy == "replay":
        raise UserError("method 'replay': a replay belongs to one batch and cannot be compared; name another policy.")
    named: list[str] = []
    given: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        key, sign, value = (part.strip() for part in item.partition("="))
        if sign:
            given[key] = value
        else:
            named.append(item)
    if len(named) > 1:
        raise UserError(f"method {spec!r}: expected at most one recipe, got {' and '.join(named)}.")
    recipe = _recipe(policy, named[0] if named else None)
    own = {f.name for f in dataclasses.fields(record.settings)}
    values = _items(recipe.policy) | {k: v for k, v in given.items() if k in own}
    losses = {name: value for name, value in flat(recipe).items() if name in LOSSES}
    for key in given.keys() - own:
        if key not in LOSSES:
            raise wrong_name(f"setting or loss of method {policy!r}:", key, own | set(LOSSES))
        losses[key] = given[key]
    text = policy + (":" if values else "") + ",".join(f"{k}={v}" for k, v in values.items())
    settings.parse(text)  # an error for a bad value
    return with_settings(dataclasses.replace(shared, policy=text, recipe=None), losses)


def _recipe(policy: str, name: str | None) -> TrainConfig:
    """The recipe of that name, or the policy's default one, or no recipe at all."""
    if name is None:
        name = get(policy).recipe
        if not name:
            return TrainConfig(data="", policy=policy)
    for known in (f"{policy}-{name}", name):
        if known in recipes.RECIPES and _trains(known, policy):
            return recipes.get(known)
    if name[:1].isdigit():
        raise UserError(f"method {policy!r}: settings are written key=value and lists 3+6, got {name!r}.")
    fitting = [known for known in recipes.RECIPES if _trains(known, policy)]
    raise unknown(f"recipe of method {policy!r}:", name, [known.removeprefix(f"{policy}-") for known in fitting])


def _trains(recipe: str, policy: str) -> bool:
    return recipes.get(recipe).policy.partition(":")[0] == policy


def _items(spec: str) -> dict[str, str]:
    pairs = (item.partition("=") for item in filter(None, spec.partition(":")[2].split(",")))
    return {key.strip(): value.strip() for key, _, value in pairs}


def full_spec(config: TrainConfig) -> str:
    """The method of a configuration written out, without the name of a recipe: parse_method gives the same again."""
    policy = config.policy.partition(":")[0]
    bare = parse_method(policy, config)
    plain: Any = settings.make(policy, {})
    here, there = (settings.make(*settings.parse(c.policy)) for c in (config, bare))
    items = {}
    for f in dataclasses.fields(plain):
        value = getattr(here, f.name)
        written = f.name in _items(config.policy)  # training does not set a gate that is written down
        if written or value != getattr(plain, f.name) or value != getattr(there, f.name):
            text = "+".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
            items[f.name] = "none" if value is None else text
    usual, there = defaults(TrainConfig), flat(bare)
    for name, value in flat(config).items():
        if name in LOSSES and (value != usual[name] or value != there[name]):
            items[name] = str(value)
    return policy + (":" if items else "") + ",".join(f"{k}={v}" for k, v in items.items())


def slug(spec: str, seed: int) -> str:
    """A readable file name for a method and a seed, unique by a hash of the method."""
    words = re.sub(r"[^A-Za-z0-9.=+]+", "-", spec).strip("-.")[:60]
    return f"{words}-{hashlib.sha256(spec.encode()).hexdigest()[:6]}-seed{seed}"

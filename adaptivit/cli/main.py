"""The command line, generated from the frozen dataclasses in config.py. --help does not import torch."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from .. import __version__
from ..checkpoint.export_config import ExportConfig
from ..errors import UserError, unknown
from ..experiments.benchmark.config import BenchmarkConfig
from ..experiments.calibrate_config import CalibrateConfig
from ..experiments.compare.config import CompareConfig
from ..experiments.quickstart_config import QuickstartConfig
from ..experiments.reproduce.plan import ReproduceConfig
from ..experiments.sweep.config import SweepConfig, from_recipe
from ..policies import get, names
from ..policies.spec import describe
from ..serve.config import DemoConfig, ServeConfig
from ..training.config import GROUPS, RENAMED, TrainConfig
from ..utils.settings import kinds
from .config import EvaluateConfig, PredictConfig
from .recipes import RecipesConfig
from .visualize_config import VisualizeConfig

_COMMANDS: dict[str, tuple[type, str]] = {
    "quickstart": (QuickstartConfig, "see it work in two minutes, with no file and no download"),
    "train": (TrainConfig, "fine-tune a backbone into an adaptive model"),
    "compare": (CompareConfig, "many methods under one recipe: table, CSV and Pareto plot"),
    "recipes": (RecipesConfig, "every recipe, or one with all its settings"),
    "reproduce": (ReproduceConfig, "run a table or figure of ours or of a paper again"),
    "sweep": (SweepConfig, "search over settings on the validation images"),
    "evaluate": (EvaluateConfig, "accuracy, cost and depth on labelled images"),
    "calibrate": (CalibrateConfig, "set what a checkpoint costs: a budget in MACs, percent or ms"),
    "predict": (PredictConfig, "classes, probabilities and cost of images"),
    "visualize": (VisualizeConfig, "see which tokens stop, skip or merge: pictures and an HTML report"),
    "export": (ExportConfig, "ONNX or .pt2, compared with the model before it is written"),
    "serve": (ServeConfig, "answer HTTP requests with a checkpoint, batch by batch of tokens"),
    "demo": (DemoConfig, "a page that shows which tokens leave where, with a small model of its own"),
    "benchmark": (BenchmarkConfig, "throughput and latency beside static baselines, in one run"),
}

# Flags with several values.
_LISTS = (
    *("--methods", "--seeds", "--space", "--only", "--set", "--images", "--hosts"),
    *("--backbones", "--policies", "--profile", "--layouts", "--batch-sizes", "--dtypes", "--static-modes"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: exit code 0, or 2 with one line for a user's mistake, 130 when interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _run(given)
    except UserError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        print("interrupted" + ("; go on with --resume" if given[:1] == ["train"] else ""), file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # `adaptivit ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if error.errno is None:
            raise
        _fail(f"{error.strerror}: {error.filename or ''}".rstrip(": "))


def _fail(line: str) -> None:
    print("adaptivit: " + " ".join(line.split()), file=sys.stderr)
    raise SystemExit(2)


def _run(given: list[str]) -> None:
    if not given or given[0] in ("-h", "--help"):
        print(_overview())
        return
    if given[0] in ("-V", "--version"):
        print(f"adaptivit {__version__}")
        return
    command, rest = given[0], given[1:]
    if command not in _COMMANDS:
        raise unknown("command", command, _COMMANDS)
    if "-h" in rest or "--help" in rest:
        _help(command, rest)
    else:
        _runner(command)(_parse(command, rest))


def _joined(rest: list[str]) -> list[str]:
    """`--budget -33%` as one word, since a value may not look like a flag."""
    words: list[str] = []
    for word in rest:
        if words and words[-1] in ("--budget", "--max-macs") and word[:1] in "-−" and word[1:2].isdigit():
            words[-1] += "=" + word
        else:
            words.append(word)
    return words


def _parse(command: str, rest: list[str]) -> Any:
    rest = _joined(rest)
    flags = [word.partition("=")[0] for word in rest if word.startswith("--")]
    twice = next((flag for flag in flags if flags.count(flag) > 1), "")
    if twice in _LISTS:  # of other flags the last one counts
        raise UserError(f"{twice} was given {flags.count(twice)} times; give all its values after one.")
    cls = _COMMANDS[command][0]
    if command in ("train", "compare", "sweep"):
        for flag in flags:
            if (said := _old_flag(flag, cls)) is not None:
                raise UserError(said)
    default: Any = None
    if command == "train":
        name = _recipe_name(rest)
        if name is not None:
            from dataclasses import replace

            from ..training.recipes import get

            default = replace(get(name), recipe=name, data=tyro.MISSING)
    if command == "sweep" and (name := _recipe_name(rest)) is not None:
        default = from_recipe(name)
    if default is not None:
        return tyro.cli(cls, args=rest, default=default, prog=f"adaptivit {command}")
    return tyro.cli(cls, args=rest, prog=f"adaptivit {command}")


def _old_flag(flag: str, cls: type) -> str | None:
    """What a flag from before 0.2 is called now."""
    name = flag[2:].replace("-", "_")
    no, name = name.startswith("no_"), name.removeprefix("no_")
    if name not in RENAMED or (name in kinds(cls) and name not in GROUPS):
        return None
    group, dot, key = RENAMED[name].rpartition(".")
    new = f"--{group}{dot}{'no-' * no}{key}".replace("_", "-")
    return f"{flag} is {new} now." if key else f"{flag} is gone; see CHANGELOG.md."


def _recipe_name(rest: list[str]) -> str | None:
    for i, word in enumerate(rest):
        if word == "--recipe" and i + 1 < len(rest):
            return rest[i + 1]
        if word.startswith("--recipe="):
            return word.partition("=")[2]
    return None


def _help(command: str, rest: list[str]) -> None:
    """tyro's help, then the policies' settings and the recipes."""
    with contextlib.suppress(SystemExit):
        _parse(command, rest)
    if command in ("train", "compare", "sweep", "evaluate", "predict", "visualize", "serve", "benchmark"):
        print(_policies())
    if command in ("train", "compare", "sweep"):
        print(_recipes("policy:NAME" if command == "compare" else "--recipe NAME; other flags override"))


def _overview() -> str:
    lines = ["adaptivit: Vision Transformers that spend work where the image needs it.", "", "commands:"]
    lines += [f"  {name:<12}{text}" for name, (_, text) in _COMMANDS.items()]
    return "\n".join([*lines, "", "adaptivit COMMAND --help shows every setting with its default and meaning."])


def _policies() -> str:
    lines = ["policies and their settings, written as name:key=value,key=value"]
    for name in names():
        cls = get(name).settings
        lines.append(f"\n  {name}: {(cls.__doc__ or '').splitlines()[0]}")
        for key, default, meaning in describe(cls):
            lines.append(f"    {key} = {default!r}\n        {meaning}")
    return "\n".join(lines) + "\n"


def _recipes(how: str) -> str:
    from ..training.recipes import listing

    return f"recipes ({how})\n{listing()}\n"


def _runner(command: str) -> Callable[[Any], None]:
    if command == "quickstart":
        from ..experiments.quickstart import quickstart

        return quickstart
    if command == "sweep":
        from ..experiments.sweep.run import sweep

        return sweep
    if command == "recipes":
        from .recipes import run as recipes

        return recipes
    if command == "reproduce":
        from ..experiments.reproduce.command import reproduce

        return reproduce
    from . import commands

    run: Callable[[Any], None] = getattr(commands, command)
    return run

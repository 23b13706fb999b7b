"""The command line: finds the command's module, parses its flags, runs it. --help does not import torch."""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import sys
import typing
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import UserError, unknown

if TYPE_CHECKING:
    from .command import Command

# The modules of this package that are commands, in the order of --help.
COMMANDS = (
    *("quickstart", "apply", "train", "compare", "recipes", "reproduce", "sweep", "evaluate", "calibrate", "predict"),
    *("visualize", "export", "serve", "demo", "benchmark"),
)
_INLINE = ("model.", "train.", "limits.", "curve.")  # groups whose flags have no prefix


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: exit code 0, or 2 with one line for a user's mistake, 130 when interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _run(given)
    except UserError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        print("interrupted" + ("; go on with --resume" if "train" in given else ""), file=sys.stderr)
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
    words = _imported(given)
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return
    if words[0] in ("-V", "--version"):
        print(f"adaptivit {__version__}")
        return
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        raise unknown("command", name, COMMANDS)
    command: Command = importlib.import_module(f".{name}", __package__).COMMAND
    if "-h" in rest or "--help" in rest:
        _help(name, command, rest)
    else:
        from .checks import check

        config = _parse(name, command, rest)
        check(config)
        command.run(config, *([_flags(rest)] if command.of_policy else []))


def _imported(given: list[str]) -> list[str]:
    """Import what follows --import, which registers policies and tasks; returns the other words."""
    words, found, rest = [], [], iter(given)
    for word in rest:
        if word == "--import" or word.startswith("--import="):
            found.append(word.partition("=")[2] or next(rest, ""))
        else:
            words.append(word)
    if found:
        from ..utils.imports import import_file_or_module

        for source in found:
            import_file_or_module(source)
    return words


def _parse(name: str, command: Command, rest: list[str]) -> Any:
    """Parse the words of a command into its configuration."""
    import tyro

    words: list[str] = []
    for word in rest:  # `--budget -33%` as one word, since a value may not look like a flag
        if words and words[-1] in ("--budget", "--max-macs") and word[:1] in "-−" and word[1:2].isdigit():
            words[-1] += "=" + word
        else:
            words.append(word)
    flags = _flags(words)
    _check_flags(command, flags)
    given: dict[str, Any] = {}
    if command.of_recipe is not None and "--recipe" in flags:
        i = next(i for i, word in enumerate(words) if word.partition("=")[0] == "--recipe")
        recipe = words[i].partition("=")[2] or (words[i + 1] if i + 1 < len(words) else "")
        given = {"default": command.of_recipe(recipe)}
    elif command.of_policy is not None and not {"-h", "--help"} & set(words):
        given = {"default": command.of_policy(_taken(words, "--policy"))}
    return tyro.cli(command.config, args=words, prog=f"adaptivit {name}", **given)


def _flags(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("--")]


def _taken(words: list[str], flag: str) -> str | None:
    """Take a flag out of the words; returns its last value."""
    value = None
    while flag in (flags := [word.partition("=")[0] for word in words]):
        word = words.pop(i := flags.index(flag))
        value = word.partition("=")[2] if "=" in word else words.pop(i) if i < len(words) else ""
    return value


def _check_flags(command: Command, flags: list[str]) -> None:
    """Refuse lists given twice, since tyro would take the last alone, and flags from before 0.2."""
    from ..training.config import RENAMED
    from ..utils.settings import kinds

    valid = {}
    for name, kind in kinds(command.config).items():
        group = next((g for g in _INLINE if name.startswith(g)), "")
        valid["--" + name.removeprefix(group).replace("_", "-")] = kind
    for flag in flags:
        if flags.count(flag) > 1 and typing.get_origin(valid.get(flag)) is tuple:
            raise UserError(f"{flag} was given {flags.count(flag)} times; give all its values after one.")
        name = flag[2:].replace("-", "_")
        new = RENAMED.get(name.removeprefix("no_"))
        if flag in valid or new is None or "--optim.lr" not in valid:
            continue
        if not new:
            raise UserError(f"{flag} is gone; see CHANGELOG.md.")
        if name == "budget":
            aim = "Training aims at a cost by --loss.cost-target 0.67; the weight of that loss is --loss.cost."
            raise UserError(f"--budget sets the cost of a trained model: adaptivit calibrate RUN --budget -33%. {aim}")
        group, dot, key = new.rpartition(".")
        raise UserError(f"{flag} is --{group}{dot}{'no-' * name.startswith('no_')}{key} now.".replace("_", "-"))


def _help(name: str, command: Command, rest: list[str]) -> None:
    """tyro's help, then the policies' settings and the recipes."""
    with contextlib.suppress(SystemExit):
        _parse(name, command, rest)
    if command.policies:
        print(_policies())
    if command.recipes:
        from ..training.recipes import listing

        print(f"recipes ({command.recipes})\n{listing()}\n")


def _overview() -> str:
    lines = ["adaptivit: Vision Transformers that spend work where the image needs it.", "", "commands:"]
    for name in COMMANDS:  # without importing them
        text = ast.get_docstring(ast.parse(files(__package__).joinpath(f"{name}.py").read_text())) or ""
        lines.append(f"  {name:<12}{text.splitlines()[0].rstrip('.')}")
    lines += ["", "adaptivit COMMAND --help shows every setting with its default and meaning."]
    lines.append("adaptivit --import FILE COMMAND first imports a file or module that registers policies or tasks.")
    return "\n".join(lines)


def _policies() -> str:
    from ..policies import get, names
    from ..policies.spec import describe

    lines = ["policies and their settings, written as name:key=value,key=value; --import FILE adds policies"]
    for name in names():
        cls = get(name).settings
        lines.append(f"\n  {name}: {(cls.__doc__ or '').splitlines()[0]}")
        for key, default, meaning in describe(cls):
            lines.append(f"    {key} = {default!r}\n        {meaning}")
    return "\n".join(lines) + "\n"

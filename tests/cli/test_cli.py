"""The command line: help without torch, every setting with its meaning, mistakes in one line with exit code 2."""

from __future__ import annotations

import dataclasses
import importlib
import os
import pickle
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import adaptivit
from adaptivit.cli.main import COMMANDS
from adaptivit.errors import UserError
from adaptivit.policies import BUILT_IN, registry
from adaptivit.policies.spec import describe
from adaptivit.training.config import RENAMED
from adaptivit.training.recipes import RECIPES
from tests.support.commands import SMALL, refused, run, static
from tests.support.data_sets import folder
from tests.support.training import named

CONFIGS = {name: importlib.import_module(f"adaptivit.cli.{name}").COMMAND for name in COMMANDS}
POSITIONAL = (
    *(("predict", "images"), ("recipes", "name"), ("reproduce", "table")),
    *(("visualize", "checkpoint"), ("calibrate", "checkpoint"), ("export", "checkpoint")),
    *(("serve", "checkpoint"), ("demo", "checkpoint")),
)


def unframed(text: str) -> str:
    """Without frames and line breaks, which depend on the width of the terminal."""
    return " ".join(re.sub(r"[│╭╮╰╯─]|\x1b\[[0-9;]*m", " ", text).split())


def settings_of(cls: type, group: str = "") -> Iterator[tuple[str, Any, str]]:
    """(name, default, meaning) of every setting, those in groups of flags included."""
    kinds = typing.get_type_hints(cls)
    for name, default, meaning in describe(cls):
        if dataclasses.is_dataclass(kinds[name]):
            inside = "" if name in ("model", "train", "limits", "curve") else f"{name}."
            yield from settings_of(kinds[name], inside)
        else:
            yield group + name, default, meaning


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


# -- help -----------------------------------------------------------------------------------------------------------
def test_the_overview_names_every_command(capsys: Any) -> None:
    for words in ([], ["-h"], ["--help"]):
        assert run(*words) == 0
        printed = capsys.readouterr().out
        for name in COMMANDS:  # its docstring is its line
            text = importlib.import_module(f"adaptivit.cli.{name}").__doc__ or ""
            assert f"  {name:<12}{text.splitlines()[0].rstrip('.')}\n" in printed


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("command", CONFIGS)
def test_help_lists_every_setting_with_its_meaning_and_default(capsys: Any, command: str) -> None:
    assert run(command, "--help") == 0
    printed = unframed(capsys.readouterr().out)
    for name, default, meaning in settings_of(CONFIGS[command].config):
        assert meaning, f"{name} has no meaning"
        assert unframed(meaning) in printed, f"the meaning of {name} is not shown"
        flag = "--" + name.replace("_", "-")
        assert flag in printed or (command, name) in POSITIONAL
        if default is not dataclasses.MISSING and not isinstance(default, bool):
            shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
            assert f"(default: {shown})" in printed
    flags = {name for name, _, _ in settings_of(CONFIGS[command].config)}
    assert CONFIGS[command].policies == bool(flags & {"policy", "policies", "methods"})
    if CONFIGS[command].policies:
        for policy, record in BUILT_IN.items():
            cls = record.settings
            assert f"{policy}: " in printed
            for name, default, meaning in describe(cls):
                assert meaning
                assert f"{name} = {default!r} {unframed(meaning)}" in printed
    if command in ("train", "compare", "sweep"):
        for name, recipe in RECIPES.items():
            assert unframed(f"{name}: {recipe.title}") in printed


@pytest.mark.usefixtures("wide")
def test_help_with_a_recipe_shows_its_values(capsys: Any) -> None:
    assert run("train", "--recipe", "aht-balanced", "--help") == 0
    printed = unframed(capsys.readouterr().out)
    assert "(default: 0.05)" in printed
    assert "(default: 1024)" in printed
    assert run("sweep", "--recipe", "dynamicvit", "--help") == 0
    assert "(default: 30)" in unframed(capsys.readouterr().out)


def test_help_and_version_do_not_import_torch() -> None:
    code = (
        "import sys; from adaptivit.cli.main import main\n"
        "main(['--help']); main(['--version'])\n"
        "from adaptivit.cli.main import COMMANDS\n"
        "for name in COMMANDS: main([name, '--help'])\n"
        "for words in (['reproduce'], ['recipes'], ['recipes', 'amod']): main(words)\n"
        "main(['train', '--recipe', 'aht-balanced', '--help'])\n"
        "slow = {'torch', 'timm', 'torchvision', 'accelerate', 'sklearn', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "assert not slow, slow"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_python_m_adaptivit() -> None:
    words = [sys.executable, "-m", "adaptivit"]
    done = subprocess.run([*words, "--version"], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"adaptivit {adaptivit.__version__}\n", "")
    done = subprocess.run([*words, "trian"], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Did you mean 'train'?" in done.stderr
    assert "Traceback" not in done.stderr


# -- mistakes -------------------------------------------------------------------------------------------------------
def test_an_unknown_name_suggests_the_nearest(tmp_path: Path, capsys: Any) -> None:
    assert "Did you mean 'evaluate'?" in refused(capsys, "evalute")
    where = folder(tmp_path / "in")
    start = ("train", "--data", where, "--out", tmp_path / "out", *SMALL)
    assert "Did you mean 'aht-balanced'?" in refused(capsys, *start, "--recipe", "aht-balance")
    assert "Did you mean 'aht-balanced'?" in refused(capsys, *start, "--recipe=aht-balance")
    assert "Did you mean 'avit'?" in refused(capsys, *start, "--policy", "avitt")
    assert "Did you mean 'threshold'?" in refused(capsys, *start, "--policy", "aht:treshold=0.9")
    assert "Did you mean 'fc1'?" in refused(capsys, *start, "--policy", "aht_merge:feature=fc2")
    assert "test_vit" in refused(capsys, *start, "--backbone", "test_vitt")
    assert not (tmp_path / "out").exists()


def test_a_budget_is_a_cost_everywhere(capsys: Any) -> None:
    """Also where there is none: once it was the weight of a loss."""
    for command in ("train", "compare", "sweep"):
        line = refused(capsys, command, "--data", "x", "--budget", "-33%")
        assert "calibrate RUN --budget -33%" in line
        assert "--loss.cost-target 0.67" in line


def test_an_unknown_flag_or_choice_is_named(tmp_path: Path, capsys: Any) -> None:
    for words, bad in (
        (("train", "--dta", "x"), "--dta"),
        (("train", "--data", "x", "--augment.kind", "much"), "much"),
        (("train", "--data", "x", "--epochs", "many"), "many"),
        (("train",), "--data"),
        (("predict",), "image"),
        (("evaluate", "--data", "x", "--layout", "mask"), "mask"),
    ):
        assert run(*words) == 2
        printed = capsys.readouterr()
        assert bad in printed.out + printed.err
        assert "Traceback" not in printed.out + printed.err


POLICIES = {
    "aht:threshold=0": "threshold: expected a number > 0, got 0",
    "aht:threshold=nan": "threshold: expected a finite number, got nan",
    "aht:threshold=high": "threshold: expected a number, got 'high'",
    "aht:eps=2": "eps: expected 0 <= eps < threshold",
    "aht:surrogate_width=0": "surrogate_width: expected a number > 0",
    "aht:index=-1": "index: expected a number >= 0",
    "aht:index=1.5": "index: expected a whole number",
    "aht:index=100000": "index",
    "aht:planner_blocks=0+3": "planner_blocks: expected block numbers",
    "aht:planner_blocks=3+3": "planner_blocks: expected different",
    "aht:straight_through=maybe": "straight_through: expected true or false",
    "aht:stages=3": "aht: the setting stages is called planner_blocks now",
    "aht:feature=worth": "aht: feature is a setting of the policy aht_merge now",
    "aht:plan_weight=1": "aht: the setting plan_weight is gone",
    "aht:threshold": "expected name:key=value",
    "avit:eps=1": "eps: expected 0 <= eps < 1",
    "replay": "replay",
    "replay:trace=nowhere": "nowhere",
}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_bad_policy_setting_is_one_line(tmp_path: Path, capsys: Any, policy: str) -> None:
    where, out = folder(tmp_path / "in"), tmp_path / "out"
    assert POLICIES[policy] in refused(capsys, "train", "--data", where, "--out", out, *SMALL, "--policy", policy)
    assert not out.exists()
    assert POLICIES[policy] in refused(
        capsys, "evaluate", "--data", where, "--backbone", "test_vit", "--policy", policy
    )


VALUES = [(n, 0) for n in ("epochs", "batch_size", "log_steps", "lr", "sigma", "cost_target")]
VALUES += [(n, -1) for n in ("min_lr", "warmup_epochs", "weight_decay", "clip_grad", "ponder", "target_depth", "prior")]
VALUES += [(n, -1) for n in ("cost", "distill", "mixup", "cutmix", "workers", "checkpoint_steps", "rand_magnitude")]
VALUES += [(n, -1) for n in ("task", "ratio", "exits", "expected", "geometric", "features", "freeze_epochs")]
VALUES += [("backbone_lr", -1)]
VALUES += [(n, 1) for n in ("val_split", "drop_path", "label_smoothing", "erasing", "ema")]
VALUES += [("rand_magnitude", 31), ("cost_target", 1.5), ("lr", float("nan")), ("seed", -1), ("img_size", 0)]


def flag(name: str) -> str:
    return "--" + RENAMED.get(name, name).replace("_", "-")


@pytest.mark.parametrize(("name", "value"), VALUES)
def test_a_bad_training_value_is_named(tmp_path: Path, capsys: Any, name: str, value: Any) -> None:
    with pytest.raises(UserError, match=name):
        named(**{name: value})
    where = folder(tmp_path / "in", each=3)
    assert run("train", "--data", where, "--out", tmp_path / "out", *SMALL, flag(name), value) == 2
    assert name in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("command", "name", "value"),
    [
        ("evaluate", "batch_size", 0),
        ("evaluate", "limit", 0),
        ("evaluate", "workers", -1),
        ("predict", "batch_size", 0),
        ("predict", "top_k", 0),
        ("quickstart", "seed", -1),
    ],
)
def test_a_bad_value_of_another_command_is_named(
    tmp_path: Path, capsys: Any, command: str, name: str, value: int
) -> None:
    where, model = folder(tmp_path / "in", each=1), static(tmp_path / "model")
    words = {"evaluate": ("--data", where, "--checkpoint", model), "predict": (where, "--checkpoint", model)}
    assert run(command, *words.get(command, ("--fast", "--out", tmp_path / "out")), flag(name), value) == 2
    assert name in capsys.readouterr().err


def test_a_bad_value_is_one_line(capsys: Any) -> None:
    assert "epochs: expected at least 1, got 0." in refused(capsys, "train", "--data", "x", "--epochs", 0)
    assert "top_k: expected at least 1, got 0." in refused(capsys, "predict", "x", "--top-k", 0)


def test_an_interruption_names_resume_where_there_is_one(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def stop(given: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("adaptivit.cli.main._run", stop)
    assert run("train", "--data", "x") == 130
    assert capsys.readouterr().err == "interrupted; go on with --resume\n"
    assert run("calibrate", "x") == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_flags_that_do_not_go_together(tmp_path: Path, capsys: Any) -> None:
    where, model = folder(tmp_path / "in", each=1), static(tmp_path / "model")
    start = ("evaluate", "--data", where, "--checkpoint")
    assert "--checkpoint DIR or --backbone" in refused(capsys, "evaluate", "--data", where)
    assert "--checkpoint DIR or --backbone" in refused(capsys, *start, model, "--backbone", "test_vit")
    assert "leave those flags out" in refused(capsys, *start, model, "--policy", "aht")
    assert "no config.json" in refused(capsys, *start, tmp_path / "nowhere")
    assert "no config.json" in refused(capsys, *start, model, "--compare-to", tmp_path / "nowhere")
    assert "--format" in refused(capsys, "predict", where, "--checkpoint", model, "--out", tmp_path / "p.txt")
    other = static(tmp_path / "two", classes=2)
    assert "3 classes, the model 2" in refused(capsys, *start, other)


@pytest.mark.parametrize("size", [-32, 8, 33])
def test_an_image_size_that_cannot_be(tmp_path: Path, capsys: Any, size: int) -> None:
    """33 is no multiple of the patch, 8 is smaller than one: refused or trained, no traceback."""
    words = ("--data", folder(tmp_path / "in"), "--out", tmp_path / "out", *SMALL, "--policy", "static")
    assert run("train", *words, "--img-size", size) in (0, 2)


class Boom:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("this-ran",))


def test_weights_that_cannot_be_used(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    where = folder(tmp_path / "in")
    start = ("train", "--data", where, "--out", tmp_path / "out", *SMALL, "--weights")
    (tmp_path / "code.pth").write_bytes(pickle.dumps({"head.weight": Boom()}, protocol=2))
    (tmp_path / "code4.pth").write_bytes(pickle.dumps({"head.weight": Boom()}, protocol=4))
    (tmp_path / "text.pth").write_text("no weights")
    (tmp_path / "text.safetensors").write_text("no weights")
    torch.save({"pos_embed": torch.zeros(1, 5, 7)}, tmp_path / "other.pth")
    torch.save({"pos_embed": torch.zeros(1, 5, 7), "f": Boom()}, tmp_path / "code2.pth")
    for name, message in (
        ("code.pth", "would run code"),
        ("code2.pth", "would run code"),
        ("code4.pth", "code4.pth"),
        ("text.pth", "text.pth"),
        ("text.safetensors", "text.safetensors"),
        ("other.pth", "do not fit"),
        ("nowhere.pth", "not found"),
    ):
        assert message in refused(capsys, *start, tmp_path / name)
    assert not (tmp_path / "this-ran").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there(tmp_path: Path, capsys: Any) -> None:
    where, model = folder(tmp_path / "in"), static(tmp_path / "model")
    for words in (
        ("train", "--data", where, "--out", tmp_path / "out", *SMALL),
        ("evaluate", "--data", where, "--checkpoint", model),
        ("predict", where / "a", "--checkpoint", model),
    ):
        assert "no GPU" in refused(capsys, *words, "--device", "cuda")
    assert not (tmp_path / "out").exists()


# -- --import -------------------------------------------------------------------------------------------------------
MINE = """
import adaptivit
from dataclasses import dataclass

@dataclass(frozen=True)
class Settings:
    \'\'\'Every second patch leaves.\'\'\'

    after: int = 1
    \'\'\'After this block.\'\'\'

@adaptivit.register_policy("mine_cli", Settings)
class Mine(adaptivit.Policy):
    pass
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(registry.PLUGINS, "registered", {})
    path = tmp_path / "my_policy.py"
    path.write_text(MINE.replace("\\'", "'"))
    return path


@pytest.mark.usefixtures("wide")
def test_a_policy_of_a_file_is_in_the_help_and_can_be_named(mine: Path, capsys: Any) -> None:
    for words in (("--import", mine, "evaluate", "--help"), ("evaluate", f"--import={mine}", "--help")):
        assert run(*words) == 0
        printed = unframed(capsys.readouterr().out)
        assert "mine_cli: Every second patch leaves." in printed
        assert "after = 1 After this block." in printed
    given = ("evaluate", "--data", "x", "--backbone", "test_vit", "--import", mine)
    assert "Did you mean 'after'?" in refused(capsys, *given, "--policy", "mine_cli:aftr=2")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("gone.py", None, "there is no file"),
        ("not a module", None, "expected a file my_policy.py or a module"),
        ("no_such_module_here", None, "ModuleNotFoundError"),
        ("bad.py", "x = 1\ny = 1 / 0\n", "bad.py, line 2: ZeroDivisionError: division by zero"),
        ("wrong.py", "def f(:\n", "SyntaxError"),
        ("taken.py", "import adaptivit\nadaptivit.register_policy('aht')\n", "The policy 'aht' is built in"),
    ],
)
def test_what_cannot_be_imported_is_said_in_a_line(
    tmp_path: Path, capsys: Any, name: str, text: str | None, message: str
) -> None:
    source = str(tmp_path / name) if name.endswith(".py") else name
    if text is not None:
        Path(source).write_text(text)
    assert message in refused(capsys, "--import", source, "train", "--data", "x")

"""The documentation holds: links lead somewhere, names and paths exist, commands parse, snippets run.

A fence after `<!-- test: gpu -->` or `<!-- test: hub -->` needs what is not here: test_untested.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import runpy
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import adaptivit
from adaptivit.cli import main as cli
from adaptivit.policies import registry

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    str(page.relative_to(ROOT)): page.read_text()
    for page in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(page for page in sorted(DOCS.rglob("*.md")) if "raw" not in page.parts),
    ]
}
FENCE = re.compile(r"^(<!-- test: (\w+) -->\n)?```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
OTHER_COMMANDS = (
    "pip install ",
    "uv sync",
    "uv run pytest",
    "uv run ruff",
    "uv run mypy",
    "uv run pre-commit",
    "uv run lint-imports",
    "uv run zensical",
)
PLACES = ("adaptivit/", "benchmarks/", "docs/", "tests/")  # a path in code font that starts so exists
# Commands that end within seconds on the stand-ins, and what makes a training as short.
QUICK = ("apply", "recipes", "evaluate", "predict", "calibrate", "train", "visualize")
SHORT = {"apply": "--img-size 64", "train": "--img-size 32 --epochs 1 --batch-size 4 --workers 0 --device cpu"}


def fences(page: str, kind: str) -> list[str]:
    """The blocks of a page that this machine can run."""
    return [text for _, needs, language, text in FENCE.findall(PAGES[page]) if language == kind and not needs]


def prose(page: str) -> str:
    return FENCE.sub("", PAGES[page])


def links(page: str) -> list[tuple[Path, str]]:
    """(file, anchor) of every relative link of a page."""
    found = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(page))
    parts = [target.partition("#") for target in found if "://" not in target and not target.startswith("mailto:")]
    here = ROOT / page
    return [((here.parent / path).resolve() if path else here, anchor) for path, _, anchor in parts]


def headings(page: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", PAGES[page]), re.MULTILINE)
    titles = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links(page: str) -> None:
    for target, anchor in links(page):
        assert target.exists(), f"{page} links to {target}, which is not there"
        if page.startswith("docs/"):
            assert target.is_relative_to(DOCS), f"{page} links to {target}, which is not on the site"
        if anchor:
            assert anchor in headings(str(target.relative_to(ROOT))), f"{page}: {target.name} has no heading #{anchor}"


@pytest.mark.parametrize("page", PAGES)
def test_names_and_paths(page: str) -> None:
    for name in re.findall(r"\]\[(adaptivit[\w.]*)\]", prose(page)):
        assert defined(name), f"{page}: there is no {name}"
    for path in re.findall(r"`([\w./-]+/[\w./-]*)`", prose(page)):
        if path.startswith(PLACES) and "NAME" not in path:
            assert (ROOT / path).exists(), f"{page}: there is no {path}"


@functools.cache
def tree(file: Path) -> list[Any]:
    return ast.parse(file.read_text()).body


def defined(name: str) -> bool:
    """Whether a dotted name is a module, or a function or class of one."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:cut])
        file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        if not file.exists():
            continue
        body = tree(file)
        for part in parts[cut:]:
            found = [node for node in body if getattr(node, "name", None) == part]
            if not found:
                return False
            body = found[0].body
        return True
    return False


def test_every_page_is_on_the_site() -> None:
    def targets(entries: list[dict[str, Any]]) -> Iterator[str]:
        for entry in entries:
            for value in entry.values():
                yield from [value] if isinstance(value, str) else targets(value)

    listed = list(targets(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]))
    assert sorted(f"docs/{target}" for target in listed) == sorted(page for page in PAGES if page.startswith("docs/"))


def test_readme_is_short() -> None:
    text = PAGES["README.md"]
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 1200
    assert "pip install -q uv && uv run adaptivit quickstart" in text
    assert "pip install -q uv && uv run pytest" in text


def test_untested() -> None:
    """Fences that do not run here: their number is known, so that none is added by accident."""
    found = [(page, needs) for page in PAGES for _, needs, _, _ in FENCE.findall(PAGES[page]) if needs]
    assert found == [("docs/guide/checkpoints.md", "hub"), ("docs/guide/gpu.md", "gpu")]
    languages = {language for page in PAGES for _, _, language, _ in FENCE.findall(PAGES[page])}
    assert languages <= {"", "sh", "python", "bash", "console"}


def commands(page: str) -> list[list[str]]:
    """The words after `adaptivit` of every command of a page."""
    lines = [line for text in fences(page, "sh") for line in text.splitlines()]
    spans = re.findall(r"`(adaptivit (?:reproduce [a-z]|evaluate --)[^`]*)`", prose(page)) if "results" in page else []
    found = []
    for line in [*lines, *(span for span in spans if "..." not in span)]:
        line = re.split(r" # |^#", line)[0].replace("pip install -q uv && ", "").strip()
        words = shlex.split(line)
        if "adaptivit" in words:
            found.append(words[words.index("adaptivit") + 1 :])
        elif words and words[0].startswith("python"):
            assert (ROOT / words[1]).exists(), f"{page}: {line}"
        elif line:
            assert line.startswith(OTHER_COMMANDS), f"{page}: {line}"
    return found


COMMANDS = {page: found for page in PAGES if (found := commands(page))}


def parse(words: list[str]) -> Any:
    name, *rest = cli._imported(words)
    return cli._parse(name, importlib.import_module(f"adaptivit.cli.{name}").COMMAND, rest)


@pytest.mark.parametrize("page", COMMANDS)
def test_commands_parse(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("deit_tiny.safetensors", "DEIT_TINY", "my_policy.py"):
        Path(name).touch()
    for name in ("sweep/best.json", *(f"{policy}/config.json" for policy in ("aht", "mod", "amod", "avit"))):
        name = f"runs/{name}"
        Path(name).parent.mkdir(parents=True)
        Path(name).write_text('{"recipe": {"optim.lr": 0.0003}}')
    for words in COMMANDS[page]:
        try:
            check(parse(words))
        except (SystemExit, adaptivit.UserError) as error:
            raise AssertionError(f"{page}: adaptivit {shlex.join(words)}: {error}") from error


def check(config: Any) -> None:
    """What a command looks at after parsing: policies, methods, axes of a sweep, rows of a table."""
    from adaptivit.experiments.compare import run as compare
    from adaptivit.experiments.reproduce import plan as reproduce
    from adaptivit.experiments.sweep import space
    from adaptivit.policies.spec import parse as policy

    match type(config).__name__:
        case "CompareConfig":
            compare.plan(config)
        case "ReproduceConfig":
            if config.table:
                reproduce.plan(config)
        case "SweepConfig":
            space.parse(config.space, config.train)
    for spec in (getattr(config, "policy", None), *getattr(config, "policies", ())):
        if spec and not spec.startswith("top_attended"):
            policy(spec)


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny stand-ins for what pages name: weights, checkpoints, photos."""
    place = tmp_path_factory.mktemp("stand_ins")
    torch.manual_seed(0)
    vit = timm.create_model("deit_tiny_patch16_224", num_classes=2)
    save_file(vit.state_dict(), place / "deit_tiny.safetensors")
    generator = np.random.default_rng(0)
    photos = [f"photos/{split}/{label}/{i}.jpg" for split in ("train", "val") for label in "ab" for i in range(3)]
    for name in ("cat.jpg", "dog.jpg", *photos):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (48, 48, 3), dtype=np.uint8)).save(place / name)
    small = {"img_size": 32, "num_classes": 2}
    static = adaptivit.create("deit_tiny_patch16_224", "static", **small)
    static.save_pretrained(place / "runs/static/model")
    model = adaptivit.create("deit_tiny_patch16_224", "aht", weights=place / "runs/static/model", **small)
    model.calibrate(torch.randn(8, 3, 32, 32))
    model.save_pretrained(place / "runs/aht/model")
    return place


@pytest.fixture
def workplace(stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of its own with the stand-ins, and no policy left registered."""
    for path in stand_ins.rglob("*"):
        if path.is_file():
            link = tmp_path / path.relative_to(stand_ins)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield tmp_path
    registry.PLUGINS.registered.clear()


@pytest.mark.parametrize("page", [page for page in PAGES if fences(page, "python")])
def test_python(page: str, workplace: Path) -> None:
    """The blocks of a page run as one script, where `images`, weights, photos and checkpoints are stand-ins."""
    if page == "docs/guide/quickstart.md":
        digits = {"img_size": 64, "patch_size": 8, "embed_dim": 24, "depth": 6, "num_heads": 3, "num_classes": 10}
        adaptivit.create(digits, "aht").save_pretrained("adaptivit-quickstart/aht")
    script = Path("example.py")
    script.write_text("\n".join(fences(page, "python")))
    space = runpy.run_path(str(script), {"images": torch.randn(2, 3, 224, 224)}, run_name="example")
    if page == "docs/guide/own-policy.md":
        assert space["out"].trace.live[:, 0].tolist() == [17, 17, 9, 9, 5, 5]
    if page == "docs/guide/calibrate.md":
        assert (space["out"].macs <= 0.75 * space["out"].costs.static).all()
    if page == "docs/guide/checkpoints.md":
        images = torch.randn(2, 3, 32, 32)
        assert torch.equal(space["model"](images).logits, space["again"](images).logits)
    if page == "docs/internals/training-loop.md":
        assert len(fences(page, "python")[0].splitlines()) <= 30


def test_commands_of_the_readme_run(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In their order, each with what the ones before left."""
    for model in ("runs/static", "runs/aht"):
        for path in sorted((workplace / model).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        (workplace / model).rmdir()
    ran = [words for words in COMMANDS["README.md"] if words[0] in QUICK]
    assert len(ran) >= 4
    for words in ran:
        cli.main([*words, *SHORT.get(words[0], "").split()])
    capsys.readouterr()

"""The documentation holds: links lead somewhere, line numbers name what they say, and examples run.

When code has moved, `uv run python tests/test_docs.py` writes the new line numbers into docs/equations.md.
"""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptivit.policies import registry

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EQUATIONS = ROOT / "docs" / "equations.md"
NEAR = 12  # a named symbol occurs at most so many lines below its anchor

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_SYMBOL = re.compile(r"\[`([\w.]+)`\]\(([^)#\s]+)#L(\d+)\)")
_CODE = re.compile(r"```.*?```", re.DOTALL)


def links(page: Path) -> list[tuple[Path, str]]:
    """(file, anchor) of every relative link of a page, code blocks aside."""
    found = _LINK.findall(_CODE.sub("", page.read_text()))
    parts = [target.partition("#") for target in found if "://" not in target and not target.startswith("mailto:")]
    return [((page.parent / path).resolve() if path else page, anchor) for path, _, anchor in parts]


def headings(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", _CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


def line_of(path: Path, name: str) -> int | None:
    """The line of a function or class by its dotted name, decorators aside."""
    body: list[Any] = ast.parse(path.read_text()).body
    line = None
    for part in name.split("."):
        found = [n for n in body if getattr(n, "name", None) == part]
        if not found:
            return None
        line, body = found[0].lineno, found[0].body
    return line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name if page.parent == ROOT else f"docs/{page.name}")
def test_links(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), f"{page.name} links to {target}, which is not there"
        number = re.fullmatch(r"L(\d+)", anchor)
        if number:
            count = len(target.read_text().splitlines())
            assert 1 <= int(number[1]) <= count, f"{page.name}: {target.name} has {count} lines, not {number[1]}"
        elif anchor:
            assert anchor in headings(target), f"{page.name}: {target.name} has no heading #{anchor}"


def test_every_page_is_in_the_index() -> None:
    listed = {target for target, _ in links(ROOT / "docs" / "README.md")}
    assert {page for page in PAGES if page.parent.name == "docs" and page.name != "README.md"} <= listed


def test_equations_name_what_stands_there() -> None:
    found = _SYMBOL.findall(EQUATIONS.read_text())
    assert found
    for name, path, line in found:
        target = EQUATIONS.parent / path
        below = target.read_text().splitlines()[int(line) - 1 : int(line) - 1 + NEAR]
        last = name.rpartition(".")[2]
        assert any(re.search(rf"\b{last}\b", text) for text in below), (
            f"docs/equations.md: {name} is not at {path}#L{line} but at line {line_of(target, name)}; "
            "uv run python tests/test_docs.py writes the new numbers"
        )


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A directory of its own, and no policy left registered."""
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
    registry._registered.clear()


def run(blocks: list[str]) -> dict[str, Any]:
    """Execute the blocks of a page as one script, in the current directory."""
    script = Path("example.py")
    script.write_text("\n".join(blocks))
    return runpy.run_path(str(script), run_name="example")


@pytest.mark.usefixtures("workplace")
def test_training_loop() -> None:
    (loop,) = python_blocks("training-loop.md")
    assert len(loop.splitlines()) <= 30
    space = run([loop])
    assert space["step"] == 7
    assert bool(space["losses"].total.isfinite())


@pytest.mark.usefixtures("workplace")
def test_own_policy() -> None:
    blocks = python_blocks("own-policy.md")
    space = run(blocks)
    assert space["out"].trace.live[:, 0].tolist() == [17, 17, 9, 9, 5, 5]
    assert any("check_policy(" in block for block in blocks)


@pytest.mark.usefixtures("workplace")
def test_python_page() -> None:
    space = run(python_blocks("python.md"))
    torch.testing.assert_close(space["first"].logits, space["again"].logits, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("workplace")
def test_calibrate_page() -> None:
    space = run(python_blocks("calibrate.md"))
    assert (space["out"].macs <= 0.75 * space["out"].costs.static).all()


@pytest.mark.usefixtures("workplace")
def test_checkpoints_page() -> None:
    space = run(python_blocks("checkpoints.md"))
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(space["model"](images).logits, space["again"](images).logits)
    assert space["started"].settings["threshold"] == 0.8


@pytest.mark.usefixtures("workplace")
def test_features_page() -> None:
    space = run(python_blocks("features.md"))
    space["loss"].backward()
    assert space["model"].vit.patch_embed.proj.weight.grad is not None


def renumber() -> None:
    """Write the present line of every symbol into docs/equations.md."""

    def present(match: re.Match[str]) -> str:
        name, path, _ = match.groups()
        line = line_of(EQUATIONS.parent / path, name)
        assert line is not None, f"{path} has no {name}"
        return f"[`{name}`]({path}#L{line})"

    EQUATIONS.write_text(_SYMBOL.sub(present, EQUATIONS.read_text()))


if __name__ == "__main__":
    renumber()

"""Docstrings and comments: first lines of at most 20 words, and no banned words."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGEST = 20  # words of a docstring's first line
BANNED = re.compile(r"\b(whoever|nobody|said|hears?|likeness|whom|of which|partakers?)\b", re.IGNORECASE)


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of the docstring of every module, class and function."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of every string that stands by itself: docstrings, and the meanings under fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def comments(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def first_line(text: str) -> str:
    """The first sentence or paragraph, whichever ends first: a line may be broken by the line length."""
    paragraph = text.strip().split("\n\n")[0]
    return re.split(r"[.:;](?:\s|$)", " ".join(paragraph.split()))[0]


@cache
def offences() -> tuple[list[str], list[str]]:
    long, banned = [], []
    for path in sorted((ROOT / "adaptivit").rglob("*.py")):
        text = path.read_text()
        tree = ast.parse(text)
        where = path.relative_to(ROOT)
        long += [f"{where}:{n}: {first_line(s)}" for n, s in docstrings(tree) if len(first_line(s).split()) > LONGEST]
        banned += [f"{where}:{n}: {m[0]}" for n, s in [*strings(tree), *comments(text)] for m in BANNED.finditer(s)]
    return long, banned


def test_first_lines_are_short() -> None:
    long, _ = offences()
    assert not long, "\n".join(long)


def test_no_banned_words() -> None:
    _, banned = offences()
    assert not banned, "\n".join(banned)

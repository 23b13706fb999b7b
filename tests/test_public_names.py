"""What `import adaptivit` offers: by completion, to type checkers, and without waiting for torch."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import adaptivit


def for_type_checkers() -> dict[str, tuple[str, str]]:
    """name -> (module, name there), of the block that only type checkers read."""
    tree = ast.parse(Path(adaptivit.__file__).read_text())
    (block,) = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    found = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        module = ".".join(filter(None, ("adaptivit", node.module)))
        found |= {alias.asname or alias.name: (module, alias.name) for alias in node.names}
    return found


def test_completion_type_checkers_and_lazy_imports_agree() -> None:
    names = for_type_checkers()
    assert dir(adaptivit) == sorted(adaptivit.__all__) == sorted({*names, "__version__"})
    for name, (module, there) in names.items():
        home = importlib.import_module(module)
        meant = getattr(home, there, None) or importlib.import_module(f"{module}.{there}")
        assert getattr(adaptivit, name) is meant, name
    assert (Path(adaptivit.__file__).parent / "py.typed").exists()


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'creat'"):
        _ = adaptivit.creat


def test_the_import_does_not_wait_for_torch() -> None:
    code = "import adaptivit, sys; dir(adaptivit); adaptivit.UserError; assert not {'torch', 'timm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

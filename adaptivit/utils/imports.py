"""Files and modules of others, imported for what they register."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path

from ..errors import UserError, first_line


def import_file_or_module(source: str) -> None:
    """Import my_policy.py or my_package.policies."""
    path = Path(source)
    if path.suffix == ".py" and not path.is_file():
        raise UserError(f"--import: there is no file {source}.")
    if not source or (path.suffix != ".py" and not source.replace(".", "").isidentifier()):
        raise UserError(f"--import: expected a file my_policy.py or a module my_package.policies, got {source!r}.")
    try:
        if path.suffix != ".py":
            importlib.import_module(source)
            return
        name = f"imported_{path.stem}"
        found = importlib.util.spec_from_file_location(name, path)
        assert found is not None
        assert found.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
    except UserError as error:
        raise UserError(f"--import {source}: {error}") from None
    except Exception as error:
        line = next((str(f.lineno) for f in _frames(error) if f.filename == str(path)), "")
        where = f"{source}, line {line}" if line else source
        raise UserError(f"--import {where}: {type(error).__name__}: {first_line(error)}") from error


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of an error, the innermost first."""
    return list(reversed(traceback.extract_tb(error.__traceback__)))

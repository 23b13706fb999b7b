"""Plain arrays from an .npz file; nothing in it is executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError, first_line


def read(path: Path) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except Exception as error:  # a damaged archive can raise anything
        raise DataError(f"Not a readable .npz of plain arrays: {path} ({first_line(error)}).") from None

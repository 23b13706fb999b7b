"""Where a run happens: versions, devices, the commit of this code, the command."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from .hardware import processor

_PACKAGES = ("torchvision", "timm", "accelerate", "numpy", "triton")


def commit() -> str:
    """The commit of this code in a clone, `-dirty` if files were changed; ADAPTIVIT_COMMIT names it elsewhere."""
    if given := os.environ.get("ADAPTIVIT_COMMIT"):
        return given
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def versions(*more: str) -> dict[str, str]:
    """Of this package, Python, torch as it was built, and installed packages; `more` names others."""
    found = {"adaptivit": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in (*_PACKAGES, *more):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def summary(**more: object) -> dict[str, object]:
    """What a report names below its figures: versions, and what else the caller gives."""
    first = {"adaptivit": __version__, "torch": torch.__version__, "Python": platform.python_version()}
    return {**first, **more, "date": datetime.date.today().isoformat()}


def describe(device: torch.device, processes: int = 1) -> dict[str, Any]:
    """Everything above, for JSON."""
    gpu = device.type == "cuda"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "directory": os.getcwd(),
        "commit": commit(),
        "versions": versions(),
        "host": platform.node(),
        "platform": platform.platform(),
        "processes": processes,
        "nodes": max(1, processes // int(os.environ.get("LOCAL_WORLD_SIZE", processes))),
        "device": torch.cuda.get_device_name(device) if gpu else processor(),
        "cuda": torch.version.cuda if gpu else None,
        "threads": torch.get_num_threads(),
    }

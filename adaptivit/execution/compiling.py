"""torch.compile for passes that are one long graph with kernels of our own in it."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch


def compiled(run: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`run`, a plain function, through torch.compile, for fixed shapes."""
    if _version() < (2, 13):
        _shorten_messages()
    return torch.compile(_apart(run), dynamic=False, **options)


def _apart(run: Any) -> FunctionType:
    """The same function with code of its own. torch counts compilations by code, and gives up after a few; closures of
    one place share it, so that a process could not capture its ninth model."""
    own = FunctionType(run.__code__.replace(), run.__globals__, run.__name__, run.__defaults__, run.__closure__)
    own.__kwdefaults__, own.__module__ = run.__kwdefaults__, run.__module__
    return own


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def _shorten_messages() -> None:
    """Log messages of torch 2.11 about operations without code name the operation alone.

    Else they write out all that it depends on, even where nothing is logged: minutes, where that is many blocks."""
    from torch._inductor.exc import OperatorIssue

    OperatorIssue.operator_str = staticmethod(_name_alone)  # type: ignore[method-assign]


def _name_alone(target: Any, args: Any, kwargs: Any) -> str:
    return f"  target: {target}"

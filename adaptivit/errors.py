"""Errors caused by input. The message is one line: what was expected, what came, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake of the caller's. The command line prints it as one line and exits with code 2.

    Not a ValueError: parsers of command lines catch those and dress them up.
    """


class UnsupportedBackbone(UserError):
    """The model is not a timm VisionTransformer that the loop can drive."""


class WeightsError(UserError):
    """A weights file or checkpoint that cannot be read or does not fit."""


class DataError(UserError):
    """Data that is missing, empty or damaged."""


class NotFiniteError(UserError):
    """A loss term became NaN or infinite."""


def first_line(error: BaseException) -> str:
    """What an exception says, in one line."""
    lines = str(error).strip().splitlines()
    return lines[0][:500] if lines else type(error).__name__


def reason_of(error: BaseException) -> str:
    """Why something failed, in one line: a user's mistake as it is, anything else after its type."""
    return first_line(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"


def unknown(kind: str, given: str, valid: Iterable[str]) -> UserError:
    """An error that lists the valid names and suggests the nearest."""
    names, given = sorted(valid), given if len(given) <= 200 else given[:200] + "..."
    near = difflib.get_close_matches(given, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return UserError(f"Unknown {kind} {given!r}.{hint} Valid: {', '.join(names) or '(none)'}.")

"""Tables and progress bars in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text


def screen_table(
    title: str,
    rows: Sequence[Sequence[str]],
    names: Sequence[str],
    left: int = 1,
    failed: Callable[[Sequence[str]], bool] = lambda row: False,
) -> Table:
    """The first `left` columns are aligned left and may wrap; failed rows are red."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i, name in enumerate(names):
        table.add_column(name, justify="left" if i < left else "right", no_wrap=i >= left, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row), style="red" if failed(row) else None)
    return table


def show(*tables: Table, width: int = 120) -> None:
    """Print tables; `width` where the output is not a terminal."""
    console = Console(width=None if Console().is_terminal else width)
    for table in tables:
        console.print(table)


@contextmanager
def bar(what: str, total: int | None = None, console: Console | None = None) -> Iterator[Callable[..., Any]]:
    """A progress bar that is gone at the end; call it with what is done, and with the total where that changes."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console or Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done, total=total: progress.update(task, completed=done, total=total)

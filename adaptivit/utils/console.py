"""Tables and progress bars in the terminal."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .atomic_io import write_text

Step = Callable[..., None]  # called as work is done
_NAMED = 10  # files


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


def left_out(files: Sequence[str], place: Path | None = None) -> None:
    """Count and name what a command left out: the first ten, and where there are more, all of them in a file."""
    lines = [
        f"left out: {len(files)} {'file' if len(files) == 1 else 'files'}",
        *(f"  {line}" for line in files[:_NAMED]),
    ]
    if len(files) > _NAMED:
        place = place or Path(tempfile.mkdtemp(prefix="adaptivit-")) / "left_out.txt"
        write_text(place, "".join(f"{line}\n" for line in files))
        lines.append(f"  and {len(files) - _NAMED} more: {place}")
    if files:
        print("\n".join(lines), file=sys.stderr)


@contextmanager
def bars(console: Console | None = None, *, keep: bool = False, hide: bool = False) -> Iterator[Step]:
    """Progress bars, one for every name that is called: step(what, done, total, note).

    They show from the first call on, so that a mistake before it is one line; `keep` leaves them there at the end.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    shown = Progress(
        *columns,
        TimeRemainingColumn(compact=True),
        console=console or Console(stderr=True),
        transient=not keep,
        disable=hide,
    )
    tasks: dict[str, TaskID] = {}

    def step(what: str, done: int, total: int | None = None, note: str | None = None) -> None:
        if not tasks:
            shown.start()
        if what not in tasks:
            tasks[what] = shown.add_task(what, total=total, note="")
        fields: dict[str, Any] = {} if note is None else {"note": note}
        shown.update(tasks[what], completed=done, total=total, **fields)

    try:
        yield step
    finally:
        if shown.live.is_started:  # else rich would end the bars that never were with an empty line
            shown.stop()


@contextmanager
def bar(what: str, total: int | None = None, console: Console | None = None) -> Iterator[Step]:
    """One progress bar that is gone at the end: step(done, total, note), a total where that changes."""
    with bars(console) as step:
        yield lambda done, total=total, note=None: step(what, done, total, note)

"""Tables and progress bars in the terminal."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task, TaskID
from rich.table import Table
from rich.text import Text

from .atomic_io import write_text

Step = Callable[..., None]  # called as work is done
_NAMED = 10  # files
_EVERY = 30.0  # seconds between two lines where the output is no terminal
_LEAST, _WIDE = 5, 30  # columns of a bar: beside the figures that matter, and beside others
_MATTER = 3  # figures
_WORD = 12  # columns that a text keeps at least


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
    """Print tables, none wider than the terminal; `width` where the output is none and COLUMNS is not set."""
    console = Console(width=None if Console().is_terminal or "COLUMNS" in os.environ else width)
    for table in tables:
        console.print(fitted(table, console.width))


def fitted(table: Table, width: int) -> Table:
    """The table; where a column that does not wrap would be cut, its rows one below the other, a line a cell."""
    texts = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    widest = [max(len(line) for cell in cells for line in cell.split("\n")) for cells in texts]
    needed = [n if column.no_wrap else min(n, _WORD) for column, n in zip(table.columns, widest, strict=True)]
    if sum(needed) + 2 * len(needed) + 1 <= width:
        return table
    stacked = Table(title=table.title, title_justify="left", caption=table.caption, caption_justify="left", box=None)
    stacked.add_column(no_wrap=True)
    stacked.add_column(overflow="fold")
    stacked.show_header = False
    for row in zip(*(column.cells for column in table.columns), strict=True):
        for column, cell in zip(table.columns, row, strict=True):
            stacked.add_row(column.header, cell)
        stacked.add_row("", "")
    return stacked


def left_out(files: Sequence[str], place: Path | None = None) -> None:
    """Count and name what a command left out: the first ten, and where there are more, all of them in a file."""
    lines = [
        f"left out: {count(len(files), 'file')}",
        *(f"  {line}" for line in files[:_NAMED]),
    ]
    if len(files) > _NAMED:
        place = place or Path(tempfile.mkdtemp(prefix="adaptivit-")) / "left_out.txt"
        write_text(place, "".join(f"{line}\n" for line in files))
        lines.append(f"  and {len(files) - _NAMED} more: {place}")
    if files:
        print("\n".join(lines), file=sys.stderr)


def announce(what: str, *facts: str) -> None:
    """The first line of what takes a while, on stderr: images, classes, steps, device, what is done."""
    print(f"{what}: {', '.join(filter(None, facts))}", file=sys.stderr, flush=True)


def count(number: int, noun: str) -> str:
    """1 image, 1,000 images."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith(('s', 'ch')) else 's'}"


@contextmanager
def bars(console: Console | None = None, *, keep: bool = False, hide: bool = False) -> Iterator[Step]:
    """Progress, a line for every name that is called: step(what, done, total, figures), the first figures first.

    It shows from the first call on, so that a mistake before it is one line; `keep` leaves it there at the end. Where
    the output is no terminal, a line is printed every 30 seconds, and at the end if it is kept.
    """
    console = console or Console(stderr=True)
    live = console.is_interactive or console.is_jupyter
    progress = Progress(_Line(console), console=console, transient=not keep, disable=hide or not live)
    tasks: dict[str, TaskID] = {}
    ended = threading.Event()

    def lines(every: bool) -> None:
        for task in progress.tasks:
            if every or not task.finished:
                console.print(_words(task), markup=False, highlight=False, soft_wrap=True)

    def tell() -> None:
        while not ended.wait(_EVERY):
            lines(every=False)

    def step(what: str, done: int, total: int | None = None, figures: Sequence[str] | None = None) -> None:
        if not tasks:
            progress.start()
            if not (hide or live):
                threading.Thread(target=tell, daemon=True).start()
        if what not in tasks:
            tasks[what] = progress.add_task(what, total=total, completed=done, figures=())
        more: dict[str, Any] = {} if figures is None else {"figures": figures}
        progress.update(tasks[what], completed=done, total=total, **more)

    try:
        yield step
    finally:
        ended.set()
        if progress.live.is_started:  # else rich would end the bars that never were with an empty line
            progress.stop()
        if keep and not (hide or live):
            lines(every=True)


@contextmanager
def bar(what: str, total: int | None = None, console: Console | None = None) -> Iterator[Step]:
    """One progress bar that is gone at the end: step(done, total, figures), a total where that changes."""
    with bars(console) as step:
        yield lambda done, total=total, figures=None: step(what, done, total, figures)


class _Line(ProgressColumn):
    """One task in one line. At any width it has its name, count and time; figures go from the last on, then the bar."""

    max_refresh = None

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console
        self.widest = 0  # of the names, so that bars begin below each other

    def render(self, task: Task) -> Text:
        self.widest = max(self.widest, len(task.description))
        done, clock = _done(task), _clock(task)
        room = self.console.width - 1 - self.widest - len(done) - len(clock) - 3
        figures: list[str] = []
        for figure in task.fields["figures"]:
            if room - len(figure) - 2 < (_LEAST if len(figures) < _MATTER else _WIDE):
                break
            figures.append(figure)
            room -= len(figure) + 2
        text = Text(f"{task.description:<{self.widest}} ", no_wrap=True, overflow="crop")
        if task.total and room >= _LEAST:
            width = min(room, _WIDE)
            full = round(width * min(task.completed / task.total, 1))
            sign = "━" if self.console.encoding.startswith("utf") else "-"
            text.append(sign * full, "bar.finished" if task.finished else "bar.complete")
            text.append((" " if self.console.color_system is None else sign) * (width - full) + " ", "bar.back")
        text.append(done, "progress.download").append(" ").append(clock, "progress.remaining")
        return text.append("".join(f"  {figure}" for figure in figures))


def _words(task: Task) -> str:
    """One task in words, where there is no terminal."""
    left = f"{_clock(task)} {'left' if task.total and not task.finished else 'in all' if task.finished else 'so far'}"
    return f"{task.description}: " + ", ".join(filter(None, (_done(task), left, *task.fields["figures"])))


def _done(task: Task) -> str:
    if task.total is None:
        return f"{int(task.completed)}" if task.completed else ""
    return f"{int(task.completed)}/{int(task.total)}"


def _clock(task: Task) -> str:
    """What remains; what it took in the end or where the end is unknown."""
    known = task.total is not None and not task.finished
    seconds = task.time_remaining if known else task.finished_time or task.elapsed
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"

"""Progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from vitrail.runtime.terminal import SafeConsole


@contextmanager
def progress_bar(
    description: str, total: float | None, done: float = 0, *, in_bytes: bool = False
) -> Iterator[Callable[[float], None]]:
    """Show a bar on standard error if it is a terminal: `with progress_bar("indexing", 64) as advance: advance(1)`."""
    console = SafeConsole(stderr=True)
    counts = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *counts, TimeRemainingColumn())
    with Progress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        redirect_stdout=False,  # results printed meanwhile stay on standard output
        redirect_stderr=False,
    ) as progress:
        task = progress.add_task(description, total=total, completed=int(done))
        yield lambda count: progress.advance(task, count)

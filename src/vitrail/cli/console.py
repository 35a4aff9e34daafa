"""What people see: results on standard output, notes and progress on standard error."""

from __future__ import annotations

import logging
import shutil
import sys

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

# Outside a terminal rich would fold tables at 80 columns; a file or a pipe has no edge.
_WIDTH = None if sys.stdout.isatty() else max(shutil.get_terminal_size().columns, 160)

out = Console(width=_WIDTH, highlight=False)
err = Console(stderr=True, highlight=False)


def problem(message: str) -> None:
    """One sentence about what went wrong."""
    err.print("[bold red]error:[/] ", end="")
    err.print(message, markup=False, soft_wrap=True)


def notes_to_stderr(level: int) -> None:
    """Show what vitrail says aloud as `note: ...`."""

    class Note(RichHandler):
        def emit(self, record: logging.LogRecord) -> None:
            err.print("[dim]note:[/] ", end="")
            err.print(record.getMessage(), markup=False, soft_wrap=True, style="dim")

    logger = logging.getLogger("vitrail")
    logger.handlers = [Note()]
    logger.setLevel(level)
    logger.propagate = False


def progress() -> Progress:
    """A bar on standard error that leaves nothing behind; silent where that is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )

"""Console output: results on standard output; notes, errors and progress on standard error."""

from __future__ import annotations

import logging
import shutil
import sys
from contextlib import suppress

from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from vitrail.runtime import escape_control
from vitrail.runtime.terminal import SafeConsole

# Outside a terminal rich would fold tables at 80 columns; a file or a pipe has no edge.
_WIDTH = None if sys.stdout is not None and sys.stdout.isatty() else max(shutil.get_terminal_size().columns, 160)

out = SafeConsole(width=_WIDTH)
err = SafeConsole(stderr=True)


def print_plain(what: RenderableType) -> None:
    """Print a table or a line without the trailing spaces that rich adds."""
    with out.capture() as captured:
        out.print(what)
    for line in captured.get().splitlines():
        out.file.write(line.rstrip() + "\n")


def one_line(text: object) -> str:
    """One line of output: line breaks and control characters are escaped."""
    return escape_control(str(text)).replace("\n", "\\n") + "\n"


def print_error(message: str) -> None:
    """Print an error message."""
    err.print(Text.assemble(("error: ", "bold red"), escape_control(message)), soft_wrap=True)


def print_stopped(message: str) -> None:
    """Print the message of a command that a signal stopped, which is not an error."""
    err.print(Text(escape_control(message)), soft_wrap=True)


def print_note(message: str) -> None:
    """Print a note."""
    err.print(Text(f"note: {escape_control(message)}", style="dim"), soft_wrap=True)


class _NoteHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # standard error may lie on a full disk, or nobody may read it any more
            print_note(getattr(record, "note", record.getMessage()))


def notes_to_stderr() -> None:
    """Print vitrail's log records as `note: ...`, without the model's name: a command has only one model."""
    logger = logging.getLogger("vitrail")
    logger.handlers = [_NoteHandler()]
    logger.setLevel(logging.WARNING)
    logger.propagate = False


def progress_bar(enabled: bool = True) -> Progress:
    """A progress bar on standard error that is removed at the end. Never shown unless that is a terminal."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=not (enabled and err.is_terminal),
        # Else rich would send what is printed meanwhile to standard error, results included.
        redirect_stdout=False,
        redirect_stderr=False,
    )

"""What people see: results on standard output, notes, problems and progress on standard error."""

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
    """A table or a line, without the spaces rich fills lines with: pipes and narrow windows mind them."""
    with out.capture() as captured:
        out.print(what)
    for line in captured.get().splitlines():
        out.file.write(line.rstrip() + "\n")


def one_line(text: object) -> str:
    """A line of a result, whatever names are in it: line breaks and what controls a terminal become escapes."""
    return escape_control(str(text)).replace("\n", "\\n") + "\n"


def print_error(message: str) -> None:
    """One sentence about what went wrong."""
    err.print(Text.assemble(("error: ", "bold red"), escape_control(message)), soft_wrap=True)


def print_stopped(message: str) -> None:
    """One sentence about a command that was ended by a signal, which is no error."""
    err.print(Text(escape_control(message)), soft_wrap=True)


def print_note(message: str) -> None:
    """Something worth knowing that is no result."""
    err.print(Text(f"note: {escape_control(message)}", style="dim"), soft_wrap=True)


class _NoteHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # standard error may lie on a full disk, or nobody may read it any more
            print_note(getattr(record, "note", record.getMessage()))


def notes_to_stderr() -> None:
    """Show what vitrail says aloud as `note: ...`; one command has one model, so its name is left out."""
    logger = logging.getLogger("vitrail")
    logger.handlers = [_NoteHandler()]
    logger.setLevel(logging.WARNING)
    logger.propagate = False


def progress_bar(wanted: bool = True) -> Progress:
    """A bar on standard error that leaves nothing behind; silent where that is no terminal."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=not (wanted and err.is_terminal),
        # Else rich would send what is printed meanwhile to standard error, results included.
        redirect_stdout=False,
        redirect_stderr=False,
    )

"""The `vitrail` command: one file per subcommand; each parses, calls one function and prints."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from vitrail.cli import (
    convert,
    datasets,
    embed,
    eval,
    explain,
    export,
    figures,
    finetune,
    models,
    predict,
    probe,
    serve,
    train,
    vtab,
)
from vitrail.cli.console import notes_to_stderr, problem, stopped
from vitrail.errors import VitrailError
from vitrail.runtime import is_main_process
from vitrail.train.interrupt import heard

AGAIN = 5.0
"""Seconds after which another Ctrl-C means that the first did not help."""


TELLING = ("train", "finetune")
"""Commands that say that they were stopped; the others end quietly."""


class Interrupted(Exception):
    """Ctrl-C, with what there is to say about it, which typer would drop."""


class Commands(TyperGroup):
    """All commands."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise Interrupted(
                str(error) or ("stopped by Ctrl-C" if ctx.invoked_subcommand in TELLING else "")
            ) from None


app = typer.Typer(
    cls=Commands,
    help="Vision Transformers: train one, or load any public checkpoint exactly; measure it, look inside it, serve it.",
    epilog="Every command takes --debug, which shows the traceback of an error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train")(train.train)
app.command("finetune")(finetune.finetune)
app.command("predict")(predict.predict)
app.command("explain")(explain.explain)
app.command("figures")(figures.figures)
app.command("eval")(eval.evaluate)
app.command("probe")(probe.probe)
app.command("vtab")(vtab.vtab)
app.command("embed")(embed.embed)
app.command("convert")(convert.convert)
app.command("export")(export.export)
app.command("serve")(serve.serve)
app.command("models")(models.models)
app.command("datasets")(datasets.datasets)


def _version(asked: bool) -> None:
    if asked:
        from vitrail import __version__

        typer.echo(f"vitrail {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and give its status: 0 done, 1 failed, 2 asked wrongly, 70 a bug, 130 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    notes_to_stderr()
    with _one_interrupt(arguments is None):
        return _run([a for a in given if a != "--debug"], debug)


def _run(arguments: list[str], debug: bool) -> int:
    try:
        status = app(args=arguments, prog_name="vitrail", standalone_mode=False)
        if sys.stdout is not None:  # it is closed where someone wrote >&-
            sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except (Interrupted, KeyboardInterrupt) as error:
        with suppress(ValueError):  # in another thread nobody listens
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if str(error) and is_main_process():  # of several processes that were all interrupted, one
            with suppress(OSError):
                stopped(f"{error}.")
        return 130
    except BrokenPipeError:  # the reader, such as head, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            raise
        message, status = _explained(error)
        if message:
            problem(message)
        return status


@contextmanager
def _one_interrupt(last: bool) -> Iterator[None]:
    """Inside, Ctrl-C raises KeyboardInterrupt once: a second would interrupt what the first is clearing up.

    One that comes more than AGAIN seconds after the first ends the process. `last`: the process ends after this,
    and what comes then is not heard any more.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    heard.clear()

    def interrupt(number: int, frame: FrameType | None) -> None:
        heard.append(time.monotonic())
        if len(heard) == 1:
            raise KeyboardInterrupt
        if heard[-1] - heard[0] > AGAIN:
            os._exit(130)

    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        deaf = last and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        if not deaf and before is not None:
            signal.signal(signal.SIGINT, before)


def _explained(error: Any) -> tuple[str, int]:
    """One sentence, and the status that goes with it."""
    if isinstance(error, VitrailError):
        return str(error), 1
    if hasattr(error, "format_message"):  # a usage error; which module its class is in depends on typer's version
        command = error.ctx.command_path if getattr(error, "ctx", None) else "vitrail"
        said = error.format_message()  # empty where the help itself was shown
        return said and f"{said}{'' if said[-1] in '.?' else '.'} See `{command} --help`.", 2
    if isinstance(error, OSError) and error.strerror:  # a full disk, a folder that may not be written
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}.", 1
    where = f"{type(error).__name__}: {str(error) or 'no message'}"
    return f"{where} (not foreseen: add --debug to see where, and please report it).", 70

"""The `vitrail` command. Each subcommand has a module: it parses options, calls one function and prints the result."""

from __future__ import annotations

import os
import re
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
    bench,
    bench_parts,
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
    reproduce,
    search,
    serve,
    train,
    vtab,
)
from vitrail.cli.console import notes_to_stderr, print_error, print_stopped
from vitrail.cli.settings import option_hint
from vitrail.errors import VitrailError
from vitrail.runtime import is_main_process
from vitrail.training.interrupt import sigint_times

FORCE_QUIT_AFTER_S = 5.0
"""A second Ctrl-C this many seconds after the first ends the process at once."""

REPORTS_INTERRUPT = ("train", "finetune")
"""Commands that print a line when Ctrl-C stops them."""


class Interrupted(Exception):
    """Ctrl-C with a message. typer drops the message of a KeyboardInterrupt."""


class Commands(TyperGroup):
    """Turns KeyboardInterrupt into Interrupted."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise Interrupted(
                str(error) or ("stopped by Ctrl-C" if ctx.invoked_subcommand in REPORTS_INTERRUPT else "")
            ) from None


app = typer.Typer(
    cls=Commands,
    help="Vision Transformers: train, fine-tune, evaluate, explain, convert, export and serve them.",
    epilog="Every command accepts --debug, which prints the traceback of an error.",
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
app.command("reproduce")(reproduce.reproduce)
app.command("embed")(embed.embed)
app.command("search")(search.search)
app.command("convert")(convert.convert)
app.command("export")(export.export)
app.command("serve")(serve.serve)
bench.app.command("engines")(bench_parts.engines)
bench.app.command("input")(bench_parts.input_pipeline)
bench.app.command("loop")(bench_parts.training_loop)
bench.app.command("serve")(bench_parts.service)
bench.app.command("growth")(bench_parts.growth)
bench.app.command("communication")(bench_parts.communication)
app.add_typer(bench.app, name="bench")
app.command("models")(models.models)
app.command("datasets")(datasets.datasets)


def _version(requested: bool) -> None:
    if requested:
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
    """Run the command and return its exit status: 0 success, 1 error, 2 wrong usage, 70 bug, 130 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    notes_to_stderr()
    with _interrupt_once(final=arguments is None):
        return _run([a for a in given if a != "--debug"], debug)


def _run(arguments: list[str], debug: bool) -> int:
    try:
        status = app(args=arguments, prog_name="vitrail", standalone_mode=False)
        if sys.stdout is not None:  # None if the caller closed it
            sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except (Interrupted, KeyboardInterrupt) as error:
        with suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if str(error) and is_main_process():  # one process reports for all
            with suppress(OSError):
                print_stopped(f"{error}.")
        return 130
    except BrokenPipeError:  # the reader of a pipe, such as head, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            raise
        message, status = _message_and_status(error, arguments)
        if message:
            print_error(message)
        return status


@contextmanager
def _interrupt_once(final: bool) -> Iterator[None]:
    """Raise KeyboardInterrupt for the first Ctrl-C only, so that a second one does not interrupt the cleanup.

    A further Ctrl-C more than FORCE_QUIT_AFTER_S seconds after the first ends the process. With `final`, the process
    ends after this block, and an ignored SIGINT stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    sigint_times.clear()

    def interrupt(number: int, frame: FrameType | None) -> None:
        sigint_times.append(time.monotonic())
        if len(sigint_times) == 1:
            raise KeyboardInterrupt
        if sigint_times[-1] - sigint_times[0] > FORCE_QUIT_AFTER_S:
            os._exit(130)

    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        ignored = final and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        if not ignored and before is not None:
            signal.signal(signal.SIGINT, before)


def _message_and_status(error: Any, arguments: Sequence[str] = ()) -> tuple[str, int]:
    if isinstance(error, VitrailError):
        return str(error), 1
    if hasattr(error, "format_message"):  # a usage error; its class depends on typer's version
        command = error.ctx.command_path if getattr(error, "ctx", None) else "vitrail"
        message = error.format_message().removeprefix("Invalid value: ")  # empty if the help was shown instead
        if message and hasattr(error, "option_name"):
            hint = option_hint(command.split()[-1], error.option_name, arguments)
            message = re.split(r" Did you mean| \(Possible", message)[0].rstrip(".") + hint if hint else message
        return message and f"{message}{'' if message[-1] in '.?' else '.'} See `{command} --help`.", 2
    if isinstance(error, OSError) and error.strerror:  # such as a full disk or a read-only folder
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}.", 1
    where = f"{type(error).__name__}: {str(error) or 'no message'}"
    return f"{where} (unexpected error: run again with --debug for the traceback, and please report it).", 70

"""The `vitrail` command: one file per subcommand; each parses, calls one function and prints."""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated

import typer

from vitrail import __version__
from vitrail.cli import convert, models, predict
from vitrail.cli.console import notes_to_stderr, problem
from vitrail.errors import VitrailError

app = typer.Typer(
    help="Vision Transformers: load any public checkpoint exactly, convert it, use it.",
    epilog="Every command takes --debug for the traceback of an error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("models")(models.models)
app.command("predict")(predict.predict)
app.command("convert")(convert.convert)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"vitrail {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Say it.")] = False,
) -> None:
    pass


def main() -> None:
    """Run the command; errors become one sentence and a status."""
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    notes_to_stderr(logging.DEBUG if debug else logging.WARNING)
    try:
        app(args=arguments, prog_name="vitrail")
    except VitrailError as error:
        if debug:
            raise
        problem(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        problem("interrupted.")
        sys.exit(130)
    except BrokenPipeError:  # the reader, such as head, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        if debug:
            raise
        problem(f"{type(error).__name__}: {error} (not foreseen: --debug shows where; please report it).")
        sys.exit(70)

"""The `vitrail` command: one file per subcommand; each parses, calls one function and prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

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
from vitrail.cli.console import notes_to_stderr, problem
from vitrail.errors import VitrailError

app = typer.Typer(
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
    try:
        status = app(args=[a for a in given if a != "--debug"], prog_name="vitrail", standalone_mode=False)
        if sys.stdout is not None:  # it is closed where someone wrote >&-
            sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except KeyboardInterrupt:
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

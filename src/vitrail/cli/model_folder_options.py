"""The options of `vitrail serve` that are about a folder of models."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli.console import print_note
from vitrail.errors import ConfigError, NotFoundError

if TYPE_CHECKING:
    from vitrail.serve.version_loader import ModelsConfig


@dataclass(frozen=True)
class ModelFolderOptions:
    """A folder of models that is watched."""

    models: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Serve all models of a folder, DIR/NAME/VERSION, and follow its changes.",
            show_default=False,
        ),
    ] = None
    default_model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Model of --models that answers requests without a model.",
            show_default="the first by name",
        ),
    ] = None
    canary: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="Images on which a new version of --models is tried, for models without a canary folder.",
            show_default="a few samples",
        ),
    ] = None
    canary_drop: Annotated[
        float,
        typer.Option(
            min=0,
            max=100,
            metavar="POINTS",
            help="Loss of accuracy on labeled canary images that refuses a new version.",
        ),
    ] = 1.0
    admin_token: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|VARIABLE",
            help="File or environment variable with the token of the /admin routes; without it there are none.",
        ),
    ] = None

    def check(self, model: str | None) -> None:
        """Raise an error if the options do not go together."""
        if self.models is None:
            for name in ("default_model", "canary", "admin_token"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"--{name.replace('_', '-')} is about the models of --models, which is not given."
                    )
            return
        if model is not None:
            raise ConfigError(f"got {model} and --models {self.models}, expected one of them.")
        if not Path(self.models).expanduser().is_dir():
            raise NotFoundError(f"--models {self.models}: there is no such folder; create it, with NAME/VERSION in it.")

    def config(self, loader: Callable[[str], Any], engine: str | None) -> ModelsConfig | None:
        """Configuration for the server; None without --models."""
        if self.models is None:
            return None
        from vitrail.serve.model_choices import FILE_NAME
        from vitrail.serve.version_loader import ModelsConfig

        folder = Path(self.models).expanduser().absolute()
        own = Path(tempfile.mkdtemp(prefix="vitrail-models-"))
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        writable = os.access(folder, os.W_OK)
        if self.admin_token is not None and not writable:
            print_note(f"{folder} cannot be written: what is chosen through /admin is forgotten when the server stops.")
        return ModelsConfig(
            folder=folder,
            loader=loader,
            low_priority=engine in (None, "torch"),
            canary=self.canary,
            canary_drop=self.canary_drop,
            default_model=self.default_model,
            admin_token=None if self.admin_token is None else _read_admin_token(self.admin_token),
            choices_file=(folder if writable else own) / FILE_NAME,
            lock_file=own / "load.lock",
        )


def _read_admin_token(where: str) -> str:
    from vitrail.serve.security import read_token

    try:
        return read_token(where)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--token", "--admin-token", 1)) from None

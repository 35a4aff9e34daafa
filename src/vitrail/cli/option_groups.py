"""Option groups: options that commands share, declared once as a dataclass.

    @with_option_groups
    def predict(images: Images, file: CheckpointOptions = CheckpointOptions()) -> None: ...

The command line shows each field of a group as an option; the function receives the group.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import update_wrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, get_type_hints

import typer

from vitrail.cli.options import Data, Device, ImageSize, Root, SkipBad, parse_ints, parse_settings, parse_size
from vitrail.engines.exported_files import ENGINES
from vitrail.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from vitrail.evaluation.features import FeatureSpec
    from vitrail.serve.access import AccessConfig


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator of a command: replaces each parameter that is an option group by the options of the group."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in inspect.signature(command).parameters.values():
        annotation = hints[parameter.name]
        if is_dataclass(annotation):
            groups[parameter.name] = annotation
            field_hints = get_type_hints(annotation, include_extras=True)
            parameters += [
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=getattr(parameter.default, field.name),
                    annotation=field_hints[field.name],
                )
                for field in fields(annotation)
            ]
        else:
            parameters.append(parameter.replace(annotation=annotation, kind=inspect.Parameter.KEYWORD_ONLY))

    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    update_wrapper(run, command)
    del run.__wrapped__  # type: ignore[attr-defined]  # typer would read the original's parameters
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


@dataclass(frozen=True)
class _OpenModelOptions:
    """Base of the groups whose options are keywords of `open_model`."""

    @property
    def load_options(self) -> dict[str, Any]:
        """The keywords of `open_model`."""
        return {}


@dataclass(frozen=True)
class CheckpointOptions(_OpenModelOptions):
    """How a checkpoint is read that does not state everything."""

    section: Annotated[
        str | None,
        typer.Option("--section", metavar="NAME", help="Part of a training checkpoint to read, such as teacher."),
    ] = None
    family: Annotated[
        str | None,
        typer.Option("--family", metavar="NAME", help="Model family of a file without metadata: DeiT, DINO, MAE, ..."),
    ] = None
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Set or override a field of the model's config, such as num_heads=4; repeatable. "
            "`vitrail models NAME --settings` describes them.",
        ),
    ] = None

    @property
    def load_options(self) -> dict[str, Any]:
        return {
            **super().load_options,
            "section": self.section,
            "family": self.family,
            "overrides": parse_settings(self.changes),
        }


@dataclass(frozen=True)
class InputOptions(_OpenModelOptions):
    """The images that a model takes."""

    image_size: ImageSize = None
    channels: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of image channels: 1 (gray), 3 (RGB) or 4 (RGBA).")
    ] = None

    @property
    def load_options(self) -> dict[str, Any]:
        return {**super().load_options, "image_size": parse_size(self.image_size), "channels": self.channels}


@dataclass(frozen=True)
class DeviceOptions(_OpenModelOptions):
    """Where a model runs, and in which precision."""

    device: Device = "auto"
    dtype: Annotated[
        str,
        typer.Option(metavar="NAME", help="float32; for speed on a GPU bfloat16, or float8 for the blocks of a ViT."),
    ] = "float32"
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile the blocks with torch.compile, for many images on a GPU.")
    ] = False

    @property
    def load_options(self) -> dict[str, Any]:
        return {**super().load_options, "device": self.device, "dtype": self.dtype, "compile": self.compile}

    def for_driver(self) -> Self:
        """The same on the CPU: a driver of other machines loads the model only to check and describe it."""
        return replace(self, device="cpu")


@dataclass(frozen=True)
class LoadOptions(DeviceOptions, CheckpointOptions, InputOptions):
    """How a model is loaded: the images it takes, its checkpoint, where it runs."""


@dataclass(frozen=True)
class EngineOptions:
    """The engine that runs a model."""

    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="NAME",
            help="torch, onnxruntime, openvino, or auto: the fastest one whose outputs match torch's.",
            show_default="torch; for an exported file, the engine of its format",
        ),
    ] = None
    calibrate: Annotated[
        str | None,
        typer.Option(
            "--calibrate",
            metavar="SPEC",
            help="Calibration images for int8 with --engine auto: a folder, shards, ...",
        ),
    ] = None

    def check(self, device: DeviceOptions) -> None:
        """Raise ConfigError for an unknown engine, or options that do not fit together."""
        if self.engine is not None and self.engine not in ENGINES:
            raise ConfigError(f"unknown engine {self.engine!r}{did_you_mean(self.engine, ENGINES)}")
        if self.engine not in (None, "torch") and device.dtype != "float32":
            raise ConfigError(f"--dtype {device.dtype} is only for torch; {self.engine} has a fixed dtype.")
        if self.engine not in (None, "torch") and device.compile:
            raise ConfigError(f"--compile is only for torch, not for {self.engine}.")
        if self.calibrate is not None and self.engine != "auto":
            raise ConfigError("--calibrate needs --engine auto; pass both or neither.")


@dataclass(frozen=True)
class AccessOptions:
    """Who may use a server how much, and what it records."""

    tokens: Annotated[
        Path | None,
        typer.Option(
            "--tokens",
            metavar="FILE",
            help="File with a line NAME: TOKEN for each token that clients may send; read again when it changes.",
        ),
    ] = None
    rate_limit: Annotated[
        str | None,
        typer.Option(
            "--rate-limit",
            metavar="RATE[:BURST]",
            help="Maximum number of images per client, such as 50/s, 600/m or 50/s:100.",
        ),
    ] = None
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            "--trusted-proxy",
            metavar="NETWORK",
            help="Proxy whose X-Forwarded-For or Forwarded header names the client, such as 10.0.0.0/8, or unix; "
            "repeatable.",
        ),
    ] = None
    access_log: Annotated[
        str | None,
        typer.Option("--access-log", metavar="FILE", help="Append a JSON line per request; - for standard output."),
    ] = None
    otel: Annotated[
        bool,
        typer.Option(
            "--otel",
            help="Send OpenTelemetry spans; OTEL_EXPORTER_OTLP_ENDPOINT says where to, and is enough without this.",
        ),
    ] = False

    @property
    def log_to_stdout(self) -> bool:
        return self.access_log == "-"

    def config(self) -> AccessConfig:
        """The server's configuration; ConfigError if something is wrong with it."""
        from vitrail.serve.access import AccessConfig
        from vitrail.serve.client_address import TrustedProxies
        from vitrail.serve.rate_limit import RateLimit

        config = AccessConfig(
            tokens=self.tokens,
            proxies=TrustedProxies.parse(self.trusted_proxy or ()),
            rate_limit=None if self.rate_limit is None else RateLimit.parse(self.rate_limit),
            log=self.access_log,
            otel=self.otel,
        )
        config.check()
        return config


@dataclass(frozen=True)
class DataOptions:
    """The images that a command reads."""

    data: Data = None
    root: Root = None
    skip_bad: SkipBad = False


@dataclass(frozen=True)
class FeatureOptions:
    """Which features of a network are taken."""

    layer: Annotated[
        str,
        typer.Option(
            "--layer",
            "--layers",
            metavar="N,...",
            help="Block indices whose outputs are concatenated (0: the first block's input, -1: the last block), or "
            "last.",
        ),
    ] = "last"
    pool: Annotated[
        str, typer.Option("--pool", metavar="HOW", help="pooled (the head's input), token, mean or token+mean.")
    ] = "pooled"
    norm: Annotated[bool, typer.Option("--norm/--no-norm", help="Apply the final norm to the layers' tokens.")] = True

    def to_spec(self) -> FeatureSpec:
        from vitrail.evaluation.features import FeatureSpec

        return FeatureSpec(layers=parse_ints(self.layer, "--layer"), pool=self.pool, norm=self.norm)


@dataclass(frozen=True)
class RunOptions:
    """The folder of a training run, and how it starts."""

    out: Annotated[Path | None, typer.Option("--out", "-o", help="Run folder; default: runs/NAME.")] = None
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run from its last checkpoint.")] = False
    auto_resume: Annotated[
        bool,
        typer.Option(
            "--auto-resume",
            help="Start a new run, resume an unfinished one, or do nothing if it is finished. For automatic restarts.",
        ),
    ] = False
    device: Annotated[str | None, typer.Option("--device", metavar="NAME", help="auto, cpu, cuda, cuda:1 or mps.")] = (
        None
    )
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="ray|ray://HOST:PORT", help="Run on a Ray cluster, with restarts on failures."),
    ] = None
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, metavar="N", help="With --on: number of processes; default: one per GPU."),
    ] = None
    max_restarts: Annotated[
        int | None,
        typer.Option(
            "--max-restarts", min=0, metavar="N", help="With --on: restarts after failures.", show_default="3"
        ),
    ] = None
    report: Annotated[bool, typer.Option("--report/--no-report", help="Write report.html at the end.")] = True
    skip_bad: SkipBad = False
    settings: Annotated[
        bool, typer.Option("--settings", help="List all settings with their values and descriptions, and exit.")
    ] = False

    def __post_init__(self) -> None:
        if self.workers is not None and self.on is None:
            raise ConfigError(f"--workers {self.workers} needs --on ray; without Ray, start processes with torchrun.")
        if self.max_restarts is not None and self.on is None:
            raise ConfigError(f"--max-restarts {self.max_restarts} needs --on ray; pass it to torchrun otherwise.")

    @property
    def overrides(self) -> list[str]:
        """--device and --skip-bad as overrides of settings: device=cpu, data.skip_bad=true."""
        device = [f"device={self.device}"] if self.device is not None else []
        return [*device, *(["data.skip_bad=true"] if self.skip_bad else [])]

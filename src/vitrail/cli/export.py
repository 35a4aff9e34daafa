"""`vitrail export`: a model as a file for other engines, compared with the model before it is called done."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from vitrail.cli.console import err, print_plain, progress_bar
from vitrail.cli.model_options import ImageSize, LabelFile, open_model
from vitrail.cli.options import Family, Json, Section, Settings, parse_settings, parse_size
from vitrail.errors import ConfigError

if TYPE_CHECKING:
    from vitrail.export.compare import Comparison
    from vitrail.export.exporter import ExportResult

CALLED = {"onnx": "ONNX", "pt2": "torch.export", "openvino": "OpenVINO"}

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A name, a file, a folder or a hub id.")]
Target = Annotated[Path, typer.Argument(metavar="DST", help="The file to write, such as model.onnx.")]
To = Annotated[
    str | None,
    typer.Option(
        "--to", metavar="FORMAT", help="onnx, pt2 (torch.export) or openvino.", show_default="as DST ends, else onnx"
    ),
]
Batch = Annotated[
    str, typer.Option("--batch-size", metavar="N", help="A fixed number of images at a time, or dynamic.")
]
Raw = Annotated[
    bool, typer.Option("--raw", help="Normalized images in and logits out, instead of pixels and probabilities.")
]
Precision = Annotated[str, typer.Option(metavar="NAME", help="float32, bfloat16 or int8.")]
Calibrate = Annotated[
    str | None, typer.Option(metavar="SPEC", help="Images for int8, like those it will see: a folder, shards, ...")
]
Check = Annotated[
    str | None,
    typer.Option(metavar="SPEC", help="Images to compare on.", show_default="parts of two photographs"),
]
Root = Annotated[str | None, typer.Option("--root", metavar="DIR", help="Folder of the built-in datasets.")]


def export(
    model: Model,
    dst: Target,
    to: To = None,
    image_size: ImageSize = None,
    batch_size: Batch = "dynamic",
    raw: Raw = False,
    precision: Precision = "float32",
    calibrate: Calibrate = None,
    check: Check = None,
    labels: LabelFile = None,
    root: Root = None,
    section: Section = None,
    family: Family = None,
    changes: Settings = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
    as_json: Json = False,
) -> None:
    """Write a model for ONNX Runtime, torch.export or OpenVINO, and compare it with the model on real images.

    vitrail export MODEL model.onnx
    """
    overrides = parse_settings(changes)
    options: dict[str, Any] = {
        "image_size": parse_size(image_size),
        "labels": labels,
        "section": section,
        "family": family,
    }
    count = _count(batch_size)
    target, to, precision = _checked(dst, to, precision, calibrate, labels, overwrite)  # before the work, not after it
    with stoppable(), err.status("loading torch and the exporters"):
        from vitrail.api.exporting import check_images, check_request
        from vitrail.api.exporting import export as run

        check_images(calibrate, check, root)
        check_request(target, to, precision, calibrate is not None, overwrite)
    vit = open_model(model, overrides=overrides, require_classes=False, **options)

    with stoppable(), Steps() as steps:
        found = run(
            vit,
            target,
            to=to,
            batch_size=count,
            raw=raw,
            precision=precision,
            calibrate=calibrate,
            check=check,
            root=root,
            overwrite=overwrite,
            step=steps.step,
            started=steps.started,
            advance=steps.advance,
        )
    if as_json:
        typer.echo(json.dumps({"path": str(found.path)} | found.to_dict(), indent=2))
        return
    print_plain(Text(str(found.path), style="bold"))
    print_plain(Text(_summary(found), style="dim"))
    print_plain(_table(found))
    print_plain(Text(f"\ncompared in {found.comparison.ran_on}\n{_report(found)}", style="dim"))


def _checked(
    dst: Path, to: str | None, precision: str, calibrate: str | None, labels: str | None, overwrite: bool
) -> tuple[Path, str, str]:
    """What is asked for, as far as it can be told without torch."""
    from vitrail.export.export_options import resolve_request
    from vitrail.weights.class_names import read_labels

    found = resolve_request(dst, to, precision, calibrated=calibrate is not None, overwrite=overwrite)
    if labels is not None:
        read_labels(labels)
    return found


class Steps:
    """How far an export is: a bar on a terminal, elsewhere a line for each step."""

    def __init__(self) -> None:
        self.bar = progress_bar()
        self.task = self.bar.add_task("preparing images", total=None)
        self.images: int | None = None

    def __enter__(self) -> Steps:
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def started(self, images: int) -> None:
        self.images = images

    def step(self, what: str) -> None:
        # Only comparing goes image by image; the bar of the others moves to and fro.
        self.bar.remove_task(self.task)
        self.task = self.bar.add_task(what, total=self.images if what == "comparing" else None)
        if not err.is_terminal:
            err.print(Text(f"{what} ...", style="dim"))

    def advance(self, count: int) -> None:
        self.bar.advance(self.task, count)


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM ends the work as Ctrl-C does, so that nothing half-done stays behind."""

    def stop(sig: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + sig)

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # in a thread that is not the first
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _count(batch: str) -> int | None:
    if batch == "dynamic":
        return None
    if not batch.isdecimal() or not int(batch):
        raise ConfigError(
            f"--batch-size expects a number of images such as 8, or dynamic for any number, got {batch!r}."
        )
    return int(batch)


def _summary(found: ExportResult) -> str:
    from vitrail.export.export_metadata import format_size

    metadata = found.metadata
    many = "any batch" if metadata.batch_size is None else f"batches of {metadata.batch_size}"
    goes = "pixels" if metadata.normalize_inside else "normalized images"
    size_ = f"{found.size / 1e6:.1f} MB, the weights alone {found.weights / 1e6:.1f} in float32"
    first = f"{CALLED[metadata.to]}, {metadata.precision}, {format_size(metadata.image)} px"
    return f"{first}, {many}, {goes} to {metadata.output_type}\nimages: {metadata.info.preprocess.summary()}\n{size_}\n"


def _report(found: ExportResult) -> str:
    """What lies beside the file."""
    info = found.metadata.info
    if info.task == "classify" and info.config.num_classes and info.labels is None:
        return f"{found.report} has these numbers and the preprocessing\nits classes have no names: pass --labels FILE"
    return f"{found.report} has these numbers, {'class names and ' * (info.labels is not None)}preprocessing"


def _table(found: ExportResult) -> Table:
    """Compared with the model: one number to a line, and dim beside it what it is held against."""
    compared = found.comparison
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 3, 0, 0))
    of = "image" if compared.images == 1 else "images"
    table.add_column(f"on {compared.images:,} {of}", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("", style="dim")
    allowed = compared.to_dict()["relative_error_allowed"]
    table.add_row("largest error", f"{compared.error:.1e}", f"of {compared.output_type}")
    table.add_row("relative error", f"{compared.relative:.1e}", f"{allowed:g} is allowed in {found.metadata.precision}")
    for row in _agreement(compared):
        table.add_row(*row)
    speed = compared.speed
    if speed is not None:
        about = f"{speed.ratio:.2f} x the model in turns, batches of {speed.batch_size}"
        table.add_row("images a second", f"{speed.export:,.3g}", about)
    return table


def _agreement(compared: Comparison) -> list[tuple[str, str, str]]:
    rows = []
    if compared.agreement is not None:
        low, high = 100 * compared.agreement.low, 100 * compared.agreement.high
        about = f"{compared.same:,} of {compared.images:,}; 95 % interval {low:.1f} to {high:.1f}"
        rows.append(("same top-1", f"{100 * compared.agreement.value:.1f} %", about))
    if compared.change is not None and compared.top1 is not None:
        change = compared.change
        between = f"{100 * change.low:+.1f} to {100 * change.high:+.1f}"
        about = f"the model {100 * compared.top1[1]:.1f} %; {100 * change.value:+.1f}, paired {between}"
        rows.append(("top-1", f"{100 * compared.top1[0]:.1f} %", about))
    return rows

"""`vitrail export`: write a model as a file for other engines, and compare the file with the model."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from vitrail.cli.console import err, print_plain, progress_bar
from vitrail.cli.model_options import LabelFile, open_model
from vitrail.cli.option_groups import CheckpointOptions, with_option_groups
from vitrail.cli.options import ImageSize, Json, Root, parse_size
from vitrail.errors import ConfigError

if TYPE_CHECKING:
    from vitrail.exporting.compare import Comparison
    from vitrail.exporting.exporter import ExportResult

FORMAT_TITLES = {"onnx": "ONNX", "pt2": "torch.export", "openvino": "OpenVINO"}

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A name, a file, a folder or a hub id.")]
Target = Annotated[Path, typer.Argument(metavar="DST", help="The file to write, such as model.onnx.")]
To = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="FORMAT",
        help="onnx, pt2 (torch.export) or openvino.",
        show_default="from the suffix of DST, else onnx",
    ),
]
Batch = Annotated[str, typer.Option("--batch-size", metavar="N", help="A fixed batch size, or dynamic for any.")]
Raw = Annotated[
    bool,
    typer.Option("--raw", help="Normalized images as input and logits as output, instead of pixels and probabilities."),
]
Precision = Annotated[str, typer.Option(metavar="NAME", help="float32, bfloat16 or int8.")]
Calibrate = Annotated[
    str | None,
    typer.Option(metavar="SPEC", help="Calibration images for int8, similar to those in use: a folder, shards, ..."),
]
Check = Annotated[
    str | None,
    typer.Option(metavar="SPEC", help="Images for the comparison.", show_default="crops of two sample photographs"),
]


@with_option_groups
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
    checkpoint: CheckpointOptions = CheckpointOptions(),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
    as_json: Json = False,
) -> None:
    """Export a model to ONNX, torch.export or OpenVINO, and compare the file with the model on real images.

    vitrail export MODEL model.onnx
    """
    options = checkpoint.load_options | {"image_size": parse_size(image_size), "labels": labels}
    fixed_batch_size = _parse_batch_size(batch_size)
    # Before torch and the model are loaded, which takes seconds.
    target, to, precision = _check_request(dst, to, precision, calibrate, labels, overwrite)
    with stoppable(), err.status("loading torch and the exporters"):
        from vitrail.exporting.export_model import check_images, check_request
        from vitrail.exporting.export_model import export as run

        check_images(calibrate, check, root)
        check_request(target, to, precision, calibrate is not None, overwrite)
    vit = open_model(model, require_classes=False, **options)

    with stoppable(), ExportProgress() as progress:
        result = run(
            vit,
            target,
            to=to,
            batch_size=fixed_batch_size,
            raw=raw,
            precision=precision,
            calibrate=calibrate,
            check=check,
            root=root,
            overwrite=overwrite,
            step=progress.step,
            started=progress.started,
            advance=progress.advance,
        )
    if as_json:
        typer.echo(json.dumps({"path": str(result.path)} | result.to_dict(), indent=2))
        return
    print_plain(Text(str(result.path), style="bold"))
    print_plain(Text(_summary(result), style="dim"))
    print_plain(_table(result))
    print_plain(Text(f"\ncompared in {result.comparison.ran_on}\n{_report_note(result)}", style="dim"))


def _check_request(
    dst: Path, to: str | None, precision: str, calibrate: str | None, labels: str | None, overwrite: bool
) -> tuple[Path, str, str]:
    """Check the options as far as possible without torch; returns the target, format and precision."""
    from vitrail.exporting.export_options import resolve_request
    from vitrail.weights.class_names import read_labels

    request = resolve_request(dst, to, precision, calibrated=calibrate is not None, overwrite=overwrite)
    if labels is not None:
        read_labels(labels)
    return request


class ExportProgress:
    """Progress of an export: a bar in a terminal, else one line per step."""

    def __init__(self) -> None:
        self.bar = progress_bar()
        self.task = self.bar.add_task("preparing images", total=None)
        self.images: int | None = None

    def __enter__(self) -> ExportProgress:
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def started(self, images: int) -> None:
        self.images = images

    def step(self, name: str) -> None:
        # Only the comparison has a known length; the bar of other steps is indeterminate.
        self.bar.remove_task(self.task)
        self.task = self.bar.add_task(name, total=self.images if name == "comparing" else None)
        if not err.is_terminal:
            err.print(Text(f"{name} ...", style="dim"))

    def advance(self, count: int) -> None:
        self.bar.advance(self.task, count)


@contextmanager
def stoppable() -> Iterator[None]:
    """Exit on SIGTERM as on Ctrl-C, so that temporary files are removed."""

    def stop(sig: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + sig)

    try:
        previous = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _parse_batch_size(batch: str) -> int | None:
    if batch == "dynamic":
        return None
    if not batch.isdecimal() or not int(batch):
        raise ConfigError(
            f"--batch-size expects a number of images such as 8, or dynamic for any number, got {batch!r}."
        )
    return int(batch)


def _summary(result: ExportResult) -> str:
    from vitrail.engines.export_metadata import format_size

    metadata = result.metadata
    batch = "any batch size" if metadata.batch_size is None else f"batch size {metadata.batch_size}"
    inputs = "pixels" if metadata.normalize_inside else "normalized images"
    size = f"{result.size / 1e6:.1f} MB, the weights in float32 are {result.weight_bytes / 1e6:.1f} MB"
    format_ = f"{FORMAT_TITLES[metadata.to]}, {metadata.precision}, {format_size(metadata.image_size)} px"
    return (
        f"{format_}, {batch}, {inputs} to {metadata.output_type}\n"
        f"images: {metadata.info.preprocess.summary()}\n{size}\n"
    )


def _report_note(result: ExportResult) -> str:
    """What the JSON file beside the export contains."""
    info = result.metadata.info
    if info.task == "classify" and info.config.num_classes and info.labels is None:
        return (
            f"{result.report} contains these numbers and the preprocessing\n"
            "the classes have no names: pass --labels FILE"
        )
    return f"{result.report} contains these numbers, {'class names and ' * (info.labels is not None)}preprocessing"


def _table(result: ExportResult) -> Table:
    """The comparison with the model: one value per row, and beside it, dimmed, what it is compared with."""
    comparison = result.comparison
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 3, 0, 0))
    noun = "image" if comparison.images == 1 else "images"
    table.add_column(f"on {comparison.images:,} {noun}", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("", style="dim")
    allowed = comparison.to_dict()["relative_error_allowed"]
    table.add_row("largest error", f"{comparison.max_error:.1e}", f"of {comparison.output_type}")
    table.add_row(
        "relative error", f"{comparison.relative_error:.1e}", f"{allowed:g} is allowed in {result.metadata.precision}"
    )
    for row in _agreement_rows(comparison):
        table.add_row(*row)
    speed = comparison.speed
    if speed is not None:
        about = f"{speed.ratio:.2f} x the model, at batch size {speed.batch_size}"
        table.add_row("images/s", f"{speed.export:,.3g}", about)
    return table


def _agreement_rows(comparison: Comparison) -> list[tuple[str, str, str]]:
    """Rows of the top-1 agreement and, if the images are labeled, of the top-1 accuracy."""
    rows = []
    if comparison.agreement is not None:
        low, high = 100 * comparison.agreement.low, 100 * comparison.agreement.high
        details = f"{comparison.same_top1:,} of {comparison.images:,}; 95 % interval {low:.1f} to {high:.1f}"
        rows.append(("same top-1", f"{100 * comparison.agreement.value:.1f} %", details))
    if comparison.top1_change is not None and comparison.top1 is not None:
        change = comparison.top1_change
        interval = f"{100 * change.low:+.1f} to {100 * change.high:+.1f}"
        details = f"the model {100 * comparison.top1[1]:.1f} %; {100 * change.value:+.1f}, paired {interval}"
        rows.append(("top-1", f"{100 * comparison.top1[0]:.1f} %", details))
    return rows

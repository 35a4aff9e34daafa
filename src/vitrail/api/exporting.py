"""`vitrail.export`: a model as a file for ONNX Runtime, torch.export or OpenVINO, compared before it is called done.

`running` is the other way: a model that an engine runs, whether from such a file or not.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vitrail.api.model import Model, OutputName, Pixels, load
from vitrail.config import BiTConfig, DataConfig, Pair, ViTConfig
from vitrail.data.decode import ImageLike
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources import open_source_splits
from vitrail.data.sources.base import Source
from vitrail.errors import ConfigError, DataError, ModelError
from vitrail.evaluate.class_matching import MappedSource, labels_for_matching, match_classes
from vitrail.evaluate.features import weights_checksum
from vitrail.evaluate.synsets import read_synsets_file
from vitrail.export import exporter as exporting
from vitrail.export.engines import Engine, open_engine, openvino_core
from vitrail.export.export_metadata import ExportMetadata, OutputType
from vitrail.export.export_options import REQUIRED_PACKAGES, is_exported, resolve_request
from vitrail.export.exporter import ExportResult
from vitrail.export.formats import existing_files
from vitrail.export.optional_packages import import_optional
from vitrail.export.sample_images import sample_images
from vitrail.runtime import warn_once
from vitrail.runtime.amx import check_bfloat16
from vitrail.weights.class_names import read_labels
from vitrail.weights.loading import adapt_model

CALIBRATED = 128
"""Images that int8 is calibrated on, at most."""
CHECKED = 1000
"""Images that an export is compared on, at most."""


def export(
    model: str | Path | Model,
    path: str | Path,
    *,
    to: str | None = None,
    image_size: Pair | None = None,
    batch_size: int | None = None,
    raw: bool = False,
    precision: str = "float32",
    calibrate: str | Sequence[ImageLike] | None = None,
    check: str | Sequence[ImageLike] | None = None,
    root: str | None = None,
    overwrite: bool = False,
    step: Callable[[str], None] = lambda what: None,
    started: Callable[[int], None] = lambda total: None,
    advance: Callable[[int], None] = lambda count: None,
    **options: Any,
) -> ExportResult:
    """Write a model as "onnx", "pt2" (torch.export) or "openvino": `export("ViT-Ti/16", "model.onnx")`.

    Without `to` the name's ending tells which. The file takes pixels as they are, B H W C, 0 to 255, and
    gives probabilities; `raw`: normalized images, B C H W, and logits. `image` is another size, `batch` a
    fixed number of images. int8 is calibrated on the images of `calibrate`. Before it is called done
    the file is run beside the model on the images of `check` (data as `vitrail.evaluate` takes them, or
    a list; without it, parts of two photographs), and one that does not agree is not left behind. A name,
    a file or a hub id is loaded with `options`, which are those of `load`.
    """
    target, to, precision = check_request(path, to, precision, calibrate is not None, overwrite)
    vit = model if isinstance(model, Model) else load(model, **options)
    net, info = adapt_model(vit.net, vit.info.replace(config=vit.net.config, notes=()), image_size)
    warn_once(info.notes, about=info.origin)
    metadata = ExportMetadata(
        info=info.replace(notes=()),
        to=cast(Any, to),
        precision=cast(Any, precision),
        normalize_inside=not raw,
        output_type=_answer(vit, raw),
        batch_size=batch_size,
    )
    images, targets = _checked(check, vit, root)
    if precision == "int8" and calibrate and _same(calibrate, check):
        warn_once(["calibrated and compared on the same images: others may agree less"], about=str(target))
    started(len(images))
    found = exporting.export(
        net,
        metadata,
        target,
        exporting.preprocess_images(metadata, images),
        targets=targets,
        calibration=exporting.preprocess_images(metadata, calibration_images(calibrate, root))
        if precision == "int8"
        else (),
        overwrite=overwrite,
        step=step,
        advance=advance,
    )
    warn_once(found.notes, about=str(target))
    return found


def check_request(
    path: str | Path, to: str | None, precision: str, calibrated: bool, overwrite: bool
) -> tuple[Path, str, str]:
    """The file to write, its format and its precision, once all is known that could be in their way."""
    target, to, precision = resolve_request(path, to, precision, calibrated=calibrated, overwrite=overwrite)
    for name in REQUIRED_PACKAGES[to]:
        import_optional(name)
    if precision == "bfloat16":
        check_bfloat16()  # before torch has computed anything
    if to == "openvino":
        openvino_core()  # which must be told of the CPU before it is used
    return target, to, precision


def check_images(calibrate: str | None, check: str | None, root: str | None = None) -> None:
    """Raise DataError where there are none."""
    for data in filter(None, dict.fromkeys((calibrate, check))):
        _some(data, 1, root)


def _same(one: object, other: object) -> bool:
    """Whether this is one data set, or the very same list."""
    return one is other or (isinstance(one, str) and one == other)


def _answer(vit: Model, raw: bool) -> OutputType:
    if vit.info.task != "classify" or not vit.config.num_classes:
        return "features"
    return "logits" if raw else "probabilities"


def _checked(
    check: str | Sequence[ImageLike] | None, vit: Model, root: str | None
) -> tuple[list[Any], npt.NDArray[np.int64] | None]:
    """Images to compare on, and their classes where the data tell."""
    if check is None:
        return sample_images(vit.config.channels), None
    if not isinstance(check, str):
        return list(check), None
    source, places = _some(check, CHECKED, root)
    images = [source[int(i)].image for i in places]
    if vit.info.task != "classify" or not vit.config.num_classes or source.multi_label:
        return images, None
    try:
        labels = labels_for_matching(vit.info, source)
        match = match_classes(source, labels, vit.config.num_classes, synsets=read_synsets_file(check, source.labels))
    except DataError as error:
        warn_once([f"whether answers are right is not compared: {error}"], about=check)
        return images, None
    warn_once(match.notes, about=check)
    return images, MappedSource(source, match).targets.astype(np.int64)[places]


def calibration_images(calibrate: str | Sequence[ImageLike] | None, root: str | None = None) -> list[Any]:
    """What int8 has its scales from: data as `vitrail.evaluate` takes them, or images; none of None."""
    if not isinstance(calibrate, str):
        return list(calibrate or ())[:CALIBRATED]
    source, places = _some(calibrate, CALIBRATED, root)
    return [source[int(i)].image for i in places]


def _some(data: str, most: int, root: str | None) -> tuple[Source, npt.NDArray[np.int64]]:
    """A data set's measured part, and the numbers of so many images from all over it."""
    source = open_source_splits(DataConfig(source=data, root=root), require_labels=False).evaluation_source
    if not hasattr(source, "__len__") or not len(source):
        raise DataError(f"{data} has no images." if hasattr(source, "__len__") else f"{data} is a stream.")
    return source, np.unique(np.linspace(0, len(source) - 1, min(most, len(source))).astype(np.int64))


class EngineModel(Model):
    """A model that an engine runs: it predicts as any other, and cannot be looked into."""

    def __init__(self, engine: Engine, source: Path | Model) -> None:
        self.engine, self._info, self.source = engine, engine.info, source
        self.preprocess = Preprocess(engine.info.preprocess)

    @property
    def config(self) -> ViTConfig | BiTConfig:
        return self.info.config

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def __getattr__(self, name: str) -> NoReturn:
        if name == "net":
            raise self._refusal("it can be run, but not explained, modified or trained")
        raise AttributeError(name)

    @property
    def fingerprint(self) -> str:
        """Eight letters that differ for other weights."""
        if isinstance(self.source, Model):
            return weights_checksum(self.source.net)
        found = 0
        for part in existing_files(self.source):
            found = zlib.crc32(part.read_bytes(), found)
        return f"{found:08x}"

    def outputs(self, pixels: Tensor) -> Tensor:
        """B C H W, 0 to 255 -> B outputs, on the CPU."""
        return torch.from_numpy(self.engine.logits(pixels.permute(0, 2, 3, 1).cpu().numpy()))

    def check_features(self) -> None:
        """Raise ModelError where the outputs are classes."""
        if self.info.task == "classify" and self.config.num_classes:
            raise self._refusal("it outputs classes, not features")

    def _run(self, pixels: Sequence[Pixels], output: OutputName) -> Tensor:
        if output == "pooled":
            self.check_features()
        return torch.from_numpy(self.engine.logits(np.stack(pixels)))

    def _refusal(self, why: str) -> ModelError:
        """Why not, and what to load instead."""
        origin = self.info.origin
        if isinstance(self.source, Model):
            return ModelError(f"{self.engine.name} runs {origin or 'this model'}: {why}; load it without an engine.")
        made_from = f" ({origin})" * bool(origin)
        return ModelError(
            f"{self.source} is an exported model: {why}; use the checkpoint it was exported from{made_from}."
        )

    def _width(self, output: OutputName) -> int:
        own = self.config.pooled_width if isinstance(self.config, ViTConfig) else 0
        return self.config.num_classes or own or super()._width(output)

    def __repr__(self) -> str:
        name = self.info.origin or self.info.family
        return f"<vitrail.Model {name}, run by {self.engine.name} in {self.engine.precision}>"


class EngineModule(nn.Module):
    """Such a model for those who call a network: its images are pixels, B C H W, 0 to 255."""

    def __init__(self, vit: EngineModel) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, pixels: Tensor) -> Tensor:
        return self.vit.outputs(pixels).to(pixels.device)


class PixelPreprocess(Preprocess):
    """Images prepared as ever, and not normalized."""

    def normalize(self, batch: Tensor) -> Tensor:
        return batch


def with_engine(
    source: str | Path | Model,
    engine: str | None = None,
    *,
    labels: str | Path | Sequence[str] | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype | None = "float32",
    threads: int | None = None,
    calibrate: str | Sequence[ImageLike] | None = None,
    root: str | None = None,
    **options: Any,
) -> Model:
    """A model run by an engine, which `open_engine` describes: `with_engine("ViT-B/16", "auto").predict("cat.jpg")`."""
    if isinstance(source, EngineModel):
        labels = source.labels if labels is None else labels
        source = source.source
    if isinstance(source, str | Path) and is_exported(Path(source).expanduser()):
        source = Path(source).expanduser()
        _check_unchanged(source, device, dtype, options)
    elif not isinstance(source, Model):
        source = load(source, dtype=dtype, **options)
    vit = EngineModel(open_engine(source, engine, device, threads, calibration_images(calibrate, root)), source)
    if labels is not None:
        vit.info = vit.info.replace(labels=read_labels(labels, vit.info.config.num_classes))
    return vit


def _check_unchanged(
    path: Path, device: str | torch.device, dtype: str | torch.dtype | None, options: Mapping[str, Any]
) -> None:
    """Raise ConfigError where something else is expected than what was exported."""
    given = sorted(name for name, value in options.items() if value is not None)
    if given:
        raise ConfigError(f"{path} is exported already: {', '.join(given)} cannot be changed any more.")
    if str(device) not in ("auto", "cpu"):
        raise ConfigError(
            f"{path} is exported and runs on the CPU; for {device}, load the checkpoint it was made from."
        )
    if dtype not in (None, "float32", torch.float32):
        raise ConfigError(f"{path} has its precision already; for {dtype}, export it anew or load the checkpoint.")

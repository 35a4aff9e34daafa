"""`vitrail.export`: a model as a file for ONNX Runtime, torch.export or OpenVINO, compared before it is called done.

`running` is the other way: a model that an engine runs, whether from such a file or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitrail.api.model import Model, Pixels, Want, load
from vitrail.config import BiTConfig, DataConfig, Pair, ViTConfig
from vitrail.data.decode import Picture
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources import open_parts
from vitrail.data.sources.base import Source
from vitrail.errors import ConfigError, DataError, ModelError
from vitrail.evaluate.matching import Mapped, match_classes
from vitrail.evaluate.synsets import beside
from vitrail.export import export as exporting
from vitrail.export.engines import Engine, open_engine, openvino_core
from vitrail.export.export import Exported
from vitrail.export.extras import need
from vitrail.export.formats import is_exported
from vitrail.export.pictures import samples
from vitrail.export.sheet import NEEDS, Answer, Sheet, refuse
from vitrail.runtime import say
from vitrail.runtime.tiles import check_bfloat16
from vitrail.weights.labels import read_labels
from vitrail.weights.opening import adapted

CALIBRATED = 128
"""Pictures that int8 is calibrated on, at most."""
CHECKED = 1000
"""Pictures that an export is compared on, at most."""


def export(
    model: str | Path | Model,
    path: str | Path,
    *,
    to: str = "onnx",
    image: Pair | None = None,
    batch: int | None = None,
    raw: bool = False,
    precision: str = "float32",
    calibrate: str | Sequence[Picture] | None = None,
    check: str | Sequence[Picture] | None = None,
    root: str | None = None,
    overwrite: bool = False,
    step: Callable[[str], None] = lambda what: None,
    started: Callable[[int], None] = lambda total: None,
    advance: Callable[[int], None] = lambda count: None,
    **options: Any,
) -> Exported:
    """Write a model as "onnx", "pt2" (torch.export) or "openvino": `export("ViT-Ti/16", "model.onnx")`.

    The file takes pixels as they are, B H W C, 0 to 255, and gives probabilities; `raw`: normalised
    images, B C H W, and logits. `image` is another size, `batch` a fixed number of pictures. int8 is
    calibrated on the pictures of `calibrate`. Before it is called done the file is run beside the model
    on the pictures of `check` (data as `vitrail.evaluate` takes them, or a list; without it, parts of
    two photographs), and one that does not agree is not left behind. A name, a file or a hub id is
    loaded with `options`, which are those of `load`.
    """
    target = check_request(path, to, precision, calibrate is not None, overwrite)
    vit = model if isinstance(model, Model) else load(model, **options)
    net, card = adapted(vit.net, vit.card.but(config=vit.net.config, notes=()), image)
    say(card.notes, about=card.origin)
    sheet = Sheet(
        card=card.but(notes=()),
        to=cast(Any, to),
        precision=cast(Any, precision),
        inside=not raw,
        answer=_answer(vit, raw),
        batch=batch,
    )
    pictures, targets = _checked(check, vit, root)
    started(len(pictures))
    found = exporting.export(
        net,
        sheet,
        target,
        exporting.prepared(sheet, pictures),
        targets=targets,
        calibration=exporting.prepared(sheet, _calibrating(calibrate, root)) if precision == "int8" else (),
        overwrite=overwrite,
        step=step,
        advance=advance,
    )
    say(found.notes, about=str(target))
    return found


def check_request(path: str | Path, to: str, precision: str, calibrated: bool, overwrite: bool) -> Path:
    """The file to write, once all is known that could be in its way."""
    refuse(to, precision)
    target = exporting.destination(path, to)
    exporting.free(target, overwrite)
    for name in NEEDS[to]:
        need(name)
    if precision == "int8" and not calibrated:
        raise ConfigError("int8 needs pictures to calibrate on, like those it will see: pass --calibrate FOLDER.")
    if precision == "bfloat16":
        check_bfloat16()  # before torch has computed anything
    if to == "openvino":
        openvino_core()  # which must be told of the CPU before it is used
    return target


def _answer(vit: Model, raw: bool) -> Answer:
    if vit.card.task != "classify" or not vit.config.classes:
        return "features"
    return "logits" if raw else "probabilities"


def _checked(
    check: str | Sequence[Picture] | None, vit: Model, root: str | None
) -> tuple[list[Any], npt.NDArray[np.int64] | None]:
    """Pictures to compare on, and their classes where the data tell."""
    if check is None:
        return samples(vit.config.channels), None
    if not isinstance(check, str):
        return list(check), None
    source, places = _some(check, CHECKED, root)
    pictures = [source[int(i)].picture for i in places]
    if vit.card.task != "classify" or not vit.config.classes or source.several:
        return pictures, None
    try:
        match = match_classes(source, vit.labels, vit.config.classes, synsets=beside(check, source.labels))
    except DataError as error:
        say([f"whether answers are right is not compared: {error}"], about=check)
        return pictures, None
    say(match.notes, about=check)
    return pictures, Mapped(source, match).targets.astype(np.int64)[places]


def _calibrating(calibrate: str | Sequence[Picture] | None, root: str | None) -> list[Any]:
    if not isinstance(calibrate, str):
        return list(calibrate or ())[:CALIBRATED]
    source, places = _some(calibrate, CALIBRATED, root)
    return [source[int(i)].picture for i in places]


def _some(data: str, most: int, root: str | None) -> tuple[Source, npt.NDArray[np.int64]]:
    """A data set's measured part, and the numbers of so many pictures from all over it."""
    source = open_parts(DataConfig(source=data, root=root), labelled=False).measured
    if not hasattr(source, "__len__") or not len(source):
        raise DataError(f"{data} has no pictures." if hasattr(source, "__len__") else f"{data} is a stream.")
    return source, np.unique(np.linspace(0, len(source) - 1, min(most, len(source))).astype(np.int64))


class Running(Model):
    """A model that an engine runs: it predicts as any other, and cannot be looked into."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.card = engine, engine.card
        self.preprocess = Preprocess(engine.card.preprocess)

    @property
    def config(self) -> ViTConfig | BiTConfig:
        return self.card.config

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def __getattr__(self, name: str) -> NoReturn:
        if name == "net":
            what = f"{self.engine.name} runs {self.card.origin or 'this model'}"
            raise ModelError(f"{what}: what happens inside is not to be had; load the model itself for that.")
        raise AttributeError(name)

    def _run(self, pixels: Sequence[Pixels], want: Want) -> Tensor:
        if want == "pooled" and self.card.task == "classify":
            raise ModelError("an exported classifier gives no features; load the model itself to embed with it.")
        return torch.from_numpy(self.engine.logits(np.stack(pixels)))

    def _width(self, want: Want) -> int:
        return self.config.classes or super()._width(want)

    def __repr__(self) -> str:
        name = self.card.origin or self.card.family
        return f"<vitrail.Model {name}, run by {self.engine.name} in {self.engine.precision}>"


def running(
    source: str | Path | Model,
    engine: str | None = None,
    *,
    labels: str | Path | Sequence[str] | None = None,
    device: str = "auto",
    threads: int | None = None,
    calibrate: str | Sequence[Picture] | None = None,
    root: str | None = None,
    **options: Any,
) -> Model:
    """A model run by an engine, which `open_engine` describes: `running("model.onnx").predict("cat.jpg")`."""
    if is_exported(source):
        given = sorted(name for name, value in options.items() if value is not None)
        if given:
            raise ConfigError(f"{source} is exported already: {', '.join(given)} cannot be changed any more.")
    elif not isinstance(source, Model):
        source = load(source, **options)
    vit = Running(open_engine(source, engine, device, threads, _calibrating(calibrate, root)))
    if labels is not None:
        vit.card = vit.card.but(labels=read_labels(labels, vit.card.config.classes))
    return vit

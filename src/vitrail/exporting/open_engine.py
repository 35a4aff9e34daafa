"""Open a model or an exported file with an engine: torch, ONNX Runtime, OpenVINO, or the fastest of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail.data.decode import ImageLike
from vitrail.engine_model import EngineModel, check_unchanged
from vitrail.engines.engine import Engine, FileEngine, open_file, torch_engine
from vitrail.engines.exported_files import ENGINES, ENGINES_BY_SUFFIX, is_exported
from vitrail.engines.optional_packages import is_installed
from vitrail.errors import CheckpointError, ConfigError, VitrailError, did_you_mean
from vitrail.exporting.autotune import describe_choice, fastest_engine, sample_batch, time_engines
from vitrail.exporting.compare import TOLERANCE
from vitrail.exporting.engine_cache import cached_engine
from vitrail.exporting.export_model import calibration_images
from vitrail.model import Model
from vitrail.open_model import load
from vitrail.runtime import pick_device, warn_once
from vitrail.weights.loading import load_checkpoint
from vitrail.weights.locate import ModelLocation


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
    """Open a model or an exported file with an engine: `with_engine("ViT-B/16", "auto").predict("cat.jpg")`.

    `engine`, `device` and `threads` are those of `open_engine`, `options` those of `vitrail.load`. `labels` replaces
    the class names. `calibrate` is a data set or a list of images for int8 with engine="auto".
    """
    if isinstance(source, EngineModel):
        labels = source.labels if labels is None else labels
        source = source.source
    if isinstance(source, str | Path) and is_exported(Path(source).expanduser()):
        source = Path(source).expanduser()
        check_unchanged(source, device, dtype, options)
    elif not isinstance(source, Model):
        source = load(source, dtype=dtype, **options)
    opened = open_engine(source, engine, device, threads, calibration_images(calibrate, root))
    return EngineModel(opened, source).with_labels(labels)


def open_engine(
    source: Any,
    engine: str | None = None,
    device: str | torch.device = "auto",
    threads: int | None = None,
    calibrate: Sequence[Any] = (),
    concurrency: int = 1,
    **options: Any,
) -> Engine:
    """Open an engine for an exported file, a model, or any source that `vitrail.load` accepts.

    engine: "torch", "onnxruntime", "openvino", or "auto": the fastest installed engine whose outputs match those of the
        model. The default is torch, or for an exported file its own engine. For another engine, a model is exported on
        the first call, and the files are cached.
    device: of torch; the other engines run on the CPU.
    threads: number of cores to use, for all calls together; the default is all cores.
    calibrate: images for static int8 quantization with "auto".
    concurrency: expected number of concurrent calls.
    options: those of `load_checkpoint`.
    """
    if engine is not None and engine not in ENGINES:
        raise ConfigError(f"unknown engine {engine!r}{did_you_mean(engine, ENGINES)}")
    if threads is not None and threads < 1:
        raise ConfigError(f"threads={threads}: expected 1 or more.")
    if is_exported(source):
        return open_export(Path(source), engine, threads, concurrency)
    if isinstance(source, str | Path | ModelLocation):
        net, info = load_checkpoint(source, **options)
    else:
        net, info = source.net, source.info
    target = pick_device(device)
    if engine in (None, "torch"):
        return torch_engine(net, info, target, threads, concurrency)
    if engine == "auto":
        return fastest_engine(net, info, target, threads, calibrate, concurrency)
    return cached_engine(net, info, engine, "float32", threads, concurrency)


def open_export(path: Path, engine: str | None = None, threads: int | None = None, concurrency: int = 1) -> FileEngine:
    """Open an exported file, by default with the engine in which it was compared with the model.

    Another `engine` must give the same outputs; "auto" selects the fastest that does.
    """
    available = [name for name in ENGINES_BY_SUFFIX[path.suffix.lower()] if name == "torch" or is_installed(name)]
    default = ENGINES_BY_SUFFIX[path.suffix.lower()][0]
    if engine in (None, default) or default not in available or (engine == "auto" and len(available) == 1):
        selected = available[0] if default not in available and engine == "auto" and available else engine
        return open_file(path, None if selected == "auto" else selected, threads, concurrency)
    if engine != "auto":
        opened = open_file(path, engine, threads, concurrency)
        _check_same_outputs(opened, open_file(path, default, threads, concurrency), path)
        return opened
    engines: dict[tuple[str, str], Engine] = {}
    excluded = {}
    for name in available:
        try:
            opened = open_file(path, name, threads)
            if engines:
                _check_same_outputs(opened, next(iter(engines.values())), path)
            engines[name, opened.precision] = opened
        except VitrailError as error:
            excluded[name] = str(error)
    if not engines:
        raise CheckpointError(next(iter(excluded.values())))
    batch = sample_batch(next(iter(engines.values())).info)
    benchmark = {**time_engines(engines, batch), "refused": excluded}
    warn_once([f"--engine auto selected {describe_choice(benchmark)}"])
    return open_file(path, benchmark["engine"], threads, concurrency)


def _check_same_outputs(engine: FileEngine, reference: Engine, path: Path) -> None:
    """Raise CheckpointError if two engines give different outputs for the same file."""
    assert isinstance(reference, FileEngine)
    batch = sample_batch(engine.info)
    outputs, expected = engine.outputs(batch), reference.outputs(batch)
    relative_error = float(np.linalg.norm(outputs - expected)) / max(float(np.linalg.norm(expected)), 1e-30)
    if not relative_error <= TOLERANCE[engine.precision]:
        raise CheckpointError(
            f"{engine.name} gives different outputs for {path} than {reference.name} (relative error "
            f"{relative_error:.2g}); try --engine {reference.name}."
        )

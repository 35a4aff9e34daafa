"""A Model that an engine runs, such as an exported file."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.config import NetConfig, ViTConfig
from vitrail.data.preprocess import Preprocess
from vitrail.engines.engine import Engine, open_file
from vitrail.engines.exported_files import existing_files
from vitrail.errors import ConfigError, ModelError
from vitrail.inference import OutputName, Pixels
from vitrail.model import Model
from vitrail.weights.checksum import weights_checksum
from vitrail.weights.class_names import read_labels


class EngineModel(Model):
    """A Model run by an engine: it predicts like any other, but cannot be explained, modified or trained."""

    def __init__(self, engine: Engine, source: Path | Model) -> None:
        self.engine, self._info, self.source = engine, engine.info, source
        self.preprocess = Preprocess(engine.info.preprocess)

    @property
    def config(self) -> NetConfig:
        return self.info.config

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def __getattr__(self, name: str) -> NoReturn:
        if name == "net":
            raise self._unsupported("it can be run, but not explained, modified or trained")
        raise AttributeError(name)

    @property
    def fingerprint(self) -> str:
        """CRC-32 of the weights or of the exported files, 8 hex digits."""
        if isinstance(self.source, Model):
            return weights_checksum(self.source.net)
        checksum = 0
        for part in existing_files(self.source):
            checksum = zlib.crc32(part.read_bytes(), checksum)
        return f"{checksum:08x}"

    def with_labels(self, labels: str | Path | Sequence[str] | None) -> EngineModel:
        """This model, with these class names instead of its own; None: unchanged."""
        if labels is not None:
            self.info = self.info.replace(labels=read_labels(labels, self.info.config.num_classes))
        return self

    def outputs(self, pixels: Tensor) -> Tensor:
        """Pixels, B C H W, 0 to 255 -> outputs, B K, on the CPU."""
        return torch.from_numpy(self.engine.logits(pixels.permute(0, 2, 3, 1).cpu().numpy()))

    def check_features(self) -> None:
        """Raise ModelError if the outputs are classes."""
        if self.info.task == "classify" and self.config.num_classes:
            raise self._unsupported("it outputs classes, not features")

    def _run(self, pixels: Sequence[Pixels], output: OutputName) -> Tensor:
        if output == "pooled":
            self.check_features()
        return torch.from_numpy(self.engine.logits(np.stack(pixels)))

    def _unsupported(self, reason: str) -> ModelError:
        """The error for an operation that needs the network; names what to load instead."""
        origin = self.info.origin
        if isinstance(self.source, Model):
            return ModelError(f"{self.engine.name} runs {origin or 'this model'}: {reason}; load it without an engine.")
        made_from = f" ({origin})" * bool(origin)
        return ModelError(
            f"{self.source} is an exported model: {reason}; use the checkpoint it was exported from{made_from}."
        )

    def _width(self, output: OutputName) -> int:
        pooled_width = self.config.pooled_width if isinstance(self.config, ViTConfig) else 0
        return self.config.num_classes or pooled_width or super()._width(output)

    def __repr__(self) -> str:
        name = self.info.origin or self.info.family
        return f"<vitrail.Model {name}, run by {self.engine.name} in {self.engine.precision}>"


class EngineModule(nn.Module):
    """An EngineModel with the interface of a network: pixels, B C H W, 0 to 255 -> outputs, B K."""

    def __init__(self, model: EngineModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        return self.model.outputs(pixels).to(pixels.device)


class PixelPreprocess(Preprocess):
    """Preprocessing without normalization, which the engine applies."""

    def normalize(self, batch: Tensor) -> Tensor:
        return batch


def open_exported(
    path: Path,
    *,
    labels: str | Path | Sequence[str] | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype | None = "float32",
    **options: Any,
) -> EngineModel:
    """Open a file written by `vitrail export` with its default engine; `options` that would change it are errors."""
    check_unchanged(path, device, dtype, options)
    return EngineModel(open_file(path), path).with_labels(labels)


def check_unchanged(
    path: Path, device: str | torch.device, dtype: str | torch.dtype | None, options: Mapping[str, Any]
) -> None:
    """Raise ConfigError if an option would change what was exported."""
    changed = sorted(name for name, value in options.items() if value is not None)
    if changed:
        raise ConfigError(
            f"{path} is an exported file: {', '.join(changed)} cannot be changed; try the original checkpoint."
        )
    if str(device) not in ("auto", "cpu"):
        raise ConfigError(
            f"{path} is exported and runs on the CPU only; for {device}, load the checkpoint it was made from."
        )
    if dtype not in (None, "float32", torch.float32):
        raise ConfigError(f"{path} has a fixed precision; for {dtype}, export it again or load the checkpoint.")

"""A job: a model, data and what is stored of each image. It is small, and any process can open it."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from vitrail.bulk.outputs import Output
from vitrail.bulk.part_computer import PartComputer
from vitrail.bulk.parts import Part, plan_parts, whole_batches
from vitrail.config import DataConfig
from vitrail.data.sources import open_source_splits
from vitrail.data.sources.base import Source, SourceSplits
from vitrail.data.sources.remote import is_remote
from vitrail.data.sources.source_spec import parse_source
from vitrail.engine_model import EngineModel
from vitrail.errors import ConfigError, DataError, did_you_mean
from vitrail.model import Model
from vitrail.open_model import load
from vitrail.runtime import warn_once
from vitrail.runtime.cores import usable_cores
from vitrail.runtime.cpu import detect_cpu
from vitrail.storage.part_folder import Manifest, truncated
from vitrail.weights.checksum import weights_checksum
from vitrail.weights.model_info import strip_local_folders

SPLITS = ("train", "validation", "test", "all")
LOCAL_KINDS = ("folder", "table", "shards")
NAMES = ("model", "data", "data_digest")
"""Settings that depend on how the model and the data are named: other processes have absolute paths of both."""


@dataclass(frozen=True)
class ModelSource:
    """A model that another process can load: a file, a folder, a name or a hub id."""

    name: str | Path
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `vitrail.load`."""

    def open(self, device: str = "cpu") -> Model:
        return load(self.name, **{**self.options, "device": device})

    def with_absolute_paths(self) -> ModelSource:
        """Independent of the current folder."""
        labels = self.options.get("labels")
        options = {**self.options, "labels": _absolute(labels)} if isinstance(labels, str | Path) else self.options
        return ModelSource(_absolute(self.name), options)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that determines the rows."""

    model: ModelSource | None
    """None: the model exists in this process only."""
    data: DataConfig
    output: Output
    split: str = "all"
    batch_size: int = 64
    images_per_part: int = 1024
    threads: int = 1
    """torch's threads for each batch on a CPU."""

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ConfigError(f"unknown split {self.split!r}{did_you_mean(self.split, SPLITS)}")
        for name in ("batch_size", "images_per_part", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: expected at least 1.")

    def open(self, model: Model) -> OpenJob:
        """The job with its model and data, in this process."""
        sources = select_splits(open_source_splits(self.data, require_labels=False), self.data, self.split)
        return OpenJob(replace(self, output=self.output.resolve(model)), model, sources)

    def for_other_processes(self) -> Job:
        """The job with absolute paths."""
        spec = parse_source(self.data.source)
        local = spec.kind in LOCAL_KINDS and not is_remote(spec.location)
        data = self.data.replace(source=f"{spec.kind}:{os.path.abspath(spec.location)}") if local else self.data
        if data.root is not None:
            data = data.replace(root=os.path.abspath(os.path.expanduser(data.root)))
        return replace(self, data=data, model=self.model and self.model.with_absolute_paths())


@dataclass(frozen=True)
class OpenJob:
    """A job with its model and data."""

    job: Job
    """With its output resolved for the model."""
    model: Model
    sources: Mapping[str, Source]
    """The chosen splits, by name."""

    def computer(self, cores: int | None = None, readers: int | None = None) -> PartComputer:
        """A computer of parts on some cores, by default all; and this many processes that decode."""
        on_cpu = self.model.device.type == "cpu" and not isinstance(self.model, EngineModel)
        cores = cores or usable_cores()
        return PartComputer(
            model=self.model,
            sources=self.sources,
            output=self.job.output,
            batch_size=self.job.batch_size,
            lanes=max(cores // self.job.threads, 1) if on_cpu else 0,
            threads=self.job.threads if on_cpu else None,
            readers=readers,
        )

    @property
    def on_gpu(self) -> bool:
        return self.model.device.type != "cpu"

    @cached_property
    def parts(self) -> list[Part]:
        counts = {name: len(source) for name, source in self.sources.items()}
        return plan_parts(counts, whole_batches(self.job.images_per_part, self.job.batch_size))

    def manifest(self, device: str | None = None) -> Manifest:
        """The manifest of the job's folder; `device`: where its parts are computed, if not where the model is."""
        device = device or self.model.device.type
        return Manifest(
            task=self.job.output.task,
            num_images=sum(len(source) for source in self.sources.values()),
            images_per_part=whole_batches(self.job.images_per_part, self.job.batch_size),
            num_parts=len(self.parts),
            settings=self.settings(device),
            processor=self.processor(device),
        )

    def processor(self, device: str) -> str:
        """The processor that computes on a device; empty for a GPU of another machine."""
        if device == "cpu":
            return detect_cpu().name
        return _accelerator(self.model.device) if device == self.model.device.type else ""

    def settings(self, device: str) -> dict[str, Any]:
        """Everything that determines the rows."""
        job, first = self.job, next(iter(self.sources.values()))
        source = job.data.source
        settings = {
            "task": job.output.task,
            "model": self.model.info.title,
            **self._identity(),
            **job.output.settings(),
            "data": strip_local_folders(source),
            "data_digest": f"{zlib.crc32(source.encode(errors='surrogateescape')):08x}",
            "split": job.split,
            "labels": list(first.labels),
            "batch_size": job.batch_size,
            "engine": self._engine(),
            "device": device,
            "threads": job.threads if device == "cpu" else None,
            "vitrail": version("vitrail"),
            "torch": torch.__version__.partition("+")[0],
        }
        return dict(json.loads(json.dumps(settings)))  # as it will be read back

    def check_same(self, manifest: Manifest, device: str, where: str) -> None:
        """Raise ConfigError if this process found another model, other images or versions than a manifest states."""
        for name, value in self.settings(device).items():
            stated = manifest.settings.get(name, value)
            if name not in NAMES and stated != value:
                raise ConfigError(
                    f"{where} has {name}={truncated(value)}, and the manifest {name}={truncated(stated)}; give it the "
                    "same files and versions."
                )

    def _identity(self) -> dict[str, Any]:
        return {
            "weights": self.model.fingerprint
            if isinstance(self.model, EngineModel)
            else weights_checksum(self.model.net),
            "preprocess": self.model.info.preprocess.to_dict(),
            "images": {name: [len(source), keys_checksum(source)] for name, source in self.sources.items()},
        }

    def _engine(self) -> str:
        """torch in its precision, or an engine in its own."""
        if isinstance(self.model, EngineModel):
            return f"{self.model.engine.name} {self.model.engine.precision}"
        return f"torch {self.model.precision}"


def select_splits(parts: SourceSplits, config: DataConfig, split: str) -> dict[str, Source]:
    """The requested splits, by name."""
    if hasattr(parts.train, "samples"):
        raise DataError(f"{config.source} is a stream, whose images have no indices to resume from; try shards:.")
    warn_once(parts.notes, about=config.source)
    present = {"train": parts.train, "validation": parts.validation, "test": parts.test}
    present = {name: source for name, source in present.items() if source is not None and len(source)}
    if split != "all" and split not in present:
        raise DataError(f"{config.source} has no {split} split; it has {', '.join(present) or 'no images at all'}.")
    if not present:
        raise DataError(f"{config.source} has no images.")
    return present if split == "all" else {split: present[split]}


def keys_checksum(source: Source) -> str:
    """CRC-32 of the images' keys in order, as eight hexadecimal digits."""
    checksum = 0
    for i in range(len(source)):
        checksum = zlib.crc32(source.key(i).encode(errors="surrogateescape") + b"\n", checksum)
    return f"{checksum:08x}"


def _absolute(name: str | Path) -> str | Path:
    """The absolute path of a file or folder; another name is unchanged."""
    path = Path(name).expanduser()
    return path.absolute() if path.exists() else name


def _accelerator(device: torch.device) -> str:
    """The name of a GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

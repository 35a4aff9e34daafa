"""Prepares a run: opens the data, builds or loads the network, and resolves the config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.config import BiTConfig, NetConfig, PreprocessConfig, TrainConfig, pair
from vitrail.config.image import preprocess_for_channels, preprocess_for_size
from vitrail.data.sources import open_data
from vitrail.data.sources.base import Source, Splits
from vitrail.errors import ConfigError, DataError, TrainError
from vitrail.models import Net, ViT, build
from vitrail.models.families import default_family
from vitrail.objectives import requires_labels
from vitrail.runtime import warn_once
from vitrail.runtime.distributed import DistributedContext
from vitrail.training.checkpointing import Progress
from vitrail.training.custom_objects import CustomObjects, copy_network
from vitrail.training.data_fingerprint import DataFingerprint, check_fingerprint, check_splits, fingerprint_data
from vitrail.weights.archive import unmap_weights
from vitrail.weights.loading import adapt_model, load_checkpoint
from vitrail.weights.model_info import FINE_TUNED_PREFIX, TRAINED_PREFIX, ModelInfo, strip_local_folders


@dataclass(frozen=True)
class Setup:
    """The data, the network and the resolved config of a run."""

    config: TrainConfig
    """With all defaults resolved: enough to repeat the run."""
    net: Net
    info: ModelInfo
    splits: Splits
    data_fingerprint: DataFingerprint
    """Stored in checkpoints and compared when the run is resumed."""
    objective: Any = None
    """The objective, if it is not one of vitrail's own."""

    @property
    def class_counts(self) -> npt.NDArray[np.int64] | None:
        """Number of images of each class; None if it is not known without reading all of them."""
        targets = getattr(self.splits.train, "targets", None)
        if targets is None:
            return None
        if targets.ndim == 2:
            return targets.sum(0)
        return np.bincount(targets[targets >= 0], minlength=len(self.info.labels or ()))


def prepare_run(
    config: TrainConfig,
    distributed: DistributedContext,
    *,
    saved: Progress | None = None,
    objects: CustomObjects | None = None,
) -> Setup:
    """Open the data, build or load the network. `saved`: of a resumed run, whose weights come from its checkpoint.

    `objects`: the objects that the config has names of.
    """
    objects = objects or CustomObjects()
    objective = objects.objective(config.objective)
    learns_labels = requires_labels(config.objective, objective)
    network_class = objects.network_class(config.init_from, weights=saved is None)
    with distributed.main_process_first():  # which downloads and indexes for all
        splits = open_data(config.data, require_labels=learns_labels, source_splits=objects.data(config.data.source))
    warn_once(splits.notes, about=config.data.source)
    labels = tuple(splits.train.labels)
    if learns_labels and not labels:
        raise TrainError(f"{config.data.source} has no labels; try objective=masked-patch or simmim, which need none.")
    if learns_labels and len(labels) == 1 and not splits.train.multi_label:
        raise DataError(f"{config.data.source} has only one class, {labels[0]!r}; a classifier needs at least two.")
    if learns_labels:
        check_splits(splits, labels, config.data.source)
    data = fingerprint_data(
        splits, labels if learns_labels else (), learns_labels and splits.train.multi_label, distributed
    )
    if saved is not None:
        warn_once(check_fingerprint(saved.data_fingerprint, data, config.data.source))
        warn_once(_describe_old_behavior(config) if not saved.data_fingerprint else [])
    if config.init_from is not None and saved is None:
        net, info = _load_init_from(config, labels if learns_labels else (), objects)
        config = config.replace(model=net.config)
    else:
        assert config.model is not None
        if config.init_from is None and config.image_size is not None:
            raise ConfigError(f"image_size={config.image_size} is only for init_from; set model.image_size instead.")
        config = config.replace(model=_with_classes(config.model, len(labels) if learns_labels else 0))
        net, info = _create_network(config, labels if learns_labels else ())
        net = net if network_class is None else copy_network(net, network_class)
        info = info.replace(**saved.model_origin) if saved is not None else info
    info = info.replace(name=config.name, multi_label=learns_labels and splits.train.multi_label)
    if config.preprocess is not None:
        info = info.replace(preprocess=config.preprocess)
    _check_sizes(net, info.preprocess)
    return Setup(config.replace(preprocess=info.preprocess), net, info, splits, data, objective)


def _describe_old_behavior(config: TrainConfig) -> list[str]:
    """Notes about settings that had another meaning in the versions whose checkpoints have no data fingerprint."""
    found = []
    if config.augment.mixes:
        found.append(
            f"images are mixed within groups of augment.mix_group={config.augment.mix_group}, not of the batch"
        )
        if config.classify.class_weights == "balanced":
            found.append("balanced class weights apply to each class of a mixed target, not to the image")
    return [f"from this step on, the run trains differently than before: {' and '.join(found)}"] if found else []


def _load_init_from(config: TrainConfig, labels: tuple[str, ...], objects: CustomObjects) -> tuple[Net, ModelInfo]:
    """Load the checkpoint `init_from`; unless it has these very classes, its head is replaced by one of zeros."""
    assert config.init_from is not None
    changes = _regularization_settings(config.model)
    if objects.init_model is not None:
        net, info = objects.init_model
        net, info = adapt_model(net.rebuild(net.config.replace(**changes), {}), info, config.image_size)
        if info.labels is None and net.config.num_classes == len(labels):
            info = info.replace(labels=labels)  # a network with this number of classes keeps its head
    else:
        net, info = load_checkpoint(config.init_from, image_size=config.image_size, overrides=changes)
        unmap_weights(net)  # frozen weights would keep the file open for the whole run
    warn_once(info.notes, about=info.origin or config.init_from)
    before = net.config
    if info.labels != labels or info.task != "classify":
        net, info = adapt_model(net, info, num_classes=0)
        if labels:
            net, info = adapt_model(net, info, num_classes=len(labels))
    if config.model is not None:
        _check_matches_checkpoint(
            config.model if config.image_size is None else config.model.replace(image_size=config.image_size),
            before,
            net.config,
        )
    origin = f"{FINE_TUNED_PREFIX}{info.name or strip_local_folders(info.origin or config.init_from)}"
    return net, info.replace(labels=labels or None, origin=origin, notes=())


def _regularization_settings(model: NetConfig | None) -> dict[str, float]:
    """The settings of the network that may differ from the checkpoint's: dropout and stochastic depth."""
    if model is None or isinstance(model, BiTConfig):
        return {}
    return {name: getattr(model, name) for name in ("dropout", "attention_dropout", "drop_path")}


def _check_matches_checkpoint(requested: NetConfig, before: NetConfig, after: NetConfig) -> None:
    """Raise if a setting of the network differs from the checkpoint's and cannot be changed."""
    first, last = before.to_dict(), after.to_dict()
    for name, value in requested.to_dict().items():
        if name != "num_classes" and value not in (first.get(name), last.get(name)):
            raise ConfigError(
                f"model.{name}={value}, but the checkpoint has {last.get(name)}. Only dropout, attention_dropout and "
                "drop_path can be changed, and the image size with image_size=."
            )


def _create_network(config: TrainConfig, labels: tuple[str, ...]) -> tuple[Net, ModelInfo]:
    assert config.model is not None
    net = build(config.model, config.seed)
    family = default_family(config.model)
    info = ModelInfo(
        config=net.config,
        preprocess=config.preprocess or _default_preprocess(config.model),
        labels=labels or None,
        family=family,
        task="classify" if labels else "embed",
        origin=f"{TRAINED_PREFIX}{strip_local_folders(config.data.source)}",
    )
    return net, info


def _default_preprocess(model: NetConfig) -> PreprocessConfig:
    """Antialiased bicubic resizing; from 96 px on with a margin around the center crop."""
    size = pair(model.image_size)
    preprocess = PreprocessConfig(image_size=224, resize="short", resize_to=256, interpolation="bicubic")
    if min(size) < 96:
        return preprocess_for_channels(preprocess.replace(image_size=size, resize_to=None), model.channels)
    return preprocess_for_size(preprocess, size, model.channels)


def _with_classes(model: NetConfig, num_classes: int) -> NetConfig:
    if model.num_classes in (0, num_classes):
        return model.replace(num_classes=num_classes)
    raise ConfigError(
        f"got model.num_classes={model.num_classes}, and the data has {num_classes} classes; "
        "num_classes=0 takes the number from the data."
    )


def _check_sizes(net: Net, preprocess: PreprocessConfig) -> None:
    if preprocess.channels != net.config.channels:
        raise ConfigError(
            f"the preprocessing gives {preprocess.channels} channels, but the network needs {net.config.channels}; "
            "give preprocess.mean and preprocess.std one number per channel."
        )
    if isinstance(net, ViT) and pair(preprocess.image_size) != pair(net.config.image_size):
        raise ConfigError(
            f"preprocess.image_size={preprocess.image_size}, but the network's position embeddings are for "
            f"model.image_size={net.config.image_size}; set both to the same size."
        )


def format_sample_names(source: Source, indices: npt.NDArray[np.int64], limit: int = 10) -> str:
    """The keys of the first `limit` samples, for a message."""
    key = getattr(source, "key", lambda number: f"number {number} of the stream")
    named = [key(int(i)) for i in indices[:limit]]
    rest = f" and {len(indices) - limit} more" if len(indices) > limit else ""
    return ", ".join(named) + rest

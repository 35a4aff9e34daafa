"""`vitrail.load`, a model from a file, a name, a hub id or a module, and `vitrail.create`, an untrained one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vitrail.config import Pair
from vitrail.engine_model import open_exported
from vitrail.engines.exported_files import is_exported
from vitrail.errors import NotFoundError
from vitrail.kernels.eight_bit import EIGHT_BIT
from vitrail.model import Model
from vitrail.models import Net, build
from vitrail.models.compiled import compile_blocks
from vitrail.models.eight_bit_net import to_eight_bit
from vitrail.models.families import FAMILIES
from vitrail.models.model_names import config_from_name, find_published
from vitrail.runtime import parse_dtype, pick_device, warn_once
from vitrail.weights import module_reader
from vitrail.weights.class_names import assume_imagenet_labels, read_labels
from vitrail.weights.family_defaults import default_preprocess
from vitrail.weights.loading import adapt_model, load_checkpoint
from vitrail.weights.locate import ModelLocation
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.shipped import SHIPPED

if TYPE_CHECKING:
    pass


def load(
    source: str | Path | ModelLocation | nn.Module,
    *,
    image_size: Pair | None = None,
    channels: int | None = None,
    num_classes: int | None = None,
    labels: str | Path | Sequence[str] | None = None,
    family: str | None = None,
    section: str | None = None,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = "float32",
    compile: bool = False,
    check_finite: bool = True,
    **overrides: Any,
) -> Model:
    """Load a model from a file, a folder, a model name, a hub id or another library's network.

    `source` is resolved in this order: an existing file or folder; a model that ships with the package
    ("vitrail/cifar10"); a model name, which stands for one public checkpoint; a hub id.

    image_size    another image size; the position embeddings are resampled
    channels      another number of image channels; the first filters are summed or repeated
    num_classes   a new head of zeros with this number of classes
    labels        class names: "imagenet-1k", a file or a list
    family        the model family of a file without metadata: DeiT, DINO, ...
    section       the part of a training checkpoint to read, such as "teacher"
    dtype         None keeps the stored dtype; "float8" is bfloat16 with the products of a ViT's blocks in 8-bit floats
    compile       torch.compile the blocks: the first batch takes longer, the others less time on a GPU
    check_finite  False accepts NaN and infinite weights
    overrides     config fields that the file does not state, such as activation="gelu-quick"

    A file written by `vitrail export` is run by its own engine: it predicts like any other model, but cannot be
    modified or explained.

    A network in memory, of timm, transformers, torchvision or open_clip, is converted: the weights are copied, the
    preprocessing and labels come from its config, and the outputs of both networks are compared on two images.
    """
    if not isinstance(source, str | Path | ModelLocation | nn.Module):
        raise NotFoundError(
            f"got a {type(source).__name__}, expected a file, a folder, a model name, a hub id or an nn.Module."
        )
    size: dict[str, Any] = {"image_size": image_size, "channels": channels, "num_classes": num_classes}
    path = source.path if isinstance(source, ModelLocation) else source
    file = None if isinstance(path, nn.Module) else Path(path).expanduser()
    if file is not None and is_exported(file):
        requested = size | {"family": family, "section": section}
        return open_exported(
            file, labels=labels, device=device, dtype=dtype, compile=compile or None, **requested, **overrides
        )
    target = pick_device(device)
    stored = "bfloat16" if dtype == EIGHT_BIT else dtype
    options: dict[str, Any] = {"family": family, "dtype": parse_dtype(stored), "check_finite": check_finite}
    if isinstance(source, nn.Module):
        net, info = adapt_model(*module_reader.read_module(source, overrides=overrides, **options), **size)
    else:
        net, info = load_checkpoint(source, overrides=overrides, section=section, **size, **options)
    info = (
        assume_imagenet_labels(net, info)
        if labels is None
        else info.replace(labels=read_labels(labels, info.config.num_classes))
    )
    if info.origin not in SHIPPED:  # nothing about a shipped model is assumed
        warn_once(info.notes, about=info.origin or Path(str(file)).name)
    net = net.to(target)
    net = to_eight_bit(net) if dtype == EIGHT_BIT else net
    if compile:
        compile_blocks(net)
    return Model(net, info)


def create(name: str, *, seed: int | None = None, device: str | torch.device = "cpu", **changes: Any) -> Net:
    """Create an untrained network with the paper's initialization.

    `create("ViT-B/16", num_classes=10, image_size=384)`
    """
    target = pick_device(device)
    return build(config_from_name(name, **changes), seed).to(target)


def create_model(name: str, *, seed: int | None = None, device: str | torch.device = "cpu", **changes: Any) -> Model:
    """Create an untrained Model by name: `create` plus the family's default preprocessing."""
    net = create(name, seed=seed, device=device, **changes)
    variant = find_published(name)
    family = (variant.name if variant else name).split("+")[-1].split("-")[0]
    known = next(k for k in FAMILIES if k.lower() == family.lower())
    preprocess = default_preprocess(known, net.config)
    classifies = net.config.num_classes and (known != "CLIP" or "num_classes" in changes)
    info = ModelInfo(config=net.config, preprocess=preprocess, family=known, origin=name)
    return Model(net.eval(), info if classifies else info.replace(task="embed"))

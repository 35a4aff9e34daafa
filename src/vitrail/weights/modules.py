"""A network of another library, in memory, read as the file that its library would write.

Its state_dict is the file's tensors and its config the JSON beside them. What no tensor shows (heads, activation,
epsilon, image size) is taken from the module's parts. Both networks compute one image before ours is called the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.config import pair
from vitrail.errors import CheckpointError, FormatError
from vitrail.models import Net
from vitrail.models.base import Network, evaluating
from vitrail.weights import checkpoint
from vitrail.weights.card import Card
from vitrail.weights.files import Archive, Tensors
from vitrail.weights.unsupported import refuse_architecture

PROCESSORS = ("preprocessor_config.json", "processor_config.json")
GELUS = {"GELU": "gelu", "GELUTanh": "gelu-tanh", "QuickGELU": "gelu-quick"}
"""Classes of timm, torch and open_clip -> ours."""
CLOSE = 1e-3
"""Relative difference of outputs that rounding cannot exceed in single precision."""


def read(module: nn.Module, *, changes: Mapping[str, Any], **options: Any) -> tuple[Net, Card]:
    """Network (in evaluation mode) and card of a module; the weights are copies.

    Modules of timm, transformers, torchvision and open_clip are read, and others with the tensors of a known format.
    FormatError is raised where the module computes something else than the network that its tensors stand for.
    Options are those of `checkpoint.read`.
    """
    module = _unwrapped(module)
    if isinstance(module, Network):
        raise FormatError("this is a network of vitrail; vitrail.Model(net, card) gives it preprocessing and labels.")
    archive = _archive(module)
    if not any(form.recognise(archive) is not None for form in checkpoint.FORMATS):
        raise FormatError(
            f"{archive.source} is not a network that vitrail reads; wanted a Vision Transformer or BiT of timm, "
            "transformers, torchvision or open_clip."
        )
    known = {} if hasattr(module, "config") else _conventions(module)  # transformers' config states all of it
    net, card = checkpoint.read(archive, changes=known | dict(changes), **options)
    if not changes:
        card = card.noting(*_compared(module, net, archive.source))
    return net, card


def _unwrapped(module: nn.Module) -> nn.Module:
    """Without the wrappers of torch.compile and of data parallelism."""
    parallel = isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel)
    inner = getattr(module, "module" if parallel else "_orig_mod", None)
    return _unwrapped(inner) if isinstance(inner, nn.Module) else module


def _archive(module: nn.Module) -> Archive:
    package, name = type(module).__module__.partition(".")[0], type(module).__name__
    config: Any = getattr(module, "config", None)
    beside: dict[str, Any] = {}
    if hasattr(config, "model_type") and hasattr(config, "to_dict"):
        beside = {"config.json": config.to_dict(), **_processor(str(getattr(config, "name_or_path", "")))}
    elif architecture := (getattr(module, "pretrained_cfg", None) or {}).get("architecture"):
        refuse_architecture(architecture)
        name, beside = architecture, {"config.json": _timm_config(module, architecture)}
    source = f"{package}'{'' if package.endswith('s') else 's'} {name}"
    state = module.state_dict()
    if any(t.is_meta for t in state.values()):
        raise CheckpointError(f"{source} has no weights: it is on the meta device; load them into it first.")
    copies = {name: t.detach().to("cpu", copy=True) for name, t in state.items()}
    return Archive(source, Tensors.of(copies, source), sidecars=beside)


def _timm_config(module: Any, architecture: str) -> dict[str, Any]:
    """timm's config.json, with those arguments that the tensors do not show or the architecture would contradict."""
    cfg = dict(module.pretrained_cfg)
    whole = {"architecture": architecture, "pretrained_cfg": cfg, "num_classes": module.num_classes}
    if hasattr(module, "patch_embed"):
        whole["model_args"] = {
            "img_size": module.patch_embed.img_size,
            "class_token": module.cls_token is not None,
            "pre_norm": not isinstance(module.norm_pre, nn.Identity),
            "global_pool": module.global_pool,
        }
    return whole | {name: cfg[name] for name in ("label_names", "label_descriptions") if cfg.get(name)}


def _processor(name: str) -> dict[str, Any]:
    """The image processor's file in the folder, or the hub's cache, that a model of transformers was loaded from."""
    from huggingface_hub import try_to_load_from_cache  # which takes a while to import
    from huggingface_hub.errors import HFValidationError

    for file in PROCESSORS if name else ():
        try:
            path = Path(name, file) if Path(name).is_dir() else try_to_load_from_cache(name, file)
            return {file: json.loads(Path(str(path)).read_text(encoding="utf-8"))}
        except (OSError, ValueError, HFValidationError):
            continue
    return {}


def _conventions(module: nn.Module) -> dict[str, Any]:
    """Fields of our config that no tensor shows, as far as the module's parts agree on one value."""
    tower = _tower(module)
    parts = list(tower.modules())
    image = getattr(getattr(tower, "patch_embed", tower), "img_size", None) or getattr(tower, "image_size", None)
    found = {
        "heads": _only(m.num_heads for m in parts if isinstance(getattr(m, "num_heads", None), int)),
        "norm_eps": _only(m.eps for m in parts if isinstance(m, nn.LayerNorm) or "RmsNorm" in type(m).__name__),
        "activation": _only(_gelu(m) for m in parts if type(m).__name__ in GELUS),
        "image": image and pair(image if isinstance(image, int) else tuple(image)),
    }
    return {name: value for name, value in found.items() if value is not None}


def _tower(module: nn.Module) -> nn.Module:
    """The image tower of open_clip's models, which hold a text tower too."""
    return visual if isinstance(visual := getattr(module, "visual", None), nn.Module) else module


def _gelu(module: nn.Module) -> str:
    return "gelu-tanh" if getattr(module, "approximate", "none") == "tanh" else GELUS[type(module).__name__]


def _only(values: Iterable[Any]) -> Any:
    """The value, where all are the same."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


@torch.no_grad()
def _compared(module: nn.Module, net: Net, source: str) -> list[str]:
    """Raise FormatError where the two compute different outputs for an image; what to note where they have none."""
    weight, ours = next(module.parameters()), next(net.parameters())
    exact = {weight.dtype, ours.dtype} <= {torch.float32, torch.float64}
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, net.config.channels, *pair(net.config.image), generator=generator)
    with evaluating(module):
        theirs = _outputs(module, image.to(weight)) if exact else None
    wanted = net(image.to(ours)).double() if exact else None
    if theirs is None or wanted is None or theirs.shape != wanted.shape or not theirs.isfinite().all():
        return [f"the outputs of {source} could not be compared: read by its tensors and config alone."]
    difference = float((theirs.cpu().double() - wanted).norm() / wanted.norm().clamp(min=1e-12))
    if difference > CLOSE:
        raise FormatError(
            f"{source} computes something else than the network that its tensors stand for (relative difference "
            f"{difference:.1g}): a part was replaced, or is of a kind that vitrail does not build."
        )
    return []


def _outputs(module: Any, images: Tensor) -> Tensor | None:
    """The module's logits or pooled features; None where its forward pass gives neither."""
    try:
        # A model of two towers wants texts too.
        found = getattr(module, "get_image_features", _tower(module))(images)
    except (TypeError, ValueError, RuntimeError):
        return None
    if not isinstance(found, Tensor):
        found = next(
            (x for n in ("logits", "image_embeds", "pooler_output") if (x := getattr(found, n, None)) is not None), None
        )
    return found if isinstance(found, Tensor) else None

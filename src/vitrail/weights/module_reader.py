"""A network of another library, in memory, read as the file that its library would write.

Its state_dict is the file's tensors and its config the JSON in its header. What no tensor shows (heads, activation,
epsilon, image size) is taken from the module's parts. Both networks compute two images before ours is called the same.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from vitrail.config import pair
from vitrail.errors import CheckpointError, FormatError
from vitrail.models import Net, ViT
from vitrail.models.base import BaseNet, eval_mode
from vitrail.weights import checkpoint
from vitrail.weights.archive import Archive, LazyTensors
from vitrail.weights.model_info import ModelInfo, preprocess_for_size
from vitrail.weights.unsupported import reject_architecture

PROCESSORS = ("preprocessor_config.json", "processor_config.json")
GELUS = {"GELU": "gelu", "GELUTanh": "gelu-tanh", "QuickGELU": "gelu-quick"}
"""Classes of timm, torch and open_clip -> ours."""
OUTPUTS = ("logits", "image_embeds", "pooler_output")
"""Fields of transformers' outputs that the network's own may be."""
ADAPTED = re.compile(r"lora_|base_layer\.|parametrizations\.|_orig$")
"""Names of tensors from which peft or torch.nn.utils computes a weight."""
CLOSE = 1e-4
"""Relative difference of outputs that rounding does not reach in single precision: 5e-6 is usual."""


def read_module(module: nn.Module, *, overrides: Mapping[str, Any], **options: Any) -> tuple[Net, ModelInfo]:
    """BaseNet (in evaluation mode) and info of a module; the weights are copies.

    Modules of timm, transformers, torchvision and open_clip are read, and others with the tensors of a known format.
    FormatError is raised where the module computes something else than the network that its tensors stand for.
    Options are those of `checkpoint.read`.
    """
    module = _unwrapped(module)
    if isinstance(module, BaseNet):
        raise FormatError("this is a network of vitrail; vitrail.Model(net, info) gives it preprocessing and labels.")
    archive = _archive(module)
    if not any(form.detect(archive) is not None for form in checkpoint.FORMATS):
        raise FormatError(
            f"{archive.source} is not a network that vitrail reads; wanted a Vision Transformer or BiT of timm, "
            "transformers, torchvision or open_clip."
        )
    known = {} if _is_transformers(module) else _conventions(module)  # transformers' config states all of it
    try:
        net, info = checkpoint.read(archive, overrides=known | dict(overrides), **options)
    except FormatError as error:
        if name := next((n for n in archive.tensors if ADAPTED.search(n)), None):
            raise FormatError(
                f"{archive.source} has an adapter or a parametrization ({name}); merge it into the weights first: "
                "merge_and_unload of peft, remove_parametrizations or prune.remove of torch."
            ) from error
        raise
    if _is_transformers(module):
        info = _own_size(module, info)
    if not overrides:
        info = info.with_notes(*_compared(module, net, archive.source))
    return net, info


def _unwrapped(module: nn.Module) -> nn.Module:
    """Without the wrappers of torch.compile, of data parallelism and of averaging."""
    wrapped = isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel | AveragedModel)
    inner = getattr(module, "module" if wrapped else "_orig_mod", None)
    return _unwrapped(inner) if isinstance(inner, nn.Module) else module


def _is_transformers(module: Any) -> bool:
    return all(hasattr(getattr(module, "config", None), name) for name in ("model_type", "to_dict"))


def _archive(module: Any) -> Archive:
    package, name = type(module).__module__.partition(".")[0], type(module).__name__
    beside: dict[str, Any] = {}
    if _is_transformers(module):
        config = module.config
        beside = {"config.json": config.to_dict(), **_processor(str(getattr(config, "name_or_path", "")))}
    elif architecture := (getattr(module, "pretrained_cfg", None) or {}).get("architecture"):
        reject_architecture(architecture)
        package, name, beside = "timm", architecture, {"config.json": _timm_config(module, architecture)}
    source = f"{package}'{'' if package.endswith('s') else 's'} {name}"
    header = {file: json.dumps(content, default=str) for file, content in beside.items()}
    return Archive(source, LazyTensors.from_tensors(_copies(module, source), source), metadata=header)


def _copies(module: nn.Module, source: str) -> dict[str, Tensor]:
    """Its state_dict on the CPU."""
    state = module.state_dict()
    for name, tensor in state.items():
        if type(tensor) is not Tensor:
            raise FormatError(
                f"{source}: its {name} is a {type(tensor).__name__}, not a plain tensor; load the network as it was "
                "before it was quantized or sharded."
            )
        if tensor.is_meta:
            raise CheckpointError(f"{source} has no weights: it is on the meta device; load them into it first.")
    return {name: t.detach().to("cpu", copy=True) for name, t in state.items()}


def _timm_config(module: Any, architecture: str) -> dict[str, Any]:
    """timm's config.json, with those arguments that the tensors do not show or the architecture would contradict."""
    cfg = dict(module.pretrained_cfg)
    classes = getattr(module, "num_classes", cfg.get("num_classes"))
    whole = {"architecture": architecture, "pretrained_cfg": cfg, "num_classes": classes}
    if hasattr(module, "patch_embed") and hasattr(module, "norm_pre"):
        whole["model_args"] = {
            "img_size": module.patch_embed.img_size,
            "class_token": module.cls_token is not None,
            "pre_norm": not isinstance(module.norm_pre, nn.Identity),
            "global_pool": module.global_pool,
        }
    return whole | {name: cfg[name] for name in ("label_names", "label_descriptions") if cfg.get(name)}


def _processor(name: str) -> dict[str, Any]:
    """The image processor's file in the folder, or the hub's cache, that a model of transformers was loaded from."""
    return next(({file: found} for file in PROCESSORS if (found := _stored(name, file))), {})


def _stored(name: str, file: str) -> dict[str, Any]:
    """A JSON file of that folder or repository; empty where there is none."""
    from huggingface_hub import try_to_load_from_cache  # which takes a while to import
    from huggingface_hub.errors import HFValidationError

    with suppress(OSError, ValueError, HFValidationError):
        path = Path(name, file) if Path(name).is_dir() else try_to_load_from_cache(name, file)
        found = json.loads(Path(str(path)).read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def _own_size(module: Any, info: ModelInfo) -> ModelInfo:
    """With preprocessing for the network's size where it is not that of the checkpoint, which the processor is for."""
    size, image = getattr(module.config, "image_size", None), pair(info.config.image_size)
    size = list(size) if isinstance(size, tuple) else size  # as JSON has it
    stored = _stored(str(getattr(module.config, "name_or_path", "")), "config.json").get("image_size", size)
    if stored == size or pair(info.preprocess.image_size) == image:
        return info
    note = f"images are resized to {image[0]}x{image[1]}, the network's size: its processor is for the checkpoint's."
    return info.replace(preprocess=preprocess_for_size(info.preprocess, image, info.preprocess.channels)).with_notes(
        note
    )


def _conventions(module: nn.Module) -> dict[str, Any]:
    """Fields of our config that no tensor shows, as far as the module's parts agree on one value."""
    parts = list(_tower(module).modules())
    sizes = [getattr(m, name, None) for m in parts for name in ("img_size", "image_size")]
    found = {
        "num_heads": _only(m.num_heads for m in parts if isinstance(getattr(m, "num_heads", None), int)),
        "norm_eps": _only(m.eps for m in parts if isinstance(m, nn.LayerNorm) or "RmsNorm" in type(m).__name__),
        "activation": _only(_gelu(m) for m in parts if type(m).__name__ in GELUS),
        "image_size": _only(
            pair(s if isinstance(s, int) else tuple(s)) for s in sizes if isinstance(s, int | tuple | list)
        ),
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
    """Raise FormatError where the two compute different outputs for two images; what to note where nothing shows it."""
    weight, ours = next(module.parameters()), next(net.parameters())
    unknown = [f"the outputs of {source} could not be compared: read by its tensors and config alone."]
    if ours.dtype not in (weight.dtype, torch.float32, torch.float64):
        return unknown  # the weights were rounded
    images = torch.randn(
        2, net.config.channels, *pair(net.config.image_size), generator=torch.Generator().manual_seed(0)
    )
    with torch.autocast("cpu", enabled=False):
        theirs, exact = _outputs(module, images), _exact(net)
        images = images.to(torch.promote_types(ours.dtype, torch.float32))
        wanted = exact(images)
        if torch.equal(wanted[0], wanted[1]):
            return unknown  # a head of zeros hides everything below it
        differences = [_difference(theirs[name], wanted) for name in OUTPUTS if name in theirs]
        if isinstance(exact, ViT) and not (exact.config.num_classes or exact.config.pre_logits or exact.pool):
            # These tokens decide the output, whatever pooler stands above them; masked autoencoders shuffle them.
            hidden, tokens = theirs.get("last_hidden_state"), exact.features(images, layers=[-1], norm=True).tokens
            if tokens and hidden is not None and hidden.shape == tokens[0].shape:
                differences.append(_difference(hidden.mean(1), tokens[0].mean(1)))
    known = [difference for difference in differences if math.isfinite(difference)]
    if not known:
        return unknown
    if min(known) <= CLOSE:
        return []
    raise FormatError(
        f"{source} computes something else than the network that its tensors stand for (relative difference "
        f"{min(known):.1g}): a part was replaced, or is of a kind that vitrail does not build."
    )


def _difference(got: Tensor, wanted: Tensor) -> float:
    """|got - wanted| / |wanted|; infinite where the shapes differ."""
    if got.shape != wanted.shape:
        return math.inf
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def _exact(module: Any) -> Any:
    """On the CPU in single precision, or double: itself, or a copy."""
    kinds = {(p.device.type, p.dtype) for p in module.parameters()}
    plain = kinds in ({("cpu", torch.float32)}, {("cpu", torch.float64)})
    return module if plain else copy.deepcopy(module).to("cpu", torch.float32)


def _outputs(module: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """What the forward pass gives, by name; nothing where it fails, as another library's may in any way."""
    try:
        theirs = _exact(module)
        # A model of two towers wants texts too.
        run = getattr(theirs, "get_image_features", _tower(theirs))
        with eval_mode(theirs):
            found = run(images.to(next(theirs.parameters()).dtype))
    except Exception:
        return {}
    if isinstance(found, Tensor):
        return {OUTPUTS[0]: found}
    named = {name: getattr(found, name, None) for name in (*OUTPUTS, "last_hidden_state")}
    return {name: x for name, x in named.items() if isinstance(x, Tensor)}

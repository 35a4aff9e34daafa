"""Convert an in-memory module of another library, as if reading the file that its library would write.

The state_dict gives the tensors, the config the JSON metadata. What no tensor shows (number of heads, activation,
epsilon, image size) is taken from the submodules. The outputs of both networks are compared on two images.
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

from vitrail.config import SwinConfig, pair
from vitrail.config.image import preprocess_for_size
from vitrail.errors import CheckpointError, FormatError
from vitrail.models import Net, ViT
from vitrail.models.base import BaseNet, eval_mode
from vitrail.weights import checkpoint
from vitrail.weights.archive import Archive, LazyTensors
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.unsupported import reject_architecture

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
GELU_CLASSES = {"GELU": "gelu", "GELUTanh": "gelu-tanh", "QuickGELU": "gelu-quick"}
"""Activation classes of timm, torch and open_clip -> `ViTConfig.activation`."""
OUTPUT_FIELDS = ("logits", "image_embeds", "pooler_output")
"""Fields of transformers' outputs that may correspond to the network's output."""
ADAPTER_TENSORS = re.compile(r"lora_|base_layer\.|parametrizations\.|_orig$")
"""Names of tensors from which peft or torch.nn.utils computes a weight."""
MAX_RELATIVE_DIFFERENCE = 1e-4
"""Relative difference of outputs; rounding in single precision typically gives 5e-6."""


def read_module(module: nn.Module, *, overrides: Mapping[str, Any], **options: Any) -> tuple[Net, ModelInfo]:
    """The network, in evaluation mode, and the model info of a module; the weights are copied.

    Modules of timm, transformers, torchvision and open_clip are supported, and others with the tensors of a known
    format. FormatError if the module's outputs differ from those of the network that its tensors describe. Options are
    those of `checkpoint.read`.
    """
    module = _unwrap(module)
    if isinstance(module, BaseNet):
        raise FormatError(
            "this is already a vitrail network; use vitrail.Model(net, info) to add preprocessing and labels."
        )
    archive = _archive_of(module)
    if not any(form.detect(archive) is not None for form in checkpoint.all_formats()):
        raise FormatError(
            f"{archive.source} is not a supported network; expected a Vision Transformer, Swin Transformer or BiT of "
            "timm, transformers, torchvision or open_clip."
        )
    # A transformers config states all conventions.
    conventions = {} if _is_transformers(module) else _infer_conventions(module)
    if _reads_as_swin(archive):
        if conventions.pop("activation", "gelu") != "gelu":
            raise FormatError(f"{archive.source} has another activation than GELU, the only one in vitrail's Swin.")
        conventions.pop("num_heads", None)  # each stage has its own
    try:
        net, info = checkpoint.read(archive, overrides=conventions | dict(overrides), **options)
    except FormatError as error:
        if name := next((n for n in archive.tensors if ADAPTER_TENSORS.search(n)), None):
            raise FormatError(
                f"{archive.source} has an adapter or a parametrization ({name}); merge it into the weights first: "
                "merge_and_unload of peft, remove_parametrizations or prune.remove of torch."
            ) from error
        raise
    if _is_transformers(module):
        info = _match_network_size(module, info)
    if not overrides:
        info = info.with_notes(*_check_same_outputs(module, net, archive.source))
    return net, info


def _reads_as_swin(archive: Archive) -> bool:
    form = next(form for form in checkpoint.all_formats() if form.detect(archive) is not None)
    return form.config_types == (SwinConfig,)


def _unwrap(module: nn.Module) -> nn.Module:
    """Remove the wrappers of torch.compile, data parallelism and weight averaging."""
    wrapped = isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel | AveragedModel)
    inner = getattr(module, "module" if wrapped else "_orig_mod", None)
    return _unwrap(inner) if isinstance(inner, nn.Module) else module


def _is_transformers(module: Any) -> bool:
    return all(hasattr(getattr(module, "config", None), name) for name in ("model_type", "to_dict"))


def _archive_of(module: Any) -> Archive:
    package, name = type(module).__module__.partition(".")[0], type(module).__name__
    sidecars: dict[str, Any] = {}
    if _is_transformers(module):
        config = module.config
        sidecars = {"config.json": config.to_dict(), **_find_processor_config(str(getattr(config, "name_or_path", "")))}
    elif architecture := (getattr(module, "pretrained_cfg", None) or {}).get("architecture"):
        reject_architecture(architecture)
        package, name, sidecars = "timm", architecture, {"config.json": _timm_config(module, architecture)}
    source = f"{package}'{'' if package.endswith('s') else 's'} {name}"
    header = {file: json.dumps(content, default=str) for file, content in sidecars.items()}
    return Archive(source, LazyTensors.from_tensors(_cpu_state_dict(module, source), source), metadata=header)


def _cpu_state_dict(module: nn.Module, source: str) -> dict[str, Tensor]:
    """A copy of the state_dict on the CPU."""
    state = module.state_dict()
    for name, tensor in state.items():
        if type(tensor) is not Tensor:
            raise FormatError(
                f"{source}: its {name} is a {type(tensor).__name__}, not a plain tensor; pass the network from before "
                "quantization or sharding."
            )
        if tensor.is_meta:
            raise CheckpointError(f"{source} has no weights: it is on the meta device; load them into it first.")
    return {name: t.detach().to("cpu", copy=True) for name, t in state.items()}


def _timm_config(module: Any, architecture: str) -> dict[str, Any]:
    """timm's config.json, with the arguments that the tensors do not show or that differ from the architecture's."""
    cfg = dict(module.pretrained_cfg)
    classes = getattr(module, "num_classes", cfg.get("num_classes"))
    config = {"architecture": architecture, "pretrained_cfg": cfg, "num_classes": classes}
    if hasattr(module, "patch_embed") and hasattr(module, "norm_pre"):
        config["model_args"] = {
            "img_size": module.patch_embed.img_size,
            "class_token": module.cls_token is not None,
            "pre_norm": not isinstance(module.norm_pre, nn.Identity),
            "global_pool": module.global_pool,
        }
    if type(module).__name__ in ("SwinTransformer", "SwinTransformerV2"):
        config |= _swin_arguments(module)
    return config | {name: cfg[name] for name in ("label_names", "label_descriptions") if cfg.get(name)}


def _swin_arguments(module: Any) -> dict[str, Any]:
    """Image size and windows of timm's Swin Transformers, as they are after set_input_size."""
    blocks = [stage.blocks[0] for stage in module.layers]
    args: dict[str, Any] = {"img_size": module.patch_embed.img_size}
    if hasattr(blocks[0].attn, "pretrained_window_size"):
        args["pretrained_window_sizes"] = [block.attn.pretrained_window_size[0] for block in blocks]
    return {"model_args": args, "windows_in_use": [block.window_size for block in blocks]}


def _find_processor_config(name: str) -> dict[str, Any]:
    """The image processor's config from the folder or cached repository that a transformers model was loaded from."""
    return next(({file: content} for file in PROCESSOR_FILES if (content := _read_stored_json(name, file))), {})


def _read_stored_json(name: str, file: str) -> dict[str, Any]:
    """A JSON file of a folder or cached repository; empty if there is none."""
    from huggingface_hub import try_to_load_from_cache  # slow to import
    from huggingface_hub.errors import HFValidationError

    with suppress(OSError, ValueError, HFValidationError):
        path = Path(name, file) if Path(name).is_dir() else try_to_load_from_cache(name, file)
        content = json.loads(Path(str(path)).read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}


def _match_network_size(module: Any, info: ModelInfo) -> ModelInfo:
    """Adapt the preprocessing if the network's image size differs from that of its checkpoint's processor."""
    size, image = getattr(module.config, "image_size", None), pair(info.config.image_size)
    size = list(size) if isinstance(size, tuple) else size  # as JSON has it
    stored = _read_stored_json(str(getattr(module.config, "name_or_path", "")), "config.json").get("image_size", size)
    if stored == size or pair(info.preprocess.image_size) == image:
        return info
    note = f"images are resized to {image[0]}x{image[1]}, the network's size, not that of the checkpoint's processor."
    return info.replace(preprocess=preprocess_for_size(info.preprocess, image, info.preprocess.channels)).with_notes(
        note
    )


def _infer_conventions(module: nn.Module) -> dict[str, Any]:
    """Config fields that no tensor shows, where all submodules agree on one value."""
    parts = list(_image_tower(module).modules())
    sizes = [getattr(m, name, None) for m in parts for name in ("img_size", "image_size")]
    fields = {
        "num_heads": _unique_value(m.num_heads for m in parts if isinstance(getattr(m, "num_heads", None), int)),
        "norm_eps": _unique_value(m.eps for m in parts if isinstance(m, nn.LayerNorm) or "RmsNorm" in type(m).__name__),
        "activation": _unique_value(_gelu_name(m) for m in parts if type(m).__name__ in GELU_CLASSES),
        "image_size": _unique_value(
            pair(s if isinstance(s, int) else tuple(s)) for s in sizes if isinstance(s, int | tuple | list)
        ),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _image_tower(module: nn.Module) -> nn.Module:
    """The image tower of an open_clip model, which also has a text tower; else the module itself."""
    return visual if isinstance(visual := getattr(module, "visual", None), nn.Module) else module


def _gelu_name(module: nn.Module) -> str:
    return "gelu-tanh" if getattr(module, "approximate", "none") == "tanh" else GELU_CLASSES[type(module).__name__]


def _unique_value(values: Iterable[Any]) -> Any:
    """The common value; None if the values differ."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None


@torch.no_grad()
def _check_same_outputs(module: nn.Module, net: Net, source: str) -> list[str]:
    """Raise FormatError if the outputs for two images differ; returns a note if they cannot be compared."""
    weight, ours = next(module.parameters()), next(net.parameters())
    not_compared = [
        f"the outputs of {source} could not be compared: it was converted from its tensors and config alone."
    ]
    if ours.dtype not in (weight.dtype, torch.float32, torch.float64):
        return not_compared  # the weights were rounded
    images = torch.randn(
        2, net.config.channels, *pair(net.config.image_size), generator=torch.Generator().manual_seed(0)
    )
    with torch.autocast("cpu", enabled=False):
        theirs, exact = _forward(module, images), _float32_on_cpu(net)
        images = images.to(torch.promote_types(ours.dtype, torch.float32))
        expected = exact(images)
        if torch.equal(expected[0], expected[1]):
            return not_compared  # with a head of zeros, all outputs are the same
        differences = [_relative_difference(theirs[name], expected) for name in OUTPUT_FIELDS if name in theirs]
        if isinstance(exact, ViT) and not (exact.config.num_classes or exact.config.pre_logits or exact.pool):
            # The last tokens decide the output whatever the pooler; masked autoencoders shuffle them.
            hidden, tokens = theirs.get("last_hidden_state"), exact.features(images, layers=[-1], norm=True).tokens
            if tokens and hidden is not None and hidden.shape == tokens[0].shape:
                differences.append(_relative_difference(hidden.mean(1), tokens[0].mean(1)))
    comparable = [difference for difference in differences if math.isfinite(difference)]
    if not comparable:
        return not_compared
    if min(comparable) <= MAX_RELATIVE_DIFFERENCE:
        return []
    raise FormatError(
        f"{source} computes other outputs than the network that its tensors describe (relative difference "
        f"{min(comparable):.1g}): a module was replaced, or is of a type that vitrail does not build."
    )


def _relative_difference(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected|; infinity if the shapes differ."""
    if got.shape != expected.shape:
        return math.inf
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def _float32_on_cpu(module: Any) -> Any:
    """The module if it is on the CPU in float32 or float64, else a float32 copy on the CPU."""
    kinds = {(p.device.type, p.dtype) for p in module.parameters()}
    plain = kinds in ({("cpu", torch.float32)}, {("cpu", torch.float64)})
    return module if plain else copy.deepcopy(module).to("cpu", torch.float32)


def _forward(module: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """The outputs by name; empty if the forward pass fails, which another library's may do in any way."""
    try:
        theirs = _float32_on_cpu(module)
        # The forward pass of a two-tower model also requires text.
        run = getattr(theirs, "get_image_features", _image_tower(theirs))
        with eval_mode(theirs):
            output = run(images.to(next(theirs.parameters()).dtype))
    except Exception:
        return {}
    if isinstance(output, Tensor):
        return {OUTPUT_FIELDS[0]: output}
    fields = {name: getattr(output, name, None) for name in (*OUTPUT_FIELDS, "last_hidden_state")}
    return {name: x for name, x in fields.items() if isinstance(x, Tensor)}

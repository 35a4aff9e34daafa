"""Hugging Face repositories of `transformers`: ViT, DeiT, DINO, DINOv2, MAE, I-JEPA, CLIP, SigLIP, BiT, Swin."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.config import BiTConfig, SwinConfig, ViTConfig, pair
from vitrail.errors import FormatError
from vitrail.models.families import FAMILIES
from vitrail.storage.atomic_write import new_folder, write_json
from vitrail.weights import huggingface_preprocess as processor
from vitrail.weights import swin_config
from vitrail.weights.archive import Archive
from vitrail.weights.family_defaults import default_preprocess
from vitrail.weights.format import Format, header_metadata
from vitrail.weights.huggingface_config import (
    BACKBONES,
    BIT_SETTINGS,
    HuggingFaceConfig,
    backbone_for,
    config_json,
    is_projection,
    mlp_ratio,
    model_class,
)
from vitrail.weights.huggingface_names import normalize_name, table
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.renaming import AnyConfig
from vitrail.weights.sidecars import stated_model
from vitrail.weights.swin_config import infer_config, is_swin
from vitrail.weights.swin_names import HUGGINGFACE_NAMES
from vitrail.weights.writers import write_safetensors

ANCHORS = {
    "embeddings.patch_embeddings.projection.weight": "embeddings.cls_token",
    "embeddings.patch_embedding.weight": "embeddings.position_embedding.weight",
    "embedder.convolution.weight": "encoder.stages.0.layers.0.conv1.weight",
    "embeddings.position_embeddings": "encoder.layer.0.attention.attention.query.weight",
}
"""Pairs of names that occur together only in transformers' files."""
UNSUPPORTED_TENSORS = {
    "embeddings.patch_embeddings.backbone.*": "a ResNet stem (ViT-Hybrid)",
    "encoder.layer.0.lambda_1": "layer scales (BEiT)",
    "encoder.layer.0.attention.attention.relative_position_bias.*": "relative position biases (BEiT)",
    "encoder.layers.0.self_attn.qkv.weight": "queries, keys and values in one matrix (BLIP)",
    "embedder.norm.weight": "post-activation units (layer_type 'bottleneck')",
    "embeddings.detection_tokens": "detection tokens (YOLOS)",
    "embeddings.text_embeddings.": "text embeddings (ViLT)",
    "embeddings.time_embeddings": "time embeddings (TimeSformer)",
    "encoder.layers.0.message_fc.": "message tokens between frames (X-CLIP)",
    "pre_layernorm.": "a norm before the blocks (OWL-ViT)",
    "hidden_states_norms.": "a norm for the map of each stage (SwinBackbone, MaskFormer)",
}
"""Tensors of similar models that compute something else."""


def detect(archive: Archive) -> str | None:
    names = {normalize_name(n) for n in archive.tensors}
    swin = "embeddings.norm.weight" in names and "encoder.layers.0.blocks.0.layernorm_before.weight" in names
    return "" if swin or any(a in names and b in names for a, b in ANCHORS.items()) else None


def infer_info(archive: Archive) -> ModelInfo:
    _reject_unsupported(archive)
    backbone = _detect_backbone(archive)
    hf_config = HuggingFaceConfig.from_archive(archive, BACKBONES[backbone])
    config: AnyConfig
    notes: list[str]
    if backbone in ("swin", "swinv2"):
        config, notes = _swin_config(archive, hf_config)
    elif backbone == "bit":
        config, notes = _bit_config(archive, hf_config), []
    else:
        config, notes = _vit_config(archive, backbone, hf_config)
    family = _family(archive, hf_config, config)
    notes += _unused_parts(archive, config)
    processor_json = processor.find_processor_json(archive)
    if processor_json is None:
        # transformers antialiases and rounds a crop's offset down, whatever the family's own code does
        preprocess = default_preprocess(family, config).replace(antialias=True, crop_rounding="floor")
        if isinstance(config, SwinConfig):  # as in the released models' files
            preprocess = preprocess.replace(resize="squash", resize_to=None)
        notes.append(
            f"there is no preprocessor_config.json; the default preprocessing of {FAMILIES[family].title} is used. "
            "Put the file beside the weights, or pass --family NAME (family=... in Python) if the model is of another "
            "family."
        )
    else:
        try:
            preprocess, processor_notes = processor.read_preprocess(
                processor_json, backbone, pair(config.image_size), config.channels
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"preprocessor_config.json is invalid ({error!r}); repair or remove it.") from None
        notes += processor_notes
        if isinstance(config, BiTConfig):
            config = config.replace(image_size=preprocess.image_size)
        elif isinstance(config, ViTConfig) and _has_uncovered_border(
            pair(preprocess.image_size), pair(config.patch_size)
        ):
            config = config.replace(uncovered="ignore")
    labels, label_note = hf_config.labels(0 if is_projection(config) else config.num_classes)
    return ModelInfo(
        config=config,
        preprocess=preprocess,
        labels=labels,
        family=family,
        task="embed" if not config.num_classes or is_projection(config) else "classify",
        multi_label=hf_config.multi_label,
        origin=archive.source,
        notes=(*notes, *([label_note] if label_note else [])),
    )


def _reject_unsupported(archive: Archive) -> None:
    for pattern, what in UNSUPPORTED_TENSORS.items():
        if any(n.startswith(pattern.removesuffix("*")) for n in archive.tensors):
            raise FormatError(f"read as huggingface: this model has {what}, which vitrail does not support.")
    if _shape(archive, "embeddings.cls_token", (1, 1))[1] > 1:
        raise FormatError("read as huggingface: this model has several class tokens (Pixio); vitrail supports one.")
    if len(_shape(archive, "embeddings.patch_embeddings.projection.weight", (0,) * 4)) == 5:
        raise FormatError("this is a video model (ViViT, VideoMAE), which vitrail does not support.")
    if len(_shape(archive, "embeddings.patch_embedding.weight", (0,) * 4)) == 2:
        raise FormatError(
            "this is SigLIP 2 with variable aspect ratio (NaFlex); vitrail supports SigLIP 2 with a fixed size only."
        )


def _detect_backbone(archive: Archive) -> str:
    """The key of BACKBONES, from the names alone."""
    names = archive.tensors
    if is_swin(archive, HUGGINGFACE_NAMES):
        return "swinv2" if any(n.endswith(".logit_scale") for n in names) else "swin"
    if "embedder.convolution.weight" in names:
        return "bit"
    if "embeddings.patch_embedding.weight" in names:
        return "clip" if "embeddings.class_embedding" in names else "siglip"
    if "encoder.layer.0.layer_scale1.lambda1" in names:
        return "dinov2_with_registers" if "embeddings.register_tokens" in names else "dinov2"
    if "embeddings.cls_token" not in names and stated_model(archive).model in ("", "ijepa"):
        return "ijepa"
    return "deit" if "embeddings.distillation_token" in names else "vit"


def _shape(archive: Archive, name: str, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
    if name in archive.tensors:
        return archive.shape(name)
    if default is None:
        raise FormatError(f"read as huggingface: the tensor {name} is missing.")
    return default


def _vit_config(archive: Archive, backbone: str, hf_config: HuggingFaceConfig) -> tuple[ViTConfig, list[str]]:
    tower = backbone in ("clip", "siglip")
    names, block = archive.tensors, "encoder.layers." if tower else "encoder.layer."
    first = "embeddings.patch_embedding" if tower else "embeddings.patch_embeddings.projection"
    width, channels, *patch = _shape(archive, f"{first}.weight")
    depth = 1 + max((int(n.removeprefix(block).split(".")[0]) for n in names if n.startswith(block)), default=-1)
    gated = f"{block}0.mlp.weights_out.weight" in names
    down = dict.fromkeys(("vit", "deit", "ijepa"), "output.dense").get(
        backbone, "mlp.weights_out" if gated else "mlp.fc2"
    )
    mlp_dim = _shape(archive, f"{block}0.{down}.weight")[1]
    hf_config.check_sizes(hidden_size=width, num_hidden_layers=depth, patch_size=tuple(patch), num_channels=channels)
    if backbone not in ("dinov2", "dinov2_with_registers"):
        hf_config.check_sizes(intermediate_size=mlp_dim)
    options: dict[str, Any] = {
        "width": width,
        "depth": depth,
        "mlp_dim": mlp_dim,
        "patch_size": tuple(patch),
        "channels": channels,
        "class_token": backbone not in ("siglip", "ijepa"),
        "num_registers": _shape(archive, "embeddings.register_tokens", (1, 0))[1],
        "patch_bias": backbone != "clip",
        "qkv_bias": tower or any(n.endswith((".query.bias", ".key.bias", ".value.bias")) for n in names),
        "layer_scale": float(hf_config.get("layerscale_value", default=1.0)) if backbone.startswith("dinov2") else None,
        "pre_norm": backbone == "clip",
    }
    options |= hf_config.conventions() | _head_options(archive, backbone, hf_config)
    options["activation"] = "swiglu" if gated else options["activation"]
    special = {"siglip": 0, "ijepa": 0, "deit": 2}.get(backbone, 1)
    rows = _shape(archive, "embeddings.position_embedding.weight" if tower else "embeddings.position_embeddings")[-2]
    options["image_size"] = hf_config.image_size(pair(options["patch_size"]), rows - special)
    if _has_uncovered_border(options["image_size"], options["patch_size"]):
        options["uncovered"] = "ignore"
    options["num_heads"], assumed = hf_config.num_heads(width, depth, mlp_dim)
    no_config = (
        f"there is no config.json; activation and epsilon are the defaults of {BACKBONES[backbone].classes[0]}. "
        "Put the file beside the weights, or pass activation=... and norm_eps=... if these are wrong."
    )
    return ViTConfig(**options), [n for n in (assumed, "" if hf_config.model_type else no_config) if n]


def _has_uncovered_border(image_size: tuple[int, int], patch: tuple[int, int]) -> bool:
    """Whether patches do not cover the last rows or columns, which transformers ignores."""
    return any(side % size for side, size in zip(image_size, patch, strict=True))


def _head_options(archive: Archive, backbone: str, hf_config: HuggingFaceConfig) -> dict[str, Any]:
    """Options for pooling and head."""
    classes = _shape(archive, "classifier.weight", (0,))[0]
    pooler = _shape(archive, "pooler.dense.weight", (0,))[0]
    match backbone:
        case "vit" if pooler and not classes:
            if (act := hf_config.get("pooler_act", default="tanh")) != "tanh":
                raise FormatError(f"config.json has pooler_act={act!r}; vitrail supports tanh only.")
            return {"num_classes": 0, "pre_logits": pooler}
        case "deit":
            both_heads = _shape(archive, "cls_classifier.weight", (0,))[0]
            return {
                "num_classes": both_heads or classes,
                "distilled": not classes,
                "num_registers": 1 if classes else 0,
            }
        case "dinov2" | "dinov2_with_registers":
            return {"num_classes": classes, "pool": "token+gap" if classes else "token"}
        case "clip" if classes:
            return {"num_classes": classes, "pool": "gap", "pool_norm": "none"}
        case "clip":
            return {"num_classes": _shape(archive, "visual_projection.weight", (0,))[0], "head_bias": False}
        case "ijepa":
            return {"num_classes": classes, "pool": "gap"}
        case "siglip":
            mapped = "head.probe" in archive.tensors and not classes
            return {"num_classes": classes, "pool": "map" if mapped else "gap"}
    return {"num_classes": classes}


def _bit_config(archive: Archive, hf_config: HuggingFaceConfig) -> BiTConfig:
    for name, ours in BIT_SETTINGS.items():
        if (stated := hf_config.get(name, default=ours)) != ours:
            raise FormatError(f"config.json has {name}={stated!r}; vitrail supports {ours!r} only.")
    units = {tuple(map(int, n.split(".")[2:5:2])) for n in archive.tensors if n.startswith("encoder.stages.")}
    root, channels, *_ = _shape(archive, "embedder.convolution.weight")
    return BiTConfig(
        channels=channels,
        num_classes=_shape(archive, "classifier.1.weight", (0,))[0],
        layers=tuple(sum(s == stage for s, _ in units) for stage in range(1 + max((s for s, _ in units), default=0))),
        width_factor=root / 64,
        standardize_eps=1e-8,
    )


def _swin_config(archive: Archive, hf_config: HuggingFaceConfig) -> tuple[SwinConfig, list[str]]:
    for name, ours in (("hidden_act", "gelu"), ("layer_norm_eps", 1e-5), ("use_absolute_embeddings", False)):
        if (stated := hf_config.get(name, default=ours)) != ours:
            raise FormatError(
                f"config.json has {name}={stated!r}; for a Swin Transformer vitrail supports {ours!r} only."
            )
    fields = ("image_size", "window_size", "pretrained_window_sizes")
    stated = {name: archive.hints[name] for name in fields if name in archive.hints}
    if hf_config.model_type:
        defaults = {"image_size": 224, "window_size": 7, "pretrained_window_sizes": ()}
        stated |= {name: hf_config.get(name, default=default) for name, default in defaults.items()}
    stated = {name: tuple(value) if isinstance(value, list) else value for name, value in stated.items()}
    if not any(stated.get("pretrained_window_sizes", ())):
        stated.pop("pretrained_window_sizes", None)
    config, notes = infer_config(archive, HUGGINGFACE_NAMES, stated)
    hf_config.check_sizes(
        embed_dim=config.width, depths=config.depths, num_heads=config.num_heads, num_channels=config.channels
    )
    return config.replace(
        dropout=float(hf_config.get("hidden_dropout_prob", default=0.0)),
        attention_dropout=float(hf_config.get("attention_probs_dropout_prob", default=0.0)),
        drop_path=float(hf_config.get("drop_path_rate", default=0.0)),
    ), notes


def _family(archive: Archive, hf_config: HuggingFaceConfig, config: AnyConfig) -> str:
    if hf_config.backbone is not BACKBONES["vit"]:
        return hf_config.backbone.family
    if hf_config.model_type == "vit_mae" or "decoder.decoder_embed.weight" in archive.tensors:
        return "MAE"
    assert isinstance(config, ViTConfig)
    bare = not config.num_classes and not config.pre_logits and "embeddings.mask_token" not in archive.tensors
    return "DINO" if bare and hf_config.model_type != "vit_msn" else "ViT"


def _unused_parts(archive: Archive, config: AnyConfig) -> list[str]:
    """Notes about parts of the file that are not loaded."""
    names, backbone = archive.tensors, backbone_for(config)
    parts = {
        "the text tower": any(n.startswith("text_model.") for n in names),
        "the decoder": any(n.startswith("decoder.") for n in names),
        "the pooler": "pooler.dense.weight" in names and not getattr(config, "pre_logits", 0),
        "the attention pooling": backbone == "siglip" and config.num_classes > 0 and "head.probe" in names,
    }
    unused = [part for part, present in parts.items() if present]
    notes = [f"not loaded: {', '.join(unused)}."] if unused else []
    if backbone == "deit" and "classifier.weight" in names:
        notes.append(
            "the distillation token has no head: it is loaded as a register, with its position embedding added."
        )
    return notes


def unsupported_parts(info: ModelInfo) -> list[str]:
    config = info.config
    if isinstance(config, BiTConfig):
        return []
    if isinstance(config, SwinConfig):
        return swin_config.unsupported_parts(HUGGINGFACE_NAMES, info)
    backbone = backbone_for(config)
    square = len(set(pair(config.image_size))) == 1
    parts = {
        f"{config.position} positions": config.position not in ("learned-1d", "none"),
        "a network without positions": config.position == "none",
        "position embeddings added at every layer": config.resolved_position_at != "stem",
        "a class token without a position": config.class_token and not config.position_on_class,
        "keys without bias": config.qkv_bias and not config.key_bias,
        "RMSNorm": config.norm == "rms",
        "qk-norm": config.qk_norm,
        "attention and MLP outputs without bias": not config.proj_bias,
        "a ResNet stem": config.stem is not None,
        "patches that are not square": len(set(pair(config.patch_size))) > 1,
        f"an image that is not square in {BACKBONES[backbone].classes[0]}": not square
        and backbone not in ("vit", "deit"),
        "a patch projection without bias": not config.patch_bias and backbone != "clip",
        "query, key and value projections without bias": not config.qkv_bias and backbone in ("clip", "siglip"),
        "a head without bias": config.num_classes > 0 and not config.head_bias and not is_projection(config),
        "a tanh layer before the head": config.pre_logits > 0 and (config.num_classes > 0 or backbone != "vit"),
        "SwiGLU without LayerScale": config.activation == "swiglu" and not backbone.startswith("dinov2"),
    }
    return [name for name, present in (parts | _unsupported_combinations(info, config, backbone)).items() if present]


def _unsupported_combinations(info: ModelInfo, config: ViTConfig, backbone: str) -> dict[str, bool]:
    """Parts that the format can store, but not in this combination."""
    token = config.pool == "token" and config.pool_norm != "none"  # for one token, norm and pooling commute
    both = config.pool == "token+gap" and config.pool_norm == "before"
    supported = {
        "vit": token,
        "dinov2": both if config.num_classes else token,
        "clip": token or (config.pool == "gap" and config.pool_norm == "none"),
        "siglip": config.pool_norm == "before" and (config.pool == "gap" or not config.num_classes),
    }
    supported |= {"deit": supported["vit"], "dinov2_with_registers": supported["dinov2"]}
    norms = {"before": "after the norm", "after": "before the norm", "none": "without a norm"}
    parts = {
        f"pool={config.pool!r} {norms[config.pool_norm]} {'with' if config.num_classes else 'without'} a head "
        f"in {BACKBONES[backbone].classes[0]}": not supported[backbone],
        "a distillation token beside other changes": config.distilled
        and (backbone != "deit" or config.num_registers > 0),
        "LayerScale beside other changes": config.layer_scale is not None and not backbone.startswith("dinov2"),
    }
    if backbone == "deit":
        parts["registers without LayerScale"] = config.num_registers > 1 or (
            config.num_registers == 1 and not config.num_classes
        )
    elif backbone.startswith("dinov2"):
        parts[f"an MLP of {config.mlp_dim} at width {config.width} beside LayerScale"] = mlp_ratio(config) is None
    elif backbone == "clip":
        parts["registers beside a norm before the blocks"] = config.num_registers > 0
        parts["a patch bias beside a norm before the blocks"] = config.patch_bias
        parts["pool='gap' without a norm and without a head"] = config.pool == "gap" and not config.num_classes
        parts["a head with bias on the class token beside a norm before the blocks"] = (
            is_projection(config) and config.head_bias
        )
        parts["class names for CLIP's projection"] = is_projection(config) and info.labels is not None
    elif backbone == "siglip":
        parts["attention pooling beside a class token"] = config.class_token
        parts["registers without a class token"] = config.num_registers > 0
        parts["a norm before the blocks without a class token"] = config.pre_norm
    return parts


def inexact_conventions(info: ModelInfo) -> list[str]:
    """Values fixed in transformers' code for BiT that differ from the config's."""
    config = info.config
    if isinstance(config, SwinConfig):
        return swin_config.inexact_conventions(HUGGINGFACE_NAMES, info)
    if not isinstance(config, BiTConfig):
        return []
    parts = {
        f"standardize_eps={config.standardize_eps:g} (transformers uses 1e-8)": config.standardize_eps != 1e-8,
        f"norm_eps={config.norm_eps:g} (transformers uses 1e-5)": config.norm_eps != 1e-5,
        "a root max pool without zero padding": config.root_pad != "zero",
    }
    return [name for name, present in parts.items() if present]


HEAD_PREFIXES = ("classifier.", "cls_classifier.", "distillation_classifier.", "visual_projection.")


def write(path: Path, tensors: Mapping[str, Tensor], info: ModelInfo, overwrite: bool) -> None:
    """Write a folder for `from_pretrained`, or one .safetensors file with the JSON files in its header."""
    tensors_to_write = complete_state_dict(tensors, info)
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    sidecars = {
        "config.json": config_json(info, dtype),
        "preprocessor_config.json": processor.preprocessor_json(info.preprocess, backbone_for(info.config)),
    }
    if path.suffix == ".safetensors":
        write_safetensors(path, tensors_to_write, header_metadata(sidecars), overwrite=overwrite)
        return
    with new_folder(path, overwrite=overwrite) as folder:
        write_safetensors(folder / "model.safetensors", tensors_to_write, header_metadata({}))
        for name, values in sidecars.items():
            write_json(folder / name, values)


def complete_state_dict(tensors: Mapping[str, Tensor], info: ModelInfo) -> dict[str, Tensor]:
    """Add the prefix of the transformers class, and the tensors that this class has but does not use."""
    config, backbone = info.config, backbone_for(info.config)
    complete = dict(tensors)
    if backbone.startswith("dinov2"):
        complete["embeddings.mask_token"] = torch.zeros_like(tensors["embeddings.cls_token"][0])
    if model_class(info) == "CLIPForImageClassification":
        norm = tensors["pre_layrnorm.weight"]
        complete |= {"post_layernorm.weight": torch.ones_like(norm), "post_layernorm.bias": torch.zeros_like(norm)}
    prefix = BACKBONES[backbone].prefix if config.num_classes or backbone in ("clip", "siglip") else ""
    return {n if n.startswith(HEAD_PREFIXES) else f"{prefix}{n}": t for n, t in complete.items()}


HUGGINGFACE = Format(
    "huggingface",
    detect,
    infer_info,
    table,
    write,
    unsupported_parts,
    inexact_conventions,
    normalize_name,
    config_types=(ViTConfig, BiTConfig, SwinConfig),
)

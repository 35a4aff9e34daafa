"""Hugging Face's config.json <-> our config and labels.

Sizes are read from the tensors. config.json is read for what no tensor shows (number of heads, activation, epsilon,
image size); a value that it omits is the default of the class in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vitrail.config import BiTConfig, Pair, SwinConfig, ViTConfig, pair
from vitrail.errors import ConfigError, FormatError
from vitrail.models.model_names import infer_num_heads
from vitrail.weights.archive import Archive
from vitrail.weights.class_names import from_id2label
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.renaming import AnyConfig

MULTI_LABEL = "multi_label_classification"
"""transformers' `problem_type` of a multi-label classifier."""
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu_python_tanh": "gelu-tanh",
    "gelu_new": "gelu-tanh",
    "gelu_fast": "gelu-tanh",
    "gelu_accurate": "gelu-tanh",
    "quick_gelu": "gelu-quick",
}
"""transformers' names -> ours; where several map to one of ours, the first is written."""


@dataclass(frozen=True)
class Backbone:
    """One architecture in transformers, with the conventions that its code fixes and no tensor shows."""

    family: str
    model_types: tuple[str, ...]
    """Values of `model_type` in its configs."""
    classes: tuple[str, str]
    """Names of the classes without and with a classifier."""
    prefix: str = ""
    """Prefix of the network's names inside a classifier."""
    activation: str = "gelu"
    norm_eps: float = 1e-6
    resample: str = "huggingface"


BACKBONES = {
    "vit": Backbone(
        "ViT", ("vit", "vit_mae", "vit_msn"), ("ViTModel", "ViTForImageClassification"), "vit.", norm_eps=1e-12
    ),
    "deit": Backbone("DeiT", ("deit",), ("DeiTModel", "DeiTForImageClassification"), "deit.", norm_eps=1e-12),
    "dinov2": Backbone("DINOv2", ("dinov2",), ("Dinov2Model", "Dinov2ForImageClassification"), "dinov2."),
    "dinov2_with_registers": Backbone(
        "DINOv2",
        ("dinov2_with_registers",),
        ("Dinov2WithRegistersModel", "Dinov2WithRegistersForImageClassification"),
        "dinov2_with_registers.",
        resample="timm",  # the only one that antialiases when it resizes positions
    ),
    "clip": Backbone(
        "CLIP",
        ("clip_vision_model", "clip"),
        ("CLIPVisionModel", "CLIPForImageClassification"),
        "vision_model.",
        activation="quick_gelu",
        norm_eps=1e-5,
    ),
    "siglip": Backbone(
        "SigLIP",
        ("siglip_vision_model", "siglip"),
        ("SiglipVisionModel", "SiglipForImageClassification"),
        "vision_model.",
        activation="gelu_pytorch_tanh",
    ),
    "ijepa": Backbone("IJEPA", ("ijepa",), ("IJepaModel", "IJepaForImageClassification"), "ijepa.", norm_eps=1e-12),
    "bit": Backbone("BiT", ("bit",), ("BitModel", "BitForImageClassification"), "bit."),
    "dinov3": Backbone("DINOv3", ("dinov3_vit",), ("DINOv3ViTModel", "DINOv3ViTModel"), norm_eps=1e-5),
    "tipsv2": Backbone(
        "TIPSv2", ("tipsv2_vision_model", "tipsv2"), ("Tipsv2VisionModel", "Tipsv2VisionModel"), resample="tipsv2"
    ),
    "swin": Backbone("Swin", ("swin",), ("SwinModel", "SwinForImageClassification"), "swin.", norm_eps=1e-5),
    "swinv2": Backbone(
        "SwinV2", ("swinv2",), ("Swinv2Model", "Swinv2ForImageClassification"), "swinv2.", norm_eps=1e-5
    ),
}

BIT_SETTINGS = {
    "layer_type": "preactivation",
    "global_padding": None,
    "hidden_act": "relu",
    "num_groups": 32,
    "embedding_dynamic_padding": False,
    "output_stride": 32,
}
"""Settings of BitConfig with the only values that BiT uses."""


def check_model_type(model_type: str) -> None:
    """Raise FormatError for a `model_type` that is not one of BACKBONES."""
    known = [t for backbone in BACKBONES.values() for t in backbone.model_types]
    if model_type not in known:
        raise FormatError(
            f"config.json has model_type={model_type!r}, which vitrail does not support; supported: {', '.join(known)}."
        )


def backbone_for(config: AnyConfig) -> str:
    """The key of BACKBONES whose code computes this network, if any does."""
    if isinstance(config, BiTConfig):
        return "bit"
    if isinstance(config, SwinConfig):
        return "swin" if config.version == 1 else "swinv2"
    if config.pool == "map" or not config.class_token:
        return "siglip"
    if config.pre_norm:
        return "clip"
    if config.layer_scale is not None:
        return "dinov2_with_registers" if config.num_registers else "dinov2"
    return "deit" if config.distilled or config.num_registers else "vit"


def is_projection(config: AnyConfig) -> bool:
    """Whether the outputs are CLIP's image embeddings rather than class logits."""
    return (
        isinstance(config, ViTConfig)
        and backbone_for(config) == "clip"
        and config.pool == "token"
        and config.num_classes > 0
    )


@dataclass(frozen=True)
class HuggingFaceConfig:
    """The vision part of a config.json; empty if there is none."""

    backbone: Backbone
    fields: dict[str, Any]
    model_type: str
    """`model_type`, or "" where there is no config.json."""
    id2label: dict[str, str] | None
    hints: dict[str, Any] = field(default_factory=dict)
    """Values passed by the caller, used where the file does not state them."""
    multi_label: bool = False
    """Whether an image may have several of the classes."""

    @classmethod
    def from_archive(cls, archive: Archive, backbone: Backbone) -> HuggingFaceConfig:
        content = archive.sidecars.get("config.json")
        if not isinstance(content, dict) or not ("model_type" in content or "hidden_size" in content):
            return cls(backbone, {}, "", None, archive.hints)
        model_type = str(content.get("model_type", backbone.model_types[0]))
        if model_type not in backbone.model_types:
            raise FormatError(
                f"config.json has model_type={model_type!r}, but the tensors are those of "
                f"{' or '.join(backbone.model_types)}: the files belong to different models."
            )
        fields = _vision_part(content) if backbone.family in ("CLIP", "SigLIP", "TIPSv2") else content
        return cls(
            backbone,
            fields,
            model_type,
            content.get("id2label"),
            archive.hints,
            content.get("problem_type") == MULTI_LABEL,
        )

    def get(self, *names: str, default: Any = None) -> Any:
        return next((self.fields[n] for n in names if self.fields.get(n) is not None), default)

    def check_sizes(self, **sizes: Any) -> None:
        """Raise FormatError where a size in config.json differs from that of the tensors."""
        for name, value in sizes.items():
            stated = self.get(name, default=value)
            if _as_pair(stated) != _as_pair(value):
                raise FormatError(
                    f"config.json has {name}={stated}, but the tensors have {value}: "
                    "the files belong to different models."
                )

    def conventions(self) -> dict[str, Any]:
        """Fields of ViTConfig that no tensor shows: activation, epsilon, dropout, position resampling."""
        hinted = {theirs for theirs, ours in ACTIVATIONS.items() if ours == self.hints.get("activation")}
        if not self.model_type and self.backbone.family == "CLIP" and not hinted:
            raise FormatError(
                "the tensors are those of a CLIP image tower and do not show which GELU it uses; pass "
                "activation='gelu-quick' for weights by OpenAI, MetaCLIP and DFN, activation='gelu' for the others."
            )
        activation = self.get("hidden_act", default=self.backbone.activation)
        if activation not in ACTIVATIONS:
            raise FormatError(
                f"config.json has hidden_act={activation!r}, which vitrail does not support; "
                f"supported: {', '.join(ACTIVATIONS)}."
            )
        return {
            "activation": ACTIVATIONS[activation],
            "norm_eps": float(
                self.get("layer_norm_eps", default=1e-6 if self.model_type == "vit_msn" else self.backbone.norm_eps)
            ),
            "resample": self.backbone.resample,
            "dropout": float(self.get("hidden_dropout_prob", default=0.0)),
            "attention_dropout": float(self.get("attention_probs_dropout_prob", "attention_dropout", default=0.0)),
            "drop_path": float(self.get("drop_path_rate", default=0.0)),
        }

    def num_heads(self, width: int, depth: int, mlp_dim: int) -> tuple[int, str]:
        """Number of heads, and a note if it was assumed."""
        default = 12 if self.model_type and width % 12 == 0 else None
        stated = self.hints.get("num_heads") or self.get("num_attention_heads", default=default)
        if stated is not None:
            return int(stated), ""
        heads = infer_num_heads(width, mlp_dim)
        if heads is None:
            raise FormatError(
                f"there is no config.json, and the number of heads at width {width} cannot be guessed; "
                "put the file beside the weights, or pass num_heads=..."
            )
        return heads, f"{heads} heads of width {width // heads} are assumed; pass num_heads=... if that is wrong."

    def image_size(self, patch: tuple[int, int], num_patches: int) -> tuple[int, int]:
        """The image size that the position embedding is for."""
        stated = self.get("image_size")
        if stated is None and self.hints.get("image_size"):
            size = pair(self.hints["image_size"])
            if math.prod(s // p for s, p in zip(size, patch, strict=True)) == num_patches:
                return size
        if stated is None:
            side = math.isqrt(num_patches)
            if side * side != num_patches:
                raise FormatError(
                    f"{num_patches} positions are not a square grid, and config.json has no image_size; "
                    "pass image_size=(height, width)."
                )
            return side * patch[0], side * patch[1]
        size = pair(stated if isinstance(stated, int) else tuple(stated))
        rows, columns = size[0] // patch[0], size[1] // patch[1]
        if rows * columns != num_patches:
            raise FormatError(
                f"config.json has image_size={stated} ({rows}x{columns} patches), but the tensors have "
                f"{num_patches} positions."
            )
        return size

    def labels(self, num_classes: int) -> tuple[tuple[str, ...] | None, str]:
        """Class names, and a note if those in the file cannot be used."""
        if not self.id2label or not num_classes:
            return None, ""
        try:
            names = from_id2label(self.id2label)
        except ConfigError as error:
            return None, f"the class names in config.json are not used: {error}"
        if names is not None and len(names) != num_classes:
            return None, f"config.json has {len(names)} class names for {num_classes} classes: they are not used."
        return names, ""


def _vision_part(content: dict[str, Any]) -> dict[str, Any]:
    """The vision tower's part; the older field vision_config_dict overrides vision_config, as in transformers."""
    if "vision_config" not in content and "vision_config_dict" not in content:
        return content
    older = content.get("vision_config_dict")
    defaults = {"hidden_act": None, "layer_norm_eps": None} if older else {}
    return {**(content.get("vision_config") or {}), **defaults, **(older or {})}


def _as_pair(value: Any) -> Any:
    """Height and width for one number; a list as a tuple."""
    return pair(value) if isinstance(value, int) else tuple(value)


def _int_or_list(size: Pair) -> int | list[int]:
    height, width = pair(size)
    return height if height == width else [height, width]


def config_json(info: ModelInfo, dtype: str) -> dict[str, Any]:
    """The contents of config.json for this model."""
    config = info.config
    name = backbone_for(config)
    backbone = BACKBONES[name]
    values: dict[str, Any] = {"architectures": [model_class(info)], "model_type": backbone.model_types[0]}
    if isinstance(config, SwinConfig):
        body = _swin(config)
    else:
        body = _bit(config) if isinstance(config, BiTConfig) else CONFIG_WRITERS[name](config)
    if config.num_classes and not is_projection(config):
        labels = info.labels or [f"LABEL_{i}" for i in range(config.num_classes)]
        values |= {
            "id2label": {str(i): label for i, label in enumerate(labels)},
            "label2id": {label: i for i, label in enumerate(labels)},
        }
        if info.multi_label:
            values["problem_type"] = MULTI_LABEL
        if name in ("clip", "siglip"):
            values["model_type"] = backbone.model_types[1]
            body = {"vision_config": {"model_type": backbone.model_types[0], **body}}
    if model_class(info) == "ViTMAEModel":
        values["model_type"] = "vit_mae"
    return values | body | {"torch_dtype": dtype}


def model_class(info: ModelInfo) -> str:
    """Name of the transformers class that computes this model."""
    config = info.config
    bare, classifier = BACKBONES[backbone_for(config)].classes
    if is_projection(config):
        return "CLIPVisionModelWithProjection"
    if isinstance(config, ViTConfig):
        if config.distilled and config.num_classes:
            return "DeiTForImageClassificationWithTeacher"
        square = len(set(pair(config.image_size))) == 1
        if info.family == "MAE" and bare == "ViTModel" and not config.num_classes and not config.pre_logits and square:
            return "ViTMAEModel"
    return classifier if config.num_classes else bare


def _shared(config: ViTConfig) -> dict[str, Any]:
    activation = "gelu" if config.activation == "swiglu" else config.activation
    return {
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_dim,
        "hidden_act": next(theirs for theirs, ours in ACTIVATIONS.items() if ours == activation),
        "layer_norm_eps": config.norm_eps,
        "image_size": _int_or_list(config.image_size),
        "patch_size": _int_or_list(config.patch_size),
        "num_channels": config.channels,
    }


def _vit(config: ViTConfig) -> dict[str, Any]:
    pooler = {"pooler_output_size": config.pre_logits, "pooler_act": "tanh"} if config.pre_logits else {}
    return _shared(config) | {
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "qkv_bias": config.qkv_bias,
        "encoder_stride": pair(config.patch_size)[0],
        **pooler,
    }


def _dinov2(config: ViTConfig) -> dict[str, Any]:
    values = _vit(config) | {
        "mlp_ratio": mlp_ratio(config),
        "layerscale_value": config.layer_scale,
        "drop_path_rate": config.drop_path,
        "use_swiglu_ffn": config.activation == "swiglu",
    }
    if config.num_registers:
        values["num_register_tokens"] = config.num_registers
    return {k: v for k, v in values.items() if k not in ("intermediate_size", "encoder_stride")}


def _clip(config: ViTConfig) -> dict[str, Any]:
    projection = {"projection_dim": config.num_classes} if is_projection(config) else {}
    return _shared(config) | {"attention_dropout": config.attention_dropout, **projection}


def _siglip(config: ViTConfig) -> dict[str, Any]:
    headless = {} if config.pool == "map" else {"vision_use_head": False}
    return _shared(config) | {"attention_dropout": config.attention_dropout, **headless}


def _bit(config: BiTConfig) -> dict[str, Any]:
    base = int(64 * config.width_factor)
    return {
        "num_channels": config.channels,
        "embedding_size": base,
        "hidden_sizes": [4 * base * 2**s for s in range(len(config.layers))],
        "depths": list(config.layers),
        "width_factor": 1,  # transformers' own would widen the stages but not the final norm
        **BIT_SETTINGS,
    }


def _swin(config: SwinConfig) -> dict[str, Any]:
    values = {
        "image_size": _int_or_list(config.image_size),
        "patch_size": _int_or_list(config.patch_size),
        "num_channels": config.channels,
        "embed_dim": config.width,
        "depths": list(config.depths),
        "num_heads": list(config.num_heads),
        "window_size": config.window_sizes[0][0],
        "mlp_ratio": config.mlp_ratio,
        "qkv_bias": config.qkv_bias,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "drop_path_rate": config.drop_path,
        "hidden_act": "gelu",
        "layer_norm_eps": config.norm_eps,
        "hidden_size": config.pooled_width,
        "encoder_stride": config.strides[-1][0],
    }
    if config.version == 2:
        values["pretrained_window_sizes"] = list(config.pretrained_window_sizes or (0,) * len(config.depths))
    return values


CONFIG_WRITERS: dict[str, Callable[[ViTConfig], dict[str, Any]]] = {
    "vit": _vit,
    "deit": _vit,
    "dinov2": _dinov2,
    "dinov2_with_registers": _dinov2,
    "clip": _clip,
    "siglip": _siglip,
}


def mlp_ratio(config: ViTConfig) -> int | None:
    """Dinov2Config's mlp_ratio, a whole multiple of the width (SwiGLU uses two thirds of it); None if none fits."""
    for ratio in range(1, 33):
        hidden = config.width * ratio
        if config.activation == "swiglu":
            hidden = (int(hidden * 2 / 3) + 7) // 8 * 8
        if hidden == config.mlp_dim:
            return ratio
    return None

"""Hugging Face's config.json <-> our config and labels.

Sizes are read from the tensors, which cannot be wrong; config.json is asked for what no tensor
shows (heads, activation, epsilon, the size of the image), and what it leaves out is the default of
the class in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vitrail.config import BiTConfig, Pair, ViTConfig, pair
from vitrail.errors import ConfigError, FormatError
from vitrail.models.model_names import infer_num_heads
from vitrail.weights.archive import Archive
from vitrail.weights.class_names import from_id2label
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.renaming import AnyConfig

SEVERAL = "multi_label_classification"
"""transformers' `problem_type` where an image may have several of the classes."""
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
"""Their names -> ours; the first of several is written."""


@dataclass(frozen=True)
class Kind:
    """One kind of network in transformers: what its code decides and its tensors do not show."""

    family: str
    types: tuple[str, ...]
    """The `model_type` of its configs."""
    models: tuple[str, str]
    """The class without and with a classifier."""
    prefix: str = ""
    """What the network's names stand under inside a classifier."""
    activation: str = "gelu"
    eps: float = 1e-6
    resample: str = "huggingface"


KINDS = {
    "vit": Kind("ViT", ("vit", "vit_mae", "vit_msn"), ("ViTModel", "ViTForImageClassification"), "vit.", eps=1e-12),
    "deit": Kind("DeiT", ("deit",), ("DeiTModel", "DeiTForImageClassification"), "deit.", eps=1e-12),
    "dinov2": Kind("DINOv2", ("dinov2",), ("Dinov2Model", "Dinov2ForImageClassification"), "dinov2."),
    "dinov2_with_registers": Kind(
        "DINOv2",
        ("dinov2_with_registers",),
        ("Dinov2WithRegistersModel", "Dinov2WithRegistersForImageClassification"),
        "dinov2_with_registers.",
        resample="timm",  # the only one of these that antialiases
    ),
    "clip": Kind(
        "CLIP",
        ("clip_vision_model", "clip"),
        ("CLIPVisionModel", "CLIPForImageClassification"),
        "vision_model.",
        activation="quick_gelu",
        eps=1e-5,
    ),
    "siglip": Kind(
        "SigLIP",
        ("siglip_vision_model", "siglip"),
        ("SiglipVisionModel", "SiglipForImageClassification"),
        "vision_model.",
        activation="gelu_pytorch_tanh",
    ),
    "ijepa": Kind("IJEPA", ("ijepa",), ("IJepaModel", "IJepaForImageClassification"), "ijepa.", eps=1e-12),
    "bit": Kind("BiT", ("bit",), ("BitModel", "BitForImageClassification"), "bit."),
}

BIT = {
    "layer_type": "preactivation",
    "global_padding": None,
    "hidden_act": "relu",
    "num_groups": 32,
    "embedding_dynamic_padding": False,
    "output_stride": 32,
}
"""What BitConfig can say and BiT's own network does not vary."""


def refuse_type(model_type: str) -> None:
    """Raise FormatError for a `model_type` that is not one of KINDS."""
    known = [t for kind in KINDS.values() for t in kind.types]
    if model_type not in known:
        raise FormatError(
            f"config.json says model_type={model_type!r}, which vitrail does not read yet; it reads {', '.join(known)}."
        )


def kind_of(config: AnyConfig) -> str:
    """The key of KINDS whose code computes this network, if any does."""
    if isinstance(config, BiTConfig):
        return "bit"
    if config.pool == "map" or not config.class_token:
        return "siglip"
    if config.pre_norm:
        return "clip"
    if config.layer_scale is not None:
        return "dinov2_with_registers" if config.num_registers else "dinov2"
    return "deit" if config.distilled or config.num_registers else "vit"


def is_projection(config: AnyConfig) -> bool:
    """CLIP's outputs are a space to compare images in, not classes."""
    return (
        isinstance(config, ViTConfig)
        and kind_of(config) == "clip"
        and config.pool == "token"
        and config.num_classes > 0
    )


@dataclass(frozen=True)
class Said:
    """What config.json says about the image's network; empty without one."""

    kind: Kind
    fields: dict[str, Any]
    type: str
    """`model_type`, or "" where there is no config.json."""
    id2label: dict[str, str] | None
    told: dict[str, Any] = field(default_factory=dict)
    """By the caller, for where the file is silent."""
    multi_label: bool = False
    """Whether an image may have several of the classes."""

    @classmethod
    def of(cls, archive: Archive, kind: Kind) -> Said:
        whole = archive.sidecars.get("config.json")
        if not isinstance(whole, dict) or not ("model_type" in whole or "hidden_size" in whole):
            return cls(kind, {}, "", None, archive.hints)
        named = str(whole.get("model_type", kind.types[0]))
        if named not in kind.types:
            raise FormatError(
                f"config.json says model_type={named!r}, the tensors look like {' or '.join(kind.types)}: "
                "two models are mixed up."
            )
        fields = _vision(whole) if kind.family in ("CLIP", "SigLIP") else whole
        return cls(kind, fields, named, whole.get("id2label"), archive.hints, whole.get("problem_type") == SEVERAL)

    def get(self, *names: str, default: Any = None) -> Any:
        return next((self.fields[n] for n in names if self.fields.get(n) is not None), default)

    def agrees(self, **found: Any) -> None:
        """Raise where config.json belongs to another network than the tensors."""
        for name, value in found.items():
            stated = self.get(name, default=value)
            if _sizes(stated) != _sizes(value):
                raise FormatError(
                    f"config.json says {name}={stated}, the tensors have {value}: two models are mixed up."
                )

    def conventions(self) -> dict[str, Any]:
        """Fields of ViTConfig that no tensor shows."""
        told = {theirs for theirs, ours in ACTIVATIONS.items() if ours == self.told.get("activation")}
        if not self.type and self.kind.family == "CLIP" and not told:
            raise FormatError(
                "its tensors are those of a CLIP image tower and do not show which GELU it computes; pass "
                "activation='gelu-quick' for weights by OpenAI, MetaCLIP and DFN, activation='gelu' for the others."
            )
        activation = self.get("hidden_act", default=self.kind.activation)
        if activation not in ACTIVATIONS:
            raise FormatError(f"config.json says hidden_act={activation!r}; vitrail has {', '.join(ACTIVATIONS)}.")
        return {
            "activation": ACTIVATIONS[activation],
            "norm_eps": float(self.get("layer_norm_eps", default=1e-6 if self.type == "vit_msn" else self.kind.eps)),
            "resample": self.kind.resample,
            "dropout": float(self.get("hidden_dropout_prob", default=0.0)),
            "attention_dropout": float(self.get("attention_probs_dropout_prob", "attention_dropout", default=0.0)),
            "drop_path": float(self.get("drop_path_rate", default=0.0)),
        }

    def heads(self, width: int, depth: int, mlp: int) -> tuple[int, str]:
        """How many, and what was assumed."""
        usual = 12 if self.type and width % 12 == 0 else None
        stated = self.told.get("num_heads") or self.get("num_attention_heads", default=usual)
        if stated is not None:
            return int(stated), ""
        heads = infer_num_heads(width, mlp)
        if heads is None:
            raise FormatError(
                f"there is no config.json to say how many heads share width {width}; put it beside the weights, "
                "or pass num_heads=..."
            )
        return heads, f"{heads} heads of {width // heads} are assumed; pass num_heads=... if there are others."

    def image(self, patch: tuple[int, int], patches: int) -> tuple[int, int]:
        """The size the positions are for."""
        stated = self.get("image_size")
        if stated is None and self.told.get("image_size"):
            size = pair(self.told["image_size"])
            if math.prod(s // p for s, p in zip(size, patch, strict=True)) == patches:
                return size
        if stated is None:
            side = math.isqrt(patches)
            if side * side != patches:
                raise FormatError(
                    f"{patches} positions are no square, and config.json has no image_size; "
                    "pass image_size=(height, width)."
                )
            return side * patch[0], side * patch[1]
        size = pair(stated if isinstance(stated, int) else tuple(stated))
        rows, columns = size[0] // patch[0], size[1] // patch[1]
        if rows * columns != patches:
            raise FormatError(
                f"config.json says image_size={stated}: {rows} x {columns} patches; there are {patches} positions."
            )
        return size

    def labels(self, num_classes: int) -> tuple[tuple[str, ...] | None, str]:
        """Names of the classes, and what was wrong with them."""
        if not self.id2label or not num_classes:
            return None, ""
        try:
            names = from_id2label(self.id2label)
        except ConfigError as error:
            return None, f"the class names in config.json were not used: {error}"
        if names is not None and len(names) != num_classes:
            return None, f"config.json has {len(names)} class names for {num_classes} classes: they were not used."
        return names, ""


def _vision(whole: dict[str, Any]) -> dict[str, Any]:
    """The vision tower's part, with an older spelling that overrides it, as transformers reads them."""
    if "vision_config" not in whole and "vision_config_dict" not in whole:
        return whole
    older = whole.get("vision_config_dict")
    defaults = {"hidden_act": None, "layer_norm_eps": None} if older else {}
    return {**(whole.get("vision_config") or {}), **defaults, **(older or {})}


def _sizes(value: Any) -> Any:
    return pair(value if isinstance(value, int) else tuple(value))


def _plain(size: Pair) -> int | list[int]:
    height, width = pair(size)
    return height if height == width else [height, width]


def written(info: ModelInfo, dtype: str) -> dict[str, Any]:
    """config.json for this model."""
    config = info.config
    name = kind_of(config)
    kind = KINDS[name]
    values: dict[str, Any] = {"architectures": [architecture(info)], "model_type": kind.types[0]}
    body = _bit(config) if isinstance(config, BiTConfig) else BODIES[name](config)
    if config.num_classes and not is_projection(config):
        labels = info.labels or [f"LABEL_{i}" for i in range(config.num_classes)]
        values |= {
            "id2label": {str(i): label for i, label in enumerate(labels)},
            "label2id": {label: i for i, label in enumerate(labels)},
        }
        if info.multi_label:
            values["problem_type"] = SEVERAL
        if name in ("clip", "siglip"):
            values["model_type"] = kind.types[1]
            body = {"vision_config": {"model_type": kind.types[0], **body}}
    if architecture(info) == "ViTMAEModel":
        values["model_type"] = "vit_mae"
    return values | body | {"torch_dtype": dtype}


def architecture(info: ModelInfo) -> str:
    """The class that computes this model."""
    config = info.config
    bare, classifier = KINDS[kind_of(config)].models
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
        "image_size": _plain(config.image_size),
        "patch_size": _plain(config.patch_size),
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
        "width_factor": 1,  # its own would widen the stages and not the final norm
        **BIT,
    }


BODIES: dict[str, Callable[[ViTConfig], dict[str, Any]]] = {
    "vit": _vit,
    "deit": _vit,
    "dinov2": _dinov2,
    "dinov2_with_registers": _dinov2,
    "clip": _clip,
    "siglip": _siglip,
}


def mlp_ratio(config: ViTConfig) -> int | None:
    """Dinov2Config counts the MLP in whole multiples of the width; two thirds of that for SwiGLU."""
    for ratio in range(1, 33):
        hidden = config.width * ratio
        if config.activation == "swiglu":
            hidden = (int(hidden * 2 / 3) + 7) // 8 * 8
        if hidden == config.mlp_dim:
            return ratio
    return None

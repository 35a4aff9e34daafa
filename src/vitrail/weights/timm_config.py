"""timm's config.json <-> our config, preprocessing and labels.

A timm repository names an architecture; timm's code decides the rest. The patterns here restate these decisions;
tests compare each of them with timm.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from vitrail.config import BiTConfig, NetConfig, PreprocessConfig, ViTConfig, pair
from vitrail.config.image import preprocess_for_channels
from vitrail.errors import FormatError
from vitrail.models.model_names import BIT_LAYERS, infer_num_heads, is_published_size, parse_name
from vitrail.models.published_models import PUBLISHED_MODELS
from vitrail.weights.archive import Archive
from vitrail.weights.class_names import imagenet_1k
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.renaming import as_vit
from vitrail.weights.sidecars import open_clip_pretrained_cfg, open_clip_tower, stated_model
from vitrail.weights.timm_family import SUPPORTED_ARCHS, arch_from_script
from vitrail.weights.timm_pretrained_cfg import pretrained_cfg

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu-tanh", "quick_gelu": "gelu-quick", "gelu_erf": "gelu"}
TANH_ARCHS = re.compile(r"large_patch16_siglip.*_512$|so400m_patch16_siglip|giantopt|patch32_siglip")
"""Architectures whose code uses the tanh form of GELU, which no tensor shows."""
KNOWN_ARGS = re.compile(
    "img_size|patch_size|in_chans|num_classes|embed_dim|depth|num_heads|mlp_ratio|global_pool|q(kv_bias|k_norm)"
    "|proj_bias|init_values|class_token|pos_embed|no_embed_class|(num_)?reg_tokens|(pre|final|fc)_norm|(act|norm)_layer"
    "|depths|window_size|pretrained_window_sizes|head_dim|always_partition|weight_init|fix_init|dynamic_img_(size|pad)|strict_img_size|((pos|patch|proj|attn)_)?drop_rate|drop_path_rate"
)
"""Arguments of timm's VisionTransformer that are supported or have no effect in evaluation."""
NORMS = (None, "", "layernorm", "layernormfp32", "rmsnorm", "rmsnormfp32")
POOLS = ("", "token", "avg", "map")
# fmt: off
ARCH_SIZES = (
    #                                              width heads
    (r"^test_vit4",                                   96,    3),
    (r"^test_vit",                                    64,    2),
    (r"_base_patch16_gap_",                          768,   16),
    (r"_plus_",                                      896,   14),
    (r"_giant_.*(dinov2|tipsv2)",                   1536,   24),
    (r"_giantopt_",                                 1536,   16),
    (r"_gigantic_",                                 1664,   16),
    (r"_giant_",                                    1408,   16),
    (r"_huge_",                                     1280,   16),
    (r"_so400m_",                                   1152,   16),
    (r"_large(_|$)|_intern300m_",                   1024,   16),
    (r"_so150m_",                                    896,   14),
    (r"_so150m2_",                                   832,   13),
    (r"_base(_|$)",                                  768,   12),
    (r"_betwixt_",                                   640,   10),
    (r"_mediumd?_",                                  512,    8),
    (r"_small(_|$)",                                 384,    6),
    (r"_little_",                                    320,    5),
    (r"_(xsmall|wee)_",                              256,    4),
    (r"_tiny_",                                      192,    3),
)
# fmt: on
"""Patterns of timm's architectures; the first match decides."""
NO_CLASS_TOKEN = re.compile(r"_siglip_|_gap_|_map_|^test_vit[24]")
INTERPOLATIONS: dict[str, Any] = {n: n for n in ("nearest", "bilinear", "bicubic", "lanczos")} | {"box": "area"}
UNKNOWN_ACTIVATION = {
    "CLIP": "the tensors are those of a CLIP image tower and do not show which GELU it uses; pass "
    "activation='gelu-quick' for weights by OpenAI, MetaCLIP and DFN, activation='gelu' for the others.",
    "SigLIP": "the tensors are those of a SigLIP image tower or of a ViT without a class token, and do not show which "
    "GELU it uses; pass activation='gelu-tanh' as in SigLIP's training, or activation='gelu' as in most of timm's "
    "models.",
}
"""Errors for bare files whose activation is not known, by the model they resemble."""
QUICKGELU_TAGS = ("openai", "metaclip", "dfn")
"""Tags of weights trained with QuickGELU; timm's plain architectures compute them with GELU."""


@dataclass
class TimmConfig:
    """Architecture, arguments and preprocessing from a sidecar or a training script; empty if there is none."""

    arch: str = ""
    tag: str = ""
    args: dict[str, Any] = field(default_factory=dict)
    pretrained_cfg: dict[str, Any] = field(default_factory=dict)
    config_json: dict[str, Any] = field(default_factory=dict)
    hints: dict[str, Any] = field(default_factory=dict)
    """Values passed by the caller, used where the file does not state them."""
    notes: list[str] = field(default_factory=list)

    @classmethod
    def from_archive(cls, archive: Archive) -> TimmConfig:
        stated = stated_model(archive)
        if stated.library != "timm":
            result = cls(*arch_from_script(archive), hints=archive.hints)
            if result.arch:
                result._check()
            return result
        if stated.file == "open_clip_config.json":
            arch, tower = stated.model, open_clip_tower(archive)
            result = cls(
                arch, "", {"global_pool": tower.get("timm_pool")}, open_clip_pretrained_cfg(archive), {}, archive.hints
            )
        else:
            content = archive.sidecars["config.json"]
            cfg = content.get("pretrained_cfg") or {k: v for k, v in content.items() if k != "model_args"}
            arch, _, tag = str(content["architecture"]).partition(".")
            args = dict(content.get("model_args") or {})
            result = cls(arch, str(cfg.get("tag") or tag), args, dict(cfg), content, archive.hints)
        result._check()
        return result

    def _check(self) -> None:
        """Raise FormatError for an unsupported architecture or argument."""
        if not SUPPORTED_ARCHS.fullmatch(self.arch) and not self.hints.get("family"):
            raise FormatError(
                f"timm's {self.arch} is not a supported architecture; if it is your own, a VisionTransformer with "
                "other sizes, pass family='ViT'."
            )
        unsupported = [name for name in self.args if not KNOWN_ARGS.fullmatch(name)]
        unsupported += ["norm_layer"] if self.args.get("norm_layer") not in NORMS else []
        unsupported += ["global_pool"] if self.global_pool not in POOLS else []
        if self.arch.startswith("resnetv2"):  # its units always have ReLU and group norm
            fixed = ("act_layer", "norm_layer")
            unsupported += [name for name in fixed if self.args.get(name) not in (None, "", "relu")]
        for name in unsupported:
            value = self.args.get(name, self.global_pool)
            raise FormatError(f"timm's {self.arch} with {name}={value!r} is not supported.")

    def check_sizes(self, **sizes: Any) -> None:
        """Raise FormatError where sizes of the tensors differ from the stated architecture and arguments."""
        if not SUPPORTED_ARCHS.fullmatch(self.arch):
            return
        stated = {
            "embed_dim": self._size[0] if self.pretrained_cfg and not self._stated_heads else None,
            "class_token": not NO_CLASS_TOKEN.search(self.arch),
            "pre_norm": "_clip_" in self.arch,
        } | self.args
        for name, value in sizes.items():
            expected = stated.get(name)
            if expected is not None and _int_or_tuple(expected) != _int_or_tuple(value):
                raise FormatError(
                    f"the file states timm's {self.arch} with {name}={expected}, but the tensors have {name}={value}: "
                    f"the files belong to different models, or model_args in config.json lacks {name}={value}."
                )

    @property
    def _size(self) -> tuple[int, int] | tuple[None, None]:
        """Width and number of heads of the architecture."""
        return next(((width, heads) for name, width, heads in ARCH_SIZES if re.search(name, self.arch)), (None, None))

    @property
    def _stated_heads(self) -> int:
        return int(self.hints.get("num_heads") or self.args.get("num_heads") or 0)

    def tag_has(self, word: str) -> bool:
        return word in self.tag

    @property
    def image_size(self) -> tuple[int, int] | None:
        """The image size (height, width) that the position embedding is for."""
        if size := self.args.get("img_size"):
            return pair(size if isinstance(size, int) else tuple(size))
        if size := self.pretrained_cfg.get("input_size"):
            return int(size[1]), int(size[2])
        size = self.hints.get("image_size")
        return pair(size) if size else None

    @property
    def global_pool(self) -> str:
        sources = (self.args, self.config_json, self.pretrained_cfg)
        return str(next((s["global_pool"] for s in sources if s.get("global_pool")), ""))

    def activation_and_eps(self, swiglu: bool, resembled: str) -> dict[str, Any]:
        """`activation` and `norm_eps`: from the arguments, else fixed by the architecture, else passed by the caller.

        resembled: the model whose image tower the tensors resemble, "CLIP" or "SigLIP"; "" for neither.
        """
        act_layer = self.args.get("act_layer")
        if swiglu:
            activation = "swiglu"
        elif act_layer is not None:
            if act_layer not in ACTIVATIONS:
                raise FormatError(f"timm's act_layer={act_layer!r} is not one of {', '.join(ACTIVATIONS)}.")
            activation = ACTIVATIONS[act_layer]
        elif self.arch:
            plain = "gelu-tanh" if TANH_ARCHS.search(self.arch) else "gelu"
            activation = "gelu-quick" if "quickgelu" in self.arch else plain
        else:
            activation = self._activation_without_arch(resembled)
        is_clip = "_clip_" in self.arch if self.arch else resembled == "CLIP"
        if self.arch and is_clip and activation == "gelu" and (not self.tag or self.tag.startswith(QUICKGELU_TAGS)):
            self.notes.append(
                "CLIP weights by OpenAI, MetaCLIP and DFN were trained with QuickGELU; timm's plain architecture "
                "uses GELU, and so does this model. Pass activation='gelu-quick' for the original outputs."
            )
        return {"activation": activation, "norm_eps": 1e-5 if is_clip and not self.args.get("norm_layer") else 1e-6}

    def _activation_without_arch(self, resembled: str) -> str:
        """The caller's activation, required where the tensors fit models with different ones; else GELU, as in timm."""
        error = UNKNOWN_ACTIVATION.get(resembled)
        if error and "activation" not in self.hints and self.hints.get("family") in (None, resembled):
            raise FormatError(error)
        return str(self.hints.get("activation", "gelu"))

    def num_heads(self, width: int, mlp_dim: int, archive: Archive, resembled: str) -> tuple[int, str]:
        if self._stated_heads:
            return self._stated_heads, ""
        if "blocks.0.attn.q_norm.weight" in archive.tensors:
            return width // archive.shape("blocks.0.attn.q_norm.weight")[0], ""
        wide, heads = self._size
        if heads and (wide == width or "embed_dim" in self.args):
            return heads, ""
        heads = infer_num_heads(width, mlp_dim)
        if heads is None or heads == 1:  # timm's test_vit has two heads of width 32
            raise FormatError(f"the file does not store the number of heads at width {width}; pass num_heads=...")
        if resembled == "SigLIP" and width == 768 and "attn_pool.latent" not in archive.tensors:
            raise FormatError(
                "the file does not store the number of heads at width 768; pass num_heads=16 for timm's "
                "vit_base_patch16_gap_224, num_heads=12 for the others."
            )
        if is_published_size(width, mlp_dim) and width // heads == 64:
            return heads, ""
        return heads, f"{heads} heads of width {width // heads} are assumed; pass num_heads=... if that is wrong."

    def preprocess(self, config: NetConfig, default: PreprocessConfig) -> tuple[PreprocessConfig, bool]:
        """Preprocessing from the sidecar and True; `default` and False if it states none."""
        cfg = self.pretrained_cfg
        if not cfg.get("mean"):
            return default, False
        size = pair(config.image_size)
        crop = float(cfg.get("crop_pct") or 0.875)
        squash = cfg.get("crop_mode") == "squash"
        for name, supported in (("crop_mode", ("center", "squash")), ("interpolation", tuple(INTERPOLATIONS))):
            if cfg.get(name) not in (None, "", *supported):
                self.notes.append(f"config.json has {name}={cfg[name]!r}, which is not supported and is ignored.")
        covered = size[0] != size[1] and not squash  # timm resizes to cover the crop and never pads
        if covered and crop != 1:
            self.notes.append(f"config.json has crop_pct={crop:g}, but the image is not square: crop_pct is ignored.")
        mean, std = (list(cfg[key]) for key in ("mean", "std"))
        stated = PreprocessConfig(
            image_size=size,
            resize="squash" if squash else "short",
            resize_to=None if covered or (squash and crop == 1) else math.floor(min(size) / crop),
            interpolation=INTERPOLATIONS.get(cfg.get("interpolation") or "bilinear", "bilinear"),
            mean=tuple(mean),
            std=tuple(std),
        )
        return preprocess_for_channels(stated, config.channels), True

    def labels(self, num_classes: int) -> tuple[str, ...] | None:
        """Class names in the file, or ImageNet's where the tag says that the head was trained on it."""
        names, described = self.config_json.get("label_names"), self.config_json.get("label_descriptions") or {}
        if isinstance(names, dict):
            names = [names.get(str(i)) for i in range(num_classes)]
        if names and len(names) == num_classes and all(names):
            return tuple(str(described.get(n, n)) for n in names)
        if num_classes == 1000 and re.search(r"(^|_)in1k(_\d+)?$", self.tag):
            return imagenet_1k()
        return None


def _int_or_tuple(value: Any) -> Any:
    """One number for a size whose height and width are equal."""
    if not isinstance(value, list | tuple):
        return value
    return value[0] if len(set(value)) == 1 else tuple(value)


def unsupported_parts(config: NetConfig) -> list[str]:
    """Descriptions of the parts that timm's VisionTransformer does not have."""
    if isinstance(config, BiTConfig):
        fits = (config.layers, config.width_factor) in BIT_ARCH
        return [] if fits else [f"a BiT of layers {config.layers} and width {config.width_factor:g}"]
    config = as_vit(config)
    parts = {
        f"{config.position} positions": config.position not in ("none", "learned-1d"),
        "keys without bias": config.qkv_bias and not config.key_bias,
        "position embeddings added at every layer": config.position != "none" and config.resolved_position_at != "stem",
        "a tanh layer before the head": bool(config.pre_logits),
        "pool='token+gap'": config.pool == "token+gap",
        "CoCa's attention pooling": config.pool == "coca",
        "a head without bias": bool(config.num_classes) and not config.head_bias,
        "a norm after attention pooling": config.pool == "map" and config.pool_norm == "after",
        "attention pooling beside a class token": config.pool == "map" and config.class_token,
        "attention pooling with SwiGLU": config.pool == "map" and config.activation == "swiglu",
        "attention pooling beside outputs without bias": config.pool == "map" and not config.proj_bias,
        "SwiGLU with RMSNorm": config.activation == "swiglu" and config.norm == "rms",
        "SwiGLU with an epsilon of 1e-5": config.activation == "swiglu" and config.norm_eps == 1e-5,
        "a patch bias beside a norm before the blocks": config.pre_norm and config.patch_bias,
        "a patch projection without bias": not config.pre_norm and not config.patch_bias,
        "registers beside a distillation token": config.distilled and bool(config.num_registers),
        "a distillation token beside other changes": config.distilled
        and (config.activation not in ("gelu", "gelu-tanh", "gelu-quick") or not config.position_on_class),
        f"a stem of layers {config.stem.layers if config.stem else ()}": config.stem is not None
        and (config.stem.layers not in STEM_ARCH or config.stem.width_factor != 1),
        "a stem beside a distillation token": config.stem is not None and config.distilled,
        "a stem beside SwiGLU": config.stem is not None and config.activation == "swiglu",
    }
    return [name for name, present in parts.items() if present]


def inexact_conventions(config: NetConfig) -> list[str]:
    """Values fixed in timm's code that differ from the config's."""
    if isinstance(config, BiTConfig):
        other = config.standardize_eps != 1e-8
        return [f"a weight standardization epsilon of {config.standardize_eps:g} (timm has 1e-8)"] if other else []
    config = as_vit(config)
    differences = []
    if config.norm_eps not in (1e-5, 1e-6) or (config.norm == "rms" and config.norm_eps != 1e-6):
        differences.append(f"a norm epsilon of {config.norm_eps:g} (timm has 1e-6, or 1e-5 in its CLIP models)")
    if config.norm_eps == 1e-5 and (config.distilled or config.stem):
        differences.append("a norm epsilon of 1e-5 in this architecture")
    stem = config.stem
    if stem and (stem.standardize, stem.standardize_eps, stem.norm_eps) != ("var", 1e-8, 1e-5):
        differences.append("the original's weight standardization in the stem (timm divides by sqrt(var + 1e-8))")
    return differences


BIT_ARCH: dict[tuple[tuple[int, ...], float], str] = {
    (BIT_LAYERS[f"R{depth}"], float(width)): f"resnetv2_{depth}x{width}_bit"
    for depth, width in ((50, 1), (50, 3), (101, 1), (101, 3), (152, 2), (152, 4))
}
STEM_ARCH = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}


def architecture(config: NetConfig) -> str:
    """The timm architecture whose code fits; its sizes are overridden by `model_args`."""
    if isinstance(config, BiTConfig):
        return BIT_ARCH[config.layers, config.width_factor]
    config = as_vit(config)
    if config.stem:
        return STEM_ARCH[config.stem.layers]
    if config.distilled:
        return "deit_base_distilled_patch16_224"
    if config.activation == "swiglu":
        return "vit_giant_patch14_dinov2"
    if config.norm_eps == 1e-5:
        return "vit_base_patch16_clip_224"
    for variant in PUBLISHED_MODELS:
        for alias in variant.aliases:
            if alias.startswith("vit_") and "_patch" in alias and _same_sizes(parse_name(variant.name), config):
                return alias
    return "vit_base_patch16_224"


def _same_sizes(variant: NetConfig, config: ViTConfig) -> bool:
    names = (
        "image_size",
        "patch_size",
        "width",
        "depth",
        "num_heads",
        "mlp_dim",
        "class_token",
        "num_registers",
        "stem",
        "pre_norm",
    )
    if not isinstance(variant, ViTConfig) or any(getattr(variant, n) != getattr(config, n) for n in names):
        return False
    return (variant.layer_scale is None) == (config.layer_scale is None) and variant.pool == config.pool


def model_args(config: NetConfig) -> dict[str, Any]:
    """Every argument whose default may differ in the architecture."""
    if isinstance(config, BiTConfig):
        return {} if config.channels == 3 else {"in_chans": config.channels}
    config = as_vit(config)
    activation = (
        next(k for k, v in ACTIVATIONS.items() if v == config.activation) if config.activation != "swiglu" else None
    )
    args: dict[str, Any] = {
        "img_size": list(pair(config.image_size)),
        "in_chans": config.channels,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.num_heads,
        "mlp_ratio": config.mlp_dim * (2 if activation is None else 1) / config.width,
        "global_pool": {"token": "token", "gap": "avg", "map": "map"}[config.pool],
        "qkv_bias": config.qkv_bias,
        "qk_norm": config.qk_norm,
        "proj_bias": config.proj_bias,
        "init_values": config.layer_scale,
        "class_token": config.class_token,
        "pos_embed": "learn" if config.position != "none" else "none",
        "no_embed_class": not config.num_positioned_prefix_tokens,
        "reg_tokens": config.num_registers,
        "pre_norm": config.pre_norm,
        "final_norm": config.pool_norm != "none",
        "fc_norm": config.pool_norm == "after" and not config.distilled,  # its heads read normalized tokens
    }
    if activation:
        args["act_layer"] = activation
    if config.norm == "rms":
        args["norm_layer"] = "rmsnorm"
    height, width = pair(config.patch_size)
    args["patch_size"] = height if height == width else [height, width]
    if config.distilled:  # its class fixes these
        for name in ("class_token", "no_embed_class", "reg_tokens", "global_pool"):
            args.pop(name)
    return args


def config_json(info: ModelInfo) -> dict[str, Any]:
    """The contents of config.json as timm writes it."""
    config = info.config
    if isinstance(config, ViTConfig):
        num_features = config.width
        first = "patch_embed.backbone.stem.conv" if config.stem else "patch_embed.proj"
        cfg = pretrained_cfg(info, first, ["head", "head_dist"] if config.distilled else "head")
    else:
        assert isinstance(config, BiTConfig)
        num_features = int(64 * config.width_factor * 32)
        cfg = pretrained_cfg(info, "stem.conv", "head.fc", fixed_input_size=False)
    values: dict[str, Any] = {
        "architecture": architecture(config),
        "num_classes": config.num_classes,
        "num_features": num_features,
        "pretrained_cfg": cfg,
        "model_args": model_args(config),
    }
    if isinstance(config, ViTConfig):
        values["global_pool"] = model_args(config).get("global_pool", "token")
    if info.labels is not None:
        values["label_names"] = list(info.labels)
    return values

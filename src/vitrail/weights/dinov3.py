"""DINOv3's Vision Transformers, and others of its shape (EUPE, LingBot-Vision): the original's files, timm's, and
transformers'.

They have rotary positions, storage (register) tokens, and no bias of the keys: the original multiplies the biases by
a stored mask, which is zero there, timm and transformers have none. The original's files also store the periods of the
rotary positions, in the released ones rounded to bfloat16; timm and transformers compute them in float32.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vitrail.config import PreprocessConfig, ViTConfig, pair
from vitrail.errors import FormatError
from vitrail.models.position import rotary_periods
from vitrail.weights import huggingface_preprocess as processor
from vitrail.weights import timm_config
from vitrail.weights.archive import Archive
from vitrail.weights.family_defaults import default_preprocess
from vitrail.weights.format import Format, write_folder
from vitrail.weights.huggingface_config import BACKBONES, HuggingFaceConfig
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.renaming import (
    CLASS_TOKEN,
    TOKENS,
    AnyConfig,
    RenameTable,
    Rule,
    Transform,
    as_vit,
    weight_and_bias,
)
from vitrail.weights.swin_names import join
from vitrail.weights.timm import PREFIXES
from vitrail.weights.timm_pretrained_cfg import pretrained_cfg
from vitrail.weights.writers import write_torch

Library = Literal["facebook", "timm", "huggingface"]
BLOCKS = {"facebook": "blocks.{i}.", "timm": "blocks.{i}.", "huggingface": "layer.{i}."}
REGISTERS = {"facebook": "storage_tokens", "timm": "reg_token", "huggingface": "embeddings.register_tokens"}
TOKEN = {"facebook": "cls_token", "timm": "cls_token", "huggingface": "embeddings.cls_token"}
PATCH = {"facebook": "patch_embed.proj", "timm": "patch_embed.proj", "huggingface": "embeddings.patch_embeddings"}
SCALES = {"facebook": "ls{n}.gamma", "timm": "gamma_{n}", "huggingface": "layer_scale{n}.lambda1"}
OUT = {"facebook": "attn.proj", "timm": "attn.proj", "huggingface": "attention.o_proj"}
MLP = {
    "facebook": ("mlp.fc1", "mlp.fc2"),
    "timm": ("mlp.fc1", "mlp.fc2"),
    "huggingface": ("mlp.up_proj", "mlp.down_proj"),
}
GATED = {
    "facebook": ("mlp.w1", "mlp.w2", "mlp.w3"),
    "timm": ("mlp.fc1_g", "mlp.fc1_x", "mlp.fc2"),
    "huggingface": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
}
"""SwiGLU's gate, value and output."""
PERIODS = "rope_embed.periods"
IGNORED = {
    "facebook": ("mask_token", PERIODS, "*.bias_mask", "local_cls_norm.*", "projectors.*"),
    "timm": (),
    "huggingface": ("embeddings.mask_token", "embeddings.register_tokens"),
}
"""The token of masked patches, fixed values, and parts for training: the norm of local crops, EUPE's projections.
transformers' register tokens are unused only if the model has none."""
HEADS = {4096: 32, 1536: 24}
"""Width -> number of heads, where a file does not store it; else heads have 64 channels."""
SATELLITE_WIDTHS = (1024, 4096)
"""Widths of the networks that were also released for satellite images, whose files have the same tensors."""
FIXED: dict[str, Any] = {"position": "rope-2d", "norm_eps": 1e-5, "uncovered": "refuse"}


def _read_masked_bias(tensors: Sequence[Tensor], _: AnyConfig) -> list[Tensor]:
    bias, mask = tensors
    queries, keys, values = (bias * mask.to(bias.dtype)).chunk(3)
    if not keys.is_meta and keys.nan_to_num().any():
        raise FormatError("attn.qkv.bias_mask keeps biases of the keys, which DINOv3's training sets to zero.")
    return [torch.cat([queries, values])]


def _write_masked_bias(tensors: Sequence[Tensor], _: AnyConfig) -> list[Tensor]:
    queries, values = tensors[0].chunk(2)
    zero, one = torch.zeros_like(queries), torch.ones_like(queries)
    return [torch.cat([queries, zero, values]), torch.cat([one, zero, one])]


MASKED_BIAS = Transform(_read_masked_bias, _write_masked_bias)
"""The original's biases of queries, keys and values, and their mask <-> the biases of queries and values."""


def _qkv_rules(library: Library, config: ViTConfig) -> list[Rule]:
    ours = "blocks.{i}.attention.qkv"
    if library == "huggingface":
        names = ("q_proj", "k_proj", "v_proj")
        weights, biases = (tuple(f"layer.{{i}}.attention.{n}.{part}" for n in names) for part in ("weight", "bias"))
        biases = biases if config.key_bias else biases[::2]
        return [Rule(weights, f"{ours}.weight", join(3)), Rule(biases, f"{ours}.bias", join(len(biases)))]
    weight, bias = weight_and_bias("blocks.{i}.attn.qkv", ours)
    if config.key_bias:
        return [weight, bias]
    if library == "facebook":
        return [weight, Rule((f"{bias.theirs}", f"{bias.theirs}_mask"), bias.ours, MASKED_BIAS)]
    return [weight, Rule(("blocks.{i}.attn.q_bias", "blocks.{i}.attn.v_bias"), bias.ours, join(2))]


def _mlp_rules(library: Library, config: ViTConfig) -> list[Rule]:
    block, ours = BLOCKS[library], "blocks.{i}.mlp."
    if config.activation != "swiglu":
        up, down = MLP[library]
        return [*weight_and_bias(block + up, f"{ours}up"), *weight_and_bias(block + down, f"{ours}down")]
    gate, value, down = GATED[library]
    both: Transform = join(2)
    return [
        *(Rule((f"{block}{gate}.{p}", f"{block}{value}.{p}"), f"{ours}up.{p}", both) for p in ("weight", "bias")),
        *weight_and_bias(block + down, f"{ours}down"),
    ]


def table(library: Library, config: AnyConfig) -> RenameTable:
    vit, block = as_vit(config), BLOCKS[library]
    rules = [
        Rule(TOKEN[library], "class_token", CLASS_TOKEN),
        Rule(REGISTERS[library], "registers", TOKENS),
        *weight_and_bias(PATCH[library], "patch"),
        *weight_and_bias(f"{block}norm1", "blocks.{i}.norm1"),
        *_qkv_rules(library, vit),
        *weight_and_bias(block + OUT[library], "blocks.{i}.attention.out"),
        *weight_and_bias(f"{block}norm2", "blocks.{i}.norm2"),
        *_mlp_rules(library, vit),
        *(Rule(block + SCALES[library].replace("{n}", n), f"blocks.{{i}}.scale{n}") for n in "12"),
        *weight_and_bias("norm", "norm"),
        *weight_and_bias("head", "head"),
    ]
    return RenameTable(f"{library} (DINOv3)", rules, IGNORED[library])


def detect(library: Library, archive: Archive) -> str | None:
    """The prefix of files with registers and LayerScale, but without position embeddings."""
    prefixes = ("",) if library == "huggingface" else ("teacher.backbone.", "backbone.", *PREFIXES)
    for prefix in prefixes:
        names = archive.strip_prefix(prefix).tensors.entries
        if library == "huggingface":
            names = {normalize_name(name): entry for name, entry in names.items()}
        scale = BLOCKS[library].format(i=0) + SCALES[library].format(n=1)
        if {TOKEN[library], REGISTERS[library], scale} <= names.keys() and not names.keys() & {
            "pos_embed", "embeddings.position_embeddings", "norm_pre.weight",
        }:  # fmt: skip
            return prefix
    return None


def normalize_name(name: str) -> str:
    """transformers' names in memory -> those on the Hub."""
    return re.sub(r"^(model\.)?layer\.", "layer.", name)


def _config(library: Library, archive: Archive, stated: dict[str, Any]) -> ViTConfig:
    """The config from the tensors; `stated`: fields that they do not show."""
    names, block = archive.tensors, BLOCKS[library]
    width, channels, *patch = archive.shape(f"{PATCH[library]}.weight")
    pattern = re.compile(re.escape(block).replace(re.escape("{i}"), r"(\d+)"))
    inside: dict[str, int] = {}
    for name in names:
        if match := pattern.match(name):
            inside[name[match.end() :]] = max(inside.get(name[match.end() :], 0), int(match[1]))
    gated = f"{GATED[library][1]}.weight" in inside and (library != "huggingface" or "mlp.gate_proj.weight" in inside)
    down = GATED[library][2] if gated else MLP[library][1]
    first = f"{block}{down}.weight".format(i=0)
    if first not in names:
        raise FormatError(f"read as {library} (DINOv3), the tensors do not fit: missing {first}.")
    mlp_dim = archive.shape(first)[1]
    biases = {"facebook": "attn.qkv.bias", "timm": "attn.q_bias", "huggingface": "attention.q_proj.bias"}
    heads = stated.pop("num_heads", None) or HEADS.get(width, width // 64)
    if not heads or width % heads:
        raise FormatError(f"the file does not store the number of heads at width {width}; pass num_heads=...")
    head = next((archive.shape(n) for n in ("head.weight", "head.bias") if n in names), (0,))
    options: dict[str, Any] = {
        "image_size": 224,
        "patch_size": tuple(patch),
        "channels": channels,
        "width": width,
        "depth": 1 + max(inside.values()),
        "num_heads": heads,
        "mlp_dim": mlp_dim,
        "num_classes": head[0],
        "num_registers": archive.shape(REGISTERS[library])[1],
        "layer_scale": 1e-5,
        "activation": "swiglu" if gated else "gelu",
        "qkv_bias": biases[library] in inside,
        "key_bias": library == "facebook" and biases[library] in inside and "attn.qkv.bias_mask" not in inside,
    }
    options["key_bias"] |= "attention.k_proj.bias" in inside
    return ViTConfig(**FIXED | options | stated)


def _info(archive: Archive, config: ViTConfig, preprocess: PreprocessConfig, *notes: str, **fields: Any) -> ModelInfo:
    return ModelInfo(
        config=config,
        preprocess=preprocess,
        family="DINOv3",
        task="classify" if config.num_classes else "embed",
        origin=archive.source,
        notes=notes,
        **fields,
    )


def _default(config: ViTConfig) -> tuple[PreprocessConfig, str]:
    preprocess = default_preprocess("DINOv3", config)
    return preprocess, f"the file does not store preprocessing; DINOv3's default is used: {preprocess.summary()}."


def infer_original(archive: Archive) -> ModelInfo:
    stated: dict[str, Any] = {name: archive.hints[name] for name in ("num_heads",) if name in archive.hints}
    if PERIODS in archive.tensors:
        periods = archive.tensors[PERIODS].float()
        stated["num_heads"] = archive.shape(f"{PATCH['facebook']}.weight")[0] // (4 * len(periods))
        stated |= rotary_fields(periods)
    config = _config("facebook", archive, stated)
    preprocess, note = _default(config)
    if config.width in SATELLITE_WIDTHS:
        note = (
            f"{note[:-1]}; networks of satellite images (SAT-493M) have mean 0.43 0.411 0.296, std 0.213 0.156 0.143."
        )
    return _info(archive, config, preprocess, note)


def rotary_fields(periods: Tensor) -> dict[str, Any]:
    """`rope_base` and `rope_periods` of stored periods: base ** (i / n), i from 0 to n - 1, perhaps rounded."""
    count = len(periods)
    base = float(periods[-1]) ** (count / (count - 1)) if count > 1 else ViTConfig().rope_base
    precisions = ("float32", "bfloat16")
    for candidate in (float(f"{base:.{digits}g}") for digits in range(1, 6)):
        for precision in precisions:
            expected = rotary_periods(4 * count, candidate, periods, precision)
            if torch.allclose(periods, expected, rtol=1e-6, atol=0):
                return {"rope_base": candidate, "rope_periods": precision}
    raise FormatError(
        f"{PERIODS} are not the powers of one base; vitrail does not support networks that were trained with "
        "pos_embed_rope_min_period and pos_embed_rope_max_period."
    )


def infer_timm(archive: Archive) -> ModelInfo:
    stated = timm_config.TimmConfig.from_archive(archive)
    pool = stated.global_pool or ("token" if "lingbot" in stated.arch else "avg" if stated.arch else "")
    hinted = ("num_heads", "image_size")
    fields: dict[str, Any] = {name: archive.hints[name] for name in hinted if name in archive.hints}
    if pool in ("token", "avg"):
        fields["pool"] = {"token": "token", "avg": "gap"}[pool]
    elif "pool" in archive.hints:
        fields["pool"] = archive.hints["pool"]
    else:
        raise FormatError(
            "the file does not state how tokens are pooled; pass pool='gap' for the mean of the patches, timm's "
            "default, or pool='token' as in DINOv3's own code."
        )
    if size := stated.image_size:
        fields["image_size"] = size
    if heads := stated.args.get("num_heads"):
        fields["num_heads"] = int(heads)
    config = _config("timm", archive, fields)
    preprocess, from_file = stated.preprocess(config, default_preprocess("DINOv3", config))
    notes = [*stated.notes, *([] if from_file else [_default(config)[1]])]
    return _info(archive, config, preprocess, *notes, labels=stated.labels(config.num_classes))


def infer_huggingface(archive: Archive) -> ModelInfo:
    hf_config = HuggingFaceConfig.from_archive(archive, BACKBONES["dinov3"])
    gated = any(".gate_proj." in name for name in archive.tensors)
    if (act := hf_config.get("hidden_act", default="silu" if gated else "gelu")) != ("silu" if gated else "gelu"):
        raise FormatError(f"config.json has hidden_act={act!r}; vitrail supports GELU, and SiLU in SwiGLU.")
    size = hf_config.get("image_size", default=224)
    stated = {
        "image_size": pair(size if isinstance(size, int) else tuple(size)),
        "rope_base": float(hf_config.get("rope_theta", default=100.0)),
        "norm_eps": float(hf_config.get("layer_norm_eps", default=1e-5)),
        "num_heads": archive.hints.get("num_heads") or hf_config.get("num_attention_heads"),
        "layer_scale": float(hf_config.get("layerscale_value", default=1.0)),
        "drop_path": float(hf_config.get("drop_path_rate", default=0.0)),
    }
    config = _config("huggingface", archive, stated)
    content = processor.find_processor_json(archive)
    if content is None:
        return _info(archive, config, *_default(config))
    preprocess, notes = processor.read_preprocess(content, "dinov3", pair(config.image_size), config.channels)
    return _info(archive, config, preprocess, *notes)


def unsupported_parts(library: Library, info: ModelInfo) -> list[str]:
    config = as_vit(info.config)
    patch = pair(config.patch_size)
    biased = {"facebook": config.key_bias, "huggingface": config.key_bias, "timm": False}[
        library
    ] or not config.key_bias
    parts = {
        f"{config.position} positions (DINOv3 has rotary ones)": config.position != "rope-2d",
        "an image whose border is not covered by patches": config.uncovered == "ignore",
        "a network without registers": not config.num_registers and library != "huggingface",
        "a network without LayerScale": config.layer_scale is None,
        "a network without a class token": not config.class_token,
        "a distillation token": config.distilled,
        "RMSNorm": config.norm == "rms",
        "qk-norm": config.qk_norm,
        "a norm before the blocks": config.pre_norm,
        "a tanh layer before the head": bool(config.pre_logits),
        "a ResNet stem": config.stem is not None,
        f"pool={config.pool!r}": config.pool not in (("token", "gap") if library == "timm" else ("token",)),
        "a norm after pooling": config.pool_norm != "before",
        "outputs without bias": not config.proj_bias or not config.patch_bias,
        f"{config.activation} in the MLP": config.activation not in ("gelu", "swiglu"),
        "a bias of the keys": config.qkv_bias and not biased,
        "a head": bool(config.num_classes) and library != "timm",
        "a head without bias": bool(config.num_classes) and not config.head_bias,
        "patches that are not square": patch[0] != patch[1],
        f"a SwiGLU of {config.mlp_dim}": config.activation == "swiglu" and config.mlp_dim % 8 > 0,
    }
    return [name for name, present in parts.items() if present]


def inexact_conventions(library: Library, info: ModelInfo) -> list[str]:
    config = as_vit(info.config)
    parts = {
        f"a norm epsilon of {config.norm_eps:g} ({library} has 1e-5)": config.norm_eps != 1e-5
        and library != "huggingface",
        f"rope_base={config.rope_base:g} (timm has 100)": config.rope_base != 100 and library == "timm",
        f"rope_periods={config.rope_periods!r} ({library} computes them in float32)": library != "facebook"
        and config.rope_periods != "float32",
    }
    return [name for name, present in parts.items() if present]


def write_original(path: Path, tensors: Mapping[str, Tensor], info: ModelInfo, overwrite: bool) -> None:
    """Write a state dict with the periods of the rotary positions and a zero mask token."""
    config = as_vit(info.config)
    head_dim = config.width // config.num_heads
    complete = {**tensors, "mask_token": torch.zeros(1, config.width)}
    complete[PERIODS] = rotary_periods(head_dim, config.rope_base, torch.empty(0), config.rope_periods)
    write_torch(path, complete, overwrite=overwrite)


def timm_json(info: ModelInfo) -> dict[str, Any]:
    """The contents of config.json as timm writes it."""
    config = as_vit(info.config)
    qkvb, gated = "_qkvb" * config.qkv_bias, config.activation == "swiglu"
    pool = {"token": "token", "gap": "avg"}[config.pool]
    args: dict[str, Any] = {
        "img_size": list(pair(config.image_size)),
        "patch_size": pair(config.patch_size)[0],
        "in_chans": config.channels,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.num_heads,
        "mlp_ratio": config.mlp_dim / config.width,
        "num_reg_tokens": config.num_registers,
        "init_values": config.layer_scale,
        "global_pool": pool,
    }
    values: dict[str, Any] = {
        "architecture": f"vit_small_{'plus_' * gated}patch16_dinov3{qkvb}",
        "num_classes": config.num_classes,
        "num_features": config.width,
        "global_pool": pool,
        "pretrained_cfg": pretrained_cfg(info, "patch_embed.proj", "head"),
        "model_args": args,
    }
    return values if info.labels is None else values | {"label_names": list(info.labels)}


def huggingface_json(info: ModelInfo) -> dict[str, Any]:
    config = as_vit(info.config)
    gated = config.activation == "swiglu"
    height, width = pair(config.image_size)
    return {
        "architectures": ["DINOv3ViTModel"],
        "model_type": "dinov3_vit",
        "hidden_size": config.width,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.num_heads,
        "num_register_tokens": config.num_registers,
        "num_channels": config.channels,
        "image_size": height if height == width else [height, width],
        "patch_size": pair(config.patch_size)[0],
        "hidden_act": "silu" if gated else "gelu",
        "use_gated_mlp": gated,
        "layer_norm_eps": config.norm_eps,
        "rope_theta": config.rope_base,
        "query_bias": config.qkv_bias,
        "key_bias": config.qkv_bias and config.key_bias,
        "value_bias": config.qkv_bias,
        "layerscale_value": config.layer_scale,
        "drop_path_rate": config.drop_path,
    }


def write_timm(path: Path, tensors: Mapping[str, Tensor], info: ModelInfo, overwrite: bool) -> None:
    """Write a folder for `timm.create_model("local-dir:PATH", pretrained=True)`."""
    write_folder(path, tensors, {"config.json": timm_json(info)}, overwrite)


def write_huggingface(path: Path, tensors: Mapping[str, Tensor], info: ModelInfo, overwrite: bool) -> None:
    """Write a folder for `DINOv3ViTModel.from_pretrained`."""
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    unused = {"embeddings.mask_token": torch.zeros_like(tensors["embeddings.cls_token"])}
    if not as_vit(info.config).num_registers:
        unused["embeddings.register_tokens"] = unused["embeddings.mask_token"][:, :0]
    sidecars = {
        "config.json": huggingface_json(info) | {"torch_dtype": dtype},
        "preprocessor_config.json": processor.preprocessor_json(info.preprocess, "vit"),
    }
    write_folder(path, {**tensors, **unused}, sidecars, overwrite)


def _format(library: Library, infer: Any, write: Any, **options: Any) -> Format:
    return Format(
        library,
        partial(detect, library),
        infer,
        partial(table, library),
        write,
        partial(unsupported_parts, library),
        partial(inexact_conventions, library),
        config_types=(ViTConfig,),
        accepts=lambda config: isinstance(config, ViTConfig) and config.position == "rope-2d",
        **options,
    )


OUTSIDE = ("dino_head.*", "ibot_head.*", "teacher.dino_head.*", "teacher.ibot_head.*", "student.*")
FORMATS = (
    _format("facebook", infer_original, write_original, ignored_outside=OUTSIDE),
    _format("timm", infer_timm, write_timm),
    _format("huggingface", infer_huggingface, write_huggingface, normalize_name=normalize_name),
)

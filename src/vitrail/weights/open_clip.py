"""OpenAI's CLIP and open_clip: the image tower of a state dict, a TorchScript archive or a repository.

Both use the same tensor names and store the text tower beside the image tower; only the image tower is loaded.
Whether the activation is GELU or QuickGELU comes from `open_clip_config.json`, from tensors that only OpenAI's files
have, or from the caller; it is never guessed. Read only: neither library loads a file without a text tower.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.config import PreprocessConfig, ViTConfig, pair
from vitrail.errors import ConversionError, FormatError
from vitrail.models.model_names import infer_num_heads
from vitrail.weights.archive import Archive
from vitrail.weights.family_defaults import default_preprocess
from vitrail.weights.format import Format
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.renaming import (
    CONCAT_QKV,
    POSITION_FLAT,
    POSITION_NAMES,
    TRANSPOSE,
    AnyConfig,
    RenameTable,
    Rule,
    Transform,
    as_vit,
    weight_and_bias,
)

IMAGE_TOWER = "visual."
"""Prefix of the image tower; a file with only the tower has none."""
TEXT_TOWER = (
    "positional_embedding",
    "token_embedding.weight",
    "transformer.*",
    "ln_final.*",
    "text_projection*",
    "text.*",
    "text_decoder.*",
    "logit_scale",
    "logit_bias",
    "attn_mask",
    "input_resolution",
    "context_length",
    "vocab_size",
)
"""The text tower, the logit scale and bias, and constants."""
OPENAI_ONLY = frozenset({"input_resolution", "context_length", "vocab_size"})
"""Tensors in OpenAI's published archives and not in open_clip's files."""

RESBLOCK = "transformer.resblocks.{i}."
RULES = (
    Rule("conv1.weight", "patch.weight"),
    Rule("class_embedding", "class_token"),
    Rule("positional_embedding", POSITION_NAMES, POSITION_FLAT),
    *weight_and_bias("ln_pre", "pre_norm"),
    *weight_and_bias(f"{RESBLOCK}ln_1", "blocks.{i}.norm1"),
    Rule(f"{RESBLOCK}attn.in_proj_weight", "blocks.{i}.attention.qkv.weight"),
    Rule(f"{RESBLOCK}attn.in_proj_bias", "blocks.{i}.attention.qkv.bias"),
    *weight_and_bias(f"{RESBLOCK}attn.ln_q", "blocks.{i}.attention.q_norm"),
    *weight_and_bias(f"{RESBLOCK}attn.ln_k", "blocks.{i}.attention.k_norm"),
    *weight_and_bias(f"{RESBLOCK}attn.out_proj", "blocks.{i}.attention.out"),
    Rule(f"{RESBLOCK}ls_1.gamma", "blocks.{i}.scale1"),
    *weight_and_bias(f"{RESBLOCK}ln_2", "blocks.{i}.norm2"),
    *weight_and_bias(f"{RESBLOCK}mlp.c_fc", "blocks.{i}.mlp.up"),
    *weight_and_bias(f"{RESBLOCK}mlp.c_proj", "blocks.{i}.mlp.down"),
    Rule(f"{RESBLOCK}ls_2.gamma", "blocks.{i}.scale2"),
    Rule("proj", "head.weight", TRANSPOSE),
)
FINAL_NORM = weight_and_bias("ln_post", "norm")


def _first_query(tensors: Sequence[Tensor], config: AnyConfig) -> list[Tensor]:
    """CoCa's first pooling query after its norm; the other queries are for the text decoder."""
    query, weight, bias = (t.float() for t in tensors)
    return [F.layer_norm(query[0], weight.shape, weight, bias, as_vit(config).norm_eps)]


def _not_writable(tensors: Sequence[Tensor], config: AnyConfig) -> list[Tensor]:
    raise ConversionError("open_clip files can be read but not written.")


SPLIT_QKV = Transform(lambda t, _: t[0].tensor_split([len(t[0]) // 3]), lambda t, _: [torch.cat(list(t))])
"""q, k, v concatenated <-> q, and k with v concatenated."""
COCA = [
    *weight_and_bias("attn_pool.ln_k", "norm"),
    Rule(
        ("attn_pool.query", "attn_pool.ln_q.weight", "attn_pool.ln_q.bias"),
        "pool.probe",
        Transform(_first_query, _not_writable),
    ),
    Rule("attn_pool.attn.in_proj_bias", ("pool.q.bias", "pool.kv.bias"), SPLIT_QKV),
    *weight_and_bias("attn_pool.attn.out_proj", "pool.out"),
    *weight_and_bias("ln_post", "pool.norm"),
]
# nn.MultiheadAttention has one matrix where queries and keys have the same width, else separate ones.
COCA_JOINT = [Rule("attn_pool.attn.in_proj_weight", ("pool.q.weight", "pool.kv.weight"), SPLIT_QKV)]
COCA_SEPARATE = [
    Rule("attn_pool.attn.q_proj_weight", "pool.q.weight"),
    Rule(("attn_pool.attn.k_proj_weight", "attn_pool.attn.v_proj_weight"), "pool.kv.weight", CONCAT_QKV),
]

ANCHORS = ("conv1.weight", "class_embedding", "ln_post.weight", "transformer.resblocks.0.ln_1.weight")
RESNET = ("attnpool.q_proj.weight", "attnpool.c_proj.weight")
FIRST_BLOCK = "transformer.resblocks.0."
UNSUPPORTED_TENSORS = {
    RESNET[0]: "CLIP's modified ResNet (RN50, RN101, RN50x4, ...)",
    RESNET[1]: "CLIP's modified ResNet (RN50, RN101, RN50x4, ...)",
    "attn_pool.probe": "the rotary positions and the attention pooling of Perception Encoder (PE)",
    "attn_pool_contrastive.query": "two attentional poolers (attentional_pool='parallel' or 'cascade')",
    "patchnorm_pre_ln.weight": "a norm on the pixels of each patch (input_patchnorm)",
    f"{FIRST_BLOCK}attn.logit_scale": "scaled cosine attention (scaled_cosine_attn)",
    f"{FIRST_BLOCK}attn.head_scale": "a learned scale per head (scale_heads)",
    f"{FIRST_BLOCK}attn.ln_inner.weight": "a norm inside the attention (scale_attn_inner)",
    f"{FIRST_BLOCK}ln_attn.weight": "a norm after the attention (scale_attn)",
    f"{FIRST_BLOCK}mlp.ln.weight": "a norm inside the MLP (scale_fc)",
}
"""Tensors of image towers that are not supported."""

TENSOR_FIELDS = (
    "layers",
    "width",
    "patch_size",
    "mlp_ratio",
    "ls_init_value",
    "no_ln_pre",
    "qk_norm",
    "pos_embed_type",
)
READ_FIELDS = ("image_size", "head_width", "pool_type", "final_ln_after_pool", "act_kwargs", "norm_kwargs")
NO_EFFECT_FIELDS = ("patch_dropout", "output_tokens", "block_type", "attentional_pool", "attn_pooler_queries")
TIMM_FIELDS = tuple(f"timm_{name}" for name in ("model_pretrained", "pool", "proj", "proj_bias", "drop", "drop_path"))
KNOWN_FIELDS = frozenset(
    {*TENSOR_FIELDS, *READ_FIELDS, *NO_EFFECT_FIELDS, *TIMM_FIELDS, "attn_pooler_heads", "image_seq_len"}
)
"""Fields of vision_cfg that tensors show, that are read here, or that do not change the image embedding."""
QUICKGELU_RUN = re.compile(r"(?:^|-)model_[\w.-]*-quickgelu-lr_")
"""Name of a QuickGELU model's run, as open_clip's training script writes it."""


@dataclass(frozen=True)
class OpenClipConfig:
    """The contents of open_clip_config.json; empty if there is none."""

    model: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)
    preprocess: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_archive(cls, archive: Archive) -> OpenClipConfig:
        content = archive.sidecars.get("open_clip_config.json")
        if not isinstance(content, dict) or not isinstance(content.get("model_cfg"), dict):
            return cls()
        model = content["model_cfg"]
        vision = dict(model.get("vision_cfg") or {})
        unknown = sorted(name for name, value in vision.items() if name not in KNOWN_FIELDS and value)
        if unknown:
            raise FormatError(
                f"open_clip_config.json has {', '.join(unknown)} in vision_cfg, which vitrail does not support."
            )
        return cls(model, vision, dict(content.get("preprocess_cfg") or {}))

    def __bool__(self) -> bool:
        return bool(self.model)


def detect(archive: Archive, tower: str) -> str | None:
    for prefix in ("", "module.", "model."):
        start = prefix + tower
        names = {n.removeprefix(start) for n in archive.tensors if n.startswith(start)}
        # Two are enough: a file that lacks one tensor is read, and the error names the missing one.
        if len(names.intersection(ANCHORS)) > 1 or names.issuperset(RESNET):
            return prefix
    return None


def table(config: AnyConfig, tower: str) -> RenameTable:
    vit = as_vit(config)
    coca = COCA + (COCA_JOINT if vit.pooled_width == vit.width else COCA_SEPARATE)
    rules = [_add_prefix(tower, rule) for rule in (*RULES, *(coca if vit.pool == "coca" else FINAL_NORM))]
    return RenameTable("open_clip", rules, TEXT_TOWER if tower else ())


def _add_prefix(tower: str, rule: Rule) -> Rule:
    names = (rule.theirs,) if isinstance(rule.theirs, str) else rule.theirs
    return replace(rule, theirs=tuple(f"{tower}{name}" for name in names))


def infer_info(archive: Archive, tower: str) -> ModelInfo:
    names = archive.tensors
    full_archive, archive = archive, archive.strip_prefix(tower)
    for name, what in UNSUPPORTED_TENSORS.items():
        if name in archive.tensors:
            raise FormatError(f"the image tower has {what}, which vitrail does not support.")
    if "ln_post.weight" not in archive.tensors or "class_embedding" not in archive.tensors:
        raise FormatError(
            "ln_post or class_embedding is missing: the image tower is not CLIP's, or is incomplete. Perception "
            "Encoder (PE), which has the same names and rotary positions, is not supported."
        )
    clip_config = OpenClipConfig.from_archive(archive)
    openai = OPENAI_ONLY.issubset(names)
    notes: list[str] = []
    config = _config(archive, clip_config, openai, notes, _activation(full_archive, clip_config, openai, tower))
    preprocess = default_preprocess("CLIP", config)
    if clip_config.preprocess:
        preprocess = _preprocess(clip_config.preprocess, preprocess, notes)
    elif not openai:
        notes.append(f"the file does not store preprocessing; CLIP's default is used: {preprocess.summary()}.")
    return ModelInfo(
        config=config,
        preprocess=preprocess,
        family="CLIP",
        task="embed",
        origin=archive.source,
        notes=tuple(notes),
    )


def _config(
    archive: Archive, clip_config: OpenClipConfig, openai: bool, notes: list[str], activation: str
) -> ViTConfig:
    names = archive.tensors
    width, channels, *patch = archive.shape("conv1.weight")
    blocks = [n.removeprefix("transformer.resblocks.") for n in names if n.startswith("transformer.resblocks.")]
    inside = {n.split(".", 1)[1] for n in blocks}  # of any block, since one may lack a tensor
    mlp = archive.shape(f"{FIRST_BLOCK}mlp.c_fc.weight")[0]
    depth = 1 + max(int(n.split(".")[0]) for n in blocks)
    for field_name, actual in (("width", width), ("layers", depth), ("patch_size", patch[0])):
        stated = clip_config.vision.get(field_name, actual)
        if stated != actual:
            raise FormatError(f"open_clip_config.json has {field_name}={stated}, but the tensors have {actual}.")
    norm = clip_config.vision.get("norm_kwargs") or {}
    return ViTConfig(
        patch_size=(patch[0], patch[1]),
        channels=channels,
        num_classes=archive.shape("proj")[1] if "proj" in names else 0,
        width=width,
        depth=depth,
        num_heads=_num_heads(archive, clip_config, openai, (width, mlp), notes),
        mlp_dim=mlp,
        norm_eps=float(norm.get("eps", 1e-5)),
        activation=activation,  # type: ignore[arg-type]
        patch_bias=False,
        qkv_bias="attn.in_proj_bias" in inside,
        qk_norm="attn.ln_q.weight" in inside,
        layer_scale=clip_config.vision.get("ls_init_value") or 1e-5 if "ls_1.gamma" in inside else None,
        pre_norm="ln_pre.weight" in names,
        head_bias=False,
        resample="timm",  # open_clip resizes positions as timm does
        **_pooling(archive, clip_config, notes),
        **_image_size(archive, clip_config, patch, notes),
    )


def _activation(archive: Archive, clip_config: OpenClipConfig, openai: bool, tower: str) -> str:
    """GELU or QuickGELU: from the caller, the config, or what only OpenAI's files have."""
    if hinted := archive.hints.get("activation"):
        return str(hinted)
    if clip_config:
        if clip_config.model.get("quick_gelu"):
            return "gelu-quick"
        options = clip_config.vision.get("act_kwargs") or {}
        return "gelu-tanh" if options.get("approximate") == "tanh" else "gelu"
    modules = archive.extras.get("modules") or {}
    quick = modules.get(f"{tower}{FIRST_BLOCK}mlp.gelu") == "QuickGELU"
    if openai or quick or QUICKGELU_RUN.search(str(archive.extras.get("name", ""))):
        return "gelu-quick"
    raise FormatError(
        "the tensors do not show whether this CLIP model uses GELU or QuickGELU, and there is no "
        "open_clip_config.json; pass activation='gelu-quick' for weights by OpenAI, MetaCLIP and DFN and for models "
        "whose name ends in -quickgelu, activation='gelu' for the others."
    )


def _num_heads(
    archive: Archive, clip_config: OpenClipConfig, openai: bool, size: tuple[int, int], notes: list[str]
) -> int:
    width, _ = size
    if hinted := archive.hints.get("num_heads"):
        return int(hinted)
    if clip_config or openai:
        return width // int(clip_config.vision.get("head_width", 64))
    if f"{FIRST_BLOCK}attn.ln_q.weight" in archive.tensors:
        return width // archive.shape(f"{FIRST_BLOCK}attn.ln_q.weight")[0]
    heads = infer_num_heads(*size)
    if heads is None:
        raise FormatError(f"the file does not store the number of heads at width {width}; pass num_heads=...")
    notes.append(
        f"{heads} heads of width {width // heads} are assumed: the file does not store their number; "
        "pass num_heads=... if that is wrong."
    )
    return heads


def _pooling(archive: Archive, clip_config: OpenClipConfig, notes: list[str]) -> dict[str, Any]:
    """Options for pooling: the class token, the mean of the patches (CLIPA), or CoCa's attention pooling."""
    pools = {"tok": "token", "avg": "gap"}
    if "attn_pool.query" in archive.tensors:
        return _coca(archive, clip_config, notes)
    if not clip_config:
        if "ln_pre.weight" in archive.tensors or "pool" in archive.hints:
            return {"pool": archive.hints.get("pool", "token"), "pool_norm": archive.hints.get("pool_norm", "before")}
        raise FormatError(
            "there is no ln_pre, as in CLIPA, so the pooling is not known, and there is no open_clip_config.json; pass "
            "pool='gap', pool_norm='after' for CLIPA, or pool='token'."
        )
    stated = clip_config.vision.get("pool_type", "tok")
    if stated not in pools:
        raise FormatError(f"open_clip_config.json has pool_type={stated!r}, which vitrail does not support.")
    return {"pool": pools[stated], "pool_norm": "after" if clip_config.vision.get("final_ln_after_pool") else "before"}


def _coca(archive: Archive, clip_config: OpenClipConfig, notes: list[str]) -> dict[str, Any]:
    """Options for CoCa's attentional pooler: the output of its first query is the image embedding."""
    if clip_config.vision.get("pool_type", "tok") != "tok":
        raise FormatError(
            f"open_clip_config.json has pool_type={clip_config.vision['pool_type']!r} beside CoCa's pooler; "
            "vitrail supports 'tok' only."
        )
    heads = archive.hints.get("pool_heads") or clip_config.vision.get("attn_pooler_heads", 8)
    if not clip_config and "pool_heads" not in archive.hints:
        notes.append(
            f"{heads} pooling heads are assumed: the file does not store their number; "
            "pass pool_heads=... if that is wrong."
        )
    return {"pool": "coca", "pool_width": archive.shape("attn_pool.query")[1], "pool_heads": int(heads)}


def _image_size(archive: Archive, clip_config: OpenClipConfig, patch: list[int], notes: list[str]) -> dict[str, Any]:
    """The image size that the position embedding is for: as stated if that fits, else square."""
    rows = archive.shape("positional_embedding")[0] - 1
    stated = clip_config.vision.get("image_size") or archive.hints.get("image_size")
    if stated:
        size = pair(stated if isinstance(stated, int) else tuple(stated))
        if (size[0] // patch[0]) * (size[1] // patch[1]) == rows:
            covered = not (size[0] % patch[0] or size[1] % patch[1])
            return {"image_size": size, "uncovered": "refuse" if covered else "ignore"}
    side = math.isqrt(rows)
    if not rows or side * side != rows:
        raise FormatError(
            f"positional_embedding has {rows + 1} rows, which is not a square grid plus a class token; "
            "pass image_size=(height, width)."
        )
    size = (side * patch[0], side * patch[1])
    if stated:
        notes.append(
            f"open_clip_config.json has image_size={stated}, but the positions are for {size[0]}x{size[1]}: "
            "the latter is used."
        )
    return {"image_size": size}


def _preprocess(preprocess_cfg: dict[str, Any], default: PreprocessConfig, notes: list[str]) -> PreprocessConfig:
    height, width = pair(default.image_size)
    changes: dict[str, Any] = {
        name: tuple(preprocess_cfg[name]) for name in ("mean", "std") if preprocess_cfg.get(name)
    }
    if preprocess_cfg.get("interpolation") in ("bilinear", "bicubic", "nearest"):
        changes["interpolation"] = preprocess_cfg["interpolation"]
    mode = preprocess_cfg.get("resize_mode", "shortest")
    if mode == "squash":
        changes |= {"resize": "squash", "resize_to": None}
    elif height != width:
        changes["resize_to"] = None  # the crop is exactly covered
    if mode == "longest":
        notes.append(
            "open_clip_config.json has resize_mode='longest' (with padding), which vitrail does not support: the short "
            "side is resized."
        )
    return default.replace(**changes)


def _make_format(tower: str) -> Format:
    bound: dict[str, Callable[..., Any]] = {
        "detect": partial(detect, tower=tower),
        "infer_info": partial(infer_info, tower=tower),
        "table": partial(table, tower=tower),
    }
    return Format(name="open_clip", **bound)  # type: ignore[arg-type]


FORMATS = (_make_format(IMAGE_TOWER), _make_format(""))
"""Image and text towers, and the image tower alone."""

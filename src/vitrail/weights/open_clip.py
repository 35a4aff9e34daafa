"""OpenAI's CLIP and open_clip: the image tower of a state dict, a TorchScript archive or a repository.

Both name their tensors alike and keep the text tower beside the image tower, which alone is read.
What no tensor shows (GELU or QuickGELU, how many heads) comes from `open_clip_config.json`, from what
only OpenAI's files have, or from the caller: it is never guessed. Read only: a file without a text
tower loads in neither library.
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
from vitrail.weights.format import Format
from vitrail.weights.model_info import ModelInfo, default_preprocess
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

TOWER = "visual."
"""Where the image tower is; a file of the tower alone has no prefix."""
TEXT = (
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
"""The text tower and the numbers beside it."""
OPENAI = frozenset({"input_resolution", "context_length", "vocab_size"})
"""Tensors that OpenAI's published archives have, and open_clip's files have not."""

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
LAST = weight_and_bias("ln_post", "norm")


def _first_query(tensors: Sequence[Tensor], config: AnyConfig) -> list[Tensor]:
    """CoCa's queries, as its pooler normalizes them: the first is the image's, the others are the text decoder's."""
    query, weight, bias = (t.float() for t in tensors)
    return [F.layer_norm(query[0], weight.shape, weight, bias, as_vit(config).norm_eps)]


def _unwritten(tensors: Sequence[Tensor], config: AnyConfig) -> list[Tensor]:
    raise ConversionError("open_clip files can be read, not written.")


SPLIT = Transform(lambda t, _: t[0].tensor_split([len(t[0]) // 3]), lambda t, _: [torch.cat(list(t))])
"""q, k, v one above the other <-> q, and k above v."""
COCA = [
    *weight_and_bias("attn_pool.ln_k", "norm"),
    Rule(
        ("attn_pool.query", "attn_pool.ln_q.weight", "attn_pool.ln_q.bias"),
        "pool.probe",
        Transform(_first_query, _unwritten),
    ),
    Rule("attn_pool.attn.in_proj_bias", ("pool.q.bias", "pool.kv.bias"), SPLIT),
    *weight_and_bias("attn_pool.attn.out_proj", "pool.out"),
    *weight_and_bias("ln_post", "pool.norm"),
]
# nn.MultiheadAttention keeps its matrices together where queries and keys are of one width, else apart.
COCA_TOGETHER = [Rule("attn_pool.attn.in_proj_weight", ("pool.q.weight", "pool.kv.weight"), SPLIT)]
COCA_APART = [
    Rule("attn_pool.attn.q_proj_weight", "pool.q.weight"),
    Rule(("attn_pool.attn.k_proj_weight", "attn_pool.attn.v_proj_weight"), "pool.kv.weight", CONCAT_QKV),
]

ANCHORS = ("conv1.weight", "class_embedding", "ln_post.weight", "transformer.resblocks.0.ln_1.weight")
RESNET = ("attnpool.q_proj.weight", "attnpool.c_proj.weight")
FIRST = "transformer.resblocks.0."
STRANGERS = {
    RESNET[0]: "CLIP's modified ResNet (RN50, RN101, RN50x4, ...)",
    RESNET[1]: "CLIP's modified ResNet (RN50, RN101, RN50x4, ...)",
    "attn_pool.probe": "the rotary positions and the attention pool of Perception Encoder (PE)",
    "attn_pool_contrastive.query": "two attentional poolers (attentional_pool='parallel' or 'cascade')",
    "patchnorm_pre_ln.weight": "a norm on the pixels of each patch (input_patchnorm)",
    f"{FIRST}attn.logit_scale": "scaled cosine attention (scaled_cosine_attn)",
    f"{FIRST}attn.head_scale": "a scale for each head (scale_heads)",
    f"{FIRST}attn.ln_inner.weight": "a norm inside the attention (scale_attn_inner)",
    f"{FIRST}ln_attn.weight": "a norm after the attention (scale_attn)",
    f"{FIRST}mlp.ln.weight": "a norm inside the MLP (scale_fc)",
}
"""Tensors of image towers that compute something else."""

SHOWN = ("layers", "width", "patch_size", "mlp_ratio", "ls_init_value", "no_ln_pre", "qk_norm", "pos_embed_type")
READ = ("image_size", "head_width", "pool_type", "final_ln_after_pool", "act_kwargs", "norm_kwargs")
TRAINING = ("patch_dropout", "output_tokens", "block_type", "attentional_pool", "attn_pooler_queries")
UNUSED = tuple(f"timm_{name}" for name in ("model_pretrained", "pool", "proj", "proj_bias", "drop", "drop_path"))
KNOWN = frozenset({*SHOWN, *READ, *TRAINING, *UNUSED, "attn_pooler_heads", "image_seq_len"})
"""Fields of vision_cfg that tensors show, that are read here, and that change no image's embedding."""
EXPERIMENT = re.compile(r"(?:^|-)model_[\w.-]*-quickgelu-lr_")
"""The name that open_clip's training script gives a run of a QuickGELU model."""


@dataclass(frozen=True)
class Stated:
    """What open_clip_config.json says; all empty where there is none."""

    model: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)
    preprocess: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, archive: Archive) -> Stated:
        whole = archive.sidecars.get("open_clip_config.json")
        if not isinstance(whole, dict) or not isinstance(whole.get("model_cfg"), dict):
            return cls()
        model = whole["model_cfg"]
        vision = dict(model.get("vision_cfg") or {})
        odd = sorted(name for name, value in vision.items() if name not in KNOWN and value)
        if odd:
            raise FormatError(f"open_clip_config.json has {', '.join(odd)} in vision_cfg, which vitrail does not read.")
        return cls(model, vision, dict(whole.get("preprocess_cfg") or {}))

    def __bool__(self) -> bool:
        return bool(self.model)


def recognize(archive: Archive, tower: str) -> str | None:
    for prefix in ("", "module.", "model."):
        start = prefix + tower
        names = {n.removeprefix(start) for n in archive.tensors if n.startswith(start)}
        # Two will do: a file that lacks one of its tensors is told so, by name.
        if len(names.intersection(ANCHORS)) > 1 or names.issuperset(RESNET):
            return prefix
    return None


def table(config: AnyConfig, tower: str) -> RenameTable:
    vit = as_vit(config)
    coca = COCA + (COCA_TOGETHER if vit.pooled_width == vit.width else COCA_APART)
    rules = [_under(tower, rule) for rule in (*RULES, *(coca if vit.pool == "coca" else LAST))]
    return RenameTable("open_clip", rules, TEXT if tower else ())


def _under(tower: str, rule: Rule) -> Rule:
    names = (rule.theirs,) if isinstance(rule.theirs, str) else rule.theirs
    return replace(rule, theirs=tuple(f"{tower}{name}" for name in names))


def describe(archive: Archive, tower: str) -> ModelInfo:
    names = archive.tensors
    whole, archive = archive, archive.strip_prefix(tower)
    for name, what in STRANGERS.items():
        if name in archive.tensors:
            raise FormatError(f"the image tower has {what}, which vitrail does not build.")
    if "ln_post.weight" not in archive.tensors or "class_embedding" not in archive.tensors:
        raise FormatError(
            "ln_post or class_embedding is missing: the image tower is not CLIP's, or not whole; Perception Encoder "
            "(PE), which has rotary positions under the same names, is not read."
        )
    stated = Stated.of(archive)
    openai = OPENAI.issubset(names)
    notes: list[str] = []
    config = _config(archive, stated, openai, notes, _activation(whole, stated, openai, tower))
    preprocess = default_preprocess("CLIP", config)
    if stated.preprocess:
        preprocess = _preprocess(stated.preprocess, preprocess, notes)
    elif not openai:
        notes.append(f"preprocessing is not in the file; as usual for CLIP: {preprocess.summary()}.")
    return ModelInfo(
        config=config,
        preprocess=preprocess,
        family="CLIP",
        task="embed",
        origin=archive.source,
        notes=tuple(notes),
    )


def _config(archive: Archive, stated: Stated, openai: bool, notes: list[str], activation: str) -> ViTConfig:
    names = archive.tensors
    width, channels, *patch = archive.shape("conv1.weight")
    blocks = [n.removeprefix("transformer.resblocks.") for n in names if n.startswith("transformer.resblocks.")]
    inside = {n.split(".", 1)[1] for n in blocks}  # of any block: one may lack a tensor
    mlp = archive.shape(f"{FIRST}mlp.c_fc.weight")[0]
    depth = 1 + max(int(n.split(".")[0]) for n in blocks)
    for field_name, found in (("width", width), ("layers", depth), ("patch_size", patch[0])):
        said = stated.vision.get(field_name, found)
        if said != found:
            raise FormatError(f"open_clip_config.json says {field_name}={said}, and the tensors have {found}.")
    norm = stated.vision.get("norm_kwargs") or {}
    return ViTConfig(
        patch_size=(patch[0], patch[1]),
        channels=channels,
        num_classes=archive.shape("proj")[1] if "proj" in names else 0,
        width=width,
        depth=depth,
        num_heads=_heads(archive, stated, openai, (width, mlp), notes),
        mlp_dim=mlp,
        norm_eps=float(norm.get("eps", 1e-5)),
        activation=activation,  # type: ignore[arg-type]
        patch_bias=False,
        qkv_bias="attn.in_proj_bias" in inside,
        qk_norm="attn.ln_q.weight" in inside,
        layer_scale=stated.vision.get("ls_init_value") or 1e-5 if "ls_1.gamma" in inside else None,
        pre_norm="ln_pre.weight" in names,
        head_bias=False,
        resample="timm",  # open_clip resizes positions as timm does
        **_pooling(archive, stated, notes),
        **_image(archive, stated, patch, notes),
    )


def _activation(archive: Archive, stated: Stated, openai: bool, tower: str) -> str:
    """GELU or QuickGELU, by what decides it."""
    if told := archive.hints.get("activation"):
        return str(told)
    if stated:
        if stated.model.get("quick_gelu"):
            return "gelu-quick"
        options = stated.vision.get("act_kwargs") or {}
        return "gelu-tanh" if options.get("approximate") == "tanh" else "gelu"
    modules = archive.extras.get("modules") or {}
    quick = modules.get(f"{tower}{FIRST}mlp.gelu") == "QuickGELU"
    if openai or quick or EXPERIMENT.search(str(archive.extras.get("name", ""))):
        return "gelu-quick"
    raise FormatError(
        "the tensors do not show whether this CLIP was trained with GELU or QuickGELU, and there is no "
        "open_clip_config.json; pass activation='gelu-quick' for weights by OpenAI, MetaCLIP and DFN and for models "
        "whose name ends in -quickgelu, activation='gelu' for the others."
    )


def _heads(archive: Archive, stated: Stated, openai: bool, size: tuple[int, int], notes: list[str]) -> int:
    width, _ = size
    if told := archive.hints.get("num_heads"):
        return int(told)
    if stated or openai:
        return width // int(stated.vision.get("head_width", 64))
    if f"{FIRST}attn.ln_q.weight" in archive.tensors:
        return width // archive.shape(f"{FIRST}attn.ln_q.weight")[0]
    heads = infer_num_heads(*size)
    if heads is None:
        raise FormatError(f"the file does not say how many heads share width {width}; pass num_heads=...")
    notes.append(
        f"{heads} heads are assumed, {width // heads} wide each: the file does not say (num_heads=... settles it)."
    )
    return heads


def _pooling(archive: Archive, stated: Stated, notes: list[str]) -> dict[str, Any]:
    """What the projection reads: the class token, or the mean of the patches (CLIPA)."""
    kinds = {"tok": "token", "avg": "gap"}
    if "attn_pool.query" in archive.tensors:
        return _coca(archive, stated, notes)
    if not stated:
        if "ln_pre.weight" in archive.tensors or "pool" in archive.hints:
            return {"pool": archive.hints.get("pool", "token"), "pool_norm": archive.hints.get("pool_norm", "before")}
        raise FormatError(
            "it has no ln_pre, as CLIPA, whose pooling no tensor shows, and there is no open_clip_config.json; pass "
            "pool='gap', pool_norm='after' for CLIPA, or pool='token'."
        )
    said = stated.vision.get("pool_type", "tok")
    if said not in kinds:
        raise FormatError(f"open_clip_config.json says pool_type={said!r}, which vitrail does not build.")
    return {"pool": kinds[said], "pool_norm": "after" if stated.vision.get("final_ln_after_pool") else "before"}


def _coca(archive: Archive, stated: Stated, notes: list[str]) -> dict[str, Any]:
    """The attentional pooler of open_clip's CoCa: the first query's output is the image's embedding."""
    if stated.vision.get("pool_type", "tok") != "tok":
        raise FormatError(f"open_clip_config.json says pool_type={stated.vision['pool_type']!r} beside CoCa's pooler.")
    heads = archive.hints.get("pool_heads") or stated.vision.get("attn_pooler_heads", 8)
    if not stated and "pool_heads" not in archive.hints:
        notes.append(f"{heads} heads of the pooler are assumed: the file does not say (pool_heads=... settles it).")
    return {"pool": "coca", "pool_width": archive.shape("attn_pool.query")[1], "pool_heads": int(heads)}


def _image(archive: Archive, stated: Stated, patch: list[int], notes: list[str]) -> dict[str, Any]:
    """The size the positions are for: as stated where that fits the table, else a square."""
    rows = archive.shape("positional_embedding")[0] - 1
    said = stated.vision.get("image_size") or archive.hints.get("image_size")
    if said:
        size = pair(said if isinstance(said, int) else tuple(said))
        if (size[0] // patch[0]) * (size[1] // patch[1]) == rows:
            covered = not (size[0] % patch[0] or size[1] % patch[1])
            return {"image_size": size, "uncovered": "refuse" if covered else "ignore"}
    side = math.isqrt(rows)
    if not rows or side * side != rows:
        raise FormatError(
            f"positional_embedding has {rows + 1} rows: no square grid and a class token; "
            "pass image_size=(height, width)."
        )
    size = (side * patch[0], side * patch[1])
    if said:
        notes.append(f"open_clip_config.json says image_size={said}; the positions are for {size[0]}x{size[1]}.")
    return {"image_size": size}


def _preprocess(stated: dict[str, Any], usual: PreprocessConfig, notes: list[str]) -> PreprocessConfig:
    height, width = pair(usual.image_size)
    changes: dict[str, Any] = {name: tuple(stated[name]) for name in ("mean", "std") if stated.get(name)}
    if stated.get("interpolation") in ("bilinear", "bicubic", "nearest"):
        changes["interpolation"] = stated["interpolation"]
    mode = stated.get("resize_mode", "shortest")
    if mode == "squash":
        changes |= {"resize": "squash", "resize_to": None}
    elif height != width:
        changes["resize_to"] = None  # the crop is just covered
    if mode == "longest":
        notes.append(
            "open_clip_config.json fits the long side and pads, which vitrail does not do: the short side is fitted."
        )
    return usual.replace(**changes)


def _form(tower: str) -> Format:
    bound: dict[str, Callable[..., Any]] = {
        "detect": partial(recognize, tower=tower),
        "infer_info": partial(describe, tower=tower),
        "table": partial(table, tower=tower),
    }
    return Format(name="open_clip", **bound)  # type: ignore[arg-type]


FORMATS = (_form(TOWER), _form(""))
"""The whole model, and the image tower by itself."""

"""Hugging Face's repositories: ViT, DeiT, DINO, DINOv2, MAE, I-JEPA, CLIP, SigLIP, BiT as `transformers` keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.config import BiTConfig, ViTConfig, pair
from vitrail.errors import FormatError
from vitrail.models.families import FAMILIES
from vitrail.weights import huggingface_preprocess as processor
from vitrail.weights.archive import Archive
from vitrail.weights.format import Format, header_metadata
from vitrail.weights.huggingface_config import (
    BIT,
    KINDS,
    Said,
    architecture,
    is_projection,
    kind_of,
    mlp_ratio,
    written,
)
from vitrail.weights.huggingface_names import spelling, table
from vitrail.weights.model_info import ModelInfo, default_preprocess
from vitrail.weights.renaming import AnyConfig
from vitrail.weights.sidecars import stated_model
from vitrail.weights.writers import new_folder, write_json, write_safetensors

ANCHORS = {
    "embeddings.patch_embeddings.projection.weight": "embeddings.cls_token",
    "embeddings.patch_embedding.weight": "embeddings.position_embedding.weight",
    "embedder.convolution.weight": "encoder.stages.0.layers.0.conv1.weight",
    "embeddings.position_embeddings": "encoder.layer.0.attention.attention.query.weight",
}
"""Pairs of names that only transformers gives."""
STRANGERS = {
    "embeddings.patch_embeddings.backbone.*": "a hybrid's ResNet (ViT-Hybrid)",
    "encoder.layer.0.lambda_1": "BEiT's scales",
    "encoder.layer.0.attention.attention.relative_position_bias.*": "relative position biases (BEiT)",
    "encoder.layers.0.self_attn.qkv.weight": "queries, keys and values in one matrix (BLIP)",
    "embedder.norm.weight": "post-activation units (layer_type 'bottleneck')",
    "embeddings.detection_tokens": "tokens of objects (YOLOS)",
    "embeddings.text_embeddings.": "words among its tokens (ViLT)",
    "embeddings.time_embeddings": "positions in time (TimeSformer)",
    "encoder.layers.0.message_fc.": "messages between frames (X-CLIP)",
    "pre_layernorm.": "OWL-ViT's first norm",
}
"""Tensors that tell a neighbor, which computes something else."""


def recognize(archive: Archive) -> str | None:
    names = {spelling(n) for n in archive.tensors}
    return "" if any(a in names and b in names for a, b in ANCHORS.items()) else None


def describe(archive: Archive) -> ModelInfo:
    _refuse_strangers(archive)
    name = _kind_in(archive)
    said = Said.of(archive, KINDS[name])
    config, notes = _bit_config(archive, said) if name == "bit" else _vit_config(archive, name, said)
    family = _family(archive, said, config)
    notes += _left_aside(archive, config)
    stated = processor.said(archive)
    if stated is None:
        # transformers antialiases and rounds a crop's place down, whatever the family's own code does
        preprocess = default_preprocess(family, config).replace(antialias=True, crop_rounding="floor")
        notes.append(
            f"there is no preprocessor_config.json: preprocessing is as usual for {FAMILIES[family].title}; put it "
            "beside the weights, or pass --family NAME (family=... in Python) if it is of another."
        )
    else:
        try:
            preprocess, heard = processor.read(stated, name, pair(config.image_size), config.channels)
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(
                f"preprocessor_config.json cannot be followed ({error!r}); repair or remove it."
            ) from None
        notes += heard
        if isinstance(config, BiTConfig):
            config = config.replace(image_size=preprocess.image_size)
        elif _leaves_an_edge(pair(preprocess.image_size), pair(config.patch_size)):
            config = config.replace(uncovered="ignore")
    labels, wrong = said.labels(0 if is_projection(config) else config.num_classes)
    return ModelInfo(
        config=config,
        preprocess=preprocess,
        labels=labels,
        family=family,
        task="embed" if not config.num_classes or is_projection(config) else "classify",
        multi_label=said.multi_label,
        origin=archive.source,
        notes=(*notes, *([wrong] if wrong else [])),
    )


def _refuse_strangers(archive: Archive) -> None:
    for pattern, what in STRANGERS.items():
        if any(n.startswith(pattern.removesuffix("*")) for n in archive.tensors):
            raise FormatError(f"read as huggingface, this network has {what}, which vitrail does not build from it.")
    if _shape(archive, "embeddings.cls_token", (1, 1))[1] > 1:
        raise FormatError("read as huggingface, this network has several class tokens (Pixio): vitrail builds one.")
    if len(_shape(archive, "embeddings.patch_embeddings.projection.weight", (0,) * 4)) == 5:
        raise FormatError("this is a network for video (ViViT, VideoMAE), which vitrail does not read yet.")
    if len(_shape(archive, "embeddings.patch_embedding.weight", (0,) * 4)) == 2:
        raise FormatError("this is SigLIP 2 for any aspect (NaFlex); vitrail reads SigLIP 2 of a fixed size only.")


def _kind_in(archive: Archive) -> str:
    """From the names alone."""
    names = archive.tensors
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
        raise FormatError(f"read as huggingface, {name} is missing.")
    return default


def _vit_config(archive: Archive, kind: str, said: Said) -> tuple[ViTConfig, list[str]]:
    tower = kind in ("clip", "siglip")
    names, block = archive.tensors, "encoder.layers." if tower else "encoder.layer."
    first = "embeddings.patch_embedding" if tower else "embeddings.patch_embeddings.projection"
    width, channels, *patch = _shape(archive, f"{first}.weight")
    depth = 1 + max((int(n.removeprefix(block).split(".")[0]) for n in names if n.startswith(block)), default=-1)
    gated = f"{block}0.mlp.weights_out.weight" in names
    down = dict.fromkeys(("vit", "deit", "ijepa"), "output.dense").get(kind, "mlp.weights_out" if gated else "mlp.fc2")
    mlp = _shape(archive, f"{block}0.{down}.weight")[1]
    said.agrees(hidden_size=width, num_hidden_layers=depth, patch_size=tuple(patch), num_channels=channels)
    if kind not in ("dinov2", "dinov2_with_registers"):
        said.agrees(intermediate_size=mlp)
    options: dict[str, Any] = {
        "width": width,
        "depth": depth,
        "mlp_dim": mlp,
        "patch_size": tuple(patch),
        "channels": channels,
        "class_token": kind not in ("siglip", "ijepa"),
        "num_registers": _shape(archive, "embeddings.register_tokens", (1, 0))[1],
        "patch_bias": kind != "clip",
        "qkv_bias": tower or any(n.endswith((".query.bias", ".key.bias", ".value.bias")) for n in names),
        "layer_scale": float(said.get("layerscale_value", default=1.0)) if kind.startswith("dinov2") else None,
        "pre_norm": kind == "clip",
    }
    options |= said.conventions() | _ending(archive, kind, said)
    options["activation"] = "swiglu" if gated else options["activation"]
    special = {"siglip": 0, "ijepa": 0, "deit": 2}.get(kind, 1)
    rows = _shape(archive, "embeddings.position_embedding.weight" if tower else "embeddings.position_embeddings")[-2]
    options["image_size"] = said.image(pair(options["patch_size"]), rows - special)
    if _leaves_an_edge(options["image_size"], options["patch_size"]):
        options["uncovered"] = "ignore"
    options["num_heads"], assumed = said.heads(width, depth, mlp)
    silent = (
        f"there is no config.json: activation and epsilon are {KINDS[kind].models[0]}'s defaults; put it beside the "
        "weights, or pass activation=..., norm_eps=... if they are others."
    )
    return ViTConfig(**options), [n for n in (assumed, "" if said.type else silent) if n]


def _leaves_an_edge(image_size: tuple[int, int], patch: tuple[int, int]) -> bool:
    """Whether a convolution would leave out the last rows or columns, as it does in transformers."""
    return any(side % size for side, size in zip(image_size, patch, strict=True))


def _ending(archive: Archive, kind: str, said: Said) -> dict[str, Any]:
    """How the tokens become an answer."""
    classes = _shape(archive, "classifier.weight", (0,))[0]
    pooler = _shape(archive, "pooler.dense.weight", (0,))[0]
    match kind:
        case "vit" if pooler and not classes:
            if (act := said.get("pooler_act", default="tanh")) != "tanh":
                raise FormatError(f"config.json says pooler_act={act!r}; vitrail has tanh there.")
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


def _bit_config(archive: Archive, said: Said) -> tuple[BiTConfig, list[str]]:
    for name, ours in BIT.items():
        if (stated := said.get(name, default=ours)) != ours:
            raise FormatError(f"config.json says {name}={stated!r}; BiT as vitrail has it means {ours!r}.")
    units = {tuple(map(int, n.split(".")[2:5:2])) for n in archive.tensors if n.startswith("encoder.stages.")}
    root, channels, *_ = _shape(archive, "embedder.convolution.weight")
    config = BiTConfig(
        channels=channels,
        num_classes=_shape(archive, "classifier.1.weight", (0,))[0],
        layers=tuple(sum(s == stage for s, _ in units) for stage in range(1 + max((s for s, _ in units), default=0))),
        width_factor=root / 64,
        standardize_eps=1e-8,
    )
    return config, []


def _family(archive: Archive, said: Said, config: AnyConfig) -> str:
    if said.kind is not KINDS["vit"]:
        return said.kind.family
    if said.type == "vit_mae" or "decoder.decoder_embed.weight" in archive.tensors:
        return "MAE"
    assert isinstance(config, ViTConfig)
    bare = not config.num_classes and not config.pre_logits and "embeddings.mask_token" not in archive.tensors
    return "DINO" if bare and said.type != "vit_msn" else "ViT"


def _left_aside(archive: Archive, config: AnyConfig) -> list[str]:
    """What the table passes over and a user may look for."""
    names, kind = archive.tensors, kind_of(config)
    parts = {
        "the text tower": any(n.startswith("text_model.") for n in names),
        "the decoder": any(n.startswith("decoder.") for n in names),
        "the pooler": "pooler.dense.weight" in names and not getattr(config, "pre_logits", 0),
        "the attention pool": kind == "siglip" and config.num_classes > 0 and "head.probe" in names,
    }
    aside = [part for part, there in parts.items() if there]
    notes = [f"left aside: {', '.join(aside)}."] if aside else []
    if kind == "deit" and "classifier.weight" in names:
        notes.append("no head reads the distillation token: it is kept as a register, its position added.")
    return notes


def cannot(info: ModelInfo) -> list[str]:
    config = info.config
    if isinstance(config, BiTConfig):
        return []
    kind = kind_of(config)
    square = len(set(pair(config.image_size))) == 1
    wrong = {
        f"{config.position} positions": config.position not in ("learned-1d", "none"),
        "a network without positions": config.position == "none",
        "positions added at the layers": config.resolved_position_at != "stem",
        "a class token without a position": config.class_token and not config.position_on_class,
        "RMSNorm": config.norm == "rms",
        "qk-norm": config.qk_norm,
        "layers without bias": not config.proj_bias,
        "a hybrid's stem": config.stem is not None,
        "patches that are not square": len(set(pair(config.patch_size))) > 1,
        f"an image that is not square in {KINDS[kind].models[0]}": not square and kind not in ("vit", "deit"),
        "a patch projection without bias": not config.patch_bias and kind != "clip",
        "queries, keys and values without bias": not config.qkv_bias and kind in ("clip", "siglip"),
        "a head without bias": config.num_classes > 0 and not config.head_bias and not is_projection(config),
        "the tanh layer before a head": config.pre_logits > 0 and (config.num_classes > 0 or kind != "vit"),
        "SwiGLU without LayerScale": config.activation == "swiglu" and not kind.startswith("dinov2"),
    }
    return [name for name, is_so in (wrong | _cannot_combine(info, config, kind)).items() if is_so]


def _cannot_combine(info: ModelInfo, config: ViTConfig, kind: str) -> dict[str, bool]:
    """Parts that each have a place, but not together."""
    token = config.pool == "token" and config.pool_norm != "none"  # before or after it, the norm does the same
    both = config.pool == "token+gap" and config.pool_norm == "before"
    own = {
        "vit": token,
        "dinov2": both if config.num_classes else token,
        "clip": token or (config.pool == "gap" and config.pool_norm == "none"),
        "siglip": config.pool_norm == "before" and (config.pool == "gap" or not config.num_classes),
    }
    own |= {"deit": own["vit"], "dinov2_with_registers": own["dinov2"]}
    norms = {"before": "after the norm", "after": "before the norm", "none": "without a norm"}
    wrong = {
        f"pool={config.pool!r} {norms[config.pool_norm]} {'with' if config.num_classes else 'without'} a head "
        f"in {KINDS[kind].models[0]}": not own[kind],
        "a distillation token beside other changes": config.distilled and (kind != "deit" or config.num_registers > 0),
        "LayerScale beside other changes": config.layer_scale is not None and not kind.startswith("dinov2"),
    }
    if kind == "deit":
        wrong["registers without LayerScale"] = config.num_registers > 1 or (
            config.num_registers == 1 and not config.num_classes
        )
    elif kind.startswith("dinov2"):
        wrong[f"an MLP of {config.mlp_dim} at width {config.width} beside LayerScale"] = mlp_ratio(config) is None
    elif kind == "clip":
        wrong["registers beside a norm before the blocks"] = config.num_registers > 0
        wrong["a patch bias beside a norm before the blocks"] = config.patch_bias
        wrong["a norm-free mean without a head"] = config.pool == "gap" and not config.num_classes
        wrong["a head with bias on the class token beside a norm before the blocks"] = (
            is_projection(config) and config.head_bias
        )
        wrong["names for the outputs of CLIP's projection"] = is_projection(config) and info.labels is not None
    elif kind == "siglip":
        wrong["an attention pool beside a class token"] = config.class_token
        wrong["registers without a class token"] = config.num_registers > 0
        wrong["a norm before the blocks without a class token"] = config.pre_norm
    return wrong


def drift(info: ModelInfo) -> list[str]:
    """Numbers fixed in its code: those of BiT."""
    config = info.config
    if not isinstance(config, BiTConfig):
        return []
    wrong = {
        f"a standardization epsilon of {config.standardize_eps:g} (it has 1e-8)": config.standardize_eps != 1e-8,
        f"a norm epsilon of {config.norm_eps:g} (it has 1e-5)": config.norm_eps != 1e-5,
        "a root pool whose border never wins": config.root_pad != "zero",
    }
    return [name for name, is_so in wrong.items() if is_so]


HEADS = ("classifier.", "cls_classifier.", "distillation_classifier.", "visual_projection.")


def write(path: Path, tensors: Mapping[str, Tensor], info: ModelInfo, overwrite: bool) -> None:
    """A folder for `from_pretrained`; a name that ends in .safetensors gives one file, the rest in its header."""
    complete = completed(tensors, info)
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    sidecars = {
        "config.json": written(info, dtype),
        "preprocessor_config.json": processor.written(info.preprocess, kind_of(info.config)),
    }
    if path.suffix == ".safetensors":
        write_safetensors(path, complete, header_metadata(sidecars), overwrite=overwrite)
        return
    with new_folder(path, overwrite=overwrite) as folder:
        write_safetensors(folder / "model.safetensors", complete, header_metadata({}))
        for name, values in sidecars.items():
            write_json(folder / name, values)


def completed(tensors: Mapping[str, Tensor], info: ModelInfo) -> dict[str, Tensor]:
    """With the prefix of its class, and with the tensors that class has and never uses."""
    config, kind = info.config, kind_of(info.config)
    whole = dict(tensors)
    if kind.startswith("dinov2"):
        whole["embeddings.mask_token"] = torch.zeros_like(tensors["embeddings.cls_token"][0])
    if architecture(info) == "CLIPForImageClassification":
        norm = tensors["pre_layrnorm.weight"]
        whole |= {"post_layernorm.weight": torch.ones_like(norm), "post_layernorm.bias": torch.zeros_like(norm)}
    prefix = KINDS[kind].prefix if config.num_classes or kind in ("clip", "siglip") else ""
    return {n if n.startswith(HEADS) else f"{prefix}{n}": t for n, t in whole.items()}


HUGGINGFACE = Format(
    name="huggingface",
    detect=recognize,
    infer_info=describe,
    table=table,
    write=write,
    unsupported_parts=cannot,
    inexact_conventions=drift,
    normalize_name=spelling,
)

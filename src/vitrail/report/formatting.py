"""Numbers and settings as text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vitrail.config import BiTConfig, SwinConfig, pair
from vitrail.models import Net
from vitrail.weights.model_info import strip_local_folders

Config = Mapping[str, Any]
Rows = list[tuple[str, str]]


def format_percent(fraction: float | None, count: int | None = None) -> str:
    """98.6 %; two decimals with at least 5,000 images."""
    if fraction is None or not math.isfinite(fraction):
        return "–"
    return f"{100 * fraction:.{2 if count and count >= 5000 else 1}f} %"


def format_interval(low: float, high: float, count: int | None = None, word: str = "to") -> str:
    """96.8 to 99.4 %."""
    return f"{format_percent(low, count).removesuffix(' %')} {word} {format_percent(high, count)}"


def format_tick_percent(fraction: float) -> str:
    """For an axis: 90 %, 97.5 %."""
    return f"{100 * fraction:.3g} %"


def format_number(value: float | None, digits: int = 3) -> str:
    """0.0412, 1,437, 3e-05."""
    if value is None or not math.isfinite(value):
        return "–"
    if value and not 1e-4 <= abs(value) < 1e6:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def format_count(count: int) -> str:
    """105 thousand, 5.7 million."""
    for size, name in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if count >= size:
            return f"{count / size:.3g} {name}"
    return f"{count}"


def format_duration(seconds: float | None) -> str:
    """48 s, 3 min 20 s, 2 h 14 min."""
    if seconds is None:
        return "–"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def format_size(value: Any) -> str:
    height, width = pair(tuple(value) if isinstance(value, list) else value)
    return f"{height} × {width}"


def pluralize(count: int, thing: str, things: str | None = None) -> str:
    """1 image, 1,437 images, 10 classes."""
    return f"{count:,} {thing if count == 1 else things or thing + 's'}"


def model_rows(net: Net) -> Rows:
    """Table rows that describe a network."""
    config, parameters = net.config, sum(p.numel() for p in net.parameters())
    if isinstance(config, BiTConfig):
        kind = f"BiT ResNet, {'-'.join(map(str, config.layers))} units, width × {config.width_factor:g}"
        return [("Model", kind), ("Parameters", f"{parameters:,}")]
    if isinstance(config, SwinConfig):
        return _swin_rows(config, parameters)
    rows, columns = config.grid
    channels = pluralize(config.channels, "channel")
    kind = "ViT with a ResNet stem" if config.stem else "ViT"
    blocks, heads = pluralize(config.depth, "block"), pluralize(config.num_heads, "head")
    size = f"width {config.width}, {blocks}, {heads}, MLP {config.mlp_dim}"
    pools = {"token": "class token", "gap": "mean of the patches", "map": "attention pool", "coca": "CoCa's pool"}
    pool = pools.get(config.pool, config.pool)
    positions = str(config.position)
    if config.resolved_position_at != "stem" and config.position != "none":
        positions += {"layers": ", at each layer", "shared": ", one table for all layers"}[config.resolved_position_at]
    return [
        ("Model", f"{kind}: {size}"),
        ("Parameters", f"{parameters:,}"),
        (
            "Patches",
            f"{rows} × {columns}, {format_size(config.patch_size)} pixels each, {channels}",
        ),
        ("Position embeddings", positions),
        ("Pooling", pool),
    ]


def _swin_rows(config: SwinConfig, parameters: int) -> Rows:
    stages, windows = ("-".join(map(str, values)) for values in (config.depths, [w[0] for w in config.window_sizes]))
    name = "Swin Transformer" + (" V2" if config.version == 2 else "")
    rows, columns = config.grid
    channels = pluralize(config.channels, "channel")
    return [
        ("Model", f"{name}: width {config.width}, {stages} blocks, {'-'.join(map(str, config.num_heads))} heads"),
        ("Parameters", f"{parameters:,}"),
        ("Patches", f"{rows} × {columns}, {format_size(config.patch_size)} pixels each, {channels}"),
        ("Windows", windows if len(set(config.window_sizes)) > 1 else format_size(config.window_sizes[0])),
        ("Pooling", "mean of the tokens"),
    ]


def run_rows(config: Config, multi_label: bool = False) -> Rows:
    """Table rows that describe how a run was trained. `multi_label` is a property of the data, not in the config."""
    rows = [("Data", strip_local_folders(str(config.get("data", {}).get("source", "–"))))]
    if config.get("init_from"):
        rows.append(("Started from", strip_local_folders(str(config["init_from"]))))
    rows += [
        ("Objective", describe_objective(config, multi_label)),
        ("Augmentation", describe_augmentation(config.get("augment", {}))),
    ]
    rows += [("Optimizer", describe_optimizer(config.get("optim", {}))), ("Schedule", describe_schedule(config))]
    regular = describe_regularization(config)
    return [*rows, ("Regularization", regular)] if regular else rows


def describe_objective(config: Config, multi_label: bool = False) -> str:
    kind = config.get("objective", "classify")
    if kind == "masked-patch":
        masked = config.get("masked_patch", {})
        ratio, target = masked.get("mask_ratio", 0.5), masked.get("target", "mean-color")
        return f"predict corrupted patches ({100 * ratio:g} %, {target})"
    if kind == "simmim":
        ratio = config.get("simmim", {}).get("mask_ratio", 0.6)
        return f"predict the pixels of masked patches (SimMIM, {100 * ratio:g} %)"
    classify = config.get("classify", {})
    sigmoid = multi_label or classify.get("loss") == "sigmoid"
    parts = ["sigmoid cross-entropy" if sigmoid else "cross-entropy"]
    if classify.get("label_smoothing"):
        parts.append(f"label smoothing {classify['label_smoothing']:g}")
    if classify.get("class_weights") == "balanced":
        parts.append("balanced class weights")
    if kind == "distill":
        distill = config.get("distill", {})
        parts.append(
            f"{distill.get('kind', 'hard')} distillation from {strip_local_folders(str(distill.get('teacher')))}"
        )
    return ", ".join(parts)


def describe_augmentation(augment: Config) -> str:
    parts = []
    if augment.get("crop") == "resized":
        parts.append("random crop of {:g} to {:g} % of the area".format(*(100 * s for s in augment["scale"])))
    elif augment.get("crop") == "pad":
        parts.append(f"random shift by up to {pluralize(augment.get('pad', 0), 'pixel')}")
    if augment.get("flip"):
        parts.append("horizontal flip" if augment["flip"] == 0.5 else f"horizontal flip ({100 * augment['flip']:g} %)")
    if any(augment.get("color_jitter", ())):
        parts.append("color jitter " + " ".join(f"{j:g}" for j in augment["color_jitter"]))
    policy = augment.get("policy")
    if policy == "three":
        parts.append("3-Augment")
    elif policy == "rand":
        parts.append(f"RandAugment {augment.get('num_ops')} × {augment.get('magnitude', 0):g}")
    if augment.get("erase"):
        parts.append(f"random erasing {100 * augment['erase']:g} %")
    for name, title in (("mixup", "mixup"), ("cutmix", "CutMix")):
        if augment.get(name) and augment.get("mix_prob", 1):
            parts.append(f"{title} {augment[name]:g}")
    return ", ".join(parts) or "none"


def describe_optimizer(optim: Config) -> str:
    kind = {"adamw": "AdamW", "sgd": "SGD", "muon": "Muon"}.get(optim.get("kind", "adamw"), str(optim.get("kind")))
    parts = [kind, f"learning rate {format_number(optim.get('lr'))}"]
    if optim.get("weight_decay"):
        parts.append(f"weight decay {format_number(optim['weight_decay'])}")
    if optim.get("layer_decay"):
        parts.append(f"layer-wise decay {optim['layer_decay']:g}")
    if optim.get("grad_clip"):
        parts.append(f"gradient clipping {optim['grad_clip']:g}")
    if optim.get("trainable", "all") != "all":
        train = optim["trainable"]
        parts.append("head only" if train == "head" else f"head and last {pluralize(train, 'block')} only")
    return ", ".join(parts)


def describe_schedule(config: Config) -> str:
    plan = config.get("schedule", {})
    parts = [
        f"{config.get('duration', '–')}, batch size {config.get('batch_size', '–')}",
        str(plan.get("kind", "cosine")),
    ]
    for name, title in (("warmup", "warm-up"), ("cooldown", "cool-down")):
        if plan.get(name) and not str(plan[name]).startswith("0 "):
            parts.append(f"{plan[name]} of {title}")
    return ", ".join(parts)


def describe_regularization(config: Config) -> str:
    model = config.get("model") or {}
    parts = [
        f"{title} {model[name]:g}"
        for name, title in (("dropout", "dropout"), ("drop_path", "stochastic depth"))
        if model.get(name)
    ]
    if config.get("ema"):
        parts.append(f"EMA of the weights ({config['ema']:g})")
    return ", ".join(parts)

"""Hypothesis strategies for configs: any valid combination of options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import reject
from hypothesis import strategies as st

from vitrail.config import BiTConfig, PreprocessConfig, StemConfig, ViTConfig
from vitrail.errors import ConfigError

SIDES = st.integers(1, 3)
EPSILONS = st.sampled_from([1e-6, 1e-5, 1e-12, 0.1 + 0.2])
RATES = st.sampled_from([0.0, 0.1, 1 / 3])


@st.composite
def stems(draw: st.DrawFn) -> StemConfig:
    return StemConfig(
        layers=draw(st.sampled_from([(), (1,), (2, 1)])),
        width_factor=0.5,
        norm_eps=draw(st.sampled_from([1e-6, 1e-5])),
        standardize=draw(st.sampled_from(["std", "var"])),
        standardize_eps=draw(st.sampled_from([1e-5, 1e-8])),
    )


@st.composite
def vit_configs(draw: st.DrawFn, positions: tuple[str, ...] = (), hybrids: bool = True) -> ViTConfig:
    """Small ViT configs; `positions` restricts the kinds of position embedding."""
    kinds = positions or ("none", "learned-1d", "learned-2d", "relative", "sincos-2d", "rope-2d")
    heads, patch, stem = draw(SIDES), (draw(SIDES), draw(SIDES)), draw(stems()) if hybrids and draw(one_in(6)) else None
    class_token = draw(st.booleans())
    distilled = class_token and draw(one_in(5))
    pools = ["token"] if distilled else ["gap", "map", "token", "token+gap", "coca"] if class_token else ["gap", "map"]
    pool, norms = draw(st.sampled_from(pools)), {"token+gap": ["before", "none"], "coca": ["before"]}
    position = draw(st.sampled_from(kinds))
    inside_attention = position in ("relative", "rope-2d")
    stride = stem.stride if stem else 1
    edge = 0 if stem or not draw(one_in(6)) else 2  # pixels that no patch covers, if patches are large enough
    options: dict[str, Any] = {
        "image_size": tuple(side * stride * draw(SIDES) + edge % side for side in patch),
        "uncovered": "ignore" if edge else "refuse",
        "patch_size": patch,
        "channels": draw(st.sampled_from([1, 3, 4])),
        "num_classes": draw(st.sampled_from([0, 1, 5])),
        "width": 8 * heads,
        "depth": draw(st.integers(1, 2)),
        "num_heads": heads,
        "mlp_dim": draw(st.sampled_from([8, 20])),
        "class_token": class_token,
        "distilled": distilled,
        "num_registers": draw(st.sampled_from([0, 0, 1, 3])),
        "position": position,
        "position_at": draw(
            st.sampled_from([None, "layers", "shared"] if inside_attention else [None, "stem", "layers", "shared"])
        ),
        "position_on_class": draw(st.booleans()),
        "position_init_std": draw(st.sampled_from([0.02, 0.1])),
        "resample": draw(
            st.sampled_from(["google", "timm", "timm-npz", "huggingface", "torchvision", "dinov2", "tipsv2"])
        ),
        "rope_base": draw(st.sampled_from([100.0, 10000.0])),
        "rope_periods": draw(st.sampled_from(["float32", "float32", "bfloat16"])),
        "norm": draw(st.sampled_from(["layer", "layer", "rms"])),
        "norm_eps": draw(EPSILONS),
        "activation": draw(st.sampled_from(["gelu", "gelu-tanh", "gelu-quick", "swiglu"])),
        "patch_bias": draw(st.booleans()),
        "qkv_bias": draw(st.booleans()),
        "key_bias": draw(st.sampled_from([True, True, False])),
        "proj_bias": draw(st.booleans()),
        "qk_norm": draw(st.booleans()),
        "layer_scale": draw(st.sampled_from([None, 1e-5, 1.0])),
        "pre_norm": draw(st.booleans()),
        "pool": pool,
        "pool_norm": draw(st.sampled_from(norms.get(pool, ["before", "after", "none"]))),
        "pool_width": draw(st.sampled_from([None, 6])) if pool == "coca" else None,
        "pool_heads": draw(st.sampled_from([1, 2])) if pool == "coca" else None,
        "pre_logits": 0 if distilled else draw(st.sampled_from([0, 0, 6])),
        "head_bias": draw(st.booleans()),
        "head_bias_init": draw(st.sampled_from([0.0, -10.0])),
        "dropout": draw(RATES),
        "attention_dropout": draw(RATES),
        "drop_path": draw(RATES),
        "stem": stem,
    }
    return ViTConfig(**options)


@st.composite
def variants_of(draw: st.DrawFn, bases: Sequence[ViTConfig], max_changes: int = 3) -> ViTConfig:
    """One of `bases` with up to `max_changes` of its options replaced at random."""
    base, donor = draw(st.sampled_from(bases)), draw(vit_configs())
    names = draw(st.sets(st.sampled_from(sorted(set(base.to_dict()) - {"width", "num_heads"})), max_size=max_changes))
    try:
        return base.replace(**{name: getattr(donor, name) for name in names})
    except ConfigError:
        reject()


@st.composite
def bit_configs(draw: st.DrawFn) -> BiTConfig:
    return BiTConfig(
        image_size=(32, draw(st.sampled_from([32, 64]))),
        channels=draw(st.sampled_from([1, 3])),
        num_classes=draw(st.sampled_from([0, 5])),
        layers=tuple(draw(st.lists(st.integers(1, 2), min_size=1, max_size=2))),
        width_factor=0.5,
        norm_eps=draw(st.sampled_from([1e-5, 1e-6])),
        standardize_eps=draw(st.sampled_from([1e-10, 1e-8])),
        root_pad=draw(st.sampled_from(["zero", "none"])),
    )


@st.composite
def preprocess_configs(draw: st.DrawFn, channels: int) -> PreprocessConfig:
    values = st.floats(0, 1)
    return PreprocessConfig(
        image_size=(draw(st.integers(1, 999)), draw(st.integers(1, 999))),
        resize=draw(st.sampled_from(["squash", "short"])),
        resize_to=draw(st.none() | st.integers(1, 999)),
        crop_rounding=draw(st.sampled_from(["round", "floor"])),
        interpolation=draw(st.sampled_from(["nearest", "bilinear", "bicubic", "lanczos"])),
        antialias=draw(st.booleans()),
        mean=tuple(draw(values) for _ in range(channels)),
        std=tuple(draw(st.floats(1e-3, 10)) for _ in range(channels)),
    )


def one_in(count: int) -> st.SearchStrategy[bool]:
    """True in about one of `count` examples."""
    return st.integers(1, count).map(lambda n: n == count)

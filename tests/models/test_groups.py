"""Which parameters decay and how high each stands, for every kind of network, and as timm has it."""

from __future__ import annotations

import math
import re

import pytest
from conftest import import_peer
from hypothesis import given
from hypothesis import strategies as st
from models.test_compile import KINDS, PUBLISHED
from strategies import bit_configs, vit_configs

from vitrail.config import BiTConfig, StemConfig, ViTConfig
from vitrail.errors import ModelError
from vitrail.models import build

KERNEL = re.compile(
    r"patch\.weight"
    r"|stem\.root\.conv\.weight|stem\.stages\.\d+\.\d+\.(conv[123]|project\.conv)\.weight"
    r"|blocks\.\d+\.(attention\.(qkv|out)|mlp\.(up|down))\.weight"
    r"|pool\.(q|kv|out|mlp\.up|mlp\.down)\.weight"
    r"|(pre_logits|head|head_distill)\.weight"
    r"|root\.weight|stages\.\d+\.\d+\.(conv[123]|project)\.weight"
)
PLAIN = re.compile(
    r".*\.bias|(.*\.)?(norm|norm[123]|pre_norm|q_norm|k_norm)\.weight|.*\.scale[12]"
    r"|class_token|distill_token|registers|pool\.probe|positions\.\d+\.(table|rows|columns|offsets|prefix)"
)


def check(config: ViTConfig | BiTConfig) -> None:
    net = build(config, meta=True)
    parameters = dict(net.named_parameters())
    decayed = net.decayed_parameters()
    top = config.depth + 1 if isinstance(config, ViTConfig) else sum(config.layers) + 1
    assert decayed <= set(parameters)
    for name, parameter in parameters.items():
        assert bool(KERNEL.fullmatch(name)) != bool(PLAIN.fullmatch(name)), f"{name} is of no known kind"
        assert (name in decayed) == bool(KERNEL.fullmatch(name)), name
        assert parameter.ndim > 1 or name not in decayed
        assert 0 <= net.layer_id(name) <= top
        assert net.layer_id(name) == expected_depth(config, name, top), name


def expected_depth(config: ViTConfig | BiTConfig, name: str, top: int) -> int:
    parts = name.split(".")
    if isinstance(config, BiTConfig):
        units = [(s, u) for s, count in enumerate(config.layers) for u in range(count)]
        at = {f"{s}.{u}": i + 1 for i, (s, u) in enumerate(units)}
        return at[".".join(parts[1:3])] if parts[0] == "stages" else {"root": 0, "norm": top, "head": top}[parts[0]]
    if parts[0] == "blocks" or (parts[0] == "positions" and config.position_at in ("layers", None) and inside(config)):
        return int(parts[1]) + 1
    if parts[0] in ("stem", "patch", "class_token", "distill_token", "registers", "positions", "pre_norm"):
        return 0
    assert parts[0] in ("norm", "pool", "pre_logits", "head", "head_distill")
    return top


def inside(config: ViTConfig) -> bool:
    """Whether each layer has positions of its own."""
    return config.position_at == "layers" or (config.position_at is None and config.position in ("relative", "rope-2d"))


@given(st.one_of(vit_configs(), bit_configs()))
def test_every_parameter_of_any_network_is_of_one_kind_and_has_a_height(config: ViTConfig | BiTConfig) -> None:
    check(config)


@pytest.mark.parametrize("config", [*PUBLISHED, *KINDS.values()])
def test_every_parameter_of_the_known_ones_too(config: ViTConfig | BiTConfig) -> None:
    check(config)


def test_everything_under_the_patches_of_a_hybrid_is_the_stem() -> None:
    net = build(
        ViTConfig(
            image_size=32, patch_size=1, width=16, depth=2, num_heads=2, mlp_dim=24, stem=StemConfig(layers=(1, 1))
        )
    )
    assert {net.layer_id(n) for n, _ in net.named_parameters() if n.startswith(("stem", "patch"))} == {0}


def test_a_name_nobody_has_is_refused() -> None:
    for kind in ("plain", "bit"):
        with pytest.raises(ModelError, match=r"no parameter is called 'haed.weight'; did you mean 'head.weight'"):
            build(KINDS[kind]).layer_id("haed.weight")


@pytest.mark.peer
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "deit3_small_patch16_224"])
def test_timm_decays_the_same_and_counts_the_same_layers(name: str) -> None:
    timm = import_peer("timm")
    from timm.optim import param_groups_layer_decay, param_groups_weight_decay

    from vitrail.models.model_names import config_from_name

    theirs = timm.create_model(name)
    ours = build(config_from_name(name), meta=True)
    named = {id(p): n for n, p in theirs.named_parameters()}
    groups = param_groups_weight_decay(theirs, 0.1, no_weight_decay_list=theirs.no_weight_decay())
    decayed = sum(p.numel() for g in groups for p in g["params"] if g["weight_decay"])
    sizes = {n: p.numel() for n, p in ours.named_parameters()}
    assert sum(sizes[n] for n in ours.decayed_parameters()) == decayed
    assert len(ours.decayed_parameters()) == sum(len(g["params"]) for g in groups if g["weight_decay"])

    their_heights: dict[int, int] = {}
    layered = param_groups_layer_decay(theirs, 0.1, no_weight_decay_list=theirs.no_weight_decay(), layer_decay=0.5)
    tops = max(round(-math.log2(g["lr_scale"])) for g in layered)
    for group in layered:
        for parameter in group["params"]:
            # timm puts the final norm with the last block; here, as in BEiT's and MAE's code, it is with the head.
            height = 13 if named[id(parameter)].startswith("norm.") else tops - round(-math.log2(group["lr_scale"]))
            their_heights[height] = their_heights.get(height, 0) + parameter.numel()
    our_heights: dict[int, int] = {}
    for n, size in sizes.items():
        our_heights[ours.layer_id(n)] = our_heights.get(ours.layer_id(n), 0) + size
    assert our_heights == their_heights

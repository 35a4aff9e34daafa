"""Weight decay and layer id of every parameter, for every kind of network and against timm."""

from __future__ import annotations

import math
import re

import pytest
from conftest import import_peer
from hypothesis import given
from hypothesis import strategies as st
from models.test_compile import KINDS, PUBLISHED
from strategies import bit_configs, vit_configs

from vitrail.config import BiTConfig, NetConfig, StemConfig, SwinConfig, ViTConfig
from vitrail.errors import ModelError
from vitrail.models import build

DECAYED = re.compile(
    r"patch\.weight"
    r"|stem\.root\.conv\.weight|stem\.stages\.\d+\.\d+\.(conv[123]|project\.conv)\.weight"
    r"|(stages\.\d+\.)?blocks\.\d+\.(attention\.(qkv|out)|mlp\.(up|down))\.weight|stages\.\d+\.merge\.reduction\.weight"
    r"|pool\.(q|kv|out|mlp\.up|mlp\.down)\.weight"
    r"|(pre_logits|head|head_distill)\.weight"
    r"|root\.weight|stages\.\d+\.\d+\.(conv[123]|project)\.weight"
)
NOT_DECAYED = re.compile(
    r".*\.bias|(.*\.)?(norm|norm[123]|pre_norm|patch_norm|q_norm|k_norm)\.weight|.*\.scale[12]"
    r"|.*\.attention\.(log_scale|bias\.(table|(up|down)\.weight))"
    r"|class_token|distill_token|registers|pool\.probe|positions\.\d+\.(table|rows|columns|offsets|prefix)"
)


def check_groups(config: NetConfig) -> None:
    net = build(config, meta=True)
    parameters = dict(net.named_parameters())
    decayed = net.decayed_parameters()
    last_id = sum(config.layers) + 1 if isinstance(config, BiTConfig) else config.depth + 1
    assert decayed <= set(parameters)
    for name, parameter in parameters.items():
        assert bool(DECAYED.fullmatch(name)) != bool(NOT_DECAYED.fullmatch(name)), (
            f"{name}: expected to match exactly one of DECAYED and NOT_DECAYED"
        )
        assert (name in decayed) == bool(DECAYED.fullmatch(name)), name
        assert parameter.ndim > 1 or name not in decayed
        assert 0 <= net.layer_id(name) <= last_id
        assert net.layer_id(name) == expected_layer_id(config, name, last_id), name


def expected_layer_id(config: NetConfig, name: str, last: int) -> int:
    parts = name.split(".")
    if isinstance(config, SwinConfig):
        if parts[0] == "stages":  # merging belongs to the first block of its stage
            return sum(config.depths[: int(parts[1])]) + (int(parts[3]) if parts[2] == "blocks" else 0) + 1
        return {"patch": 0, "patch_norm": 0, "norm": last, "head": last}[parts[0]]
    if isinstance(config, BiTConfig):
        units = [(s, u) for s, count in enumerate(config.layers) for u in range(count)]
        unit_ids = {f"{s}.{u}": i + 1 for i, (s, u) in enumerate(units)}
        return (
            unit_ids[".".join(parts[1:3])]
            if parts[0] == "stages"
            else {"root": 0, "norm": last, "head": last}[parts[0]]
        )
    if parts[0] == "blocks" or (
        parts[0] == "positions" and config.position_at in ("layers", None) and has_positions_per_layer(config)
    ):
        return int(parts[1]) + 1
    if parts[0] in ("stem", "patch", "class_token", "distill_token", "registers", "positions", "pre_norm"):
        return 0
    assert parts[0] in ("norm", "pool", "pre_logits", "head", "head_distill")
    return last


def has_positions_per_layer(config: ViTConfig) -> bool:
    """Whether each layer has its own position parameters."""
    return config.position_at == "layers" or (config.position_at is None and config.position in ("relative", "rope-2d"))


@given(st.one_of(vit_configs(), bit_configs()))
def test_parameters_of_random_configs_have_a_decay_group_and_layer_id(config: ViTConfig | BiTConfig) -> None:
    check_groups(config)


@pytest.mark.parametrize("config", [*PUBLISHED, *KINDS.values()])
def test_parameters_of_published_configs_have_a_decay_group_and_layer_id(config: NetConfig) -> None:
    check_groups(config)


def test_stem_and_patch_parameters_of_a_hybrid_have_layer_id_0() -> None:
    net = build(
        ViTConfig(
            image_size=32, patch_size=1, width=16, depth=2, num_heads=2, mlp_dim=24, stem=StemConfig(layers=(1, 1))
        )
    )
    assert {net.layer_id(n) for n, _ in net.named_parameters() if n.startswith(("stem", "patch"))} == {0}


def test_unknown_parameter_suggests_the_nearest_name() -> None:
    for kind in ("plain", "bit"):
        with pytest.raises(ModelError, match=r"unknown parameter 'haed.weight'; did you mean 'head.weight'"):
            build(KINDS[kind]).layer_id("haed.weight")


@pytest.mark.peer
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "deit3_small_patch16_224"])
def test_decayed_parameters_and_layer_ids_match_timm(name: str) -> None:
    timm = import_peer("timm")
    from timm.optim import param_groups_layer_decay, param_groups_weight_decay

    from vitrail.models.model_names import config_from_name

    theirs = timm.create_model(name)
    ours = build(config_from_name(name), meta=True)
    names = {id(p): n for n, p in theirs.named_parameters()}
    groups = param_groups_weight_decay(theirs, 0.1, no_weight_decay_list=theirs.no_weight_decay())
    decayed = sum(p.numel() for g in groups for p in g["params"] if g["weight_decay"])
    sizes = {n: p.numel() for n, p in ours.named_parameters()}
    assert sum(sizes[n] for n in ours.decayed_parameters()) == decayed
    assert len(ours.decayed_parameters()) == sum(len(g["params"]) for g in groups if g["weight_decay"])

    their_sizes: dict[int, int] = {}
    layer_groups = param_groups_layer_decay(theirs, 0.1, no_weight_decay_list=theirs.no_weight_decay(), layer_decay=0.5)
    last_id = max(round(-math.log2(g["lr_scale"])) for g in layer_groups)
    for group in layer_groups:
        for parameter in group["params"]:
            # timm puts the final norm with the last block; here, as in BEiT's and MAE's code, it is with the head.
            layer_id = (
                13 if names[id(parameter)].startswith("norm.") else last_id - round(-math.log2(group["lr_scale"]))
            )
            their_sizes[layer_id] = their_sizes.get(layer_id, 0) + parameter.numel()
    our_sizes: dict[int, int] = {}
    for n, size in sizes.items():
        our_sizes[ours.layer_id(n)] = our_sizes.get(ours.layer_id(n), 0) + size
    assert our_sizes == their_sizes

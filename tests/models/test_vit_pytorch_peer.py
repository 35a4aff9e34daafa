"""Comparison with vit-pytorch's code on the same weights, where both compute the same function.

In evaluation, its ViT with patch dropout is a ViT without qkv bias, with torch's default LayerNorm
epsilon and no position embedding on the class token. Its plain ViT and SimpleViT normalize each patch
before and after the projection, which vitrail does not support: of the plain ViT, everything after the
patch embedding is compared; of SimpleViT, the sin-cos positions.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import randomized, relative
from conftest import import_peer
from small_models import small
from torch import Tensor, nn

from vitrail.config import ViTConfig, pair
from vitrail.models import ViT, build
from vitrail.models.position import sincos_2d

import_peer("vit_pytorch")
from vit_pytorch import recorder, simple_vit, vit, vit_with_patch_dropout  # noqa: E402

pytestmark = pytest.mark.peer

SIZES: dict[str, Any] = {"dim": 48, "depth": 3, "heads": 4, "dim_head": 12, "mlp_dim": 64, "num_classes": 7}
OURS = small(image_size=224, width=48, depth=3, num_heads=4, mlp_dim=64, num_classes=7, qkv_bias=False, norm_eps=1e-5)


def block_weights(theirs: nn.Module) -> dict[str, Tensor]:
    names = {
        "0.norm": "norm1", "0.to_qkv": "attention.qkv", "0.to_out.0": "attention.out",
        "1.net.0": "norm2", "1.net.1": "mlp.up", "1.net.4": "mlp.down",
    }  # fmt: skip
    state = {}
    for name, value in theirs.transformer.layers.state_dict().items():
        layer, _, rest = name.partition(".")
        part, _, kind = rest.rpartition(".")
        state[f"blocks.{layer}.{names[part]}.{kind}"] = value
    return state


def prefixed_state(ours: str, theirs: nn.Module) -> dict[str, Tensor]:
    return {f"{ours}.{name}": value for name, value in theirs.state_dict().items()}


def loaded(config: ViTConfig, state: dict[str, Tensor]) -> ViT:
    net = build(config, meta=True)
    net.load_state_dict(state, assign=True)
    assert isinstance(net, ViT)
    return net.eval()


def from_patch_dropout_vit(theirs: nn.Module, config: ViTConfig) -> ViT:
    """A vitrail ViT with the weights of vit-pytorch's ViT with patch dropout."""
    projection, head = theirs.to_patch_embedding[1], theirs.mlp_head
    patches = projection.weight.unflatten(1, (*pair(config.patch_size), 3))  # channels last
    state = block_weights(theirs) | prefixed_state("norm", head[0]) | prefixed_state("head", head[1])
    state |= {"patch.weight": patches.permute(0, 3, 1, 2), "patch.bias": projection.bias}
    state |= {
        "class_token": theirs.cls_token[0, 0],
        "positions.0.table": theirs.pos_embedding.unflatten(0, config.grid),
    }
    return loaded(config, state)


@pytest.mark.parametrize("image", [(32, 32), (24, 56)])
def test_vit_with_patch_dropout_gives_the_same_logits(image: tuple[int, int]) -> None:
    theirs = randomized(vit_with_patch_dropout.ViT(image_size=image, patch_size=8, **SIZES))
    net = from_patch_dropout_vit(theirs, OURS.replace(image_size=image, position_on_class=False))
    images = torch.randn(2, 3, *image)
    with torch.no_grad():
        assert relative(net(images), theirs(images)) <= 1e-5


def test_vit_ti_16_with_patch_dropout_gives_the_same_logits() -> None:
    sizes = {"dim": 192, "depth": 12, "heads": 3, "dim_head": 64, "mlp_dim": 768, "num_classes": 10}
    theirs = randomized(vit_with_patch_dropout.ViT(image_size=224, patch_size=16, **sizes))
    config = OURS.replace(
        patch_size=16, width=192, depth=12, num_heads=3, mlp_dim=768, num_classes=10, position_on_class=False
    )
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert relative(from_patch_dropout_vit(theirs, config)(images), theirs(images)) <= 1e-5


def from_plain_vit(theirs: nn.Module, **options: Any) -> ViT:
    """A vitrail ViT with the weights of vit-pytorch's plain ViT, except for the patch projection, which is zero."""
    config = OURS.replace(image_size=32, **options)
    pos_embedding = theirs.pos_embedding
    table = pos_embedding[config.num_positioned_prefix_tokens :].unflatten(0, config.grid)
    state = (
        block_weights(theirs)
        | prefixed_state("norm", theirs.transformer.norm)
        | prefixed_state("head", theirs.mlp_head)
    )
    state |= {"patch.weight": torch.zeros(48, 3, 8, 8), "patch.bias": torch.zeros(48), "positions.0.table": table}
    if config.class_token:
        state |= {
            "class_token": theirs.cls_token[0],
            "positions.0.prefix": pos_embedding[: config.num_positioned_prefix_tokens],
        }
    return loaded(config, state)


@pytest.mark.parametrize(
    ("pool", "options"), [("cls", {"pool": "token"}), ("mean", {"pool": "gap", "class_token": False})]
)
def test_plain_vit_gives_the_same_logits_after_the_patch_embedding(pool: str, options: dict[str, Any]) -> None:
    theirs = randomized(vit.ViT(image_size=32, patch_size=8, pool=pool, **SIZES))
    net, images = from_plain_vit(theirs, **options), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        x = theirs.to_patch_embedding(images)
        if net.class_token is not None:
            x = torch.cat([net.class_token.expand(2, 1, -1), x], dim=1)
        x = net.norm_before_pool(net.encode(net.add_position(x, 0, (4, 4)), (4, 4)))
        assert relative(net.classify(*net.pool_tokens(x)), theirs(images)) <= 1e-5


def test_attention_equals_that_of_their_recorder() -> None:
    theirs = randomized(vit.ViT(image_size=32, patch_size=8, **SIZES))
    net, images = from_plain_vit(theirs, pool="token"), torch.randn(2, 3, 32, 32)
    assert net.class_token is not None
    attention: list[Tensor] = []
    with torch.no_grad():
        logits, expected = recorder.Recorder(theirs)(images)  # B depth H T T
        x = torch.cat([net.class_token.expand(2, 1, -1), theirs.to_patch_embedding(images)], dim=1)
        x = net.norm_before_pool(net.encode(net.add_position(x, 0, (4, 4)), (4, 4), attention_out=attention))
        assert relative(torch.stack(attention, dim=1), expected) <= 1e-5
        assert relative(net.classify(*net.pool_tokens(x)), logits) <= 1e-5


@pytest.mark.parametrize("grid", [(4, 4), (3, 7)])
def test_sincos_positions_equal_theirs(grid: tuple[int, int]) -> None:
    expected = simple_vit.posemb_sincos_2d(*grid, 48)
    assert relative(sincos_2d(grid, 48, torch.zeros(1)), expected) <= 1e-6

"""Gradient-weighted rollout against its definition with all layers' attention in one graph."""

from __future__ import annotations

import pytest
import torch
from compare import randomized
from explain.test_attention import KINDS, image
from small_models import small
from torch import Tensor

from vitrail.config import BiTConfig, ViTConfig
from vitrail.errors import ModelError
from vitrail.explain import gradient_rollout
from vitrail.models import ViT, build


def by_definition(net: ViT, images: Tensor, targets: Tensor) -> Tensor:
    """Chefer, Gur and Wolf's recursion R <- R + A' R with every gradient from one backward pass."""
    config, attention, look = net.config, [], []
    x = net.norm_before_pool(net.encode(*net.embed(images), attention_out=attention))
    logits = net.classify(*net.pool_tokens(x, look if net.pool is not None else None))
    grads = torch.autograd.grad(logits.gather(1, targets[:, None]).sum(), [*attention, *look])
    joint = torch.eye(x.shape[1], dtype=images.dtype).expand(len(images), -1, -1)
    for weights, grad in zip(attention, grads[: config.depth], strict=True):
        joint = joint + (weights * grad).clamp(min=0).mean(1) @ joint
    special = config.num_prefix_tokens
    if look:
        pool = (look[0] * grads[-1]).clamp(min=0).mean(1)[:, 0]  # B N
        row = torch.einsum("bn,bnt->bt", pool, joint[:, -pool.shape[1] :])
    elif config.pool == "token":
        row = joint[:, : 1 + config.distilled].mean(1)
    elif config.pool == "gap":
        row = joint[:, special:].mean(1)
    else:
        row = (joint[:, 0] + joint[:, special:].mean(1)) / 2
    return row[:, special:].unflatten(1, config.grid).detach()


@pytest.mark.parametrize("name", KINDS)
def test_block_by_block_is_the_same_as_all_at_once(name: str):
    config = KINDS[name]
    net = randomized(build(config)).eval().double()
    images, targets = image(config).double(), torch.tensor([1, 3])
    got = gradient_rollout(net, images, targets)
    assert got.shape == (2, *config.grid)
    torch.testing.assert_close(got.double(), by_definition(net, images, targets), rtol=1e-5, atol=1e-9)
    assert (got >= 0).all()


def test_another_class_has_another_explanation():
    net = randomized(build(small())).eval()
    images = image(net.config, 1)
    one, other = (gradient_rollout(net, images, torch.tensor([k])) for k in (0, 1))
    assert not torch.allclose(one, other)


def test_it_leaves_no_gradient_and_no_mode_behind():
    net = randomized(build(ViTConfig(**small().to_dict() | {"dropout": 0.5}))).train()
    images = image(net.config, 1)
    with torch.no_grad():  # as most callers are
        view = gradient_rollout(net, images, torch.tensor([0]))
    assert net.training
    assert not view.requires_grad
    assert all(p.grad is None for p in net.parameters())


def test_a_network_without_classes_or_with_other_classes_is_refused():
    net = build(small(num_classes=0))
    with pytest.raises(ModelError, match="no class score to explain"):
        gradient_rollout(net, image(net.config, 1), torch.tensor([0]))
    net = build(small())
    for wrong in (torch.tensor([5]), torch.tensor([-1]), torch.tensor([0, 1])):
        with pytest.raises(ModelError, match="expected 1 class indices from 0 to 4"):
            gradient_rollout(net, image(net.config, 1), wrong)


def test_a_network_without_attention_is_refused():
    net = build(BiTConfig(image_size=32, num_classes=2, layers=(1, 1, 1, 1), width_factor=0.5))
    with pytest.raises(ModelError, match="no attention"):
        gradient_rollout(net, torch.randn(1, 3, 32, 32), torch.tensor([0]))

"""Gradient-weighted rollout compared with its definition, computed with one graph of all layers."""

from __future__ import annotations

import pytest
import torch
from compare import randomized
from explain.test_attention import CONFIGS, random_images
from small_models import small
from torch import Tensor

from vitrail.config import BiTConfig, ViTConfig
from vitrail.errors import ModelError
from vitrail.explain import gradient_rollout
from vitrail.models import ViT, build


def reference_gradient_rollout(net: ViT, images: Tensor, targets: Tensor) -> Tensor:
    """Chefer, Gur and Wolf's recursion R <- R + A' R with every gradient from one backward pass."""
    config, attention, pool_attention = net.config, [], []
    x = net.norm_before_pool(net.encode(*net.embed(images), attention_out=attention))
    logits = net.classify(*net.pool_tokens(x, pool_attention if net.pool is not None else None))
    grads = torch.autograd.grad(logits.gather(1, targets[:, None]).sum(), [*attention, *pool_attention])
    joint = torch.eye(x.shape[1], dtype=images.dtype).expand(len(images), -1, -1)
    for weights, grad in zip(attention, grads[: config.depth], strict=True):
        joint = joint + (weights * grad).clamp(min=0).mean(1) @ joint
    special = config.num_prefix_tokens
    if pool_attention:
        pool = (pool_attention[0] * grads[-1]).clamp(min=0).mean(1)[:, 0]  # B N
        row = torch.einsum("bn,bnt->bt", pool, joint[:, -pool.shape[1] :])
    elif config.pool == "token":
        row = joint[:, : 1 + config.distilled].mean(1)
    elif config.pool == "gap":
        row = joint[:, special:].mean(1)
    else:
        row = (joint[:, 0] + joint[:, special:].mean(1)) / 2
    return row[:, special:].unflatten(1, config.grid).detach()


@pytest.mark.parametrize("name", CONFIGS)
def test_gradient_rollout_equals_the_reference(name: str):
    config = CONFIGS[name]
    net = randomized(build(config)).eval().double()
    images, targets = random_images(config).double(), torch.tensor([1, 3])
    got = gradient_rollout(net, images, targets)
    assert got.shape == (2, *config.grid)
    torch.testing.assert_close(got.double(), reference_gradient_rollout(net, images, targets), rtol=1e-5, atol=1e-9)
    assert (got >= 0).all()


def test_explanation_depends_on_the_class():
    net = randomized(build(small())).eval()
    images = random_images(net.config, 1)
    first, second = (gradient_rollout(net, images, torch.tensor([k])) for k in (0, 1))
    assert not torch.allclose(first, second)


def test_parameter_gradients_and_training_mode_are_unchanged():
    net = randomized(build(ViTConfig(**small().to_dict() | {"dropout": 0.5}))).train()
    images = random_images(net.config, 1)
    with torch.no_grad():  # as in most callers
        view = gradient_rollout(net, images, torch.tensor([0]))
    assert net.training
    assert not view.requires_grad
    assert all(p.grad is None for p in net.parameters())


def test_missing_and_out_of_range_classes_are_errors():
    net = build(small(num_classes=0))
    with pytest.raises(ModelError, match="no class score to explain"):
        gradient_rollout(net, random_images(net.config, 1), torch.tensor([0]))
    net = build(small())
    for targets in (torch.tensor([5]), torch.tensor([-1]), torch.tensor([0, 1])):
        with pytest.raises(ModelError, match="expected 1 class indices from 0 to 4"):
            gradient_rollout(net, random_images(net.config, 1), targets)


def test_network_without_attention_is_an_error():
    net = build(BiTConfig(image_size=32, num_classes=2, layers=(1, 1, 1, 1), width_factor=0.5))
    with pytest.raises(ModelError, match="no attention"):
        gradient_rollout(net, torch.randn(1, 3, 32, 32), torch.tensor([0]))

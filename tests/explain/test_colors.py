"""Features as colors: principal components compared with scikit-learn's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compare import randomized
from explain.test_attention import CONFIGS, random_images
from sklearn.decomposition import PCA
from small_models import small

from vitrail.config import BiTConfig
from vitrail.errors import ModelError
from vitrail.explain import feature_colors, patch_features
from vitrail.explain.colors import principal_components
from vitrail.models import build


def test_components_equal_scikit_learns_up_to_the_sign():
    features = torch.randn(2, 3, 4, 10, generator=torch.Generator().manual_seed(1))
    got = principal_components(features).reshape(-1, 3).numpy()
    expected = PCA(3, svd_solver="full").fit_transform(features.reshape(-1, 10).double().numpy())
    for ours, theirs in zip(got.T, expected.T, strict=True):
        np.testing.assert_allclose(ours * np.sign(ours @ theirs), theirs, atol=1e-9)


def test_sign_does_not_depend_on_the_order_of_the_patches():
    features = torch.randn(1, 4, 4, 8, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(principal_components(features.flip(1)), principal_components(features).flip(1))


@pytest.mark.parametrize("name", CONFIGS)
def test_feature_colors_of_every_kind_of_network(name: str):
    config = CONFIGS[name]
    net = randomized(build(config)).eval()
    for layer in (None, 1, -1):
        features = patch_features(net, random_images(config), layer)
        assert features.shape == (2, *config.grid, config.width)
        colors = feature_colors(features)
        assert colors.shape == (2, *config.grid, 3)
        assert 0 <= colors.min() < 0.05
        assert 0.95 < colors.max() <= 1


def test_features_of_a_layer_exclude_special_tokens():
    net = randomized(build(small(num_registers=2))).eval()
    images = random_images(net.config)
    tokens = net.features(images, outputs=("tokens",)).tokens
    torch.testing.assert_close(patch_features(net, images, 1).flatten(1, 2), tokens[1][:, 3:])


def test_foreground_excludes_patches_similar_to_the_edges():
    """Patches in the middle differ from those along the edges in one direction."""
    generator = torch.Generator().manual_seed(0)
    features = 0.1 * torch.randn(2, 8, 8, 6, generator=generator)
    features[:, 2:6, 2:6, 0] += 5
    for sign in (1, -1):
        colors = feature_colors(sign * features, foreground=True)
        white = (colors == 1).all(-1)
        assert not white[:, 2:6, 2:6].any()
        assert white.sum() == 2 * (64 - 16)


def test_unavailable_features_are_an_error():
    net = build(BiTConfig(image_size=32, num_classes=2, layers=(1, 1, 1, 1), width_factor=0.5))
    assert patch_features(net, torch.randn(1, 3, 32, 32)).ndim == 4
    with pytest.raises(ModelError, match="stages instead of layers"):
        patch_features(net, torch.randn(1, 3, 32, 32), 1)
    with pytest.raises(ModelError, match="there is no layer 7"):
        patch_features(build(small()), torch.randn(1, 3, 32, 32), 7)
    with pytest.raises(ModelError, match="3 components need"):
        principal_components(torch.randn(1, 1, 2, 8))

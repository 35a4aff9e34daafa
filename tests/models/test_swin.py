"""Swin Transformers: windows, outputs by name, copies for other sizes, and what training needs of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from compare import randomized, relative
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitrail.config import SwinConfig
from vitrail.config.swin import WindowPlacement
from vitrail.errors import ConfigError, ModelError
from vitrail.models import Swin, build
from vitrail.models.flops import count_flops
from vitrail.models.model_names import parse_name
from vitrail.models.windows import WindowPlan, from_windows, join_and_unroll, roll_and_cut, to_windows, window_plan

RULES = ("torchvision", "microsoft", "huggingface", "timm")
SMALL: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 4,
    "width": 8,
    "depths": (2, 2),
    "num_heads": (1, 2),
    "window_size": 3,
    "num_classes": 5,
}
"""Maps of 8 x 8 and 4 x 4 tokens."""


def small_swin(**changes: Any) -> Swin:
    net = randomized(build(SwinConfig(**SMALL | changes)))
    assert isinstance(net, Swin)
    return net


plans = st.builds(
    lambda grid, size, rule, built, shifted: window_plan(
        grid, WindowPlacement(size, rule, built), shifted, torch.empty(0)
    ),
    st.tuples(st.integers(1, 11), st.integers(1, 11)),
    st.integers(1, 5).map(lambda side: (side, side)),
    st.sampled_from(RULES),
    st.tuples(st.integers(1, 11), st.integers(1, 11)),
    st.booleans(),
)


@settings(max_examples=60)
@given(plans)
def test_windows_by_index_equal_windows_by_rolling_padding_and_cutting(plan) -> None:
    x = torch.randn(2, math.prod(plan.grid), 3, dtype=torch.float64, requires_grad=True)
    windows, expected = to_windows(x, plan), roll_and_cut(x, plan)
    assert torch.equal(windows, expected)
    assert torch.equal(from_windows(windows, plan), x)
    assert torch.equal(join_and_unroll(windows, plan), x)
    weights = torch.randn_like(windows)
    (grad,) = torch.autograd.grad((windows * weights).sum(), x)
    (expected_grad,) = torch.autograd.grad((expected * weights).sum(), x)
    assert torch.equal(grad, expected_grad)


@settings(max_examples=60)
@given(plans)
def test_mask_separates_tokens_that_are_apart_in_the_map(plan) -> None:
    """Unmasked tokens of a window are less than a window apart in the map."""
    assume(plan.mask is not None and not plan.roll_first)  # timm's rule masks the wrong pairs of padded maps
    rows, columns = plan.grid
    source = plan.source.view(plan.num_windows, -1)
    for places, mask in zip(source.tolist(), plan.mask, strict=True):
        for i, a in enumerate(places):
            for j, b in enumerate(places):
                if rows * columns in (a, b):  # padding
                    continue
                apart = [abs(p - q) for p, q in zip(divmod(a, columns), divmod(b, columns), strict=True)]
                assert mask[i, j] or all(d < s for d, s in zip(apart, plan.shape.size, strict=True))


def test_second_derivatives_pass_through_windows() -> None:
    plan = window_plan((3, 4), WindowPlacement((2, 2), "torchvision", (3, 4)), True, torch.empty(0))
    x = torch.randn(1, 12, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: from_windows(to_windows(x, plan) ** 3, plan), (x,))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [(32, 32), (20, 52), (4, 4), (33, 30)])
def test_images_of_any_size_give_finite_logits(version: int, rule: str, size: tuple[int, int]) -> None:
    net = small_swin(version=version, window_rule=rule)
    assert net(torch.randn(2, 3, *size)).isfinite().all()


@pytest.mark.parametrize("version", [1, 2])
def test_conventions_agree_at_the_training_size_and_differ_elsewhere(version: int) -> None:
    """timm's placement of windows against torchvision's; both differ from the others on the smallest maps."""
    sizes: dict[str, Any] = {"version": version, "image_size": 64, "window_size": 4}
    nets = {rule: small_swin(**sizes, window_rule=rule) for rule in RULES}
    images = {side: torch.randn(2, 3, side, side) for side in (64, 56, 24)}
    expected = {side: nets["torchvision"](x) for side, x in images.items()}
    for net in nets.values():
        assert relative(net(images[64]), expected[64]) <= 1e-5
    assert relative(nets["timm"](images[56]), expected[56]) > 0.01
    assert relative(nets["microsoft"](images[56]), expected[56]) <= 1e-5  # both pad, then shift
    assert relative(nets["microsoft"](images[24]), expected[24]) > 0.01


def test_version_2_is_finite_with_windows_of_one_token() -> None:
    assert small_swin(version=2, window_size=1)(torch.randn(1, 3, 32, 32)).isfinite().all()


@pytest.mark.parametrize("version", [1, 2])
def test_features_give_the_pyramid_with_its_strides(version: int) -> None:
    net, images = small_swin(version=version), torch.randn(2, 3, 32, 48)
    output = net.features(images, ("logits", "feature_maps", "patches", "pooled"))
    assert torch.allclose(output.logits, net(images), atol=1e-6)
    assert net.config.strides == ((4, 4), (8, 8))
    assert [m.shape for m in output.feature_maps] == [(2, 8, 8, 12), (2, 16, 4, 6)]
    assert torch.allclose(net.norm(output.feature_maps[-1].permute(0, 2, 3, 1)), output.patches, atol=1e-6)
    assert torch.allclose(output.patches.mean((1, 2)), output.pooled, atol=1e-6)
    (last,) = net.features(images, layers=[-1]).feature_maps
    assert torch.equal(last, output.feature_maps[-1])


@pytest.mark.parametrize("version", [1, 2])
def test_attention_inside_windows_agrees_with_the_fused_path(version: int) -> None:
    net, images = small_swin(version=version), torch.randn(2, 3, 32, 32)
    output = net.features(images, ("attention", "logits", "tokens"))
    assert relative(output.logits, net(images)) <= 1e-5
    # 8 x 8 tokens in 3 x 3 windows: 3 x 3 of them; 4 x 4: 2 x 2
    assert [a.shape for a in output.attention] == [(2, 9, 1, 9, 9)] * 2 + [(2, 4, 2, 9, 9)] * 2
    assert all(torch.allclose(a.sum(-1), torch.ones(())) for a in output.attention)
    assert [t.shape for t in output.tokens] == [(2, 64, 8)] * 3 + [(2, 16, 16)] * 2
    (third,) = net.features(images, "attention", layers=[2]).attention
    assert torch.allclose(third, output.attention[2], atol=1e-6)


def test_attention_of_a_shifted_window_does_not_cross_the_edge() -> None:
    net, images = small_swin(window_size=4, num_heads=(2, 2)), torch.randn(1, 3, 32, 32)
    (attention,) = net.features(images, "attention", layers=[1]).attention
    plan = net.stages[0].blocks[1].attention.plan((8, 8), images)
    assert (
        attention[:, plan.mask.nonzero()[:, 0], :, plan.mask.nonzero()[:, 1], plan.mask.nonzero()[:, 2]].max() < 1e-30
    )


def test_unavailable_outputs_are_refused_with_the_reason() -> None:
    net, images = small_swin(), torch.randn(1, 3, 32, 32)
    with pytest.raises(ModelError, match="cannot give 'class_token': a Swin Transformer has no class token"):
        net.features(images, "class_token")
    with pytest.raises(ModelError, match="layers counts stages"):
        net.features(images, ("feature_maps", "attention"), layers=[0])
    with pytest.raises(ModelError, match="there is no layer 2; expected 0 to 1"):
        net.features(images, "feature_maps", layers=[2])
    with pytest.raises(ModelError, match="patch_size=4 leaves 1 px"):
        small_swin(uncovered="refuse")(torch.randn(1, 3, 33, 32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": (3, 6)}, "the width of stage 1, 8, is not divisible by its num_heads=3"),
        ({"num_heads": (1,)}, r"num_heads=\(1,\): expected 2 values, as in depths=\(2, 2\)|2 stages"),
        ({"pretrained_window_sizes": (3, 3)}, "pretrained_window_sizes are for version=2"),
        ({"window_size": (2, 3), "window_rule": "microsoft"}, "has square windows only"),
        ({"window_size": 0}, "window_size must be positive"),
        ({"depths": ()}, "depths is empty"),
    ],
)
def test_impossible_configs_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SwinConfig(**SMALL | changes)


def test_resized_copy_keeps_the_function_where_windows_do_not_change() -> None:
    net, images = small_swin(), torch.randn(1, 3, 48, 40)
    copy = net.resized((48, 40))
    assert copy.config.image_size == (48, 40)
    assert torch.equal(copy(images), net(images))


def test_tables_are_resampled_for_another_window() -> None:
    net = small_swin()
    copy = net.with_window(5)
    table, old = copy.stages[0].blocks[0].attention.bias.table, net.stages[0].blocks[0].attention.bias.table
    assert table.shape == (81, 1)
    assert torch.allclose(table.view(9, 9)[4, 4], old.view(5, 5)[2, 2], atol=1e-6)  # distance 0 stays in the middle
    assert torch.equal(net.with_window(3)(torch.ones(1, 3, 32, 32)), net(torch.ones(1, 3, 32, 32)))
    shrunk = small_swin(window_rule="microsoft", window_size=4).resized(16)  # its last map has 2 x 2 tokens
    assert shrunk.stages[1].blocks[0].attention.bias.table.shape == (9, 2)


def test_other_windows_of_version_2_keep_the_scale_of_distances() -> None:
    """As in the released models: SwinV2-B-w12to16 is SwinV2-B-w12 with windows of 16."""
    for name, window in (("SwinV2-B-w12to16@192", 16), ("SwinV2-B-w12to24@192", 24)):
        small = build(parse_name("SwinV2-B-w12").replace(width=8, num_heads=(1, 1, 1, 1), window_rule="microsoft"))
        assert isinstance(small, Swin)
        assert small.with_window(window).config.pretrained_window_sizes == parse_name(name).pretrained_window_sizes
    net = small_swin(version=2, window_size=2)
    larger = net.with_window(4)
    rows = [n.stages[0].blocks[0].attention.bias.bias(plan_of(n, 2)) for n in (net, larger)]
    torch.testing.assert_close(rows[0], rows[1])  # the same function of the distance
    assert larger.with_window(2).config.pretrained_window_sizes == (2, 2)
    with pytest.raises(ModelError, match="not square"):
        small_swin(version=2, window_size=(2, 4)).with_window(4)


def plan_of(net: Swin, window: int) -> WindowPlan:
    """Windows of another size in the network's first block."""
    placement = net.config.window_placement(0)._replace(size=(window, window))
    return window_plan((8, 8), placement, False, torch.empty(0))


def test_copies_for_other_classes_and_channels() -> None:
    net = small_swin()
    assert net.with_classes(7)(torch.randn(1, 3, 32, 32)).tolist() == [[0.0] * 7]
    assert net.with_classes(0)(torch.randn(1, 3, 32, 32)).shape == (1, 16)
    gray = torch.randn(1, 1, 32, 32)
    assert torch.allclose(net.with_channels(1)(gray), net(gray.expand(-1, 3, -1, -1)), atol=1e-5)


def test_version_2_starts_with_blocks_that_are_the_identity() -> None:
    net = build(SwinConfig(**SMALL, version=2), seed=0)
    embedded, *blocks = net.features(torch.randn(1, 3, 32, 32), "tokens").tokens
    assert torch.equal(embedded, blocks[0])
    assert torch.equal(blocks[0], blocks[1])
    log_scale = net.stages[0].blocks[0].attention.log_scale
    assert torch.allclose(log_scale, torch.full_like(log_scale, math.log(10)))


def test_layers_are_numbered_from_the_patches_to_the_head() -> None:
    net = small_swin(version=2)
    ids = {name: net.layer_id(name) for name, _ in net.named_parameters()}
    assert ids["patch.weight"] == ids["patch_norm.bias"] == 0
    assert ids["stages.0.blocks.1.mlp.up.weight"] == 2
    assert ids["stages.1.merge.reduction.weight"] == ids["stages.1.blocks.0.norm1.weight"] == 3
    assert ids["norm.weight"] == ids["head.weight"] == 5


def test_weight_decay_excludes_position_biases() -> None:
    decayed = small_swin(version=2).decayed_parameters()
    assert {"patch.weight", "stages.0.blocks.0.attention.qkv.weight", "stages.1.merge.reduction.weight"} <= decayed
    assert not [name for name in decayed if "attention.bias" in name or "norm" in name or "log_scale" in name]
    assert not [name for name in small_swin().decayed_parameters() if "table" in name]


@pytest.mark.parametrize("changes", [{}, {"version": 2}, {"window_size": 4}, {"image_size": 36}])
def test_flops_match_torchs_counter(changes: dict[str, Any]) -> None:
    net = small_swin(**changes)
    images = torch.randn(1, 3, *net.config.image_size)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        net(images)  # caches the position biases, whose MLPs are not counted
        with FlopCounterMode(display=False) as counter:
            net(images)
    assert counter.get_total_flops() == count_flops(net.config)


@pytest.mark.parametrize("version", [1, 2])
def test_checkpointed_gradients_equal_stored_ones(version: int) -> None:
    net = small_swin(version=version, dropout=0.1, drop_path=0.2).double().train()
    images, seeds = torch.randn(3, 3, 32, 32, dtype=torch.float64), torch.arange(3)
    gradients = []
    for checkpointing in (False, True):
        net.gradient_checkpointing = checkpointing
        net.zero_grad()
        net(images, seeds).square().sum().backward()
        gradients.append([p.grad.clone() for p in net.parameters()])
    for stored, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(stored, recomputed)


def test_random_draws_depend_on_the_sample_not_on_its_batch() -> None:
    net = small_swin(dropout=0.2, drop_path=0.5).double().train()
    images, seeds = torch.randn(4, 3, 32, 32, dtype=torch.float64), torch.tensor([3, 1, 4, 1])
    whole = net(images, seeds)
    torch.testing.assert_close(whole[2:], net(images[2:], seeds[2:]))
    assert not torch.allclose(whole, net(images, seeds + 1))


def test_cached_biases_follow_the_weights_and_the_image_size() -> None:
    net, images = small_swin(), torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        before = net(images)
        net(torch.randn(1, 3, 24, 40))
        assert torch.equal(net(images), before)
        net.stages[0].blocks[1].attention.bias.table.mul_(3)
        assert not torch.allclose(net(images), before)

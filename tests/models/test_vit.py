"""ViT: combinations of options, image sizes, named outputs and initialization."""

from __future__ import annotations

import copy
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from compare import randomized, relative
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitrail.config import StemConfig, ViTConfig
from vitrail.errors import ConfigError, ModelError
from vitrail.models import ViT, build
from vitrail.models.base import adapt_channels
from vitrail.models.flops import count_flops, count_parameters
from vitrail.models.layers import PatchEmbed

SMALL = {"image_size": 16, "patch_size": 4, "width": 16, "depth": 2, "num_heads": 2, "mlp_dim": 24, "num_classes": 5}
ALL = ("logits", "pooled", "pre_logits", "patches", "tokens", "attention")


def small(**options: object) -> ViTConfig:
    return ViTConfig(**SMALL | options)  # type: ignore[arg-type]


@st.composite
def configs(draw: st.DrawFn) -> ViTConfig:
    """Any valid combination of options."""
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    position = pick("none", "learned-1d", "learned-2d", "relative", "sincos-2d", "rope-2d")
    class_token = pick(True, False)
    pool = pick("token", "gap", "map", "token+gap") if class_token else pick("gap", "map")
    distilled = class_token and pool == "token" and pick(True, False)
    return small(
        image_size=pick(16, (16, 24)),
        patch_size=pick(4, (8, 4)),
        channels=pick(1, 3, 4),
        class_token=class_token,
        distilled=distilled,
        num_registers=pick(0, 3),
        position=position,
        position_at=pick("layers", "shared")
        if position in ("relative", "rope-2d")
        else pick("stem", "layers", "shared"),
        position_on_class=pick(True, False),
        resample=pick("google", "timm", "timm-npz", "huggingface", "torchvision", "dinov2"),
        norm=pick("layer", "rms"),
        activation=pick("gelu", "gelu-tanh", "gelu-quick", "swiglu"),
        patch_bias=pick(True, False),
        qkv_bias=pick(True, False),
        proj_bias=pick(True, False),
        qk_norm=pick(True, False),
        layer_scale=pick(None, 0.1),
        pre_norm=pick(True, False),
        pool=pool,
        pool_norm=pick("before", "none") if pool == "token+gap" else pick("before", "after", "none"),
        pre_logits=0 if distilled else pick(0, 12),
        num_classes=pick(0, 5),
        head_bias=pick(True, False),
        dropout=pick(0.0, 0.1),
        attention_dropout=pick(0.0, 0.1),
        drop_path=pick(0.0, 0.3),
    )


@settings(max_examples=40)
@given(configs())
def test_every_option_works_with_every_other(config: ViTConfig) -> None:
    net = randomized(ViT(config))
    images = torch.randn(2, config.channels, *config.image_size)  # type: ignore[misc]
    outputs = [
        *ALL,
        *(["head_logits"] if config.distilled else []),
        *(["pool_attention"] if config.pool == "map" else []),
    ]
    with torch.no_grad():
        out = net.features(images, outputs=outputs)
        logits = net(images)
    tokens = math.prod(config.grid) + config.num_prefix_tokens
    assert logits.shape == (2, config.num_classes or config.head_width)
    assert relative(out.logits, logits) <= 1e-5
    assert [t.shape for t in out.tokens] == [(2, tokens, 16)] * 3
    assert out.patches.shape == (2, *config.grid, 16)
    for attention in out.attention:
        assert attention.shape == (2, 2, tokens, tokens)
        torch.testing.assert_close(attention.sum(-1), torch.ones(2, 2, tokens))
    if config.distilled:
        assert relative(sum(out.head_logits) / 2, logits) <= 1e-6
    net.train()
    net(images).sum().backward()
    unused = {n for n, p in net.named_parameters() if p.grad is None}
    assert not unused, "DistributedDataParallel requires a gradient for every parameter"
    assert count_parameters(config) == sum(p.numel() for p in net.parameters())


@settings(max_examples=20)
@given(configs())
def test_flops_are_torchs_own_count(config: ViTConfig) -> None:
    net = ViT(config).eval()
    images = torch.randn(1, config.channels, *config.image_size)  # type: ignore[misc]
    # The counter does not support every fused kernel; the math kernel consists of two matrix products.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        net.features(images, outputs=("logits", "patches"))  # all tokens, of which the logits alone may need few
    assert counter.get_total_flops() == count_flops(config)


@settings(max_examples=30)
@given(configs(), st.sampled_from([(24, 16), (8, 32), (40, 40)]))
def test_any_size_at_run_time_equals_a_permanent_resize(config: ViTConfig, size: tuple[int, int]) -> None:
    net = randomized(ViT(config))
    images = torch.randn(1, config.channels, *size)
    if config.position == "relative":
        with pytest.raises(ModelError, match="relative positions"):
            net(images)
        with pytest.raises(ModelError, match="relative positions"):
            net.resized(size)
        return
    with torch.no_grad():
        assert relative(net.resized(size)(images), net(images)) <= 1e-6


def test_patch_projection_equals_a_strided_convolution() -> None:
    project = randomized(PatchEmbed(3, 8, (4, 2)))
    images = torch.randn(2, 3, 12, 10)
    expected = F.conv2d(images, project.weight, project.bias, stride=(4, 2)).permute(0, 2, 3, 1)
    assert relative(project(images), expected) <= 1e-6


def test_uncovered_edges_are_ignored_as_in_a_convolution() -> None:
    net = randomized(ViT(small(image_size=18, uncovered="ignore")))
    assert net.config.grid == (4, 4)
    images = torch.randn(1, 3, 18, 19)
    with torch.no_grad():
        expected = F.conv2d(images, net.patch.weight, net.patch.bias, stride=4).flatten(2).mT
        assert relative(net.patch(net.crop_to_patches(images)).flatten(1, 2), expected) <= 1e-5
        assert torch.equal(net(images), net(images[:, :, :16, :16]))
    with pytest.raises(ModelError, match="uncovered"):
        net(torch.zeros(1, 3, 3, 16))


def test_fused_attention_is_bypassed_only_if_attention_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    net, images = randomized(ViT(small())), torch.randn(1, 3, 16, 16)
    calls = []
    fused = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or fused(*a, **k))
    with torch.no_grad():
        net(images)
        assert len(calls) == 2
        net.features(images, outputs="tokens")
        assert len(calls) == 4
        net.features(images, outputs="attention")
        assert len(calls) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool": "coca", "pool_heads": 3}, "pool_width=16 is not divisible by pool_heads=3"),
        ({"pool": "coca", "pool_norm": "after"}, "pool_norm='before'"),
        ({"pool": "coca", "class_token": False}, "class_token=true"),
        ({"pool": "map", "pool_heads": 2}, "only for pool='coca', not for pool='map'"),
        ({"pool_width": 8}, "only for pool='coca'"),
    ],
)
def test_invalid_coca_pool_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small(**options)


def test_seeded_weights_do_not_depend_on_earlier_draws() -> None:
    config = small(num_registers=2, pool="map", layer_scale=1e-4)
    first = ViT(config, seed=3)
    torch.randn(7)
    repeat, other = ViT(config, seed=3), ViT(config, seed=4)
    for (name, a), b in zip(first.state_dict().items(), repeat.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert not torch.equal(first.patch.weight, other.patch.weight)


@torch.no_grad()
def test_initialization_matches_the_papers_code() -> None:
    net = ViT(ViTConfig(width=384, num_heads=6, mlp_dim=1536, depth=1, num_classes=10, pre_logits=384), seed=0)
    block = net.blocks[0]
    limit = math.sqrt(6 / (384 + 384))
    for part in block.attention.qkv.weight.chunk(3):  # initialized as three D x D matrices, not one of 3D x D
        assert part.abs().max() <= limit
        assert part.abs().max() > 0.99 * limit
        assert float(part.std()) == pytest.approx(limit / math.sqrt(3), rel=0.02)
    up = block.mlp.up.weight
    assert float(up.abs().max()) == pytest.approx(math.sqrt(6 / (384 + 1536)), rel=0.01)
    assert float(block.mlp.up.bias.std()) == pytest.approx(1e-6, rel=0.1)
    assert float(net.patch.weight.std()) == pytest.approx(1 / math.sqrt(768), rel=0.02)
    assert float(net.pre_logits.weight.std()) == pytest.approx(1 / math.sqrt(384), rel=0.02)
    assert float(net.positions[0].table.std()) == pytest.approx(0.02, rel=0.02)
    for parameter in (net.class_token, net.head.weight, net.head.bias, net.patch.bias, block.attention.qkv.bias):
        assert not parameter.any()
    assert ViT(small(head_bias_init=-10.0)).head.bias.unique().tolist() == [-10.0]
    map_net = ViT(small(width=256, pool="map", class_token=False, num_registers=4), seed=0)
    bound = math.sqrt(6 / 257)
    assert 0.95 * bound < float(map_net.pool.probe.abs().max()) <= bound
    assert float(map_net.pool.kv.weight.abs().max()) == pytest.approx(math.sqrt(6 / 512), rel=0.01)
    assert float(map_net.registers.std()) == pytest.approx(1e-6, rel=0.1)
    assert float(ViT(small(width=512, distilled=True), seed=0).distill_token.std()) == pytest.approx(0.02, rel=0.1)


def test_gradient_checkpointing_saves_memory_and_keeps_gradients() -> None:
    config = small(position="rope-2d", layer_scale=0.1)
    net, images = randomized(ViT(config)).train(), torch.randn(2, 3, 16, 16)
    checkpointed = copy.deepcopy(net)
    checkpointed.gradient_checkpointing = True
    saved_elements = {False: 0, True: 0}
    for checkpointing, model in ((False, net), (True, checkpointed)):

        def pack(t: torch.Tensor, key: bool = checkpointing) -> torch.Tensor:
            saved_elements[key] += t.numel()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = model(images).square().sum()
        loss.backward()
    for a, b in zip(net.parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert saved_elements[True] < saved_elements[False] / 2


def test_resampled_positions_are_cached_in_evaluation_only() -> None:
    net, images = randomized(ViT(small())), torch.randn(1, 3, 24, 24)
    position = net.positions[0]
    with torch.no_grad():
        first = net(images)
        assert position._cache is not None
        cached = position._cache.value
        net(images)
        assert position._cache.value is cached
        position.table.mul_(2)
        assert not torch.equal(net(images), first), "a changed table must be resampled again"
        net.load_state_dict({k: v / 2 if k.endswith("table") else v for k, v in net.state_dict().items()})
        assert relative(net(images), first) <= 1e-6
    net.train()
    assert position._cache is None
    net(images).sum().backward()
    assert position._cache is None
    assert position.table.grad.abs().sum() > 0
    net.eval()(images).sum().backward()  # gradients are possible in evaluation mode, too
    assert position._cache is None


def test_meta_network_loads_a_state_dict() -> None:
    config = small(
        position="sincos-2d",
        pool="map",
        class_token=False,
        stem=StemConfig(layers=(1,), width_factor=0.5),
        patch_size=1,
    )
    net = randomized(ViT(config))
    meta_net = build(config, meta=True)
    assert all(p.is_meta for p in meta_net.parameters())
    assert not list(meta_net.buffers())
    meta_net.load_state_dict(net.state_dict(), assign=True)
    images = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(meta_net.eval()(images), net(images))


def test_with_classes_creates_zero_heads_and_keeps_the_original() -> None:
    net = randomized(ViT(small(pre_logits=12)))
    new = net.with_classes(3)
    assert new.config.num_classes == 3
    assert new.config.pre_logits == 0
    assert not new.head.weight.any()
    assert not new.head.bias.any()
    assert new.blocks[0].mlp.up.weight.data_ptr() != net.blocks[0].mlp.up.weight.data_ptr()
    assert net.with_classes(0)(torch.randn(1, 3, 16, 16)).shape == (1, 16)
    distilled = randomized(ViT(small(distilled=True))).with_classes(2)
    assert distilled.head_distill.weight.shape == (2, 16)


@pytest.mark.parametrize("channels", [1, 2, 4, 6])
def test_with_channels_adapts_the_patch_projection(channels: int) -> None:
    net = randomized(ViT(small()))
    gray = torch.randn(1, 1, 16, 16)
    with torch.no_grad():
        expected = net(gray.expand(-1, 3, -1, -1))
        got = net.with_channels(channels)(gray.expand(-1, channels, -1, -1))
    if channels in (1, 6):
        assert relative(got, expected) <= 1e-5
    else:
        assert got.shape == expected.shape
    weight = torch.randn(8, 3, 2, 2)
    assert adapt_channels(weight, 3) is weight


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("position", ["none", "learned-1d", "learned-2d", "relative", "sincos-2d", "rope-2d"])
def test_outputs_have_the_dtype_of_the_network(position: str, dtype: torch.dtype) -> None:
    net = randomized(ViT(small(position=position)))
    images = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        expected = net(images)
        got = net.to(dtype)(images.to(dtype))
    assert got.dtype == dtype
    assert relative(got, expected) <= (1e-5 if dtype == torch.float64 else 0.02)


def test_threads_with_different_grids_do_not_mix_cached_tables() -> None:
    net = randomized(ViT(small(depth=1)))
    position, like = net.positions[0], torch.zeros(1)
    with torch.no_grad():
        expected = {grid: position.build_table(grid, like) for grid in ((4, 4), (2, 8), (8, 2))}

    def all_equal(grid: tuple[int, int]) -> bool:
        with torch.no_grad():
            return all(torch.equal(position(grid, like), expected[grid]) for _ in range(300))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(all_equal, expected))


def test_vmap_over_stacked_weights_matches_each_network() -> None:
    nets = [randomized(ViT(small()), seed) for seed in (0, 1)]
    params, _ = torch.func.stack_module_state(nets)
    images = torch.randn(2, 3, 24, 16)
    run = lambda weights: torch.func.functional_call(nets[0], weights, (images,))  # noqa: E731
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # vmap does not support fused attention
        stacked_logits = torch.vmap(run)(params)
        for got, net in zip(stacked_logits, nets, strict=True):
            assert relative(got, net(images)) <= 1e-5


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(3, 16, 16), "expected images as B 3 H W, got \\(3, 16, 16\\)"),
        (torch.zeros(1, 1, 16, 16), "expected images as B 3 H W"),
        (torch.zeros(1, 3, 16, 16, dtype=torch.uint8), "expected normalized float images, got torch.uint8"),
        (torch.zeros(1, 3, 18, 16), "patch_size=4 leaves 2 px of the image's height 18 uncovered; try height 16 or 20"),
        (torch.zeros(1, 3, 16, 2), "try width 4"),
    ],
)
def test_invalid_images_are_refused(images: torch.Tensor, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ViT(small())(images)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ("atention", "unknown output 'atention'; did you mean 'attention'"),
        ("head_logits", "not distilled"),
        ("feature_maps", "a ViT has tokens"),
        ("pool_attention", "pools by 'token'"),
    ],
)
def test_unavailable_outputs_are_refused(outputs: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ViT(small()).features(torch.zeros(1, 3, 16, 16), outputs=outputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"image_size": 230, "patch_size": 16},
            "patch_size=16 leaves 6 px of the image's height 230 uncovered; try height 224 or 240",
        ),
        ({"num_heads": 3}, "width=16 is not divisible by num_heads=3"),
        ({"class_token": False}, "pool='token' needs class_token=true"),
        ({"position": "relative", "position_at": "stem"}, "is applied inside attention"),
        ({"position": "learned"}, "did you mean 'learned-"),
        ({"dropout": 1.0}, "dropout=1.0: expected a probability"),
        ({"width": 18, "num_heads": 3, "position": "rope-2d"}, "multiple of 4"),
        ({"depth": 0}, "depth must be positive"),
        ({"depth": "12"}, "expects a whole number, got '12'"),
        ({"distilled": True, "pool": "gap"}, "distilled=true needs pool='token', got pool='gap'"),
        ({"stem": StemConfig(), "patch_size": 3}, "does not divide the stem's"),
    ],
)
def test_invalid_configs_are_refused_at_construction(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small(**options)

"""torch.compile(fullgraph=True), torch.export and checkpointing for every kind of network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compare import randomized, relative

from vitrail.config import BiTConfig, NetConfig, StemConfig, SwinConfig, ViTConfig, pair
from vitrail.models import Net, build
from vitrail.models.model_names import parse_name
from vitrail.models.published_models import PUBLISHED_MODELS

SMALL = {"image_size": 32, "patch_size": 8, "width": 16, "depth": 1, "num_heads": 2, "mlp_dim": 24, "num_classes": 5}
SMALL_SWIN = {
    "image_size": 32,
    "patch_size": 4,
    "width": 8,
    "depths": (2, 2),
    "num_heads": (1, 2),
    "mlp_ratio": 2.0,
    "window_size": 3,
    "num_classes": 5,
}
"""Maps of 8 x 8 and 4 x 4 tokens in windows of 3 x 3: shifted, padded."""
TWO = SMALL | {"depth": 2}
"""Two blocks, for what blocks share and for their order of random draws; otherwise one block is enough."""
KINDS: dict[str, NetConfig] = {
    "plain": ViTConfig(**SMALL),
    "no position": ViTConfig(**SMALL, position="none"),
    "learned-2d at layers": ViTConfig(**TWO, position="learned-2d", position_at="layers"),
    "relative": ViTConfig(**SMALL, position="relative"),
    "relative, shared, gap": ViTConfig(**TWO, position="relative", position_at="shared", pool="gap"),
    "sincos, gap": ViTConfig(**SMALL, position="sincos-2d", pool="gap", class_token=False),
    "rope, registers": ViTConfig(**SMALL, position="rope-2d", num_registers=2),
    "map": ViTConfig(**SMALL, pool="map", class_token=False),
    "distilled": ViTConfig(**SMALL, distilled=True),
    "dinov2": ViTConfig(**SMALL, layer_scale=0.1, activation="swiglu", num_registers=2, pool="token+gap"),
    "clip": ViTConfig(**SMALL, pre_norm=True, activation="gelu-quick", patch_bias=False, head_bias=False),
    "rms, qk-norm": ViTConfig(**SMALL, norm="rms", qk_norm=True, pool_norm="after", pool="gap"),
    "dropouts": ViTConfig(**TWO, dropout=0.1, attention_dropout=0.1, drop_path=0.2),
    "pre-training head": ViTConfig(**SMALL, pre_logits=8),
    "hybrid": ViTConfig(**SMALL | {"patch_size": 1}, stem=StemConfig(layers=(1, 1), width_factor=0.5)),
    "bit": BiTConfig(layers=(1, 1), width_factor=0.5, num_classes=5, image_size=32),
    "swin": SwinConfig(**SMALL_SWIN),
    "swin-v2": SwinConfig(**SMALL_SWIN, version=2, window_rule="timm"),
    "swin, dropouts": SwinConfig(**SMALL_SWIN, dropout=0.1, attention_dropout=0.1, drop_path=0.2),
}


def shrunk(name: str) -> NetConfig:
    """A published model's config at a small size, with all other options unchanged."""
    config = parse_name(name)
    if isinstance(config, BiTConfig):
        return config.replace(layers=(1,) * len(config.layers), width_factor=0.5, image_size=32, num_classes=5)
    if isinstance(config, SwinConfig):
        pretrained = tuple(min(size, 3) for size in config.pretrained_window_sizes[:2])
        windows = {"window_size": 2, "stage_window_sizes": (2, 3) if config.stage_window_sizes else ()}
        sizes = {"width": 8, "depths": (2, 1), "num_heads": (1, 2), "image_size": 32, "num_classes": 5}
        return config.replace(**sizes, **windows, pretrained_window_sizes=pretrained)
    stem = config.stem and config.stem.replace(layers=(1,) * len(config.stem.layers), width_factor=0.5)
    patch = pair(config.patch_size)[0] if stem else 8
    side = 2 * patch * (stem.stride if stem else 1)
    small = config.replace(width=16, num_heads=2, depth=1, mlp_dim=24, patch_size=patch, image_size=side, stem=stem)
    return small.replace(num_classes=5) if config.num_classes else small


PUBLISHED = {shrunk(v.name): v.name for v in PUBLISHED_MODELS}
"""Each distinct combination of options of the published models -> the name of a model that has it."""


def net_of(kind: str) -> Net:
    return randomized(build(KINDS[kind]))


@pytest.fixture(autouse=True)
def _reset_compiler() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_as_one_graph_for_evaluation_and_training(kind: str) -> None:
    net, images = net_of(kind), torch.randn(2, 3, 32, 32)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert relative(compiled(images), net(images)) <= 1e-5
    net.train()
    torch.manual_seed(0)
    compiled(images).square().sum().backward()
    got = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    torch.manual_seed(0)
    net(images).square().sum().backward()
    if "dropouts" not in kind:  # a compiled graph draws its random numbers in another order
        for a, p in zip(got, net.parameters(), strict=True):
            torch.testing.assert_close(a, p.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", PUBLISHED, ids=PUBLISHED.values())
def test_every_published_model_compiles_as_one_graph(config: NetConfig) -> None:
    net, images = randomized(build(config)).train(), torch.randn(2, 3, *pair(config.image_size))
    outputs = torch.compile(net, fullgraph=True, backend="eager")(images)  # the tests with KINDS include AOTAutograd
    assert relative(outputs.detach(), net(images).detach()) <= 1e-5
    outputs.sum().backward()
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.parametrize(
    ("kind", "training"), [("rope, registers", False), pytest.param("plain", True, marks=pytest.mark.slow)]
)
def test_compiles_with_inductor(kind: str, training: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Kernels that are cached for AVX-512 are also loaded under ATEN_CPU_CAPABILITY=avx2, and compute NaN there.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    net, images = net_of(kind).train(training), torch.randn(2, 3, 32, 32)
    with torch.set_grad_enabled(training):
        outputs = torch.compile(net, fullgraph=True)(images)
        assert relative(outputs.detach(), net(images).detach()) <= 1e-5
    if training:
        outputs.sum().backward()


@pytest.mark.parametrize("kind", ["plain", "sincos, gap"])
def test_compiles_as_one_graph_at_another_size(kind: str) -> None:
    net, images = net_of(kind), torch.randn(1, 3, 48, 40)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert relative(compiled(images), net(images)) <= 1e-5


@pytest.mark.parametrize("kind", ["plain", "distilled", "map", "hybrid"])
def test_compiles_with_gradient_checkpointing(kind: str) -> None:
    net, images = net_of(kind).train(), torch.randn(2, 3, 32, 32)
    net.gradient_checkpointing = True
    torch.compile(net, fullgraph=True, backend="aot_eager")(images).sum().backward()
    got = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    net.gradient_checkpointing = False
    net(images).sum().backward()
    for a, p in zip(got, net.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_exports_with_a_dynamic_batch_size(kind: str, tmp_path: Path) -> None:
    net, images = net_of(kind), torch.randn(2, 3, 32, 32)
    program = torch.export.export(net, (images,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},))
    torch.export.save(program, tmp_path / "net.pt2")
    reloaded = torch.export.load(tmp_path / "net.pt2").module()
    larger_batch = torch.randn(5, 3, 32, 32)
    with torch.no_grad():
        assert relative(reloaded(larger_batch), net(larger_batch)) <= 1e-5

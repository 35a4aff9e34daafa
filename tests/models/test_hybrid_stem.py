"""The hybrid's stem against the original code's outputs and timm, and the parts it shares with BiT."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compare import randomized, relative
from conftest import golden, import_peer
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vitrail.config import StemConfig
from vitrail.errors import ConfigError
from vitrail.models.hybrid import Bottleneck, ResNetStem, count_flops
from vitrail.models.resnet import max_pool_same, same_padding, standardize

TIMM = {"standardize": "var", "standardize_eps": 1e-8, "norm_eps": 1e-5}
SMALL = StemConfig(layers=(1, 2), width_factor=0.5)


def loaded(config: StemConfig, state: dict[str, Tensor]) -> ResNetStem:
    with torch.device("meta"):
        stem = ResNetStem(config, 3)
    stem.load_state_dict(state, assign=True)
    return stem.eval()


# The original code's parameter names, and its encoder in plain PyTorch


def our_name(name: str) -> str:
    name = re.sub(r"block(\d+)/unit(\d+)/", lambda m: f"stages.{int(m[1]) - 1}.{int(m[2]) - 1}.", name)
    for theirs, ours in [
        ("conv_root", "root.conv"), ("gn_root", "root.norm"), ("conv_proj", "project.conv"),
        ("gn_proj", "project.norm"), ("gn", "norm"), ("/kernel", ".weight"), ("/scale", ".weight"), ("/bias", ".bias"),
    ]:  # fmt: skip
        name = name.replace(theirs, ours)
    return name


def stem_state(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    ours = {our_name(k): v for k, v in weights.items() if k.startswith(("conv_root", "gn_root", "block"))}
    return {k: v.permute(3, 2, 0, 1) if v.ndim == 4 else v for k, v in ours.items()}


def layer_norm(x: Tensor, w: dict[str, Tensor], prefix: str) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{prefix}/scale"], w[f"{prefix}/bias"], 1e-6)


def encoder_block(x: Tensor, w: dict[str, Tensor], prefix: str) -> Tensor:
    y, attention = layer_norm(x, w, f"{prefix}/LayerNorm_0"), f"{prefix}/MultiHeadDotProductAttention_1"
    q, k, v = (
        torch.einsum("bnd,dhk->bhnk", y, w[f"{attention}/{n}/kernel"]) + w[f"{attention}/{n}/bias"][:, None]
        for n in ("query", "key", "value")
    )
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    x = x + torch.einsum("bhnk,hkd->bnd", weights @ v, w[f"{attention}/out/kernel"]) + w[f"{attention}/out/bias"]
    y, mlp = layer_norm(x, w, f"{prefix}/LayerNorm_2"), f"{prefix}/MlpBlock_3"
    y = F.gelu(y @ w[f"{mlp}/Dense_0/kernel"] + w[f"{mlp}/Dense_0/bias"], approximate="tanh")
    return x + y @ w[f"{mlp}/Dense_1/kernel"] + w[f"{mlp}/Dense_1/bias"]


def original_vit(features: Tensor, w: dict[str, Tensor]) -> Tensor:
    kernel = w["embedding/kernel"].permute(3, 2, 0, 1)
    x = F.conv2d(features, kernel, w["embedding/bias"], stride=kernel.shape[-1]).flatten(2).mT
    x = torch.cat([w["cls"].expand(len(x), 1, -1), x], dim=1) + w["Transformer/posembed_input/pos_embedding"]
    for i in range(3):
        x = encoder_block(x, w, f"Transformer/encoderblock_{i}")
    return layer_norm(x, w, "Transformer/encoder_norm")[:, 0] @ w["head/kernel"] + w["head/bias"]


@pytest.mark.parametrize(("name", "layers"), [("google_hybrid", (2, 2, 2)), ("google_hybrid_patch2", (2, 2))])
def test_stem_matches_the_logits_of_the_original_code(name: str, layers: tuple[int, ...]):
    weights = {k: torch.from_numpy(v) for k, v in np.load(golden(f"{name}.npz")).items()}
    io = np.load(golden(f"{name}_io.npz"))
    stem = loaded(StemConfig(layers=layers, width_factor=0.5), stem_state(weights))
    with torch.no_grad():
        logits = original_vit(stem(torch.from_numpy(io["images_nhwc"]).permute(0, 3, 1, 2)), weights)
    assert relative(logits, torch.from_numpy(io["logits"])) <= 1e-5


# timm


def timm_backbone(layers: tuple[int, ...]) -> nn.Module:
    import_peer("timm")
    from timm.models.vision_transformer_hybrid import _resnetv2

    with torch.device("meta"):
        backbone = _resnetv2(layers)
    return randomized(backbone)


def from_timm(state: dict[str, Tensor]) -> dict[str, Tensor]:
    names = {k: re.sub(r"^(stem\.)?(?=conv|norm)", "root.", k) for k in state}
    return {n.replace(".blocks.", ".").replace("downsample", "project"): state[k] for k, n in names.items()}


@pytest.mark.peer
@pytest.mark.parametrize("layers", [(2, 2, 2, 2), (3, 4, 9), ()], ids=["R26", "R50", "R"])
def test_stem_matches_timms_feature_map_at_even_and_odd_sizes(layers: tuple[int, ...]):
    theirs = timm_backbone(layers).double()  # in float32 rounding grows to 1e-5 over sixteen units
    stem = loaded(StemConfig(layers=layers, **TIMM), from_timm(theirs.state_dict()))
    with torch.no_grad():
        for size in [(64, 64), (65, 63), (66, 47), (33, 64)]:
            images = torch.randn(1, 3, *size, dtype=torch.float64)
            ours = stem(images)
            assert relative(ours, theirs(images)) <= 1e-10
            assert ours.shape[1:] == (stem.config.channels, *(-(-side // stem.config.stride) for side in size))


@pytest.mark.peer
def test_the_two_standardization_conventions_differ():
    theirs = timm_backbone((2, 2))
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim == 4:
                parameter.mul_(1e-3)  # small kernels, as after long weight decay, for which the epsilons matter
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        for options, low, high in [(TIMM, 0, 1e-5), ({}, 1e-3, 1)]:
            stem = loaded(StemConfig(layers=(2, 2), **options), from_timm(theirs.state_dict()))
            assert low <= relative(stem(images), theirs(images)) <= high


# Padding and standardization


@given(size=st.integers(1, 300), kernel=st.sampled_from([1, 3, 7]), stride=st.integers(1, 3))
def test_same_padding_is_the_minimum_that_covers_the_input(size: int, kernel: int, stride: int):
    before, after = same_padding(size, kernel, stride)
    windows = -(-size // stride)
    covered = (windows - 1) * stride + kernel
    assert before + after == max(covered - size, 0)
    assert after - before in (0, 1)


@given(height=st.integers(1, 12), width=st.integers(1, 12))
def test_same_max_pool_ignores_the_padding(height: int, width: int):
    x = -torch.rand(1, 2, height, width)  # zero padding would be the maximum
    (top, bottom), (left, right) = same_padding(height, 3, 2), same_padding(width, 3, 2)
    padded = F.pad(x, (left, right, top, bottom), value=-torch.inf)
    assert torch.equal(max_pool_same(x), F.max_pool2d(padded, 3, 2))


@pytest.mark.parametrize("by", ["std", "var"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_standardize_matches_its_formula_in_any_precision(by: str, dtype: torch.dtype):
    kernel = (torch.randn(8, 6, 3, 3) * 0.02 + 1).to(dtype)
    exact = kernel.double()
    centered = exact - exact.mean((1, 2, 3), keepdim=True)
    std = exact.std((1, 2, 3), keepdim=True, correction=0)
    expected = centered / (std + 1e-3) if by == "std" else centered / (std.square() + 1e-3).sqrt()
    got = standardize(kernel, by, 1e-3)
    assert got.dtype == dtype
    assert relative(got.double(), expected) <= {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 4e-3)


@pytest.mark.parametrize("by", ["std", "var"])
def test_gradients_of_standardize_are_correct_and_finite(by: str):
    kernel = torch.randn(3, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda k: standardize(k, by, 1e-3), kernel)
    flat = torch.ones(2, 2, 3, 3, requires_grad=True)
    standardize(flat, by, 1e-5).square().sum().backward()
    assert flat.grad is not None
    assert flat.grad.isfinite().all()


# The stem as a module


def test_parameter_names_are_as_documented():
    unit_parts = [f"{part}{i}" for i in (1, 2, 3) for part in ("conv", "norm")]
    expected = {"root.conv.weight", "root.norm.weight", "root.norm.bias"}
    for prefix, parts in [
        ("stages.0.0", [*unit_parts, "project.conv", "project.norm"]),
        ("stages.1.0", [*unit_parts, "project.conv", "project.norm"]),
        ("stages.1.1", unit_parts),
    ]:
        expected |= {f"{prefix}.{part}.weight" for part in parts} | {
            f"{prefix}.{part}.bias" for part in parts if "norm" in part
        }
    assert set(ResNetStem(SMALL, 3).state_dict()) == expected


def test_meta_stem_loads_all_weights():
    original = randomized(ResNetStem(SMALL, 3))
    reloaded = loaded(SMALL, original.state_dict())
    assert not list(reloaded.buffers())
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(reloaded(images), original(images))


def test_initialization_matches_the_original_code():
    stem = ResNetStem(StemConfig(layers=(2, 2)), 3)
    weight = stem.stages[1][1].conv2.weight
    std = 1 / (128 * 9) ** 0.5
    assert weight.std().item() == pytest.approx(std, rel=0.01)
    assert weight.abs().max().item() <= 2 * std / 0.8796
    for name, parameter in stem.named_parameters():
        if ".norm3.weight" in name or name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name


def test_new_residual_unit_is_the_identity():
    unit = ResNetStem(SMALL, 3).stages[1][1]
    assert isinstance(unit, Bottleneck)
    x = torch.rand(1, 256, 8, 8)
    assert torch.equal(unit(x), x)


def test_the_same_seed_gives_the_same_weights():
    first, second, other = (ResNetStem(SMALL, 3).initialize(torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.root.conv.weight, other.root.conv.weight)


@pytest.mark.parametrize("size", [(32, 32), (37, 30)])
def test_stem_compiles_and_exports_as_one_graph(size: tuple[int, int]):
    stem = randomized(ResNetStem(SMALL, 3))
    images = torch.randn(2, 3, *size)
    with torch.no_grad():
        expected = stem(images)  # caches kernels, which must not become constants of the graphs
        torch._dynamo.reset()
        assert relative(torch.compile(stem, fullgraph=True, backend="aot_eager")(images), expected) <= 1e-6
        program = torch.export.export(stem, (images,))
    assert not program.constants
    assert relative(program.module()(images), expected) <= 1e-6


@pytest.mark.parametrize("layers", [(), (1, 2), (2, 1, 1)])
@pytest.mark.parametrize("size", [(32, 32), (45, 30)])
def test_flops_equal_torchs_count(layers: tuple[int, ...], size: tuple[int, int]):
    config = StemConfig(layers=layers, width_factor=0.5)
    with torch.device("meta"):
        stem, images = ResNetStem(config, 4), torch.empty(3, 4, *size)
    with FlopCounterMode(display=False) as counter:
        stem(images)
    assert 3 * count_flops(config, size, 4) == counter.get_total_flops()


def test_width_not_divisible_by_the_norm_groups_is_refused():
    with pytest.raises(ConfigError, match=r"do not divide 16 channels; try a width_factor that is a multiple of 0\.5"):
        ResNetStem(StemConfig(width_factor=0.25), 3)

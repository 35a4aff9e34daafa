"""8-bit linear layers: the error of their rounding, which layers they replace, and that they stay 8-bit."""

from __future__ import annotations

import pytest
import torch
from compare import randomized, relative
from torch import nn

from vitrail.config import ViTConfig
from vitrail.kernels.eight_bit import (
    E4M3,
    LARGEST,
    EightBitLinear,
    quantize_rows,
)
from vitrail.models import ViT
from vitrail.models.eight_bit_net import EightBitMLP, hidden_bound, to_eight_bit

SMALL = {"image_size": 32, "patch_size": 8, "width": 64, "depth": 2, "num_heads": 2, "mlp_dim": 128, "num_classes": 5}


def test_rows_are_scaled_to_the_largest_number_and_restored_within_its_rounding() -> None:
    x = torch.randn(7, 48) * torch.logspace(-6, 6, 7)[:, None]
    x[3] = 0
    values, scale = quantize_rows(x)
    assert values.dtype == E4M3
    assert values.float().abs().amax(1).tolist() == [LARGEST if i != 3 else 0 for i in range(7)]
    error = (values.float() * scale - x).abs()
    assert (error <= 2**-4 * x.abs() + 2**-10 * scale).all(), "3 bits after the first, and subnormal numbers"


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_computes_the_product_of_the_rounded_values(bias: bool) -> None:
    layer, x = nn.Linear(48, 32, bias=bias), torch.randn(2, 5, 48)
    small = EightBitLinear(layer)
    values, scale = quantize_rows(x)
    weight = small.weight.float() * small.weight_scale.t()
    expected = (values.float() * scale) @ weight.t() + (layer.bias if bias else 0)
    assert small(x).shape == (2, 5, 32)
    assert relative(small(x), expected) <= 1e-6
    assert relative(small(x), layer(x)) <= 0.06


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_results_have_the_dtype_of_the_input(dtype: torch.dtype) -> None:
    layer, x = nn.Linear(48, 32).to(dtype), torch.randn(3, 48, dtype=dtype)
    assert EightBitLinear(layer)(x).dtype == dtype


def test_a_cast_of_the_network_leaves_weights_and_scales() -> None:
    small = EightBitLinear(nn.Linear(16, 8)).bfloat16()
    assert (small.weight.dtype, small.weight_scale.dtype, small.bias.dtype) == (E4M3, torch.float32, torch.bfloat16)
    assert small.to("meta").weight.device.type == "meta"


def test_layers_of_the_blocks_are_replaced_and_nothing_else() -> None:
    net = randomized(ViT(ViTConfig(**SMALL)))
    small, images = to_eight_bit(net), torch.randn(4, 3, 32, 32)
    replaced = {name for name, module in small.named_modules() if isinstance(module, EightBitLinear)}
    layers = ("attention.qkv", "mlp.up", "mlp.down")
    assert replaced == {f"blocks.{i}.{layer}" for i in range(2) for layer in layers}
    with torch.no_grad():
        assert 1e-3 < relative(small(images), net.eval()(images)) < 0.1
        assert 1e-3 < relative(small.bfloat16()(images.bfloat16()).float(), net(images)) < 0.1
    assert all(isinstance(block.mlp, EightBitMLP) for block in small.blocks)
    some = to_eight_bit(net, lambda name: not name.endswith("down"))
    assert isinstance(some.blocks[0].mlp.down, nn.Linear)
    assert isinstance(some.blocks[0].mlp.up, EightBitLinear)
    assert isinstance(some.blocks[0].attention.out, EightBitLinear)
    assert isinstance(net.blocks[0].mlp.up, nn.Linear), "the network itself is unchanged"


def test_layers_without_a_bias_of_the_keys_keep_their_precision() -> None:
    small = to_eight_bit(randomized(ViT(ViTConfig(**SMALL, key_bias=False))))
    assert isinstance(small.blocks[0].attention.qkv, nn.Linear)
    assert isinstance(small.blocks[0].mlp.up, EightBitLinear)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_networks_are_compiled_as_one_graph() -> None:
    torch.compiler.reset()
    small, images = to_eight_bit(randomized(ViT(ViTConfig(**SMALL)))), torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        run = torch.compile(small, fullgraph=True, backend="aot_eager")
        assert relative(run(images), small(images)) <= 2e-2, "a last bit can change how a value is rounded to 8 bits"


def test_no_input_exceeds_the_bound_of_the_hidden_values_and_some_come_near() -> None:
    norm, layer = nn.LayerNorm(48), nn.Linear(48, 96)
    nn.init.normal_(norm.weight, 1, 0.3)
    nn.init.normal_(norm.bias)
    bound = hidden_bound(layer, norm)
    with torch.no_grad():
        directions = layer.weight * norm.weight  # the inputs for which a hidden value is largest, and random ones
        x = torch.cat([directions, -directions, torch.randn(1000, 48) * torch.logspace(-3, 3, 1000)[:, None]])
        largest = layer(norm(x * 1e3)).abs().amax()
    assert 0.9 * bound < largest <= bound * (1 + 1e-5)


@pytest.mark.parametrize("activation", ["gelu", "gelu-tanh"])
def test_hidden_values_have_one_scale_and_agree_with_the_plain_mlp(activation: str) -> None:
    net = randomized(ViT(ViTConfig(**SMALL, activation=activation)))
    block = net.blocks[0]
    small, x = EightBitMLP(block.mlp, block.norm2), torch.randn(3, 7, 64)
    normed = block.norm2(x)
    values, scale = quantize_rows(normed.flatten(0, 1))
    hidden = block.mlp.activation(small.up.multiply(values, scale, torch.float32)) / small.hidden_scale
    assert hidden.abs().amax() <= LARGEST
    with torch.no_grad():
        restored = hidden.to(E4M3).float() * small.hidden_scale
        assert (
            relative(small(normed).flatten(0, 1), small.down.multiply(restored, torch.ones(21, 1), torch.float32))
            <= 1e-2  # a last bit can change how a value is rounded to 8 bits
        )
        assert relative(small(normed), block.mlp(normed)) < 0.06


def test_mlps_whose_hidden_values_have_no_bound_keep_scales_of_rows() -> None:
    for changes in ({"activation": "swiglu"}, {"norm": "rms"}, {"proj_bias": False}):
        small = to_eight_bit(randomized(ViT(ViTConfig(**SMALL, **changes))))
        assert not isinstance(small.blocks[0].mlp, EightBitMLP)
        assert isinstance(small.blocks[0].mlp.up, EightBitLinear)

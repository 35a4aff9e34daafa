"""The products with epilogues agree with plain PyTorch, forward and backward; Triton's kernels are interpreted."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from importlib.metadata import version
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compare import relative
from torch import Tensor, nn

from vitrail.config import ViTConfig
from vitrail.errors import ConfigError
from vitrail.kernels import choice, fused_mlp
from vitrail.kernels.choice import Backend, backend_for, force, set_kernels
from vitrail.kernels.fused_mlp import can_fuse, linear_gelu, linear_residual, mlp_reference
from vitrail.kernels.gelu_polynomial import gelu_derivative
from vitrail.kernels.packed_attention import packed_attention_reference
from vitrail.models.layers import MLP, Block

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # Triton 3.6's own
TOLERANCE = 3e-4
"""Of the kernels' GELU, relative to the norm (the products are computed in float32 here)."""
SHAPES = [(70, 32, 144), (128, 64, 256), (33, 16, 16), (1, 16, 272)]
"""Rows, width, hidden width: ragged in every dimension of a tile, and a single tile."""


@pytest.fixture
def triton_products(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The Triton kernels, interpreted, in small tiles."""
    pytest.importorskip("triton")
    if not INTERPRETED:
        pytest.skip("TRITON_INTERPRET=1 must be set before Triton is imported: a test below starts such a process")
    if np.lib.NumpyVersion(np.__version__) >= "2.4.0" and version("triton") < "3.8":
        pytest.skip("this Triton's interpreter does not run with this NumPy")
    module = importlib.import_module("vitrail.kernels.triton_products")
    assert module.is_interpreted()
    small = module.TileConfig(block_m=32, block_n=64, block_k=16, group=2)
    monkeypatch.setattr(module.launch, "__kwdefaults__", {**module.launch.__kwdefaults__, "config": small})
    monkeypatch.setattr(module.dgelu, "__defaults__", (False, small))
    monkeypatch.setattr(module, "RESIDUAL", small)
    return module


def random_mlp(rows: int, width: int, hidden: int) -> list[Tensor]:
    """x, and the weights and biases of both layers."""
    shapes = ((rows, width), (hidden, width), (hidden,), (width, hidden), (width,))
    scales = (1, width, 1, hidden, 1)
    return [(torch.randn(s) / scale**0.5).requires_grad_() for s, scale in zip(shapes, scales, strict=True)]


@pytest.fixture(params=["plain", "triton"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "triton":
        request.getfixturevalue("triton_products")
    return request.param


@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients_agree_with_the_reference(
    shape: tuple[int, int, int], tanh: bool, backend: Backend
) -> None:
    tensors = random_mlp(*shape)
    expected, found = mlp_reference(*tensors, tanh), fused_mlp.fused_mlp(*tensors, backend, tanh)
    grad = torch.randn_like(expected)
    assert relative(found, expected) <= TOLERANCE
    for ours, theirs in zip(
        torch.autograd.grad(found, tensors, grad), torch.autograd.grad(expected, tensors, grad), strict=True
    ):
        assert relative(ours, theirs) <= TOLERANCE
    with torch.no_grad():
        assert relative(fused_mlp.fused_mlp(*tensors, backend, tanh), expected) <= TOLERANCE


@pytest.mark.parametrize("shape", SHAPES)
def test_epilogues_agree_with_plain_products(shape: tuple[int, int, int], backend: Backend) -> None:
    x, weight, bias, *_ = (t.detach() for t in random_mlp(*shape))
    plain = F.linear(x, weight, bias)
    residual = torch.randn_like(plain)
    assert relative(linear_gelu(x, weight, bias, backend), F.gelu(plain)) <= TOLERANCE
    assert relative(linear_residual(x, weight, bias, residual, backend), plain + residual) <= 1e-6


def test_every_tiling_agrees(triton_products: ModuleType) -> None:
    x, weight, bias, *_ = (t.detach() for t in random_mlp(70, 48, 144))
    plain, tile = F.linear(x, weight, bias), triton_products.TileConfig
    for config in (
        tile(block_m=32, block_n=32, block_k=16, parts=1),
        tile(block_m=16, block_n=64, block_k=32, parts=2, group=1, flatten=False, per_sm=2),
        tile(block_m=64, block_n=128, block_k=64),
    ):
        out, argument = torch.full_like(plain, torch.nan), torch.full_like(plain, torch.nan)
        triton_products.launch("gelu", x, weight, out, bias=bias, argument=argument, config=config)
        assert relative(argument, plain) <= 1e-6
        assert relative(out, F.gelu(plain)) <= TOLERANCE


@pytest.mark.parametrize(
    ("images", "tokens", "heads", "head_dim"),
    [(2, 37, 3, 16), (1, 16, 2, 32), (3, 5, 1, 16), (1, 83, 2, 16), (1, 145, 1, 16), (1, 197, 1, 16)],
)
@pytest.mark.usefixtures("triton_products")
def test_attention_agrees_with_the_reference(images: int, tokens: int, heads: int, head_dim: int) -> None:
    """From one piece of the keys to three, the last one partly or wholly filled."""
    from vitrail.kernels.triton_attention import cut, packed_attention

    qkv = torch.randn(images, tokens, 3 * heads * head_dim)
    assert sum(cut(tokens)) >= tokens
    for block in (16, 64):
        assert relative(packed_attention(qkv, heads, block), packed_attention_reference(qkv, heads)) <= 1e-5
    strided = qkv.transpose(0, 1).contiguous().transpose(0, 1)
    assert relative(packed_attention(strided, heads), packed_attention_reference(qkv, heads)) <= 1e-5


def test_eight_bit_operands_are_scaled_by_row_and_the_result_by_one_number(triton_products: ModuleType) -> None:
    x, weight, bias, *_ = (t.detach() for t in random_mlp(40, 32, 80))
    row_scale, column_scale = x.abs().amax(1) / 448, weight.abs().amax(1) / 448
    small, light = (
        (x / row_scale[:, None]).to(torch.float8_e4m3fn),
        (weight / column_scale[:, None]).to(torch.float8_e4m3fn),
    )
    restored = F.linear(small.float() * row_scale[:, None], light.float() * column_scale[:, None], bias)
    config = triton_products.TileConfig(block_m=32, block_n=64, block_k=32)
    out = torch.full_like(restored, torch.nan)
    scales = {"row_scale": row_scale, "column_scale": column_scale}
    triton_products.launch("gelu", small.half(), light.half(), out, bias=bias, **scales, config=config)
    assert relative(out, F.gelu(restored)) <= TOLERANCE
    scale = torch.tensor(0.004)
    triton_products.launch("gelu", small.half(), light.half(), out, bias=bias, **scales, out_scale=scale, config=config)
    assert relative(out, (F.gelu(restored) / scale).clamp(-448, 448)) <= TOLERANCE
    residual = torch.randn_like(restored)
    triton_products.launch(
        "linear", small.half(), light.half(), out, bias=bias, **scales, residual=residual, config=config
    )
    assert relative(out, restored + residual) <= TOLERANCE


def test_the_backward_product_gives_gelu_again_and_the_sums(triton_products: ModuleType) -> None:
    grad, weight, argument = torch.randn(70, 32), torch.randn(32, 144), torch.randn(70, 144) * 3
    product, hidden, sums = torch.ops.vitrail.linear_dgelu(grad, weight, argument, "triton", False)
    expected = (grad @ weight) * gelu_derivative(argument)
    assert relative(product, expected) <= 1e-5
    assert relative(hidden, F.gelu(argument)) <= TOLERANCE
    assert relative(sums, expected.sum(0)) <= 1e-4


def test_strided_and_unaligned_inputs_and_gradients_agree(backend: Backend) -> None:
    """Tensor memory access reads contiguous rows at multiples of 16 bytes only."""
    tensors = random_mlp(24, 32, 64)
    x, up, up_bias, down, down_bias = tensors
    strided = x.t().contiguous().t(), up.t().contiguous().t(), up_bias, down.t().contiguous().t(), down_bias
    padded = torch.zeros(24 * 32 + 3)[3:].view(24, 32).copy_(x)
    for given in (strided, (padded, *tensors[1:]), (F.pad(x, (0, 3))[:, :32], *tensors[1:])):
        found, expected = fused_mlp.fused_mlp(*given, backend), mlp_reference(*tensors)
        assert relative(found, expected) <= TOLERANCE
        for grad in (torch.ones(1).expand(24, 32), torch.randn(32, 24).t()):
            ours = torch.autograd.grad(found, (up, up_bias, down, down_bias), grad, retain_graph=True)
            theirs = torch.autograd.grad(expected, (up, up_bias, down, down_bias), grad, retain_graph=True)
            assert max(map(relative, ours, theirs)) <= TOLERANCE
    residual = torch.randn(64, 24).t()
    plain = F.linear(x, up, up_bias) + residual
    assert relative(linear_residual(strided[0], strided[1], up_bias, residual, backend), plain) <= 1e-6


@pytest.fixture
def half(backend: Backend) -> torch.dtype:
    """16 bits; Triton's interpreter multiplies bfloat16 as if it were integers."""
    return torch.float16 if backend == "triton" else torch.bfloat16


def test_16_bits_round_no_more_than_plain_layers_do(backend: Backend, half: torch.dtype) -> None:
    exact = [t.detach().to(half).double().requires_grad_() for t in random_mlp(70, 32, 144)]
    tensors = [t.detach().to(half).requires_grad_() for t in exact]
    expected, plain, found = mlp_reference(*exact), mlp_reference(*tensors), fused_mlp.fused_mlp(*tensors, backend)
    grad = torch.randn_like(plain)
    errors = []
    for out, leaves in ((plain, tensors), (found, tensors)):
        ours = (out, *torch.autograd.grad(out, leaves, grad))
        theirs = (expected, *torch.autograd.grad(expected, exact, grad.double(), retain_graph=True))
        errors.append(torch.tensor([relative(a, b) for a, b in zip(ours, theirs, strict=True)]))
    assert errors[1].max() <= 1e-2
    assert (errors[1] <= 1.3 * errors[0] + 1e-3).all()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_graphs_have_no_breaks_and_the_same_gradients(compiler: str) -> None:
    torch.compiler.reset()
    tensors = random_mlp(20, 16, 32)
    compiled = torch.compile(lambda *t: fused_mlp.fused_mlp(*t, "plain"), fullgraph=True, backend=compiler)
    expected, found = mlp_reference(*tensors), compiled(*tensors)
    for ours, theirs in zip(
        torch.autograd.grad(found.sum(), tensors), torch.autograd.grad(expected.sum(), tensors), strict=True
    ):
        assert relative(ours, theirs) <= TOLERANCE


def test_operators_pass_torchs_own_checks() -> None:
    x, weight, bias, down, _ = (t.detach() for t in random_mlp(20, 16, 32))
    argument = F.linear(x, weight, bias)
    for name, args in {
        "linear_gelu": (x, weight, bias, "plain", True),
        "linear_gelu_keep": (x, weight, bias, "plain", True),
        "linear_dgelu": (x, down, argument, "plain", True),
        "linear_residual": (x, weight, bias, argument, "plain"),
    }.items():
        operator = getattr(torch.ops.vitrail, name).default
        torch.library.opcheck(operator, args, test_utils=("test_schema", "test_faketensor"))


@pytest.fixture(params=["gelu", "gelu-tanh"])
def config(request: pytest.FixtureRequest) -> ViTConfig:
    return ViTConfig(width=32, num_heads=2, mlp_dim=64, activation=request.param)


@pytest.fixture
def any_tensor_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if float32 on a CPU were bfloat16 on a GPU."""
    for module in ("vitrail.kernels.fused_mlp", "vitrail.models.layers"):
        monkeypatch.setattr(f"{module}.can_fuse", lambda x, *layers: True)


@pytest.mark.usefixtures("any_tensor_fits")
def test_layers_use_the_forced_kernels_and_agree(config: ViTConfig, backend: Backend) -> None:
    torch.manual_seed(0)
    block, x = Block(config), torch.randn(3, 11, 32)
    for p in block.parameters():
        nn.init.normal_(p, std=0.2)
    expected = block(x)
    inference = {"mlp": "triton", "residual": "triton", "attention residual": "triton"}
    training = {"mlp training": "triton"}
    if backend == "plain":
        return
    with force(training):
        found = block(x)
        grads = torch.autograd.grad(found.square().sum(), list(block.parameters()))
    assert relative(found, expected) <= TOLERANCE
    for ours, theirs in zip(grads, torch.autograd.grad(expected.square().sum(), list(block.parameters())), strict=True):
        assert relative(ours, theirs) <= TOLERANCE
    with force(inference), torch.no_grad():
        assert relative(block.eval()(x), expected) <= TOLERANCE


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
@pytest.mark.usefixtures("any_tensor_fits", "triton_products")
def test_compiled_blocks_call_the_forced_triton_kernels(config: ViTConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    block, x, used = Block(config), torch.randn(3, 11, 32), []
    for p in block.parameters():
        nn.init.normal_(p, std=0.2)
    expected = block(x)
    wanted = torch.autograd.grad(expected.square().sum(), list(block.parameters()))
    run = torch.compile(block, fullgraph=True, backend="aot_eager")
    module = importlib.import_module("vitrail.kernels.triton_products")
    launch = module.launch
    monkeypatch.setattr(module, "launch", lambda epilogue, *a, **k: used.append(epilogue) or launch(epilogue, *a, **k))
    with force({"mlp training": "triton"}):
        grads = torch.autograd.grad(run(x).square().sum(), list(block.parameters()))
    assert max(map(relative, grads, wanted)) <= TOLERANCE
    with force({"mlp": "triton", "residual": "triton", "attention residual": "triton"}), torch.no_grad():
        assert relative(run.eval()(x), expected) <= TOLERANCE
    assert used == ["gelu", "dgelu", "linear", "gelu", "linear"]


@pytest.mark.usefixtures("any_tensor_fits")
def test_weights_stay_float32_under_autocast(config: ViTConfig, backend: Backend, half: torch.dtype) -> None:
    mlp, x = MLP(config), torch.randn(2, 9, 32, requires_grad=True)
    for p in mlp.parameters():
        nn.init.normal_(p, std=0.3)
    results = []
    for kernels in ({}, {"mlp training": backend}):
        with force(kernels), torch.autocast("cpu", half):
            out = mlp(x)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), (x, *mlp.parameters()))))
    for ours, theirs in zip(*reversed(results), strict=True):
        assert ours.dtype == theirs.dtype
        assert relative(ours, theirs) <= 2e-2
    assert results[0][0].dtype == half


@pytest.mark.skipif(INTERPRETED, reason="this is the process that the test starts")
def test_interpreted_triton_kernels_agree() -> None:
    """All tests of this file once more, those of the Triton kernels with them."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-q", __file__]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def test_plain_kernels_are_the_default_until_others_were_measured() -> None:
    for operation in choice.OPERATIONS:
        assert backend_for(operation, torch.device("cpu")) == "plain"
    with force({"mlp": "triton"}):
        assert backend_for("mlp", torch.device("cpu")) == "triton"
    assert backend_for("mlp", torch.device("cpu")) == "plain"
    for measured in choice.MEASURED.values():
        assert set(measured) <= set(choice.OPERATIONS)
        for operation, names in measured.items():
            assert set(names) <= set(choice.OPERATIONS[operation]) - {"plain"}


def test_a_measured_gpu_uses_the_fastest_installed_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(choice, "gpu_name", lambda index: "a GPU")
    monkeypatch.setattr(choice, "MEASURED", {"a GPU": {"mlp": ("quack", "triton")}})
    monkeypatch.setattr(choice, "is_installed", lambda name: name != "quack")
    assert backend_for("mlp", gpu) == "triton"
    assert backend_for("residual", gpu) == "plain"
    set_kernels("plain")
    try:
        assert backend_for("mlp", gpu) == "plain"
    finally:
        set_kernels("auto")
    monkeypatch.setenv("VITRAIL_KERNELS", "plain")
    assert backend_for("mlp", gpu) == "plain"
    with pytest.raises(ConfigError, match="expected auto or plain"):
        set_kernels("fast")  # type: ignore[arg-type]


def test_the_environment_replaces_measured_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(choice, "gpu_name", lambda index: "a GPU")
    monkeypatch.setattr(choice, "MEASURED", {"a GPU": {"residual": ("triton",), "attention": ("triton",)}})
    monkeypatch.setattr(choice, "is_installed", lambda name: True)
    monkeypatch.setenv("VITRAIL_KERNELS", "mlp=triton, gelu=polynomial,residual=plain")
    assert choice.describe(gpu) == "mlp=triton,gelu=polynomial,attention=triton"
    assert choice.describe(torch.device("cpu")) == ""
    for wrong, message in {"mpl=triton": "did you mean 'mlp'", "gelu=triton": "expected one of plain, poly"}.items():
        monkeypatch.setenv("VITRAIL_KERNELS", wrong)
        with pytest.raises(ConfigError, match=message):
            backend_for("mlp", gpu)


def test_kernels_are_for_many_aligned_bfloat16_rows_on_a_gpu(config: ViTConfig) -> None:
    x = torch.randn(2000, 32, dtype=torch.bfloat16, device="meta")
    layer = nn.Linear(32, 64)
    assert not can_fuse(x, layer), "not a GPU"
    assert MLP(config).backend(x) == "plain"

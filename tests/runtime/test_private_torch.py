"""vitrail works without each of torch's private functions: every symbol is hidden in turn."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from compare import randomized
from small_models import small

import vitrail
from vitrail.models import build
from vitrail.runtime import private_torch

SYMBOLS = (
    "_C._get_tracing_state",
    "_C._functorch.peek_interpreter_stack",
    "_C._len_torch_dispatch_stack",
    "ops.mkldnn._linear_pointwise",
    "nn.modules.module._has_any_global_hook",
    "ops.aten._upsample_bilinear2d_aa.out",
    "ops.aten._upsample_bicubic2d_aa.out",
    "_softmax_backward_data",
    "_foreach_mul_",
    "_foreach_add_",
    "_foreach_lerp_",
    "_foreach_lerp",
)


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make `torch_attribute` miss one symbol, as a torch without it would."""
    find = private_torch.torch_attribute

    def hide_symbol(symbol: str) -> None:
        monkeypatch.setattr(private_torch, "torch_attribute", lambda path: None if path == symbol else find(path))

    return hide_symbol


def test_every_symbol_exists_in_the_tested_torch():
    missing = [symbol for symbol in SYMBOLS if private_torch.torch_attribute(symbol) is None]
    assert set(missing) <= {"ops.mkldnn._linear_pointwise"}  # not in builds without oneDNN


def test_an_unknown_symbol_is_none():
    assert private_torch.torch_attribute("_C._no_such_function") is None
    assert private_torch.torch_attribute("ops.no_such_library.no_such_operator") is None


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_training_step_and_inference_without_the_symbol(symbol: str, hide: Callable[[str], None]):
    torch.manual_seed(0)
    net = randomized(build(small(activation="gelu-tanh")))
    images = torch.randn(2, 3, 32, 32)

    def outputs_and_gradients() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            logits = net.eval()(images)
        net.train().zero_grad()
        net(images).square().sum().backward()
        return logits, net.blocks[0].attention.qkv.weight.grad.clone()

    expected = outputs_and_gradients()
    hide(symbol)
    for actual, reference in zip(outputs_and_gradients(), expected, strict=True):
        torch.testing.assert_close(actual, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("symbol", SYMBOLS[:3])
def test_fused_kernels_are_off_when_torch_does_not_tell_whether_it_traces(symbol: str, hide: Callable[[str], None]):
    assert private_torch.is_plain_eager()
    hide(symbol)
    assert not private_torch.is_plain_eager()


def test_softmax_backward_without_the_symbol(hide: Callable[[str], None]):
    logits = torch.randn(3, 5, 7, requires_grad=True)
    grad = torch.randn(3, 5, 7)
    weights = logits.softmax(-1)
    (expected,) = torch.autograd.grad(weights, logits, grad)
    hide("_softmax_backward_data")
    torch.testing.assert_close(private_torch.softmax_backward(grad, weights.detach()), expected)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("hidden", [False, True])
def test_resized_images_are_the_same_without_the_symbol(mode: str, hidden: bool, hide: Callable[[str], None]):
    image = torch.randint(0, 256, (1, 3, 50, 70), dtype=torch.uint8)
    if hidden:
        hide(f"ops.aten._upsample_{mode}2d_aa.out")
    out = torch.empty(1, 3, 24, 24, dtype=torch.uint8)
    private_torch.resize_uint8(image, (24, 24), mode, out)
    assert torch.equal(out, F.interpolate(image, size=(24, 24), mode=mode, antialias=True))


@pytest.mark.parametrize("symbol", ["_foreach_mul_", "_foreach_add_", "_foreach_lerp_", "_foreach_lerp"])
def test_operations_on_lists_are_the_same_without_the_symbol(symbol: str, hide: Callable[[str], None]):
    def result() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        tensors, others = ([torch.randn(n, generator=generator) for n in (3, 5)] for _ in range(2))
        private_torch.foreach_mul_(tensors, 0.5)
        private_torch.foreach_mul_(tensors, torch.tensor(1.5))
        private_torch.foreach_add_(tensors, others, alpha=-2.0)
        private_torch.foreach_lerp_(tensors, others, 0.25)
        return private_torch.foreach_lerp(tensors, others, 0.75)

    expected = result()
    hide(symbol)
    for actual, reference in zip(result(), expected, strict=True):
        torch.testing.assert_close(actual, reference)


def test_the_limit_of_compiled_versions_is_raised_and_never_lowered():
    config = private_torch.torch_attribute("_dynamo.config")
    with config.patch(recompile_limit=8):
        private_torch.raise_recompile_limit(20)
        private_torch.raise_recompile_limit(10)
        assert config.recompile_limit == 20


@pytest.mark.parametrize(
    "add",
    ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"],
)
def test_hooks_of_a_module_and_of_all_modules_are_found(add: str):
    layer = torch.nn.Linear(2, 2)
    assert not private_torch.has_hooks(layer)
    handle = getattr(layer, add)(print)
    assert private_torch.has_hooks(layer)
    handle.remove()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert private_torch.has_hooks(layer)
    handle.remove()


def test_private_functions_of_torch_are_used_nowhere_else():
    package = Path(vitrail.__file__).parent
    uses = [
        f"{path.relative_to(package)}:{line}: {name}"
        for path in package.rglob("*.py")
        if path.name != "private_torch.py"
        for line, name in private_names(path)
    ]
    assert uses == []


def private_names(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of every use of a name of torch that begins with an underscore."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            name = node.module or ""
        else:
            continue
        if name.startswith("torch.") and any(
            part.startswith("_") and part != "__version__" for part in name.split(".")
        ):
            yield node.lineno, name

"""Functions of torch that its public interface does not have, each with a plain substitute for when it is missing.

A release of torch may rename or remove them. Everything private that vitrail uses is named here; the results stay the
same without it, up to rounding, and only speed is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Function = TypeVar("Function", bound=Callable[..., object])


@cache
def torch_attribute(path: str) -> Any:
    """The attribute of torch at a dotted path, such as "ops.mkldnn._linear_pointwise"; None if there is none."""
    found: Any = torch
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except (AttributeError, RuntimeError):  # torch.ops raises either
            return None
    return found


def is_plain_eager() -> bool:
    """Whether operators run as they are called: no compilation, tracing, torch.func transform or dispatch mode.

    False where torch does not tell: callers then use the reference implementation, which works everywhere.
    """
    if torch.compiler.is_compiling():
        return False
    tracing, transforms = (
        torch_attribute("_C._get_tracing_state"),
        torch_attribute("_C._functorch.peek_interpreter_stack"),
    )
    num_modes = torch_attribute("_C._len_torch_dispatch_stack")
    if tracing is None or transforms is None or num_modes is None:
        return False
    return tracing() is None and transforms() is None and num_modes() == 0


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module runs hooks, its own or those of all modules, besides its `forward`."""
    own = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    global_hooks = torch_attribute("nn.modules.module._has_any_global_hook")
    return any(own) or global_hooks is None or bool(global_hooks())


def constant_when_compiled(function: Function) -> Function:
    """Decorator: torch.compile calls the function once and keeps its result.

    As `torch.compiler.assume_constant_result`, which imports the compiler. Without it the function is compiled, too.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_when_compiled
def is_exporting() -> bool:
    """Whether torch.export traces. Asked in a compiled function, torch 2.11's own answer is always yes."""
    return torch.compiler.is_exporting()


def raise_recompile_limit(limit: int) -> None:
    """Let torch.compile keep this many versions of one function; the default, 8, is meant for changing shapes."""
    config = torch_attribute("_dynamo.config")
    if hasattr(config, "recompile_limit"):
        config.recompile_limit = max(config.recompile_limit, limit)


Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def linear() -> Linear | None:
    """oneDNN's product with a bias on a CPU; None if this torch does not have it."""
    operator = _linear_pointwise()
    return None if operator is None else lambda x, weight, bias: operator(x, weight, bias, "none", [], "")


def linear_gelu_tanh() -> Linear | None:
    """oneDNN's product with a bias and the tanh GELU on a CPU; None if this torch does not have it."""
    operator = _linear_pointwise()
    return None if operator is None else lambda x, weight, bias: operator(x, weight, bias, "gelu", [], "tanh")


def _linear_pointwise() -> Any:
    enabled = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    return torch_attribute("ops.mkldnn._linear_pointwise") if enabled else None


def softmax_backward(grad: Tensor, weights: Tensor) -> Tensor:
    """Gradient of softmax over the last dimension at its result `weights`."""
    fused = torch_attribute("_softmax_backward_data")
    if fused is not None:
        result: Tensor = fused(grad, weights, -1, weights.dtype)
        return result
    product = grad * weights
    return product - weights * product.sum(-1, keepdim=True)


def resize_uint8(image: Tensor, size: Sequence[int], mode: str, out: Tensor) -> None:
    """Antialiased resizing of uint8 images, n C H W, into `out`; mode "bilinear" or "bicubic"."""
    operator = torch_attribute(f"ops.aten._upsample_{mode}2d_aa.out")
    if operator is not None:
        operator(image, size, False, None, None, out=out)
    else:
        out.copy_(F.interpolate(image, size=tuple(size), mode=mode, align_corners=False, antialias=True))


def foreach_mul_(tensors: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply every tensor in place."""
    if (fused := torch_attribute("_foreach_mul_")) is not None:
        fused(tensors, factor)
    else:
        for tensor in tensors:
            tensor.mul_(factor)


def foreach_add_(tensors: Sequence[Tensor], others: Sequence[Tensor], alpha: float) -> None:
    """tensor += alpha * other, in place."""
    if (fused := torch_attribute("_foreach_add_")) is not None:
        fused(tensors, others, alpha=alpha)
    else:
        for tensor, other in zip(tensors, others, strict=True):
            tensor.add_(other, alpha=alpha)


def foreach_lerp_(tensors: Sequence[Tensor], ends: Sequence[Tensor], weight: float) -> None:
    """tensor += weight * (end - tensor), in place."""
    if (fused := torch_attribute("_foreach_lerp_")) is not None:
        fused(tensors, ends, weight)
    else:
        for tensor, end in zip(tensors, ends, strict=True):
            tensor.lerp_(end, weight)


def foreach_lerp(tensors: Sequence[Tensor], ends: Sequence[Tensor], weight: float) -> list[Tensor]:
    """tensor + weight * (end - tensor)."""
    if (fused := torch_attribute("_foreach_lerp")) is not None:
        return list(fused(tensors, ends, weight))
    return [tensor.lerp(end, weight) for tensor, end in zip(tensors, ends, strict=True)]


ScaledProduct = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]


def scaled_mm() -> ScaledProduct | None:
    """Product of 8-bit floats with scales, to bfloat16, on a GPU: (a, b, scales of a, scales of b, bias)."""
    operator = torch_attribute("_scaled_mm")
    if operator is None:
        return None
    return lambda a, b, scale_a, scale_b, bias: operator(
        a, b, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True
    )

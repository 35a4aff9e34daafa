# mypy: ignore-errors
# (a CuTe kernel is not Python to a type checker)
"""The products of `triton_products` with QuACK's kernels (quack-kernels, the extra `hopper`), for Hopper GPUs.

QuACK inlines a Python function into the epilogue of its matrix product. On Hopper two groups of warps take turns, so
that one computes its epilogue while the other multiplies: an epilogue that takes less time than the product is free.
A kernel is compiled when its shape is first used, in a few seconds.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32
from quack.epilogue.ops import RowVecLoad, RowVecReduce
from quack.gemm_config import GemmConfig
from quack.gemm_runtime import identity
from torch import Tensor

from vitrail.kernels.gelu_polynomial import COEFFICIENTS, EXPONENT, LIMIT, SLOPE

# x: M K; weight: N K; results: M N


def _accept_unknown_values() -> None:
    """QuACK 0.6.5 refuses kernels that depend on values new in nvidia-cutlass-dsl 4.8."""
    strict = identity.semantic_value_key

    def tolerant(value, seen):
        try:
            return strict(value, seen)
        except TypeError:
            return ("unknown", type(value).__module__, type(value).__qualname__)

    identity.semantic_value_key = tolerant


_accept_unknown_values()

from quack.epilogue.frontend import gemm_epilogue  # noqa: E402 - it binds the function replaced above

CONFIGS = {
    "pingpong 128x192, cluster 2x1": GemmConfig(is_dynamic_persistent=False),
    "pingpong 128x160, cluster 2x1": GemmConfig(tile_n=160, is_dynamic_persistent=False),
    "pingpong 128x128, cluster 2x1": GemmConfig(tile_n=128, is_dynamic_persistent=False),
    "pingpong 128x192, cluster 1x2": GemmConfig(cluster_m=1, cluster_n=2, is_dynamic_persistent=False),
    "cooperative 128x256, cluster 2x1": GemmConfig(tile_n=256, pingpong=False, is_dynamic_persistent=False),
    "cooperative 256x128, cluster 2x1": GemmConfig(tile_m=256, tile_n=128, pingpong=False, is_dynamic_persistent=False),
    "cooperative 256x192, cluster 2x1": GemmConfig(tile_m=256, tile_n=192, pingpong=False, is_dynamic_persistent=False),
}
"""Tilings worth a measurement; those that are not named: 128 x 192, cluster 2 x 1, pingpong."""
GELU = CONFIGS["pingpong 128x192, cluster 2x1"]
DGELU = CONFIGS["cooperative 128x256, cluster 2x1"]
RESIDUAL = CONFIGS["pingpong 128x192, cluster 2x1"]
"""Tilings of the three epilogues."""
BIAS = {"bias": RowVecLoad("bias")}


def _tail(x):
    """t = |x| up to the limit, exp(-t^2 / 2), and the polynomial."""
    t = cute.arch.fmin(cute.arch.fmax(x, -x), Float32(LIMIT))
    power = cute.math.exp2(t * t * EXPONENT, fastmath=True)
    polynomial = t * COEFFICIENTS[6] + COEFFICIENTS[5]
    for coefficient in COEFFICIENTS[4::-1]:
        polynomial = polynomial * t + coefficient
    return t, power, polynomial


def _gelu(x):
    t, power, polynomial = _tail(x)
    return cute.arch.fmax(x, Float32(0.0), nan=True) - t * power * polynomial


def _gelu_and_derivative(x):
    t, power, polynomial = _tail(x)
    sign = cute.arch.fmin(cute.arch.fmax(x * 1e30, Float32(-1.0)), Float32(1.0))
    derivative = sign * (0.5 - power * (polynomial - t * SLOPE)) + 0.5
    return cute.arch.fmax(x, Float32(0.0), nan=True) - t * power * polynomial, derivative


@gemm_epilogue(ops=BIAS)
def linear_mod(acc, bias):
    return {"D": acc + bias}


@gemm_epilogue(ops=BIAS)
def linear_residual_mod(acc, c, bias):
    return {"D": acc + bias + c}


@gemm_epilogue(ops=BIAS)
def linear_gelu_mod(acc, bias):
    return {"D": _gelu(acc + bias)}


@gemm_epilogue(ops=BIAS, outputs=("hidden",))
def linear_gelu_keep_mod(acc, bias):
    z = acc + bias
    return {"D": z, "hidden": _gelu(z)}


@gemm_epilogue(outputs=("hidden",), reduces={"sums": RowVecReduce("sums")})
def dgelu_mod(acc, c):
    hidden, derivative = _gelu_and_derivative(c)
    dz = acc * derivative
    return {"D": dz, "hidden": hidden, "sums": dz}


def linear(x: Tensor, weight: Tensor, bias: Tensor, config: GemmConfig = RESIDUAL) -> Tensor:
    return linear_mod(x, weight.t(), bias=bias, config=config)["D"]


def linear_residual(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, config=RESIDUAL) -> Tensor:
    return linear_residual_mod(x, weight.t(), residual, bias=bias, config=config)["D"]


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, config: GemmConfig = GELU) -> Tensor:
    return linear_gelu_mod(x, weight.t(), bias=bias, config=config)["D"]


def linear_gelu_keep(x: Tensor, weight: Tensor, bias: Tensor, config=GELU) -> tuple[Tensor, Tensor]:
    """GELU and its argument."""
    out = linear_gelu_keep_mod(x, weight.t(), bias=bias, config=config)
    return out["hidden"], out["D"]


def dgelu(grad: Tensor, weight: Tensor, argument: Tensor, config=DGELU) -> tuple[Tensor, Tensor, Tensor]:
    """(grad weight) GELU'(argument), GELU(argument), and the column sums of the first; weight: K N."""
    out = dgelu_mod(grad, weight, argument, config=config)
    return out["D"], out["hidden"], out["sums"]

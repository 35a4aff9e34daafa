"""int8 for OpenVINO without calibration images: quantized weights, dynamically quantized activations.

Weights are stored as int8 with one scale per output channel. The scales of the activations are computed at run time,
one per token and group of `group_size` values (engines/openvino_engine.py): no image can exceed a calibrated range, and
a large token does not affect the precision of the others. OpenVINO computes these products in int8 if the CPU has
instructions for it, else in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vitrail.engines.openvino_engine import nodes_of_type
from vitrail.engines.optional_packages import import_optional
from vitrail.errors import ModelError

# I inputs, O outputs of a matrix product

INT8_MAX = 127


def compress(model: Any) -> list[str]:
    """Quantize the weights of an OpenVINO model's matrix products to int8, in place. Returns notes for the user."""
    operators = import_optional("openvino.opset13")
    products = _products(model)
    if not products:
        raise ModelError("this network has no matrix products with constant weights to quantize.")
    for product in products:
        weight = _weight_matrix(product)  # O I
        scale = np.maximum(np.abs(weight).max(1, keepdims=True) / INT8_MAX, 1e-12).astype(np.float32)
        quantized = operators.constant(np.round(weight / scale).astype(np.int8))
        dequantized = operators.multiply(operators.convert(quantized, "f32"), operators.constant(scale))
        replacement = operators.matmul(product.input_value(0), dequantized, False, True)
        replacement.set_friendly_name(product.get_friendly_name())
        product.output(0).replace(replacement.output(0))
    return [
        f"the weights of {len(products)} matrix products are int8; activations are quantized dynamically, per token"
    ]


def _products(model: Any) -> list[Any]:
    """MatMul nodes with a constant floating-point matrix, that is, not yet compressed."""
    return [node for node in nodes_of_type("MatMul", model) if _is_constant_matrix(node.input_value(1).get_node())]


def _is_constant_matrix(node: Any) -> bool:
    return bool(node.get_type_name() == "Constant" and len(node.shape) == 2 and node.get_element_type().is_real())


def _weight_matrix(product: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The weights of a MatMul node as O I, whether or not it transposes them."""
    weight = np.asarray(product.input_value(1).get_node().data, np.float32)
    return weight if product.get_attributes()["transpose_b"] else np.ascontiguousarray(weight.T)

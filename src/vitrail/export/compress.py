"""int8 for OpenVINO without calibration images: quantized weights, dynamically quantized activations.

Weights are stored as int8 with one scale per output channel. The scales of the activations are computed at run time,
one per token and group of `group_size` values: no image can exceed a calibrated range, and a large token does not
affect the precision of the others. OpenVINO computes these products in int8 if the CPU has instructions for it, else in
float32.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from vitrail.errors import ModelError
from vitrail.export.optional_packages import import_optional

# I inputs, O outputs of a matrix product

MAX_GROUP_SIZE = 256
"""Maximum number of activations that share a scale. Larger groups are faster and less accurate."""
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


def group_size(model: Any) -> int:
    """Number of activations that share a scale; 0 if the model has no compressed products.

    The largest number, up to MAX_GROUP_SIZE, that divides the inputs of every compressed product.
    """
    inputs = [product.input_value(1).get_partial_shape()[1].get_length() for product in _compressed_products(model)]
    common = math.gcd(*inputs)
    return next((size for size in range(min(common, MAX_GROUP_SIZE), 0, -1) if common % size == 0), 0)


def _products(model: Any) -> list[Any]:
    """MatMul nodes with a constant floating-point matrix, that is, not yet compressed."""
    return [node for node in _nodes_of_type("MatMul", model) if _is_constant_matrix(node.input_value(1).get_node())]


def _is_constant_matrix(node: Any) -> bool:
    return bool(node.get_type_name() == "Constant" and len(node.shape) == 2 and node.get_element_type().is_real())


def _compressed_products(model: Any) -> list[Any]:
    """MatMul nodes whose matrix is an integer constant times its scales."""
    compressed = []
    for node in _nodes_of_type("MatMul", model):
        scaled = node.input_value(1).get_node()
        if scaled.get_type_name() == "Multiply":
            converted = scaled.input_value(0).get_node()
            if (
                converted.get_type_name() == "Convert"
                and converted.input_value(0).get_node().get_type_name() == "Constant"
            ):
                compressed.append(node)
    return compressed


def _nodes_of_type(op_type: str, model: Any) -> list[Any]:
    return [node for node in model.get_ordered_ops() if node.get_type_name() == op_type]


def _weight_matrix(product: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The weights of a MatMul node as O I, whether or not it transposes them."""
    weight = np.asarray(product.input_value(1).get_node().data, np.float32)
    return weight if product.get_attributes()["transpose_b"] else np.ascontiguousarray(weight.T)

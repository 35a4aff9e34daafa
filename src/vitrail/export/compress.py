"""OpenVINO in 8-bit integers without images to calibrate on: weights rounded, activations as they come.

Weights have one scale for each output channel and lie in the file as integers. Activations get theirs
while the network runs, one for each token and each stretch of `group_size` numbers, so that no image can
lie outside of a range that other images have set, and one large token spoils no other. OpenVINO
computes such a product in integers where the CPU has instructions for it, and in float32 where not.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from vitrail.errors import ModelError
from vitrail.export.optional_packages import import_optional

# I inputs, O outputs of a product

GROUP = 256
"""Numbers that share a scale, at most. Longer stretches are faster and less exact."""
LEVELS = 127


def compress(model: Any) -> list[str]:
    """Write the weights of an OpenVINO model's products as integers; gives what to say of it."""
    operators = import_optional("openvino.opset13")
    products = _products(model)
    if not products:
        raise ModelError("this network has no products with constant weights to write in integers.")
    for product in products:
        weight = _weight(product)  # O I
        step = np.maximum(np.abs(weight).max(1, keepdims=True) / LEVELS, 1e-12).astype(np.float32)
        rounded = operators.constant(np.round(weight / step).astype(np.int8))
        back = operators.multiply(operators.convert(rounded, "f32"), operators.constant(step))
        new = operators.matmul(product.input_value(0), back, False, True)
        new.set_friendly_name(product.get_friendly_name())
        product.output(0).replace(new.output(0))
    return [f"the weights of {len(products)} products are 8-bit integers; activations are rounded token by token"]


def group_size(model: Any) -> int:
    """How many numbers of a token share a scale: as many as divide the inputs of every compressed product; 0: none."""
    inputs = [product.input_value(1).get_partial_shape()[1].get_length() for product in _compressed(model)]
    common = math.gcd(*inputs)
    return next((size for size in range(min(common, GROUP), 0, -1) if common % size == 0), 0)


def _products(model: Any) -> list[Any]:
    """Products with a constant matrix that are not compressed yet."""
    return [node for node in _of("MatMul", model) if _is_matrix(node.input_value(1).get_node())]


def _is_matrix(node: Any) -> bool:
    return bool(node.get_type_name() == "Constant" and len(node.shape) == 2 and node.get_element_type().is_real())


def _compressed(model: Any) -> list[Any]:
    """Products whose matrix is an integer constant times its scales."""
    found = []
    for node in _of("MatMul", model):
        scaled = node.input_value(1).get_node()
        if scaled.get_type_name() == "Multiply":
            turned = scaled.input_value(0).get_node()
            if turned.get_type_name() == "Convert" and turned.input_value(0).get_node().get_type_name() == "Constant":
                found.append(node)
    return found


def _of(kind: str, model: Any) -> list[Any]:
    return [node for node in model.get_ordered_ops() if node.get_type_name() == kind]


def _weight(product: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """O I, whichever way the product has it."""
    weight = np.asarray(product.input_value(1).get_node().data, np.float32)
    return weight if product.get_attributes()["transpose_b"] else np.ascontiguousarray(weight.T)

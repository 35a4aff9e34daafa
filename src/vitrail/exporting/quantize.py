"""Static int8 quantization of ONNX models, calibrated on images.

Activations have one scale per matrix product, from their minimum and maximum over the calibration images; weights have
one per output channel. Products of two activations (queries and keys) stay in float32, and so does a product whose
output quantization would change too much: in a trained ViT, a few of the MLPs' second layers, where one token is
hundreds of times larger than all others. With two such layers of the ImageNet ViT-Ti/16 in int8, ten of a hundred top-1
predictions change.

The graph is written with QuantizeLinear and DequantizeLinear around float operators (QDQ), which ONNX Runtime and
OpenVINO convert to integer arithmetic.

Weights use about seven of their eight bits, so that integer products are the same on every CPU. An x86 CPU without VNNI
instructions multiplies unsigned activations by signed weights with `vpmaddubsw`, which adds two products in 16 bits and
saturates at 32,767. Here no two weights of an output with the same sign add up to more than 128 in absolute value, and
255 x 128 fits, whichever two a kernel adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.engines.optional_packages import import_optional, silence_exporters
from vitrail.errors import ConfigError, ModelError

# N rows of activations, I inputs, O outputs of a product

Floats = npt.NDArray[np.float32]

MAX_RELATIVE_ERROR = 0.04
"""Products with a larger relative error of the output stay in float32."""
MAX_ROWS = 512
"""Maximum number of rows of activations per product on which the error is measured."""
UINT8_MAX = 255  # the largest quantized activation
MAX_PAIR_SUM = 128
"""Largest sum of two quantized weights of one output with the same sign: 255 x 128 = 32,640 fits into 16 bits."""
NO_IMAGES = (
    "int8 in ONNX needs calibration images, similar to those in use: "
    "pass --calibrate FOLDER, or --to openvino, which does not need them."
)


@dataclass
class Product:
    """A product with constant weights, and the range of its activations over the calibration images."""

    node: Any
    weight: Floats
    axis: int
    """Axis of the output channels in the weights."""
    low: float = 0.0
    high: float = 0.0
    rows: list[Floats] = field(default_factory=list)  # sampled activations, each N I; none of convolutions

    @property
    def activation(self) -> str:
        """Name of the activations in the graph."""
        return str(self.node.input[0])

    def observe(self, values: Floats, rng: np.random.Generator, num_rows: int) -> None:
        """Update the range with a batch of activations, and sample `num_rows` of its rows."""
        self.low, self.high = min(self.low, float(values.min())), max(self.high, float(values.max()))
        if self.node.op_type == "MatMul":
            flat = values.reshape(-1, values.shape[-1])
            self.rows.append(flat[rng.choice(len(flat), min(num_rows, len(flat)), replace=False)])

    @property
    def activation_qparams(self) -> tuple[np.float32, np.uint8]:
        """Scale and zero point of the activations."""
        scale = max((self.high - self.low) / UINT8_MAX, 1e-12)
        return np.float32(scale), np.uint8(np.clip(round(-self.low / scale), 0, UINT8_MAX))

    def quantized_weight(self) -> tuple[npt.NDArray[np.int8], Floats]:
        """The int8 weights and their scales, one per output."""
        flat = np.moveaxis(self.weight, self.axis, 0).reshape(self.weight.shape[self.axis], -1)  # O I
        largest = np.abs(flat).max(1)
        pair = np.maximum(_two_largest(flat), _two_largest(-flat))
        # Rounding adds at most a half to each of the two, hence the - 1.
        scale = np.maximum(np.maximum(largest, pair) / (MAX_PAIR_SUM - 1), 1e-12).astype(np.float32)
        scale = scale.reshape([-1 if i == self.axis else 1 for i in range(self.weight.ndim)])
        return np.round(self.weight / scale).astype(np.int8), scale

    def relative_error(self) -> float:
        """Relative error of the output on the sampled rows if both factors are quantized; 0 without rows."""
        if not self.rows:
            return 0.0
        x = np.concatenate(self.rows)  # N I
        scale, zero_point = self.activation_qparams
        dequantized_x = (np.clip(np.round(x / scale) + zero_point, 0, UINT8_MAX) - zero_point).astype(
            np.float32
        ) * scale
        weight, weight_scale = self.quantized_weight()
        exact = x @ self.weight  # N O
        return float(np.linalg.norm(dequantized_x @ (weight * weight_scale) - exact)) / max(
            float(np.linalg.norm(exact)), 1e-12
        )


def _two_largest(rows: Floats) -> Floats:
    """Sum of the two largest values of each row, with negative values counted as 0."""
    count = min(2, rows.shape[1])
    return np.maximum(np.partition(rows, -count, axis=1)[:, -count:], 0).sum(1)


def quantize(model: Any, images: Sequence[npt.NDArray[Any]]) -> tuple[Any, list[str]]:
    """Quantize the products of an ONNX model; `images` are batches of its input. Returns the model and notes."""
    if not images:
        raise ConfigError(NO_IMAGES)
    _replace_gemm(model)
    products = _products(model)
    if not products:
        raise ModelError("this network has no matrix products with constant weights to quantize.")
    _calibrate(model, products, images)
    in_float32 = [p for p in products if p.relative_error() > MAX_RELATIVE_ERROR]
    for number, product in enumerate(p for p in products if p.relative_error() <= MAX_RELATIVE_ERROR):
        _insert_quantization(model, product, number)
    _remove_unused_weights(model)
    count = len(products) - len(in_float32)
    excluded = f"; {len(in_float32)} of {len(products)} products stay in float32 for accuracy" * bool(in_float32)
    return model, [f"{count} products are in int8{excluded}"]


def _replace_gemm(model: Any) -> None:
    """Replace Gemm nodes by MatMul and Add, so that matrix products have one operator."""
    onnx = import_optional("onnx")
    weights = {i.name: i for i in model.graph.initializer}
    nodes = []
    for node in model.graph.node:
        options = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        simple = all(options.get(n, 1.0) == 1.0 for n in ("alpha", "beta")) and not options.get("transA")
        if node.op_type != "Gemm" or node.input[1] not in weights or not simple:
            nodes.append(node)
            continue
        name = node.input[1]
        if options.get("transB"):
            transposed = onnx.numpy_helper.to_array(weights[name]).T
            name = f"{name}_transposed"
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.ascontiguousarray(transposed), name))
        has_bias = len(node.input) > 2
        matmul_output = f"{node.output[0]}_product" if has_bias else node.output[0]
        nodes.append(
            onnx.helper.make_node("MatMul", [node.input[0], name], [matmul_output], name=f"{node.name}_product")
        )
        if has_bias:
            nodes.append(onnx.helper.make_node("Add", [matmul_output, node.input[2]], [node.output[0]], name=node.name))
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _products(model: Any) -> list[Product]:
    """MatMul and Conv nodes with constant float32 weights."""
    onnx = import_optional("onnx")
    weights = {i.name: i for i in model.graph.initializer}
    products = []
    for node in model.graph.node:
        if node.op_type not in ("MatMul", "Conv") or node.input[1] not in weights:
            continue
        weight = onnx.numpy_helper.to_array(weights[node.input[1]])
        if weight.dtype == np.float32 and weight.ndim == (2 if node.op_type == "MatMul" else 4):
            products.append(Product(node, weight, axis=1 if node.op_type == "MatMul" else 0))
    return products


def _calibrate(model: Any, products: list[Product], images: Sequence[npt.NDArray[Any]]) -> None:
    """Run the model on the images with the activations of all products as additional outputs."""
    onnx, onnxruntime = import_optional("onnx"), import_optional("onnxruntime")
    instrumented = onnx.ModelProto()
    instrumented.CopyFrom(model)
    existing = {output.name for output in instrumented.graph.output}
    names = list(dict.fromkeys(p.activation for p in products))
    for name in names:
        if name not in existing:
            instrumented.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    with silence_exporters():
        session = onnxruntime.InferenceSession(
            instrumented.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    rng = np.random.default_rng(0)
    rows_per_batch = max(MAX_ROWS // len(images), 1)
    input_name = session.get_inputs()[0].name
    for batch in images:
        activations = dict(zip(names, session.run(names, {input_name: batch}), strict=True))
        for product in products:
            product.observe(activations[product.activation], rng, rows_per_batch)


def _insert_quantization(model: Any, product: Product, number: int) -> None:
    """Insert QuantizeLinear and DequantizeLinear nodes for both factors of a product."""
    onnx = import_optional("onnx")
    node, name = product.node, f"int8_{number}"
    (scale, zero_point), (weight, weight_scale) = product.activation_qparams, product.quantized_weight()
    constants = {
        "step": np.array(scale),
        "zero": np.array(zero_point),
        "weight": weight,
        "weight_step": weight_scale.reshape(-1),
        "weight_zero": np.zeros(weight_scale.size, np.int8),
    }
    for suffix, value in constants.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, f"{name}_{suffix}"))
    qparams = [f"{name}_step", f"{name}_zero"]
    make_node = onnx.helper.make_node
    nodes = [
        make_node("QuantizeLinear", [node.input[0], *qparams], [f"{name}_near"], name=f"{name}_round"),
        make_node("DequantizeLinear", [f"{name}_near", *qparams], [f"{name}_in"], name=f"{name}_back"),
        make_node(
            "DequantizeLinear",
            [f"{name}_weight", f"{name}_weight_step", f"{name}_weight_zero"],
            [f"{name}_by"],
            axis=product.axis,
            name=f"{name}_weight_back",
        ),
    ]
    index = next(i for i, other in enumerate(model.graph.node) if other.output[0] == node.output[0])
    target = model.graph.node[index]
    target.input[0], target.input[1] = f"{name}_in", f"{name}_by"
    for offset, new_node in enumerate(nodes):
        model.graph.node.insert(index + offset, new_node)


def _remove_unused_weights(model: Any) -> None:
    """Remove the weights that no node uses any more."""
    inputs = {name for node in model.graph.node for name in node.input}
    used = [i for i in model.graph.initializer if i.name in inputs]
    del model.graph.initializer[:]
    model.graph.initializer.extend(used)

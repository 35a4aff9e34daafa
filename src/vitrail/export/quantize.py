"""ONNX in 8-bit integers: products of activations and weights, both rounded, calibrated on images.

Activations get one scale for each product, from the least to the greatest value that the images
show; weights one for each output channel. Products of two activations (queries with keys) stay in
float32, and so does a product that rounding would change too much: in a trained ViT a few of the
MLPs' second layers, where one token is hundreds of times larger than all others. Left in integers,
two such layers of the ImageNet ViT-Ti/16 change ten of a hundred top-1 answers.

Everything is written as QuantizeLinear and DequantizeLinear around plain operators, which ONNX
Runtime and OpenVINO both turn into integer arithmetic.

Weights use about seven of their eight bits, so that integer products are the same on every CPU. An x86
CPU without VNNI instructions multiplies unsigned activations by signed weights with `vpmaddubsw`, which
adds two products in 16 bits and cuts the sum off at 32,767. Here no two weights of an output can sum to
more than 128 in size, and 255 x 128 fits, whichever two a kernel adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.errors import ConfigError, ModelError
from vitrail.export.optional_packages import import_optional, silence_exporters

# N rows of activations, I inputs, O outputs of a product

Floats = npt.NDArray[np.float32]

LOSS = 0.04
"""A product that rounding changes by more than this share of its size stays in float32."""
ROWS = 512
"""Rows of activations that this is measured on, at most, for each product."""
LEVELS = 255
PAIR = 128
"""The largest sum of two weights of one output and sign: 255 x 128 = 32,640 fits into 16 bits."""
NO_IMAGES = (
    "int8 in ONNX needs images to calibrate on, like those it will see: "
    "pass --calibrate FOLDER, or --to openvino, which can do without."
)


@dataclass
class Product:
    """A product with constant weights, and what the images have shown of its other factor."""

    node: Any
    weight: Floats
    axis: int
    """Of the outputs, in the weights."""
    low: float = 0.0
    high: float = 0.0
    rows: list[Floats] = field(default_factory=list)

    @property
    def activation(self) -> str:
        return str(self.node.input[0])

    def see(self, values: Floats, rng: np.random.Generator, share: int) -> None:
        """Widen the range, and keep some rows."""
        self.low, self.high = min(self.low, float(values.min())), max(self.high, float(values.max()))
        if self.node.op_type == "MatMul":
            flat = values.reshape(-1, values.shape[-1])
            self.rows.append(flat[rng.choice(len(flat), min(share, len(flat)), replace=False)])

    @property
    def scale(self) -> tuple[np.float32, np.uint8]:
        """Step and zero point of the activations."""
        step = max((self.high - self.low) / LEVELS, 1e-12)
        return np.float32(step), np.uint8(np.clip(round(-self.low / step), 0, LEVELS))

    def rounded(self) -> tuple[npt.NDArray[np.int8], Floats]:
        """The weights in integers, and their steps: one for each output."""
        flat = np.moveaxis(self.weight, self.axis, 0).reshape(self.weight.shape[self.axis], -1)  # O I
        largest = np.abs(flat).max(1)
        both = np.maximum(_two_largest(flat), _two_largest(-flat))
        # Rounding adds a half to each of the two, so one less than PAIR is theirs to fill.
        step = np.maximum(np.maximum(largest, both) / (PAIR - 1), 1e-12).astype(np.float32)
        step = step.reshape([-1 if i == self.axis else 1 for i in range(self.weight.ndim)])
        return np.round(self.weight / step).astype(np.int8), step

    def loss(self) -> float:
        """How much rounding both factors changes the product, as a share of its size."""
        if not self.rows:
            return 0.0
        x = np.concatenate(self.rows)  # N I
        step, zero = self.scale
        near = (np.clip(np.round(x / step) + zero, 0, LEVELS) - zero).astype(np.float32) * step
        weight, steps = self.rounded()
        exact = x @ self.weight  # N O
        return float(np.linalg.norm(near @ (weight * steps) - exact)) / max(float(np.linalg.norm(exact)), 1e-12)


def _two_largest(rows: Floats) -> Floats:
    """The sum of each row's two largest values, negative ones counted as 0."""
    kept = min(2, rows.shape[1])
    return np.maximum(np.partition(rows, -kept, axis=1)[:, -kept:], 0).sum(1)


def quantize(model: Any, images: Sequence[npt.NDArray[Any]]) -> tuple[Any, list[str]]:
    """The same model with its products in integers, calibrated on what goes into it; and what to say of it."""
    if not images:
        raise ConfigError(NO_IMAGES)
    _plain_products(model)
    products = _products(model)
    if not products:
        raise ModelError("this network has no products with constant weights to write in integers.")
    _calibrate(model, products, images)
    kept = [p for p in products if p.loss() > LOSS]
    for number, product in enumerate(p for p in products if p.loss() <= LOSS):
        _insert(model, product, number)
    _tidy(model)
    count = len(products) - len(kept)
    stay = f"; {len(kept)} of {len(products)} products stay in float32, where rounding costs most" * bool(kept)
    return model, [f"{count} products are in 8-bit integers{stay}"]


def _plain_products(model: Any) -> None:
    """Gemm -> MatMul and Add, so that there is one kind of product."""
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
            turned = onnx.numpy_helper.to_array(weights[name]).T
            name = f"{name}_transposed"
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.ascontiguousarray(turned), name))
        biased = len(node.input) > 2
        middle = f"{node.output[0]}_product" if biased else node.output[0]
        nodes.append(onnx.helper.make_node("MatMul", [node.input[0], name], [middle], name=f"{node.name}_product"))
        if biased:
            nodes.append(onnx.helper.make_node("Add", [middle, node.input[2]], [node.output[0]], name=node.name))
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _products(model: Any) -> list[Product]:
    onnx = import_optional("onnx")
    weights = {i.name: i for i in model.graph.initializer}
    found = []
    for node in model.graph.node:
        if node.op_type not in ("MatMul", "Conv") or node.input[1] not in weights:
            continue
        weight = onnx.numpy_helper.to_array(weights[node.input[1]])
        if weight.dtype == np.float32 and weight.ndim == (2 if node.op_type == "MatMul" else 4):
            found.append(Product(node, weight, axis=1 if node.op_type == "MatMul" else 0))
    return found


def _calibrate(model: Any, products: list[Product], images: Sequence[npt.NDArray[Any]]) -> None:
    """Run the model on images with every product's activations as outputs."""
    onnx, runtime = import_optional("onnx"), import_optional("onnxruntime")
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    there = {output.name for output in watched.graph.output}
    names = list(dict.fromkeys(p.activation for p in products))
    for name in names:
        if name not in there:
            watched.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    with silence_exporters():
        session = runtime.InferenceSession(watched.SerializeToString(), options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    share = max(ROWS // len(images), 1)
    given = session.get_inputs()[0].name
    for batch in images:
        seen = dict(zip(names, session.run(names, {given: batch}), strict=True))
        for product in products:
            product.see(seen[product.activation], rng, share)


def _insert(model: Any, product: Product, number: int) -> None:
    """Round both factors of a product, and say by how much."""
    onnx = import_optional("onnx")
    node, name = product.node, f"int8_{number}"
    (step, zero), (weight, steps) = product.scale, product.rounded()
    constants = {
        "step": np.array(step),
        "zero": np.array(zero),
        "weight": weight,
        "weight_step": steps.reshape(-1),
        "weight_zero": np.zeros(steps.size, np.int8),
    }
    for what, value in constants.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, f"{name}_{what}"))
    around = [f"{name}_step", f"{name}_zero"]
    make = onnx.helper.make_node
    new = [
        make("QuantizeLinear", [node.input[0], *around], [f"{name}_near"], name=f"{name}_round"),
        make("DequantizeLinear", [f"{name}_near", *around], [f"{name}_in"], name=f"{name}_back"),
        make(
            "DequantizeLinear",
            [f"{name}_weight", f"{name}_weight_step", f"{name}_weight_zero"],
            [f"{name}_by"],
            axis=product.axis,
            name=f"{name}_weight_back",
        ),
    ]
    at = next(i for i, other in enumerate(model.graph.node) if other.output[0] == node.output[0])
    here = model.graph.node[at]
    here.input[0], here.input[1] = f"{name}_in", f"{name}_by"
    for offset, one in enumerate(new):
        model.graph.node.insert(at + offset, one)


def _tidy(model: Any) -> None:
    """Without the weights that nothing reads any more."""
    used = {name for node in model.graph.node for name in node.input}
    kept = [i for i in model.graph.initializer if i.name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)

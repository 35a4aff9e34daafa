"""Dynamic int8 in OpenVINO: weights are quantized per output channel, activations per token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.engines.openvino_engine import group_size, openvino_core
from vitrail.errors import ModelError
from vitrail.exporting.compress import INT8_MAX, compress
from vitrail.exporting.engine_cache import cached_engine

openvino = pytest.importorskip("openvino")
ops = pytest.importorskip("openvino.opset13")

# N tokens, I inputs, O outputs


def make_product(weight: np.ndarray, transposed: bool) -> openvino.Model:
    """x -> x W^T for a weight O I, stored transposed or not."""
    x = ops.parameter([-1, weight.shape[1]], np.float32)
    matrix = ops.constant(weight if transposed else np.ascontiguousarray(weight.T))
    return openvino.Model([ops.matmul(x, matrix, False, transposed)], [x], "product")


def run(model: openvino.Model, x: np.ndarray, **options: object) -> np.ndarray:
    settings = {"INFERENCE_PRECISION_HINT": "f32", **options}
    return openvino_core().compile_model(model, "CPU", settings)([x])[0]


@pytest.mark.parametrize("transposed", [False, True])
def test_weights_are_quantized_per_output_channel(transposed: bool):
    rng = np.random.default_rng(0)
    weight = (rng.normal(size=(24, 64)) * np.geomspace(0.01, 10, 24)[:, None]).astype(np.float32)
    model = make_product(weight, transposed)
    compress(model)
    scale = np.abs(weight).max(1, keepdims=True) / INT8_MAX
    dequantized = np.round(weight / scale) * scale
    x = rng.normal(size=(5, 64)).astype(np.float32)
    np.testing.assert_allclose(
        run(model, x, DYNAMIC_QUANTIZATION_GROUP_SIZE=0), x @ dequantized.T, rtol=1e-3, atol=1e-3
    )


def test_a_large_token_does_not_affect_other_tokens():
    rng = np.random.default_rng(1)
    weight = rng.normal(size=(64, 128)).astype(np.float32)
    x = rng.normal(size=(6, 128)).astype(np.float32)
    x[2] *= 1000
    model = make_product(weight, True)
    compress(model)
    outputs, expected = run(model, x, DYNAMIC_QUANTIZATION_GROUP_SIZE=group_size(model)), x @ weight.T
    relative_error = np.linalg.norm(outputs - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert relative_error.max() < 0.03


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 40).map(lambda n: 16 * n), min_size=1, max_size=4))
def test_group_size_divides_the_inputs_of_every_product(sizes: list[int]):
    inputs = [ops.parameter([-1, size], np.float32) for size in sizes]
    weights = [ops.constant(np.ones((8, size), np.float32)) for size in sizes]
    products = [ops.matmul(x, weight, False, True) for x, weight in zip(inputs, weights, strict=True)]
    model = openvino.Model(products, inputs, "two_outputs")
    assert group_size(model) == 0  # not compressed yet
    compress(model)
    group = group_size(model)
    assert 16 <= group <= 256
    assert all(size % group == 0 for size in sizes)


def test_a_network_without_matrix_products_is_refused():
    x = ops.parameter([-1, 4], np.float32)
    with pytest.raises(ModelError, match="no matrix products"):
        compress(openvino.Model([ops.relu(x)], [x], "none"))


def test_a_compressed_network_is_close_to_the_model(tiny, torch_engine, images):
    batch = np.stack(images)
    float32_engine = cached_engine(tiny.net, tiny.info, "openvino")
    int8_engine = cached_engine(tiny.net, tiny.info, "openvino", "int8")
    expected, logits = torch_engine.logits(batch), int8_engine.logits(batch)
    assert int8_engine.precision == "int8"
    assert 0 < np.linalg.norm(logits - expected) / np.linalg.norm(expected) < 0.05
    np.testing.assert_allclose(float32_engine.logits(batch), expected, atol=1e-4)

"""OpenVINO in integers without calibration: weights rounded as NumPy rounds them, activations token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.errors import ModelError
from vitrail.export.compress import LEVELS, compress, group_size
from vitrail.export.engine_cache import cached_engine
from vitrail.export.engines import openvino_core

openvino = pytest.importorskip("openvino")
ops = pytest.importorskip("openvino.opset13")

# N tokens, I inputs, O outputs


def product(weight: np.ndarray, turned: bool) -> openvino.Model:
    """x -> x W' for a weight O I, stored one way or the other."""
    x = ops.parameter([-1, weight.shape[1]], np.float32)
    matrix = ops.constant(weight if turned else np.ascontiguousarray(weight.T))
    return openvino.Model([ops.matmul(x, matrix, False, turned)], [x], "product")


def run(model: openvino.Model, x: np.ndarray, **options: object) -> np.ndarray:
    settings = {"INFERENCE_PRECISION_HINT": "f32", **options}
    return openvino_core().compile_model(model, "CPU", settings)([x])[0]


@pytest.mark.parametrize("turned", [False, True])
def test_weights_are_rounded_row_by_row(turned: bool):
    rng = np.random.default_rng(0)
    weight = (rng.normal(size=(24, 64)) * np.geomspace(0.01, 10, 24)[:, None]).astype(np.float32)
    model = product(weight, turned)
    compress(model)
    step = np.abs(weight).max(1, keepdims=True) / LEVELS
    near = np.round(weight / step) * step
    x = rng.normal(size=(5, 64)).astype(np.float32)
    np.testing.assert_allclose(run(model, x, DYNAMIC_QUANTIZATION_GROUP_SIZE=0), x @ near.T, rtol=1e-3, atol=1e-3)


def test_one_large_token_spoils_no_other():
    rng = np.random.default_rng(1)
    weight = rng.normal(size=(64, 128)).astype(np.float32)
    x = rng.normal(size=(6, 128)).astype(np.float32)
    x[2] *= 1000
    model = product(weight, True)
    compress(model)
    got, expected = run(model, x, DYNAMIC_QUANTIZATION_GROUP_SIZE=group_size(model)), x @ weight.T
    off = np.linalg.norm(got - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert off.max() < 0.03


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 40).map(lambda n: 16 * n), min_size=1, max_size=4))
def test_the_group_divides_every_products_inputs(inputs: list[int]):
    given = [ops.parameter([-1, size], np.float32) for size in inputs]
    weights = [ops.constant(np.ones((8, size), np.float32)) for size in inputs]
    outputs = [ops.matmul(x, weight, False, True) for x, weight in zip(given, weights, strict=True)]
    model = openvino.Model(outputs, given, "two_outputs")
    assert group_size(model) == 0  # nothing is compressed yet
    compress(model)
    group = group_size(model)
    assert 16 <= group <= 256
    assert all(size % group == 0 for size in inputs)


def test_a_network_without_products_is_refused():
    x = ops.parameter([-1, 4], np.float32)
    with pytest.raises(ModelError, match="no products"):
        compress(openvino.Model([ops.relu(x)], [x], "none"))


def test_a_network_in_such_integers_is_smaller_and_close_to_the_model(tiny, own, images):
    batch = np.stack(images)
    exact = cached_engine(tiny.net, tiny.info, "openvino")
    engine = cached_engine(tiny.net, tiny.info, "openvino", "int8")
    expected, got = own.logits(batch), engine.logits(batch)
    assert engine.precision == "int8"
    assert 0 < np.linalg.norm(got - expected) / np.linalg.norm(expected) < 0.05
    np.testing.assert_allclose(exact.logits(batch), expected, atol=1e-4)

"""Static int8 quantization of ONNX models: compared with NumPy; products with large errors stay in float32."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from vitrail.engines.engine import open_file
from vitrail.errors import ConfigError
from vitrail.exporting.quantize import MAX_PAIR_SUM, Product, quantize


def make_product(weight: np.ndarray, rows: np.ndarray) -> Product:
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    result = Product(node, weight.astype(np.float32), axis=1)
    result.observe(rows.astype(np.float32), np.random.default_rng(0), len(rows))
    return result


@given(seed=st.integers(0, 99), size=st.floats(1e-3, 1e3), shift=st.floats(-3, 3))
def test_quantization_error_is_at_most_half_a_step(seed: int, size: float, shift: float):
    rng = np.random.default_rng(seed)
    rows = size * (rng.normal(size=(20, 6)) + shift).astype(np.float32)
    product = make_product(rng.normal(size=(6, 4)), rows)
    scale, zero_point = product.activation_qparams
    dequantized = (np.clip(np.round(rows / scale) + zero_point, 0, 255) - float(zero_point)) * scale
    assert np.abs(dequantized - rows).max() <= 1.01 * scale  # the zero point is rounded, too
    assert scale <= 1.001 * (max(rows.max(), 0) - min(rows.min(), 0)) / 255
    weight, weight_scale = product.quantized_weight()
    assert weight.dtype == np.int8
    assert np.abs(weight * weight_scale - product.weight).max() <= 0.501 * weight_scale.max()
    assert (largest_pair(weight) >= MAX_PAIR_SUM - 2).all()  # each output uses the whole range without saturation
    assert (largest_pair(weight) <= MAX_PAIR_SUM).all()


def largest_pair(weight: np.ndarray, axis: int = 1) -> np.ndarray:
    """Per output: the largest absolute value of an integer weight or of the sum of two weights with the same sign."""
    flat = np.sort(np.moveaxis(weight.astype(np.int64), axis, 0).reshape(weight.shape[axis], -1))  # O I
    return np.maximum(np.maximum(flat, 0)[:, -2:].sum(1), -np.minimum(flat, 0)[:, :2].sum(1))


def multiply_without_vnni(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x @ weight, N I by I O, with the sums of two products saturated at 16 bits, as in `vpmaddubsw`."""
    pairs = x.astype(np.int64)[:, :, None] * weight.astype(np.int64)[None]  # N I O
    pairs = pairs.reshape(len(x), -1, 2, weight.shape[1]).sum(2)
    return np.clip(pairs, -(2**15), 2**15 - 1).sum(1)


def quantize_to_eight_bits(weight: np.ndarray) -> np.ndarray:
    """Quantized weights that use all eight bits, as in files of vitrail 0.1.0."""
    return np.round(weight / (np.abs(weight).max(0, keepdims=True) / 127)).astype(np.int8)


@given(seed=st.integers(0, 999), outliers=st.sampled_from([1, 3, 30]))
def test_quantized_products_never_saturate_without_vnni(seed: int, outliers: int):
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(32, 6))
    weight[rng.integers(0, 32, 4), rng.integers(0, 6, 4)] *= outliers
    quantized, _ = make_product(weight, rng.normal(size=(4, 32))).quantized_weight()
    activations = np.concatenate(
        [255 * (quantized.T > 0), 255 * (quantized.T < 0), rng.integers(0, 256, (8, 32))]
    ).astype(np.uint8)
    for order in (np.arange(32), rng.permutation(32), np.argsort(quantized[:, 0]), np.argsort(-quantized[:, 1])):
        x, w = activations[:, order], quantized[order]
        np.testing.assert_array_equal(multiply_without_vnni(x, w), x.astype(np.int64) @ w.astype(np.int64))


def test_weights_with_all_eight_bits_saturate_without_vnni():
    rng = np.random.default_rng(0)
    weight = quantize_to_eight_bits(rng.normal(size=(32, 6)))
    x = np.repeat(255 * (weight.T > 0), 2, axis=0).astype(np.uint8)
    assert (multiply_without_vnni(x, weight) < x.astype(np.int64) @ weight.astype(np.int64)).any()
    assert largest_pair(weight).max() > MAX_PAIR_SUM


def test_an_output_with_one_input_and_an_output_of_zeros_are_quantized():
    weight, scale = make_product(np.array([[0.5, 0.0]]), np.ones((4, 1))).quantized_weight()
    assert weight.tolist() == [[127, 0]]
    np.testing.assert_allclose(weight * scale, [[0.5, 0.0]], rtol=1e-6)


def test_an_outlier_among_the_activations_increases_the_relative_error():
    rng = np.random.default_rng(0)
    rows, weight = rng.normal(size=(64, 8)), rng.normal(size=(8, 8))
    error_without_outlier = make_product(weight, rows).relative_error()
    rows[0] *= 1e-9
    rows[1, 0] = 3000
    weight[0] = 1e-6  # its weights are so small that it hardly affects the output
    assert error_without_outlier < 0.02 < 0.5 < make_product(weight, rows).relative_error()


def make_model(weight: np.ndarray, gemm: bool) -> onnx.ModelProto:
    """x -> x weight + 1, as MatMul and Add or as Gemm with a transposed weight."""
    bias = numpy_helper.from_array(np.ones(weight.shape[1], np.float32), "b")
    if gemm:
        nodes = [helper.make_node("Gemm", ["x", "w", "b"], ["y"], name="product", transB=1)]
        weight = np.ascontiguousarray(weight.T)
    else:
        nodes = [
            helper.make_node("MatMul", ["x", "w"], ["middle"], name="product"),
            helper.make_node("Add", ["middle", "b"], ["y"], name="bias"),
        ]
    graph_input = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", weight.shape[gemm]])
    graph_output = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", weight.shape[not gemm]])
    onnx_graph = helper.make_graph(
        nodes, "small", [graph_input], [graph_output], [numpy_helper.from_array(weight, "w"), bias]
    )
    return helper.make_model(onnx_graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.parametrize("gemm", [False, True])
def test_the_quantized_graph_computes_the_same_as_numpy(gemm: bool):
    import onnxruntime

    rng = np.random.default_rng(1)
    weight, x = rng.normal(size=(16, 12)).astype(np.float32), rng.normal(size=(40, 16)).astype(np.float32)
    model, notes = quantize(make_model(weight, gemm), [x[:20], x[20:]])
    onnx.checker.check_model(model)
    assert notes == ["1 products are in int8"]
    assert {i.name for i in model.graph.initializer if i.data_type == TensorProto.FLOAT} >= {"b"}
    assert not any(i.name.startswith("w") for i in model.graph.initializer)
    low, high = min(x.min(), 0), max(x.max(), 0)
    scale = np.float32((high - low) / 255)
    zero_point = np.round(-low / scale)
    dequantized_x = (np.clip(np.round(x / scale) + zero_point, 0, 255) - zero_point) * scale
    high, low = (np.maximum(np.sort(sign * weight, axis=0)[-2:], 0).sum(0) for sign in (1, -1))
    weight_scale = np.maximum(high, low) / 127
    expected = dequantized_x @ (np.round(weight / weight_scale) * weight_scale) + 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": x})[0], expected, atol=2e-4)


def test_a_product_with_a_large_error_stays_in_float32():
    rng = np.random.default_rng(0)
    rows, weight = rng.normal(size=(64, 8)).astype(np.float32), rng.normal(size=(8, 8)).astype(np.float32)
    rows[1, 0], weight[0] = 3000, 1e-6
    original = make_model(weight, False)
    op_types = [node.op_type for node in original.graph.node]
    model, notes = quantize(original, [rows])
    assert [node.op_type for node in model.graph.node] == op_types
    assert "1 of 1 products stay in float32" in notes[0]


def test_int8_without_calibration_images_is_refused():
    with pytest.raises(ConfigError, match="--calibrate FOLDER"):
        quantize(make_model(np.eye(4, dtype=np.float32), False), [])


def integer_weights(model: onnx.ModelProto) -> list[tuple[np.ndarray, int]]:
    """The int8 weights of every quantized product, and their axis of output channels."""
    values = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    weights = []
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in values:
            axis = next(a.i for a in node.attribute if a.name == "axis")
            weights.append((values[node.input[0]], axis))
    return weights


def test_quantized_convolutions_never_saturate():
    rng = np.random.default_rng(0)
    weight, x = rng.normal(size=(8, 3, 4, 4)).astype(np.float32), rng.normal(size=(2, 3, 16, 16)).astype(np.float32)
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="patches", strides=[4, 4])
    graph_input = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 16, 16])
    graph_output = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8, 4, 4])
    onnx_graph = helper.make_graph(
        [node], "small", [graph_input], [graph_output], [numpy_helper.from_array(weight, "w")]
    )
    model, _ = quantize(helper.make_model(onnx_graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), [x])
    [(quantized, axis)] = integer_weights(model)
    assert (quantized.shape, axis) == (weight.shape, 0)
    assert largest_pair(quantized, axis).max() <= MAX_PAIR_SUM


def test_an_int8_network_runs_in_both_engines(int8_file, torch_engine, images):
    assert int8_file.comparison.relative_error > 1e-4  # the file does not compute in float32
    assert not int8_file.metadata.saturates
    model = onnx.load(str(int8_file.path))
    assert [node.op_type for node in model.graph.node].count("QuantizeLinear") == len(integer_weights(model)) >= 5
    for weight, axis in integer_weights(model):
        assert weight.dtype == np.int8
        assert largest_pair(weight, axis).max() <= MAX_PAIR_SUM
    batch = np.stack(images)
    expected = torch_engine.logits(batch)
    for engine in ("onnxruntime", "openvino"):
        logits = open_file(int8_file.path, engine).logits(batch)
        assert np.linalg.norm(logits - expected) / np.linalg.norm(expected) < 0.05


SCRIPT = """
import sys
import numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
numpy.save(sys.argv[3], session.run(None, {"pixels": numpy.load(sys.argv[2])})[0])
"""


@pytest.mark.slow
def test_a_cpu_without_vnni_gives_the_same_outputs(int8_file, images, tmp_path):
    emulator = shutil.which("qemu-x86_64")
    if emulator is None or platform.machine() != "x86_64":
        pytest.skip("needs an x86-64 CPU and qemu-x86_64 (on Debian: apt install qemu-user)")
    np.save(tmp_path / "in.npy", np.stack(images))
    command = [emulator, "-cpu", "Haswell", sys.executable, "-c", SCRIPT, int8_file.path]
    subprocess.run([*command, tmp_path / "in.npy", tmp_path / "out.npy"], check=True, capture_output=True)
    expected = open_file(int8_file.path).outputs(np.stack(images))
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, rtol=1e-4, atol=1e-5)

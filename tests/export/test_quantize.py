"""int8: what is rounded and how much, held against NumPy; what rounding would spoil stays in float32."""

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

from vitrail.errors import ConfigError
from vitrail.export.engines import open_file
from vitrail.export.quantize import PAIR, Product, quantize


def product(weight: np.ndarray, rows: np.ndarray) -> Product:
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    made = Product(node, weight.astype(np.float32), axis=1)
    made.see(rows.astype(np.float32), np.random.default_rng(0), len(rows))
    return made


@given(seed=st.integers(0, 99), size=st.floats(1e-3, 1e3), shift=st.floats(-3, 3))
def test_rounding_moves_a_number_by_half_a_step_at_most(seed: int, size: float, shift: float):
    rng = np.random.default_rng(seed)
    rows = size * (rng.normal(size=(20, 6)) + shift).astype(np.float32)
    made = product(rng.normal(size=(6, 4)), rows)
    step, zero = made.scale
    back = (np.clip(np.round(rows / step) + zero, 0, 255) - float(zero)) * step
    assert np.abs(back - rows).max() <= 1.01 * step  # the zero point is rounded, too
    assert step <= 1.001 * (max(rows.max(), 0) - min(rows.min(), 0)) / 255
    weight, steps = made.rounded()
    assert weight.dtype == np.int8
    assert np.abs(weight * steps - made.weight).max() <= 0.501 * steps.max()
    assert (largest_pair(weight) >= PAIR - 2).all()  # each output uses all of the range that is safe
    assert (largest_pair(weight) <= PAIR).all()


def largest_pair(weight: np.ndarray, axis: int = 1) -> np.ndarray:
    """Of each output: the largest sum, in size, of one of its integer weights or of two with the same sign."""
    flat = np.sort(np.moveaxis(weight.astype(np.int64), axis, 0).reshape(weight.shape[axis], -1))  # O I
    return np.maximum(np.maximum(flat, 0)[:, -2:].sum(1), -np.minimum(flat, 0)[:, :2].sum(1))


def without_vnni(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x times weight, N I by I O, as `vpmaddubsw` has it: sums of two products are cut off at 16 bits."""
    pairs = x.astype(np.int64)[:, :, None] * weight.astype(np.int64)[None]  # N I O
    pairs = pairs.reshape(len(x), -1, 2, weight.shape[1]).sum(2)
    return np.clip(pairs, -(2**15), 2**15 - 1).sum(1)


def full_range(weight: np.ndarray) -> np.ndarray:
    """Integer weights that use all eight bits, as in files of vitrail 0.1.0."""
    return np.round(weight / (np.abs(weight).max(0, keepdims=True) / 127)).astype(np.int8)


@given(seed=st.integers(0, 999), outliers=st.sampled_from([1, 3, 30]))
def test_no_activations_and_no_order_of_inputs_saturate_without_vnni(seed: int, outliers: int):
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(32, 6))
    weight[rng.integers(0, 32, 4), rng.integers(0, 6, 4)] *= outliers
    made, _ = product(weight, rng.normal(size=(4, 32))).rounded()
    worst = np.concatenate([255 * (made.T > 0), 255 * (made.T < 0), rng.integers(0, 256, (8, 32))]).astype(np.uint8)
    for order in (np.arange(32), rng.permutation(32), np.argsort(made[:, 0]), np.argsort(-made[:, 1])):
        x, w = worst[:, order], made[order]
        np.testing.assert_array_equal(without_vnni(x, w), x.astype(np.int64) @ w.astype(np.int64))


def test_weights_of_all_eight_bits_saturate_without_vnni():
    rng = np.random.default_rng(0)
    weight = full_range(rng.normal(size=(32, 6)))
    x = np.repeat(255 * (weight.T > 0), 2, axis=0).astype(np.uint8)
    assert (without_vnni(x, weight) < x.astype(np.int64) @ weight.astype(np.int64)).any()
    assert largest_pair(weight).max() > PAIR


def test_an_output_of_one_input_and_one_of_zeros_are_rounded_too():
    weight, steps = product(np.array([[0.5, 0.0]]), np.ones((4, 1))).rounded()
    assert weight.tolist() == [[127, 0]]
    np.testing.assert_allclose(weight * steps, [[0.5, 0.0]], rtol=1e-6)


def test_one_giant_among_small_numbers_is_what_rounding_spoils():
    rng = np.random.default_rng(0)
    rows, weight = rng.normal(size=(64, 8)), rng.normal(size=(8, 8))
    even = product(weight, rows).loss()
    rows[0] *= 1e-9
    rows[1, 0] = 3000
    weight[0] = 1e-6  # and it hardly matters to the result
    assert even < 0.02 < 0.5 < product(weight, rows).loss()


def graph(weight: np.ndarray, gemm: bool) -> onnx.ModelProto:
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
    given_ = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", weight.shape[gemm]])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", weight.shape[not gemm]])
    made = helper.make_graph(nodes, "small", [given_], [out], [numpy_helper.from_array(weight, "w"), bias])
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.parametrize("gemm", [False, True])
def test_the_graph_computes_what_numpy_does_with_rounded_factors(gemm: bool):
    import onnxruntime

    rng = np.random.default_rng(1)
    weight, x = rng.normal(size=(16, 12)).astype(np.float32), rng.normal(size=(40, 16)).astype(np.float32)
    made, notes = quantize(graph(weight, gemm), [x[:20], x[20:]])
    onnx.checker.check_model(made)
    assert notes == ["1 products are in 8-bit integers"]
    assert {i.name for i in made.graph.initializer if i.data_type == TensorProto.FLOAT} >= {"b"}
    assert not any(i.name.startswith("w") for i in made.graph.initializer)
    low, high = min(x.min(), 0), max(x.max(), 0)
    step = np.float32((high - low) / 255)
    zero = np.round(-low / step)
    near = (np.clip(np.round(x / step) + zero, 0, 255) - zero) * step
    high, low = (np.maximum(np.sort(sign * weight, axis=0)[-2:], 0).sum(0) for sign in (1, -1))
    steps = np.maximum(high, low) / 127
    expected = near @ (np.round(weight / steps) * steps) + 1
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": x})[0], expected, atol=2e-4)


def test_what_rounding_would_spoil_stays_as_it_was():
    rng = np.random.default_rng(0)
    rows, weight = rng.normal(size=(64, 8)).astype(np.float32), rng.normal(size=(8, 8)).astype(np.float32)
    rows[1, 0], weight[0] = 3000, 1e-6
    before = graph(weight, False)
    kinds = [node.op_type for node in before.graph.node]
    made, notes = quantize(before, [rows])
    assert [node.op_type for node in made.graph.node] == kinds
    assert "1 of 1 products stay in float32" in notes[0]


def test_int8_without_images_is_refused():
    with pytest.raises(ConfigError, match="--calibrate FOLDER"):
        quantize(graph(np.eye(4, dtype=np.float32), False), [])


def integer_weights(model: onnx.ModelProto) -> list[tuple[np.ndarray, int]]:
    """Of every quantized product: its weights, and the axis of its outputs."""
    values = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    found = []
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in values:
            axis = next(a.i for a in node.attribute if a.name == "axis")
            found.append((values[node.input[0]], axis))
    return found


def test_convolutions_cannot_saturate_either():
    rng = np.random.default_rng(0)
    weight, x = rng.normal(size=(8, 3, 4, 4)).astype(np.float32), rng.normal(size=(2, 3, 16, 16)).astype(np.float32)
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="patches", strides=[4, 4])
    given_ = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 16, 16])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8, 4, 4])
    parts = helper.make_graph([node], "small", [given_], [out], [numpy_helper.from_array(weight, "w")])
    made, _ = quantize(helper.make_model(parts, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), [x])
    [(rounded, axis)] = integer_weights(made)
    assert (rounded.shape, axis) == (weight.shape, 0)
    assert largest_pair(rounded, axis).max() <= PAIR


def test_a_network_in_int8_is_smaller_and_runs_in_both_engines(int8_file, own, images):
    assert int8_file.comparison.relative > 1e-4  # it is another computation indeed
    assert not int8_file.metadata.saturates
    model = onnx.load(str(int8_file.path))
    assert [node.op_type for node in model.graph.node].count("QuantizeLinear") == len(integer_weights(model)) >= 5
    for weight, axis in integer_weights(model):
        assert weight.dtype == np.int8
        assert largest_pair(weight, axis).max() <= PAIR
    batch = np.stack(images)
    expected = own.logits(batch)
    for engine in ("onnxruntime", "openvino"):
        got = open_file(int8_file.path, engine).logits(batch)
        assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 0.05


EMULATED = """
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
    command = [emulator, "-cpu", "Haswell", sys.executable, "-c", EMULATED, int8_file.path]
    subprocess.run([*command, tmp_path / "in.npy", tmp_path / "out.npy"], check=True, capture_output=True)
    here = open_file(int8_file.path).outputs(np.stack(images))
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), here, rtol=1e-4, atol=1e-5)

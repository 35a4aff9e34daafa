"""int8: what is rounded and how much, held against NumPy; what rounding would spoil stays in float32."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from vitrail.errors import ConfigError
from vitrail.export.engines import open_file
from vitrail.export.export import export
from vitrail.export.quantise import Product, quantise
from vitrail.export.sheet import Sheet


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
    assert (np.abs(weight).max(0) == 127).all()  # each output uses its whole range


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
    made, notes = quantise(graph(weight, gemm), [x[:20], x[20:]])
    onnx.checker.check_model(made)
    assert notes == ["1 products are in 8-bit integers"]
    assert {i.name for i in made.graph.initializer if i.data_type == TensorProto.FLOAT} >= {"b"}
    assert not any(i.name.startswith("w") for i in made.graph.initializer)
    low, high = min(x.min(), 0), max(x.max(), 0)
    step = np.float32((high - low) / 255)
    zero = np.round(-low / step)
    near = (np.clip(np.round(x / step) + zero, 0, 255) - zero) * step
    steps = np.abs(weight).max(0) / 127
    wanted = near @ (np.round(weight / steps) * steps) + 1
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": x})[0], wanted, atol=2e-4)


def test_what_rounding_would_spoil_stays_as_it_was():
    rng = np.random.default_rng(0)
    rows, weight = rng.normal(size=(64, 8)).astype(np.float32), rng.normal(size=(8, 8)).astype(np.float32)
    rows[1, 0], weight[0] = 3000, 1e-6
    before = graph(weight, False)
    kinds = [node.op_type for node in before.graph.node]
    made, notes = quantise(before, [rows])
    assert [node.op_type for node in made.graph.node] == kinds
    assert "1 of 1 products stay in float32" in notes[0]


def test_int8_without_pictures_is_refused():
    with pytest.raises(ConfigError, match="--calibrate FOLDER"):
        quantise(graph(np.eye(4, dtype=np.float32), False), [])


def test_a_network_in_int8_is_smaller_and_runs_in_both_engines(tiny, own, pictures, tmp_path):
    sheet = Sheet(card=tiny.card, to="onnx", precision="int8", answer="logits")
    made = export(tiny.net, sheet, tmp_path / "tiny.onnx", pictures, calibration=pictures, timed=False)
    assert made.comparison.relative > 1e-4  # it is another computation indeed
    kinds = [node.op_type for node in onnx.load(str(made.path)).graph.node]
    assert kinds.count("QuantizeLinear") >= 5
    batch = np.stack(pictures)
    wanted = own.logits(batch)
    for engine in ("onnxruntime", "openvino"):
        got = open_file(made.path, engine).logits(batch)
        assert np.linalg.norm(got - wanted) / np.linalg.norm(wanted) < 0.05

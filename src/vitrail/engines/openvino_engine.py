"""OpenVINO: reads an exported file and compiles it for single images, for batches, or for both."""

from __future__ import annotations

import math
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.engines.export_metadata import KEY, ExportMetadata, check_graph, parse_metadata, warn_of_saturation
from vitrail.engines.optional_packages import error_summary, import_optional, silence_exporters
from vitrail.errors import CheckpointError, ConfigError
from vitrail.runtime.amx import ISA_VARIABLE, WITHOUT_AMX, disable_broken_amx
from vitrail.runtime.cpu import detect_cpu
from vitrail.runtime.signal_stack import preserve_signal_stack

Pixels = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

MAX_GROUP_SIZE = 256
"""Maximum number of activations that share a scale. Larger groups are faster and less accurate."""
BELOW_AVX512 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2")
"""Values of ONEDNN_MAX_CPU_ISA that exclude AVX-512."""


def read_openvino(path: Path, threads: int | None, concurrency: int) -> tuple[ExportMetadata, CompiledModel]:
    """Read and compile an OpenVINO or ONNX file that vitrail wrote."""
    core = openvino_core()
    try:
        with silence_exporters():
            model = core.read_model(str(path))
            text = model.get_rt_info([KEY]).astype(str) if model.has_rt_info([KEY]) else None
            metadata = parse_metadata(text or _onnx_metadata(path), path)
            check_graph(metadata, _port_shape(model.inputs[0]), _port_shape(model.outputs[0]), path)
            # By default, OpenVINO computes in bfloat16 if the CPU supports it.
            settings: dict[str, Any] = {
                "INFERENCE_PRECISION_HINT": "bf16" if metadata.precision == "bfloat16" else "f32"
            }
            settings |= {"INFERENCE_NUM_THREADS": threads} if threads else {}
            group = group_size(model) if metadata.precision == "int8" else None
            settings |= {"DYNAMIC_QUANTIZATION_GROUP_SIZE": group} if group is not None else {}
            if not group:  # dynamic quantization is used on CPUs with VNNI only
                warn_of_saturation(metadata, path)
            compiled = CompiledModel(
                lambda hint: core.compile_model(model, "CPU", settings | hint), concurrency, metadata.batch_size
            )
    except RuntimeError as error:
        raise CheckpointError(f"{path} cannot be run by OpenVINO: {error_summary(error)}.") from error
    return metadata, compiled


def _port_shape(port: Any) -> list[int | None]:
    """Shape of an OpenVINO input or output; None for a dynamic dimension."""
    return [None if dim.is_dynamic else dim.get_length() for dim in port.partial_shape]


def group_size(model: Any) -> int:
    """Number of activations that share a scale; 0 if the model has no compressed products.

    The largest number, up to MAX_GROUP_SIZE, that divides the inputs of every compressed product.
    """
    inputs = [product.input_value(1).get_partial_shape()[1].get_length() for product in _compressed_products(model)]
    common = math.gcd(*inputs)
    return next((size for size in range(min(common, MAX_GROUP_SIZE), 0, -1) if common % size == 0), 0)


def _compressed_products(model: Any) -> list[Any]:
    """MatMul nodes whose matrix is an integer constant times its scales."""
    compressed = []
    for node in nodes_of_type("MatMul", model):
        scaled = node.input_value(1).get_node()
        if scaled.get_type_name() == "Multiply":
            converted = scaled.input_value(0).get_node()
            if (
                converted.get_type_name() == "Convert"
                and converted.input_value(0).get_node().get_type_name() == "Constant"
            ):
                compressed.append(node)
    return compressed


def nodes_of_type(op_type: str, model: Any) -> list[Any]:
    return [node for node in model.get_ordered_ops() if node.get_type_name() == op_type]


class CompiledModel:
    """An OpenVINO model, compiled on first use for single images, for batches, or for both.

    A batch is split among the cores: cores that process their own images need no synchronization, which is about 10 %
    faster on two cores. A single image is faster on all cores, but uses the version for batches if only that one is
    compiled.
    """

    def __init__(self, compile_for: Callable[[dict[str, Any]], Any], concurrency: int, batch_size: int | None) -> None:
        self.compile_for, self.concurrency, self.batch_size = compile_for, concurrency, batch_size
        self.lock = threading.Lock()
        self.single_requests: queue.SimpleQueue[Any] | None = None
        """The request that uses all cores, while it is idle."""
        self.shared_requests: queue.SimpleQueue[Any] | None = None
        """Idle requests that each use a share of the cores."""
        if concurrency > 1:
            self._compile_shared()

    def __call__(self, inputs: Pixels) -> Floats:
        max_parts = len(inputs) if self.batch_size is None else 1  # a fixed batch is not split
        idle_requests = self._idle_requests(max_parts)
        requests = [idle_requests.get()]
        try:
            while len(requests) < max_parts:  # do not wait while holding a request
                requests.append(idle_requests.get_nowait())
        except queue.Empty:
            pass
        parts, started = np.array_split(inputs, len(requests)), []
        try:
            for request, part in zip(requests, parts, strict=True):
                started.append(request)
                request.start_async([part], share_inputs=True)
            return np.concatenate([_wait_for_output(request) for request in requests])
        finally:
            for request in started:  # after an interrupt, no request may still read the pixels
                with suppress(RuntimeError):
                    request.wait()
            for request in requests:
                idle_requests.put(request)

    def _idle_requests(self, max_parts: int) -> queue.SimpleQueue[Any]:
        with self.lock:
            if self.shared_requests is not None and (max_parts > 1 or self.single_requests is None):
                return self.shared_requests
            if max_parts > 1:
                return self._compile_shared()
            if self.single_requests is None:
                self.single_requests = queue.SimpleQueue()
                self.single_requests.put(self.compile_for({"PERFORMANCE_HINT": "LATENCY"}).create_infer_request())
            return self.single_requests

    def _compile_shared(self) -> queue.SimpleQueue[Any]:
        hint = {"NUM_STREAMS": self.concurrency} if self.concurrency > 1 else {"PERFORMANCE_HINT": "THROUGHPUT"}
        compiled = self.compile_for(hint)
        self.shared_requests = queue.SimpleQueue()
        for _ in range(compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS")):
            self.shared_requests.put(compiled.create_infer_request())
        return self.shared_requests


def _wait_for_output(request: Any) -> Floats:
    """Wait for a request; returns a copy of its output."""
    request.wait()
    return np.array(request.get_output_tensor(0).data)


def _onnx_metadata(path: Path) -> str | None:
    """Metadata of an ONNX file, which OpenVINO does not read; None for other files."""
    if path.suffix.lower() != ".onnx":
        return None
    properties = import_optional("onnx").load(str(path), load_external_data=False).metadata_props
    return next((entry.value for entry in properties if entry.key == KEY), None)


def openvino_core() -> Any:
    """An OpenVINO core, after its ISA limit has been set: it is read once, when the first model is compiled."""
    openvino = import_optional("openvino")
    try:
        disable_broken_amx()
    except ConfigError:  # too late for torch, but not for OpenVINO
        os.environ.setdefault(ISA_VARIABLE, WITHOUT_AMX)
    with preserve_signal_stack():
        _start_openvino()
        core = openvino.Core()
        core.set_property({"ENABLE_MMAP": False})  # a mapped file must not be modified or truncated
        core.get_property("CPU", "FULL_DEVICE_NAME")  # loads the CPU plugin, which changes the signal stack
    return core


@lru_cache(maxsize=1)
def _start_openvino() -> None:
    """Compile a small model, so that OpenVINO reads its own ISA limit if that differs from the environment's."""
    env_limit, limit = os.environ.get(ISA_VARIABLE, ""), openvino_limit()
    if env_limit == limit:
        return
    openvino, operators = import_optional("openvino"), import_optional("openvino.opset13")
    x = operators.parameter([-1, 16], np.float32)
    os.environ[ISA_VARIABLE] = limit
    try:
        openvino.Core().compile_model(openvino.Model([operators.relu(x)], [x], "first"), "CPU")
    finally:
        os.environ[ISA_VARIABLE] = env_limit


def openvino_limit() -> str:
    """Value of ONEDNN_MAX_CPU_ISA for OpenVINO; empty if there is no limit.

    A limit below AVX-512 is raised on a CPU with AVX-512: only some of OpenVINO's kernels respect it, and others crash
    with a segmentation fault or fail to compile (int8, bfloat16).
    """
    env_limit = os.environ.get(ISA_VARIABLE, "")
    return WITHOUT_AMX if env_limit.upper() in BELOW_AVX512 and "AVX-512" in detect_cpu().instructions else env_limit

"""Inference engines with one interface: torch, ONNX Runtime and OpenVINO.

    engine = open_engine("model.onnx")
    engine.logits(pixels)    # B H W C, as from Preprocess.pixels -> B outputs

Engines are thread-safe. With `concurrency` > 1, that many concurrent calls share the cores; else one call uses all of
them.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from vitrail.data.preprocess import Preprocess
from vitrail.errors import CheckpointError, ConfigError, did_you_mean
from vitrail.export.compress import group_size
from vitrail.export.export_metadata import KEY, ExportMetadata
from vitrail.export.export_options import is_exported, weights_path
from vitrail.export.formats import check_graph, error_summary, parse_metadata, read_program
from vitrail.export.optional_packages import import_optional, silence_exporters
from vitrail.models import Net
from vitrail.models.base import eval_mode
from vitrail.runtime import pick_device, warn_once
from vitrail.runtime.amx import ISA_VARIABLE, WITHOUT_AMX, check_bfloat16, disable_broken_amx
from vitrail.runtime.cores import usable_cores
from vitrail.runtime.cpu import detect_cpu
from vitrail.runtime.signal_stack import preserve_signal_stack
from vitrail.weights.loading import load_checkpoint
from vitrail.weights.locate import ModelLocation
from vitrail.weights.model_info import ModelInfo

# B images, H x W pixels, C channels, K outputs

Pixels = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
EngineName = Literal["torch", "onnxruntime", "openvino"]

ENGINES = ("torch", "onnxruntime", "openvino", "auto")
ENGINES_BY_SUFFIX: dict[str, tuple[EngineName, ...]] = {
    ".onnx": ("onnxruntime", "openvino"),
    ".pt2": ("torch",),
    ".xml": ("openvino",),
}
"""Engines that can run a file, by its suffix; the first one is the default."""
SATURATES = (
    "this int8 file was written by an older version of vitrail: on this CPU, which has no VNNI instructions, sums of "
    "its 8-bit products can saturate at 16 bits and give wrong outputs; export the model again"
)
BELOW_AVX512 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2")
"""Values of ONEDNN_MAX_CPU_ISA that exclude AVX-512."""


class Engine(Protocol):
    """Runs a network on batches of pixels."""

    @property
    def name(self) -> EngineName: ...

    @property
    def precision(self) -> str:
        """Precision of the computation: float32, bfloat16 or int8."""

    @property
    def info(self) -> ModelInfo:
        """Preprocessing, class names and task of the model."""

    def logits(self, pixels: Pixels) -> Floats:
        """B H W C, 0 to 255 -> logits or features, B K; probabilities of a file are converted to logits."""


class TorchEngine:
    """Runs a vitrail network in torch."""

    name: EngineName = "torch"

    def __init__(self, net: Net, info: ModelInfo, device: str | torch.device = "cpu") -> None:
        self.net, self.info, self.device = net.to(pick_device(device)), info, pick_device(device)
        self.preprocess = Preprocess(info.preprocess)
        self.dtype = next(net.parameters()).dtype
        if self.dtype == torch.bfloat16 and self.device.type == "cpu":
            check_bfloat16()

    @property
    def precision(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @torch.no_grad()
    def logits(self, pixels: Pixels) -> Floats:
        batch = torch.from_numpy(pixels).to(self.device).permute(0, 3, 1, 2)
        with eval_mode(self.net):
            out: torch.Tensor = self.net(self.preprocess.normalize(batch).to(self.dtype))
        return out.to("cpu", torch.float32).numpy()


class FileEngine:
    """Runs an exported file. `run` maps the input of the file to its output."""

    def __init__(self, name: EngineName, metadata: ExportMetadata, run: Callable[[Pixels], Floats]) -> None:
        self.name, self.metadata, self.run = name, metadata, run
        self.preprocess = Preprocess(metadata.info.preprocess)

    @property
    def info(self) -> ModelInfo:
        return self.metadata.info

    @property
    def precision(self) -> str:
        return self.metadata.precision

    def logits(self, pixels: Pixels) -> Floats:
        out = self.outputs(pixels)
        if self.metadata.output_type != "probabilities":
            return out
        tiny = np.finfo(np.float32).tiny
        logs = np.log(np.maximum(out, tiny))
        return logs - np.log(np.maximum(1 - out, tiny)) if self.info.multi_label else logs

    def outputs(self, pixels: Pixels) -> Floats:
        """B H W C, 0 to 255 -> the output of the file, B K; a fixed batch size is applied in parts."""
        inputs = self.to_input(pixels)
        batch_size = self.metadata.batch_size
        if batch_size is None:
            return self.run(inputs)
        outputs = [
            self.run(_padded(inputs[i : i + batch_size], batch_size))[: len(inputs) - i]
            for i in range(0, len(inputs), batch_size)
        ]
        return np.concatenate(outputs)

    def with_info(self, info: ModelInfo) -> FileEngine:
        """The same file with another model info, for example with other class names."""
        return FileEngine(self.name, replace(self.metadata, info=info), self.run)

    def __repr__(self) -> str:
        return f"<{self.name} in {self.precision}: {self.info.origin or self.info.family}>"

    def to_input(self, pixels: Pixels) -> Pixels:
        """B H W C, 0 to 255 -> the input of the file: pixels, B H W C, or normalized images, B C H W."""
        if self.metadata.normalize_inside:
            dtype = np.uint8 if self.metadata.takes_uint8 else np.float32
            return np.ascontiguousarray(pixels, dtype)
        return self.preprocess.normalize(torch.from_numpy(pixels).permute(0, 3, 1, 2)).numpy()


def _padded(batch: Pixels, size: int) -> Pixels:
    """Append black images up to a full batch."""
    missing = size - len(batch)
    return batch if not missing else np.concatenate([batch, np.zeros((missing, *batch.shape[1:]), batch.dtype)])


def open_engine(
    source: Any,
    engine: str | None = None,
    device: str | torch.device = "auto",
    threads: int | None = None,
    calibrate: Sequence[Any] = (),
    concurrency: int = 1,
    **options: Any,
) -> Engine:
    """Open an engine for an exported file, a model, or any source that `vitrail.load` accepts.

    engine: "torch", "onnxruntime", "openvino", or "auto": the fastest installed engine whose outputs match those of the
        model. The default is torch, or for an exported file its own engine. For another engine, a model is exported on
        the first call, and the files are cached.
    device: of torch; the other engines run on the CPU.
    threads: number of cores to use, for all calls together; the default is all cores.
    calibrate: images for static int8 quantization with "auto".
    concurrency: expected number of concurrent calls.
    options: those of `load_checkpoint`.
    """
    if engine is not None and engine not in ENGINES:
        raise ConfigError(f"no engine {engine!r}{did_you_mean(engine, ENGINES)}")
    if threads is not None and threads < 1:
        raise ConfigError(f"threads={threads}: expected 1 or more.")
    if is_exported(source):
        from vitrail.export import autotune  # it imports this module

        return autotune.open_export(Path(source), engine, threads, concurrency)
    if isinstance(source, str | Path | ModelLocation):
        net, info = load_checkpoint(source, **options)
    else:
        net, info = source.net, source.info
    target = pick_device(device)
    if engine in (None, "torch"):
        return torch_engine(net, info, target, threads, concurrency)
    from vitrail.export import autotune, engine_cache  # they import this module

    if engine == "auto":
        return autotune.fastest_engine(net, info, target, threads, calibrate, concurrency)
    return engine_cache.cached_engine(net, info, engine, "float32", threads, concurrency)


def torch_engine(
    net: Net, info: ModelInfo, device: str | torch.device = "cpu", threads: int | None = None, concurrency: int = 1
) -> TorchEngine:
    """A network on a device; sets torch's number of threads."""
    _set_torch_threads(threads, concurrency)
    return TorchEngine(net, info, device)


def _set_torch_threads(threads: int | None, concurrency: int) -> None:
    """Set the number of threads that torch uses for a call."""
    if threads is not None or concurrency > 1:
        torch.set_num_threads(_threads_per_call(threads, concurrency))


def _threads_per_call(threads: int | None, concurrency: int) -> int:
    """Number of cores of each of `concurrency` concurrent calls, at least 1."""
    return max((threads or usable_cores()) // concurrency, 1)


def open_file(path: Path, engine: str | None = None, threads: int | None = None, concurrency: int = 1) -> FileEngine:
    """Open an exported file, by default with the first engine of its type."""
    supported = ENGINES_BY_SUFFIX[path.suffix.lower()]
    if engine not in (None, *supported):
        raise ConfigError(f"{path} is run by {' or '.join(supported)}, not by {engine}.")
    name = engine or supported[0]
    if name == "torch":
        return _open_program(path, threads, concurrency)
    return (
        _open_onnx(path, threads, concurrency) if name == "onnxruntime" else _open_openvino(path, threads, concurrency)
    )


def _open_program(path: Path, threads: int | None, concurrency: int) -> FileEngine:
    _set_torch_threads(threads, concurrency)
    module, metadata = read_program(path)
    if metadata.precision == "bfloat16":
        check_bfloat16()

    @torch.no_grad()
    def run(inputs: Pixels) -> Floats:
        return module(torch.from_numpy(inputs)).numpy()

    return FileEngine("torch", metadata, run)


def _open_onnx(path: Path, threads: int | None, concurrency: int) -> FileEngine:
    onnxruntime = import_optional("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = _threads_per_call(threads, concurrency) if concurrency > 1 else threads or 0
    try:
        if weights_path(path).exists() and hasattr(options, "add_external_initializers_from_files_in_memory"):
            weights = weights_path(path).read_bytes()  # else ONNX Runtime maps the file, and sees later writes to it
            options.add_external_initializers_from_files_in_memory([weights_path(path).name], [weights], [len(weights)])
        with silence_exporters():
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # each kind of failure has its own type
        raise CheckpointError(f"{path} cannot be read as ONNX: {error_summary(error)}.") from error
    metadata = parse_metadata(session.get_modelmeta().custom_metadata_map.get(KEY), path)
    check_graph(metadata, session.get_inputs()[0].shape, session.get_outputs()[0].shape, path)
    warn_of_saturation(metadata, path)
    input_name = session.get_inputs()[0].name

    def run(inputs: Pixels) -> Floats:
        return session.run(None, {input_name: inputs})[0]

    return FileEngine("onnxruntime", metadata, run)


def _open_openvino(path: Path, threads: int | None, concurrency: int) -> FileEngine:
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
    return FileEngine("openvino", metadata, compiled)


def _port_shape(port: Any) -> list[int | None]:
    """Shape of an OpenVINO input or output; None for a dynamic dimension."""
    return [None if dim.is_dynamic else dim.get_length() for dim in port.partial_shape]


def warn_of_saturation(metadata: ExportMetadata, path: Path) -> None:
    """Warn if the sums of products of an int8 file can saturate on this CPU."""
    if metadata.saturates and detect_cpu().int8_saturates:
        warn_once([SATURATES], about=str(path))


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

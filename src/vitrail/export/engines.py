"""What runs a network: torch, ONNX Runtime or OpenVINO, all asked in the same way.

    engine = open_engine("model.onnx")
    engine.logits(pixels)    # B H W C, as Preprocess.pixels gives them -> B outputs

Engines may be called from several threads. Where that is the rule (`concurrency`), each call computes on its
own share of the cores; else one call uses all of them.
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
Name = Literal["torch", "onnxruntime", "openvino"]

ENGINES = ("torch", "onnxruntime", "openvino", "auto")
ENGINES_BY_SUFFIX: dict[str, tuple[Name, ...]] = {
    ".onnx": ("onnxruntime", "openvino"),
    ".pt2": ("torch",),
    ".xml": ("openvino",),
}
"""Which engines run which files; the first where none is named."""
SATURATES = (
    "this int8 file is from an older vitrail: its products can exceed the 16 bits in which this CPU, which has no VNNI "
    "instructions, adds them, so its answers may be wrong here; export the model anew"
)
BELOW_AVX512 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2")
"""Values of ONEDNN_MAX_CPU_ISA."""


class Engine(Protocol):
    """Runs one network."""

    @property
    def name(self) -> Name: ...

    @property
    def precision(self) -> str:
        """ "float32", "bfloat16" or "int8"."""

    @property
    def info(self) -> ModelInfo:
        """Preprocessing, class names and what the outputs are."""

    def logits(self, pixels: Pixels) -> Floats:
        """B H W C, values 0 to 255 -> B K; of a file that gives probabilities, numbers that stand for the same."""


class TorchEngine:
    """A network of our own."""

    name: Name = "torch"

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
    """An exported file; `run` takes what it was exported for and gives what it gives."""

    def __init__(self, name: Name, metadata: ExportMetadata, run: Callable[[Pixels], Floats]) -> None:
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
        """What the file itself gives for pixels, whatever its batch."""
        given = self.to_input(pixels)
        size = self.metadata.batch_size
        if size is None:
            return self.run(given)
        parts = [self.run(_padded(given[i : i + size], size))[: len(given) - i] for i in range(0, len(given), size)]
        return np.concatenate(parts)

    def with_info(self, info: ModelInfo) -> FileEngine:
        """The same file, for a model info that has other names for its classes."""
        return FileEngine(self.name, replace(self.metadata, info=info), self.run)

    def __repr__(self) -> str:
        return f"<{self.name} in {self.precision}: {self.info.origin or self.info.family}>"

    def to_input(self, pixels: Pixels) -> Pixels:
        """B H W C, 0 to 255 -> what goes into the file."""
        if self.metadata.normalize_inside:
            kind = np.uint8 if self.metadata.takes_uint8 else np.float32
            return np.ascontiguousarray(pixels, kind)
        return self.preprocess.normalize(torch.from_numpy(pixels).permute(0, 3, 1, 2)).numpy()


def _padded(batch: Pixels, size: int) -> Pixels:
    """Black images after the last one, up to a full batch."""
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
    """What runs a model: an exported file, a model, or whatever `vitrail.load` takes.

    engine: "torch" (the default), "onnxruntime", "openvino", or "auto": the fastest that is installed
    and agrees with the model, with int8 scales from the images of `calibrate` where there are any. An
    exported file brings its own. For another engine than torch a model is exported first, once: the
    files are kept. `threads` are all cores it may use, `concurrency` how many calls will be made side by side.
    `options` are those of `load_checkpoint`.
    """
    if engine is not None and engine not in ENGINES:
        raise ConfigError(f"no engine {engine!r}{did_you_mean(engine, ENGINES)}")
    if threads is not None and threads < 1:
        raise ConfigError(f"threads={threads}: expected 1 or more.")
    if is_exported(source):
        from vitrail.export import autotune  # which opens files itself

        return autotune.open_export(Path(source), engine, threads, concurrency)
    if isinstance(source, str | Path | ModelLocation):
        net, info = load_checkpoint(source, **options)
    else:
        net, info = source.net, source.info
    target = pick_device(device)
    if engine in (None, "torch"):
        return torch_engine(net, info, target, threads, concurrency)
    from vitrail.export import autotune, engine_cache  # which make engines themselves

    if engine == "auto":
        return autotune.fastest_engine(net, info, target, threads, calibrate, concurrency)
    return engine_cache.cached_engine(net, info, engine, "float32", threads, concurrency)


def torch_engine(
    net: Net, info: ModelInfo, device: str | torch.device = "cpu", threads: int | None = None, concurrency: int = 1
) -> TorchEngine:
    _set_torch_threads(threads, concurrency)
    return TorchEngine(net, info, device)


def _set_torch_threads(threads: int | None, concurrency: int) -> None:
    """torch's cores for one call."""
    if threads is not None or concurrency > 1:
        torch.set_num_threads(_threads_per_call(threads, concurrency))


def _threads_per_call(threads: int | None, concurrency: int) -> int:
    """Cores of one call among several."""
    return max((threads or usable_cores()) // concurrency, 1)


def open_file(path: Path, engine: str | None = None, threads: int | None = None, concurrency: int = 1) -> FileEngine:
    """An exported file, run by the first engine that can, or by another."""
    able = ENGINES_BY_SUFFIX[path.suffix.lower()]
    if engine not in (None, *able):
        raise ConfigError(f"{path} is run by {' or '.join(able)}, not by {engine}.")
    name = engine or able[0]
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
    def run(given: Pixels) -> Floats:
        return module(torch.from_numpy(given)).numpy()

    return FileEngine("torch", metadata, run)


def _open_onnx(path: Path, threads: int | None, concurrency: int) -> FileEngine:
    runtime = import_optional("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = _threads_per_call(threads, concurrency) if concurrency > 1 else threads or 0
    try:
        if weights_path(path).exists() and hasattr(options, "add_external_initializers_from_files_in_memory"):
            weights = weights_path(path).read_bytes()  # else ONNX Runtime keeps the file mapped, and changes with it
            options.add_external_initializers_from_files_in_memory([weights_path(path).name], [weights], [len(weights)])
        with silence_exporters():
            session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # a class of its own for each kind of failure
        raise CheckpointError(f"{path} cannot be read as ONNX: {error_summary(error)}.") from error
    metadata = parse_metadata(session.get_modelmeta().custom_metadata_map.get(KEY), path)
    check_graph(metadata, session.get_inputs()[0].shape, session.get_outputs()[0].shape, path)
    warn_of_saturation(metadata, path)
    name = session.get_inputs()[0].name

    def run(given: Pixels) -> Floats:
        return session.run(None, {name: given})[0]

    return FileEngine("onnxruntime", metadata, run)


def _open_openvino(path: Path, threads: int | None, concurrency: int) -> FileEngine:
    core = openvino_core()
    try:
        with silence_exporters():
            model = core.read_model(str(path))
            text = model.get_rt_info([KEY]).astype(str) if model.has_rt_info([KEY]) else None
            metadata = parse_metadata(text or _onnx_metadata(path), path)
            check_graph(metadata, _shape(model.inputs[0]), _shape(model.outputs[0]), path)
            # Left to itself it computes in bfloat16 wherever the CPU has that.
            settings: dict[str, Any] = {
                "INFERENCE_PRECISION_HINT": "bf16" if metadata.precision == "bfloat16" else "f32"
            }
            settings |= {"INFERENCE_NUM_THREADS": threads} if threads else {}
            group = group_size(model) if metadata.precision == "int8" else None
            settings |= {"DYNAMIC_QUANTIZATION_GROUP_SIZE": group} if group is not None else {}
            if not group:  # else OpenVINO rounds activations only on a CPU with VNNI
                warn_of_saturation(metadata, path)
            compiled = Compiled(
                lambda how: core.compile_model(model, "CPU", settings | how), concurrency, metadata.batch_size
            )
    except RuntimeError as error:
        raise CheckpointError(f"{path} cannot be run by OpenVINO: {error_summary(error)}.") from error
    return FileEngine("openvino", metadata, compiled)


def _shape(port: Any) -> list[int | None]:
    """Of an input or output of OpenVINO's; None: any."""
    return [None if side.is_dynamic else side.get_length() for side in port.partial_shape]


def warn_of_saturation(metadata: ExportMetadata, path: Path) -> None:
    """Say that an int8 file may answer wrongly on this CPU."""
    if metadata.saturates and detect_cpu().int8_saturates:
        warn_once([SATURATES], about=str(path))


class Compiled:
    """OpenVINO's model, compiled for all cores on one image or for a batch shared out among them.

    Cores that each have their own images never wait for each other, which is worth a tenth on two;
    a lone image is faster with all of them. What is asked for first is compiled first, and a lone
    image later goes where there is something compiled already.
    """

    def __init__(self, compile_for: Callable[[dict[str, Any]], Any], concurrency: int, batch_size: int | None) -> None:
        self.compile_for, self.concurrency, self.batch = compile_for, concurrency, batch_size
        self.lock = threading.Lock()
        self.alone: queue.SimpleQueue[Any] | None = None
        """The one request that has all cores."""
        self.shared: queue.SimpleQueue[Any] | None = None
        """Requests that have a share each, those that are free."""
        if concurrency > 1:
            self._compile_shared()

    def __call__(self, given: Pixels) -> Floats:
        most = len(given) if self.batch is None else 1  # a fixed batch is never parted
        idle = self._requests(most)
        requests = [idle.get()]
        try:
            while len(requests) < most:  # nobody waits while he holds one
                requests.append(idle.get_nowait())
        except queue.Empty:
            pass
        parts, started = np.array_split(given, len(requests)), []
        try:
            for request, part in zip(requests, parts, strict=True):
                started.append(request)
                request.start_async([part], share_inputs=True)
            return np.concatenate([_wait_for_output(request) for request in requests])
        finally:
            for request in started:  # an interrupted call leaves none at work on pixels that are gone
                with suppress(RuntimeError):
                    request.wait()
            for request in requests:
                idle.put(request)

    def _requests(self, most: int) -> queue.SimpleQueue[Any]:
        with self.lock:
            if self.shared is not None and (most > 1 or self.alone is None):
                return self.shared
            if most > 1:
                return self._compile_shared()
            if self.alone is None:
                self.alone = queue.SimpleQueue()
                self.alone.put(self.compile_for({"PERFORMANCE_HINT": "LATENCY"}).create_infer_request())
            return self.alone

    def _compile_shared(self) -> queue.SimpleQueue[Any]:
        hint = {"NUM_STREAMS": self.concurrency} if self.concurrency > 1 else {"PERFORMANCE_HINT": "THROUGHPUT"}
        compiled = self.compile_for(hint)
        self.shared = queue.SimpleQueue()
        for _ in range(compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS")):
            self.shared.put(compiled.create_infer_request())
        return self.shared


def _wait_for_output(request: Any) -> Floats:
    request.wait()
    return np.array(request.get_output_tensor(0).data)


def _onnx_metadata(path: Path) -> str | None:
    """OpenVINO reads ONNX without its metadata."""
    if path.suffix.lower() != ".onnx":
        return None
    found = import_optional("onnx").load(str(path), load_external_data=False).metadata_props
    return next((entry.value for entry in found if entry.key == KEY), None)


def openvino_core() -> Any:
    """OpenVINO, with the limit on its instruction sets in place: it reads that once, when it first compiles."""
    openvino = import_optional("openvino")
    try:
        disable_broken_amx()
    except ConfigError:  # too late for torch, which has begun already
        os.environ.setdefault(ISA_VARIABLE, WITHOUT_AMX)
    with preserve_signal_stack():
        _start_openvino()
        core = openvino.Core()
        core.set_property({"ENABLE_MMAP": False})  # a mapped file changes under the engine, or ends the process
        core.get_property("CPU", "FULL_DEVICE_NAME")  # loads the CPU plugin, which changes the signal stack
    return core


@lru_cache(maxsize=1)
def _start_openvino() -> None:
    """Compile a first, small model where OpenVINO needs another limit than torch and other processes."""
    given, limit = os.environ.get(ISA_VARIABLE, ""), openvino_limit()
    if given == limit:
        return
    openvino, operators = import_optional("openvino"), import_optional("openvino.opset13")
    x = operators.parameter([-1, 16], np.float32)
    os.environ[ISA_VARIABLE] = limit
    try:
        openvino.Core().compile_model(openvino.Model([operators.relu(x)], [x], "first"), "CPU")
    finally:
        os.environ[ISA_VARIABLE] = given


def openvino_limit() -> str:
    """The value of ONEDNN_MAX_CPU_ISA that OpenVINO runs under; empty where there is none.

    On a CPU with AVX-512, only some of its kernels obey a limit below that: others then end the process with a
    segmentation fault, or cannot be compiled (int8, bfloat16).
    """
    given = os.environ.get(ISA_VARIABLE, "")
    return WITHOUT_AMX if given.upper() in BELOW_AVX512 and "AVX-512" in detect_cpu().instructions else given

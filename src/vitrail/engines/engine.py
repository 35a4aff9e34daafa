"""Engines: run a network, or an exported file, with torch, ONNX Runtime or OpenVINO, through one interface.

    engine = open_file("model.onnx")
    engine.logits(pixels)    # B H W C, from Preprocess.pixels -> B K

Engines are thread-safe. With `concurrency` above 1, each call uses its share of the cores, else all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from vitrail.data.preprocess import Preprocess
from vitrail.engines.export_metadata import KEY, ExportMetadata, check_graph, parse_metadata, warn_of_saturation
from vitrail.engines.exported_files import ENGINES_BY_SUFFIX, EngineName, weights_path
from vitrail.engines.openvino_engine import read_openvino
from vitrail.engines.optional_packages import error_summary, import_optional, silence_exporters
from vitrail.errors import CheckpointError, ConfigError
from vitrail.inference import run_network
from vitrail.kernels.eight_bit import EIGHT_BIT, is_eight_bit
from vitrail.models import Net
from vitrail.runtime import pick_device
from vitrail.runtime.amx import check_bfloat16
from vitrail.runtime.cores import usable_cores
from vitrail.weights.model_info import ModelInfo

# B images, H x W pixels, C channels, K outputs

Pixels = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]


class Engine(Protocol):
    """Runs a network on batches of pixels."""

    @property
    def name(self) -> EngineName: ...

    @property
    def precision(self) -> str:
        """Precision of the computation: float32, bfloat16, float8 or int8."""

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
        return EIGHT_BIT if is_eight_bit(self.net) else str(self.dtype).removeprefix("torch.")

    def logits(self, pixels: Pixels) -> Floats:
        return run_network(self.net, self.preprocess, pixels).float().numpy()


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


def read_program(path: Path) -> tuple[Any, ExportMetadata]:
    """Read a .pt2 file: a callable module, and the metadata."""
    from vitrail.engines.pt2_archive import read_archive  # imports torch.export, which takes seconds

    module, text = read_archive(path)
    metadata = parse_metadata(text, path)
    nodes = {node.op: node for node in module.graph.nodes}
    check_graph(metadata, nodes["placeholder"].meta["val"].shape, nodes["output"].args[0][0].meta["val"].shape, path)
    return module, metadata


def _open_openvino(path: Path, threads: int | None, concurrency: int) -> FileEngine:
    metadata, compiled = read_openvino(path, threads, concurrency)
    return FileEngine("openvino", metadata, compiled)

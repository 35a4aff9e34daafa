"""What runs a network: torch, ONNX Runtime or OpenVINO, all asked in the same way.

    engine = open_engine("model.onnx")
    engine.logits(pixels)    # B H W C, as Preprocess.pixels gives them -> B outputs

Engines may be called from several threads. torch and ONNX Runtime then run side by side; OpenVINO
takes one call after the other, since one call uses all of its cores.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from vitrail.data.preprocess import Preprocess
from vitrail.errors import CheckpointError, ConfigError, nearest
from vitrail.export.extras import need, quiet
from vitrail.export.formats import first_line, is_exported, read_program, sheet_of
from vitrail.export.sheet import KEY, Sheet
from vitrail.models import Net
from vitrail.runtime import pick_device
from vitrail.runtime.tiles import SETTING, WITHOUT_TILES, check_bfloat16
from vitrail.weights.card import Card
from vitrail.weights.locate import Found
from vitrail.weights.opening import open_checkpoint

# B pictures, H x W pixels, C channels, K outputs

Pixels = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Name = Literal["torch", "onnxruntime", "openvino"]

ENGINES = ("torch", "onnxruntime", "openvino", "auto")
RUNS: dict[str, tuple[Name, ...]] = {".onnx": ("onnxruntime", "openvino"), ".pt2": ("torch",), ".xml": ("openvino",)}
"""Which engines run which files; the first where none is named."""


class Engine(Protocol):
    """Runs one network."""

    @property
    def name(self) -> Name: ...

    @property
    def precision(self) -> str:
        """ "float32", "bfloat16" or "int8"."""

    @property
    def card(self) -> Card:
        """Preprocessing, class names and what the outputs are."""

    def logits(self, pixels: Pixels) -> Floats:
        """B H W C, values 0 to 255 -> B K; of a file that gives probabilities, numbers that stand for the same."""


class TorchEngine:
    """A network of our own."""

    name: Name = "torch"

    def __init__(self, net: Net, card: Card, device: str | torch.device = "cpu") -> None:
        self.net, self.card, self.device = net.to(pick_device(device)).eval(), card, pick_device(device)
        self.preprocess = Preprocess(card.preprocess)
        self.dtype = next(net.parameters()).dtype
        if self.dtype == torch.bfloat16 and self.device.type == "cpu":
            check_bfloat16()

    @property
    def precision(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @torch.no_grad()
    def logits(self, pixels: Pixels) -> Floats:
        batch = torch.from_numpy(pixels).to(self.device).permute(0, 3, 1, 2)
        out: torch.Tensor = self.net(self.preprocess.normalise(batch).to(self.dtype))
        return out.to("cpu", torch.float32).numpy()


class FileEngine:
    """An exported file; `run` takes what it was exported for and gives what it gives."""

    def __init__(self, name: Name, sheet: Sheet, run: Callable[[Pixels], Floats]) -> None:
        self.name, self.sheet, self.run = name, sheet, run
        self.preprocess = Preprocess(sheet.card.preprocess)

    @property
    def card(self) -> Card:
        return self.sheet.card

    @property
    def precision(self) -> str:
        return self.sheet.precision

    def logits(self, pixels: Pixels) -> Floats:
        out = self.outputs(pixels)
        if self.sheet.answer != "probabilities":
            return out
        tiny = np.finfo(np.float32).tiny
        logs = np.log(np.maximum(out, tiny))
        return logs - np.log(np.maximum(1 - out, tiny)) if self.card.several else logs

    def outputs(self, pixels: Pixels) -> Floats:
        """What the file itself gives for pixels, whatever its batch."""
        given = self.prepared(pixels)
        size = self.sheet.batch
        if size is None:
            return self.run(given)
        parts = [self.run(_filled(given[i : i + size], size))[: len(given) - i] for i in range(0, len(given), size)]
        return np.concatenate(parts)

    def prepared(self, pixels: Pixels) -> Pixels:
        """B H W C, 0 to 255 -> what goes into the file."""
        if self.sheet.inside:
            kind = np.uint8 if self.sheet.bytes_in else np.float32
            return np.ascontiguousarray(pixels, kind)
        return self.preprocess.normalise(torch.from_numpy(pixels).permute(0, 3, 1, 2)).numpy()


def _filled(batch: Pixels, size: int) -> Pixels:
    """Black pictures after the last one, up to a full batch."""
    missing = size - len(batch)
    return batch if not missing else np.concatenate([batch, np.zeros((missing, *batch.shape[1:]), batch.dtype)])


def open_engine(
    source: Any,
    engine: str | None = None,
    device: str | torch.device = "auto",
    threads: int | None = None,
    calibrate: Sequence[Any] = (),
    **options: Any,
) -> Engine:
    """What runs a model: an exported file, a model, or whatever `vitrail.load` takes.

    engine: "torch" (the default), "onnxruntime", "openvino", or "auto": the fastest that is installed
    and agrees with the model; it considers int8 only where it is given pictures to `calibrate` on. An
    exported file brings its own. For another engine than torch a model is exported first, once: the
    files are kept. `options` are those of `open_checkpoint`.
    """
    if engine is not None and engine not in ENGINES:
        raise ConfigError(f"no engine {engine!r}{nearest(engine, ENGINES)}")
    if threads is not None and threads < 1:
        raise ConfigError(f"threads={threads}: wanted 1 or more.")
    if is_exported(source):
        return open_file(Path(source), engine, threads)
    if isinstance(source, str | Path | Found):
        net, card = open_checkpoint(source, **options)
    else:
        net, card = source.net, source.card
    target = pick_device(device)
    if engine in (None, "torch"):
        return torch_engine(net, card, target, threads)
    from vitrail.export import choose  # which makes engines itself

    if engine == "auto":
        return choose.fastest(net, card, target, threads, calibrate)
    return choose.engine_of(net, card, engine, "float32", threads)


def torch_engine(net: Net, card: Card, device: str | torch.device = "cpu", threads: int | None = None) -> TorchEngine:
    if threads is not None:
        torch.set_num_threads(threads)
    return TorchEngine(net, card, device)


def open_file(path: Path, engine: str | None = None, threads: int | None = None) -> FileEngine:
    """An exported file, run by its own engine or by another that can."""
    able = RUNS[path.suffix.lower()]
    if engine not in (None, "auto", *able):
        raise ConfigError(f"{path} is run by {' or '.join(able)}, not by {engine}.")
    name = able[0] if engine in (None, "auto") else engine
    if name == "torch":
        return _open_program(path, threads)
    return _open_onnx(path, threads) if name == "onnxruntime" else _open_openvino(path, threads)


def _open_program(path: Path, threads: int | None) -> FileEngine:
    if threads is not None:
        torch.set_num_threads(threads)
    module, sheet = read_program(path)
    if sheet.precision == "bfloat16":
        check_bfloat16()

    @torch.no_grad()
    def run(given: Pixels) -> Floats:
        return module(torch.from_numpy(given)).numpy()

    return FileEngine("torch", sheet, run)


def _open_onnx(path: Path, threads: int | None) -> FileEngine:
    runtime = need("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads or 0
    try:
        with quiet():
            session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # a class of its own for each kind of failure
        raise CheckpointError(f"{path} cannot be read as ONNX: {first_line(error)}.") from error
    sheet = sheet_of(session.get_modelmeta().custom_metadata_map.get(KEY), path)
    name = session.get_inputs()[0].name

    def run(given: Pixels) -> Floats:
        return session.run(None, {name: given})[0]

    return FileEngine("onnxruntime", sheet, run)


def _open_openvino(path: Path, threads: int | None) -> FileEngine:
    core = openvino_core()
    try:
        with quiet():
            model = core.read_model(str(path))
            text = model.get_rt_info([KEY]).astype(str) if model.has_rt_info([KEY]) else None
            sheet = sheet_of(text or _onnx_sheet(path), path)
            # Left to itself it computes in bfloat16 wherever the CPU has that.
            settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "bf16" if sheet.precision == "bfloat16" else "f32"}
            settings |= {"PERFORMANCE_HINT": "LATENCY"}
            settings |= {"INFERENCE_NUM_THREADS": threads} if threads else {}
            request = core.compile_model(model, "CPU", settings).create_infer_request()
    except RuntimeError as error:
        raise CheckpointError(f"{path} cannot be run by OpenVINO: {first_line(error)}.") from error
    lock = threading.Lock()  # a request holds its inputs and outputs

    def run(given: Pixels) -> Floats:
        with lock:
            return np.array(request.infer([given], share_inputs=True)[0])

    return FileEngine("openvino", sheet, run)


def _onnx_sheet(path: Path) -> str | None:
    """OpenVINO reads ONNX without its metadata."""
    if path.suffix.lower() != ".onnx":
        return None
    found = need("onnx").load(str(path), load_external_data=False).metadata_props
    return next((entry.value for entry in found if entry.key == KEY), None)


def openvino_core() -> Any:
    """OpenVINO, told beforehand where a CPU only announces tiles: it asks once, when first used."""
    openvino = need("openvino")
    try:
        check_bfloat16()
    except ConfigError:  # too late for torch, which has begun already
        os.environ.setdefault(SETTING, WITHOUT_TILES)
    return openvino.Core()

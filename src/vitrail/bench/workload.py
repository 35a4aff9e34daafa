"""What a case repeats: a training step, a forward pass, attention with logits, or a matrix product; with its check."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.bench.cases import OWN, Case
from vitrail.bench.libraries import (
    LIBRARIES,
    import_library,
    is_model_name,
    network_config,
    peer_network,
    random_network,
)
from vitrail.config import pair
from vitrail.data.preprocess import Preprocess
from vitrail.engines.engine import Engine, TorchEngine
from vitrail.engines.export_metadata import ExportMetadata
from vitrail.errors import ConfigError, DataError
from vitrail.explain.attention import AttentionIterator, full_precision
from vitrail.explain.rollout import rollout
from vitrail.inference import Pixels, run_network
from vitrail.kernels.eight_bit import E4M3
from vitrail.kernels.onednn_linear import project
from vitrail.models import Net
from vitrail.models.eight_bit_net import to_eight_bit
from vitrail.models.flops import count_flops
from vitrail.runtime import autocast, private_torch
from vitrail.runtime.amx import check_bfloat16
from vitrail.weights.loading import load_checkpoint
from vitrail.weights.model_info import ModelInfo

# B images of C channels, H x W pixels, K classes

CHECKED_IMAGES = 32
"""Number of images whose outputs are compared with those of the plain network."""
GRADIENT_CHUNK = 16
"""Images at a time for the plain network's gradients, which are computed without a shortcut."""
PRODUCT_SIDE = {"cpu": 1024, "cuda": 8192}
"""Side of the square matrices whose product measures the device's rate."""


@dataclass
class Workload:
    """A step that can be repeated, and what is known of it."""

    step: Callable[[], object]
    flops: float
    """Of one step."""
    compile_s: float | None = None
    """Seconds of the first step of a compiled network, which compiles it."""
    error: float | None = None
    """Largest relative error of its outputs, and in training of its gradients, compared with the plain network's."""
    version: str = ""
    top1: float | None = None
    """Accuracy on labeled images."""
    chosen: str | None = None
    """Engine and precision that `auto` has selected."""


def make_workload(case: Case) -> Workload:
    """Build, compile, run and check the network of a case."""
    if case.work == "product":
        return _product(case)
    if case.pixels:
        return _from_pixels(case)
    if case.precision in ("bfloat16", "float8") and case.device == "cpu":
        check_bfloat16()
    ours, info, net, installed = _networks(case)
    images = _random_images(case, ours)
    prepare = _training if case.work == "train" else _inference
    load = prepare(case, net, ours, images)
    load.version = installed
    load.flops = (3 if case.work == "train" else 1) * case.batch_size * count_flops(info.config)
    return load


def _networks(case: Case) -> tuple[Net, ModelInfo, nn.Module, str]:
    """Our plain network, its info, and the network of the case with its library's version."""
    ours, info = own_network(case)
    if case.library == OWN or case.engine != "torch":
        return ours, info, ours, version(case.library)
    library, installed = import_library(case.library)
    return ours, info, peer_network(library, ours, info), installed


def own_network(case: Case) -> tuple[Net, ModelInfo]:
    """Our network in float32, with random weights or those of a checkpoint."""
    if is_model_name(case.model):
        return random_network(network_config(case.model, case.changes))
    net, info = load_checkpoint(case.model)
    return net.eval(), info.replace(config=net.config)


def _random_images(case: Case, ours: Net) -> Tensor:
    """B C H W, the same in every process."""
    height, width = pair(ours.config.image_size)
    shape = (case.batch_size, ours.config.channels, height, width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(case.device)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference / norm of the expected values, in float64."""
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def compiled(function: Any, mode: str | None) -> Any:
    """torch.compile as a user calls it; None: eager."""
    return function if mode is None else torch.compile(function, mode=None if mode == "default" else mode)


def _timed_first(case: Case, step: Callable[[], Any]) -> tuple[Any, float | None]:
    """The result of the first call, and its time if it compiles."""
    start = time.perf_counter()
    result = step()
    if case.device != "cpu":
        torch.cuda.synchronize()
    return result, time.perf_counter() - start if case.compile is not None else None


def _plain_reference(case: Case, net: nn.Module, ours: Net) -> nn.Module:
    """The plain network that the case is compared with: ours, or for another architecture its own, in float32."""
    peer = LIBRARIES.get(case.library)
    return net if peer is not None and not peer.same_function else ours


def _inference(case: Case, net: nn.Module, ours: Net, images: Tensor) -> Workload:
    dtype = torch.float32 if case.precision == "float32" else torch.bfloat16
    with torch.no_grad():
        plain = _plain_reference(case, net, ours).to(case.device)
        expected = plain(images[:CHECKED_IMAGES])
        ours.to("cpu")
    net, images = net.to(case.device, dtype), images.to(dtype)
    net = to_eight_bit(net) if case.precision == "float8" else net
    run = compiled(_function_of(case, net), case.compile)

    @torch.no_grad()
    def step() -> Any:
        return run(images)

    out, compile_s = _timed_first(case, step)
    logits = out[0] if isinstance(out, tuple) else out
    return Workload(step, 0, compile_s, relative_error(logits[:CHECKED_IMAGES], expected))


def _function_of(case: Case, net: Any) -> Callable[[Tensor], Any]:
    """images -> logits, or the logits with attention or its rollout."""

    def attention(images: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        out = net.features(images, outputs=("logits", "attention"))
        return out.logits, out.attention

    def whole_rollout(images: Tensor) -> tuple[Tensor, Tensor]:
        logits, layers = attention(images)
        return logits, rollout([full_precision(layer) for layer in layers])

    def streamed_rollout(images: Tensor) -> tuple[Tensor, Tensor]:
        layers = AttentionIterator(net, images)
        product = rollout(layers)
        return layers.logits, product

    functions: dict[str, Callable[[Tensor], Any]] = {
        "attention": attention,
        "rollout": whole_rollout,
        "streamed rollout": streamed_rollout,
    }
    return functions.get(case.work, net)


def _training(case: Case, net: nn.Module, ours: Net, images: Tensor) -> Workload:
    """Forward pass, loss, backward pass and optimizer, on one batch that is on the device."""
    classes = ours.config.num_classes
    targets = torch.randint(classes, (len(images),), generator=torch.Generator().manual_seed(2)).to(images.device)
    with torch.no_grad():
        plain = _plain_reference(case, net, ours).to(case.device)
        expected = plain(images[:CHECKED_IMAGES]).cpu()
    if plain is not net:
        ours.to("cpu")
    net = net.to(case.device).train()
    gradients = _plain_gradients(net, images, targets)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    run = compiled(net, case.compile)

    def forward_backward() -> Tensor:
        with autocast(case.precision, images.device):
            logits: Tensor = run(images)
            loss = F.cross_entropy(logits.float(), targets)
        loss.backward()
        return logits

    def step() -> None:
        forward_backward()
        optimizer.step()
        optimizer.zero_grad()

    logits, compile_s = _timed_first(case, forward_backward)
    error = relative_error(logits[:CHECKED_IMAGES], expected)
    found = [p.grad for p in net.parameters() if p.grad is not None]
    wrong = sum(float((f.cpu() - g).double().square().sum()) for f, g in zip(found, gradients, strict=True))
    whole = sum(float(g.double().square().sum()) for g in gradients)
    optimizer.step()
    optimizer.zero_grad()
    return Workload(step, 0, compile_s, max(error, (wrong / max(whole, 1e-60)) ** 0.5))


def _plain_gradients(net: nn.Module, images: Tensor, targets: Tensor) -> list[Tensor]:
    """Gradients of the mean loss of the batch, eager and in float32, on the CPU."""
    for chunk, labels in zip(images.split(GRADIENT_CHUNK), targets.split(GRADIENT_CHUNK), strict=True):
        (F.cross_entropy(net(chunk), labels, reduction="sum") / len(images)).backward()
    gradients = [p.grad.cpu() for p in net.parameters() if p.grad is not None]
    net.zero_grad(set_to_none=True)
    return gradients


def _product(case: Case) -> Workload:
    """A product of two large square matrices."""
    device = torch.device(case.device)
    side = PRODUCT_SIDE.get(device.type, 1024)
    if case.precision == "bfloat16" and device.type == "cpu":
        check_bfloat16()
    if case.precision == "float8":
        return _float8_product(device, side)
    dtype = torch.bfloat16 if case.precision == "bfloat16" else torch.float32
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    if device.type == "cpu":
        return Workload(torch.no_grad()(lambda: project(a, b, None)), 2 * side**3, version=torch.__version__)
    out = torch.empty_like(a)
    return Workload(lambda: torch.mm(a, b, out=out), 2 * side**3, version=torch.__version__)


def _float8_product(device: torch.device, side: int) -> Workload:
    """The same in e4m3, to bfloat16."""
    product, one = private_torch.scaled_mm(), torch.ones((), device=device)
    if product is None:
        raise ConfigError("this torch has no products of 8-bit floats.")
    a, b = (torch.randn(side, side, device=device).to(E4M3) for _ in range(2))
    return Workload(lambda: product(a, b.t(), one, one, None), 2 * side**3, version=torch.__version__)


class FromPixels(nn.Module):
    """uint8 pixels, B H W C -> logits: a peer's network with the normalization before it, in one multiply and add."""

    scale: Tensor
    shift: Tensor

    def __init__(self, net: nn.Module, info: ModelInfo, dtype: torch.dtype) -> None:
        super().__init__()
        self.net, self.dtype = net.to(dtype), dtype
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (info.preprocess.mean, info.preprocess.std))
        self.register_buffer("scale", (1 / (255 * std)).to(dtype))
        self.register_buffer("shift", (-mean / std).to(dtype))

    def forward(self, pixels: Tensor) -> Tensor:
        logits: Tensor = self.net(pixels.permute(0, 3, 1, 2).to(self.dtype) * self.scale + self.shift)
        return logits


def _from_pixels(case: Case) -> Workload:
    """Inference on a CPU as a service does it: uint8 pixels in, float32 logits out, in any engine."""
    if case.precision == "bfloat16":
        check_bfloat16()
    ours, info, net, installed = _networks(case)
    height, width = pair(ours.config.image_size)
    rng = np.random.default_rng(1)
    pixels = rng.integers(0, 256, (case.batch_size, height, width, ours.config.channels), dtype=np.uint8)
    reference = TorchEngine(ours, info)
    expected = torch.from_numpy(reference.logits(pixels[:CHECKED_IMAGES]))
    load = Workload(lambda: None, case.batch_size * count_flops(info.config), version=installed)
    if case.engine == "torch":
        run = _pixel_function(case, net, ours, info)
    else:
        engine = _export_engine(case, ours, info)
        run, load.chosen = engine.logits, f"{engine.name} {engine.precision}" if case.engine == "auto" else None
    out, load.compile_s = _timed_first(case, lambda: run(pixels))
    load.step, load.error = lambda: run(pixels), relative_error(torch.as_tensor(out)[:CHECKED_IMAGES], expected)
    load.top1 = None if case.data is None else _top1(case, info, run)
    return load


def _pixel_function(case: Case, net: nn.Module, ours: Net, info: ModelInfo) -> Callable[[Pixels], Any]:
    """pixels -> logits, in torch."""
    dtype = torch.bfloat16 if case.precision == "bfloat16" else torch.float32
    if net is ours:
        own, preprocess = ours.to(dtype), Preprocess(info.preprocess)
        if case.compile is not None:
            own.compile(mode=None if case.compile == "default" else case.compile)
        return lambda pixels: run_network(own, preprocess, pixels)
    peer = compiled(FromPixels(net, info, dtype).eval(), case.compile)

    @torch.no_grad()
    def run(pixels: Pixels) -> Tensor:
        return peer(torch.from_numpy(pixels)).float()

    return run


def _export_engine(case: Case, ours: Net, info: ModelInfo) -> Engine:
    """An engine for an exported file, or the one that --engine auto selects."""
    # These import torch.export, which takes seconds.
    from vitrail.exporting.autotune import fastest_engine
    from vitrail.exporting.engine_cache import cached_engine
    from vitrail.exporting.export_model import calibration_images
    from vitrail.exporting.exporter import preprocess_images

    images = calibration_images(case.calibrate, case.root)
    if case.engine == "auto":
        return fastest_engine(ours, info, torch.device("cpu"), calibrate=images)
    static = preprocess_images(ExportMetadata(info=info, to="onnx"), images) if case.precision == "int8" else []
    return cached_engine(ours, info, case.engine, case.precision, calibration=static)  # type: ignore[arg-type]


def labeled_images(case: Case, info: ModelInfo) -> tuple[list[Any], npt.NDArray[np.int64]]:
    """Images and their class indices; DataError if the data are not labeled with the model's classes."""
    from vitrail.exporting.export_model import comparison_images

    images, targets = comparison_images(case.data, info, case.root)
    if targets is None:
        raise DataError(f"{case.data} has no labels that are classes of {case.model}.")
    return images, targets


def _top1(case: Case, info: ModelInfo, run: Callable[[Pixels], Any]) -> float:
    """Top-1 accuracy on the labeled images, in batches of the case's size."""
    images, targets = labeled_images(case, info)
    preprocess, correct = Preprocess(info.preprocess), 0
    for start in range(0, len(images), case.batch_size):
        part = images[start : start + case.batch_size]
        batch = np.stack([preprocess.pixels(image) for image in part])
        padding = [(0, case.batch_size - len(part)), (0, 0), (0, 0), (0, 0)]  # another batch size would compile again
        logits = np.asarray(run(np.pad(batch, padding)))[: len(part)]
        correct += int((logits.argmax(1) == targets[start : start + case.batch_size]).sum())
    return correct / len(images)

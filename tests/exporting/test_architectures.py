"""All architectures in all formats: exported files give the outputs of the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import model, small

from vitrail.config import BiTConfig, NetConfig, PreprocessConfig, StemConfig, SwinConfig
from vitrail.engines.engine import TorchEngine, open_file
from vitrail.engines.export_metadata import ExportMetadata
from vitrail.exporting import formats
from vitrail.exporting.tracing import trace

TINY = {"image_size": (16, 24), "patch_size": 8, "width": 16, "depth": 1, "mlp_dim": 24}
SWIN: dict[str, Any] = {"image_size": (32, 48), "width": 8, "depths": (2, 2), "num_heads": (1, 2), "num_classes": 5}
CONFIGS: dict[str, NetConfig] = {
    "distilled": small(**TINY, distilled=True, activation="gelu-tanh"),
    "registers, rope, swiglu": small(**TINY, num_registers=2, position="rope-2d", activation="swiglu", layer_scale=0.1),
    "dinov3": small(**TINY, num_registers=2, position="rope-2d", layer_scale=0.1, key_bias=False, norm_eps=1e-5),
    "relative, gap": small(**TINY, position="relative", pool="gap", class_token=False),
    "map, sincos": small(**TINY, pool="map", class_token=False, position="sincos-2d"),
    "clip": small(
        **TINY, pre_norm=True, activation="gelu-quick", patch_bias=False, head_bias=False, pool="coca", pool_width=6
    ),
    "rms, qk-norm": small(**TINY, norm="rms", qk_norm=True, pool="token+gap"),
    "hybrid": small(
        **TINY | {"image_size": (32, 48), "patch_size": 1}, stem=StemConfig(layers=(1, 1), width_factor=0.5)
    ),
    "swin, padded and shifted": SwinConfig(**SWIN, window_size=3),
    "swin v2": SwinConfig(**SWIN, window_size=4, version=2, window_rule="timm"),
    "bit": BiTConfig(layers=(1, 1), width_factor=0.5, num_classes=5, image_size=(32, 48)),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_each_format_reproduces_the_logits_of_the_network(name: str, tmp_path: Path):
    config = CONFIGS[name]
    preprocess = PreprocessConfig(image_size=config.image_size, antialias=name != "map, sincos")
    vit = model(config, preprocess=preprocess, task="embed" if name == "clip" else "classify", labels=None)
    output_type = "features" if name == "clip" else "logits"
    height, width = config.image_size
    pixels = np.random.default_rng(0).integers(0, 256, (3, height, width, 3), dtype=np.uint8)
    if name == "map, sincos":  # TensorFlow's resizing does not round pixels
        pixels = pixels.astype(np.float32) * np.float32(0.987)
    expected = TorchEngine(vit.net, vit.info).logits(pixels)
    for to, file_name in (("onnx", "tiny.onnx"), ("pt2", "tiny.pt2")):
        metadata = ExportMetadata(info=vit.info, to=to, output_type=output_type)  # type: ignore[arg-type]
        path = tmp_path / file_name
        formats.write(trace(vit.net, metadata), metadata, path)
        for engine in ("onnxruntime", "openvino") if to == "onnx" else ("torch",):
            opened = open_file(path, engine)
            logits = opened.logits(pixels)
            relative_error = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
            assert relative_error <= 1e-5, (engine, relative_error)
            np.testing.assert_allclose(opened.logits(pixels[:1]), logits[:1], atol=1e-4)
            assert opened.info == vit.info


def test_multi_label_files_return_sigmoid_probabilities(tmp_path: Path):
    vit = model(small(**TINY), multi_label=True)
    metadata = ExportMetadata(info=vit.info, to="pt2", output_type="probabilities")
    formats.write(trace(vit.net, metadata), metadata, tmp_path / "multi_label.pt2")
    engine = open_file(tmp_path / "multi_label.pt2")
    pixels = np.random.default_rng(0).integers(0, 256, (2, 16, 24, 3), dtype=np.uint8)
    logits = torch.from_numpy(TorchEngine(vit.net, vit.info).logits(pixels))
    np.testing.assert_allclose(engine.outputs(pixels), logits.sigmoid().numpy(), atol=1e-6)
    np.testing.assert_allclose(engine.logits(pixels), logits.numpy(), atol=1e-4)


def test_an_export_at_another_image_size_contains_resampled_positions(tmp_path: Path):
    vit = model(small(**TINY | {"image_size": 32}))
    larger = vit.net.resized((24, 40))
    info = vit.info.replace(config=larger.config, preprocess=vit.info.preprocess.replace(image_size=(24, 40)))
    metadata = ExportMetadata(info=info, to="pt2", normalize_inside=False)
    formats.write(trace(larger, metadata), metadata, tmp_path / "larger.pt2")
    pixels = np.random.default_rng(0).integers(0, 256, (2, 24, 40, 3), dtype=np.uint8)
    images = vit.preprocess.normalize(torch.from_numpy(pixels).permute(0, 3, 1, 2))
    with torch.no_grad():
        expected = vit.net(images).numpy()  # positions are resampled in the forward pass
    np.testing.assert_allclose(open_file(tmp_path / "larger.pt2").logits(pixels), expected, atol=1e-5)

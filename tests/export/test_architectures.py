"""Every kind of network through every format: the same numbers as the network itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import model, small

from vitrail.config import BiTConfig, PreprocessConfig, StemConfig, ViTConfig
from vitrail.export import formats
from vitrail.export.engines import TorchEngine, open_file
from vitrail.export.export_metadata import ExportMetadata
from vitrail.export.tracing import trace

LITTLE = {"image_size": (16, 24), "patch_size": 8, "width": 16, "depth": 1, "mlp_dim": 24}
KINDS: dict[str, ViTConfig | BiTConfig] = {
    "distilled": small(**LITTLE, distilled=True, activation="gelu-tanh"),
    "registers, rope, swiglu": small(
        **LITTLE, num_registers=2, position="rope-2d", activation="swiglu", layer_scale=0.1
    ),
    "relative, gap": small(**LITTLE, position="relative", pool="gap", class_token=False),
    "map, sincos": small(**LITTLE, pool="map", class_token=False, position="sincos-2d"),
    "clip": small(
        **LITTLE, pre_norm=True, activation="gelu-quick", patch_bias=False, head_bias=False, pool="coca", pool_width=6
    ),
    "rms, qk-norm": small(**LITTLE, norm="rms", qk_norm=True, pool="token+gap"),
    "hybrid": small(
        **LITTLE | {"image_size": (32, 48), "patch_size": 1}, stem=StemConfig(layers=(1, 1), width_factor=0.5)
    ),
    "bit": BiTConfig(layers=(1, 1), width_factor=0.5, num_classes=5, image_size=(32, 48)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_format_gives_the_networks_numbers(kind: str, tmp_path: Path):
    config = KINDS[kind]
    preprocess = PreprocessConfig(image_size=config.image_size, antialias=kind != "map, sincos")
    vit = model(config, preprocess=preprocess, task="embed" if kind == "clip" else "classify", labels=None)
    output_type = "features" if kind == "clip" else "logits"
    height, width = config.image_size
    pixels = np.random.default_rng(0).integers(0, 256, (3, height, width, 3), dtype=np.uint8)
    if kind == "map, sincos":  # TensorFlow's way to resize rounds nothing
        pixels = pixels.astype(np.float32) * np.float32(0.987)
    expected = TorchEngine(vit.net, vit.info).logits(pixels)
    for to, name in (("onnx", "tiny.onnx"), ("pt2", "tiny.pt2")):
        metadata = ExportMetadata(info=vit.info, to=to, output_type=output_type)  # type: ignore[arg-type]
        path = tmp_path / name
        formats.write(trace(vit.net, metadata), metadata, path)
        for engine in ("onnxruntime", "openvino") if to == "onnx" else ("torch",):
            opened = open_file(path, engine)
            got = opened.logits(pixels)
            off = np.linalg.norm(got - expected) / np.linalg.norm(expected)
            assert off <= 1e-5, (engine, off)
            np.testing.assert_allclose(opened.logits(pixels[:1]), got[:1], atol=1e-4)
            assert opened.info == vit.info


def test_several_classes_have_a_probability_each(tmp_path: Path):
    vit = model(small(**LITTLE), multi_label=True)
    metadata = ExportMetadata(info=vit.info, to="pt2", output_type="probabilities")
    formats.write(trace(vit.net, metadata), metadata, tmp_path / "several.pt2")
    engine = open_file(tmp_path / "several.pt2")
    pixels = np.random.default_rng(0).integers(0, 256, (2, 16, 24, 3), dtype=np.uint8)
    logits = torch.from_numpy(TorchEngine(vit.net, vit.info).logits(pixels))
    np.testing.assert_allclose(engine.outputs(pixels), logits.sigmoid().numpy(), atol=1e-6)
    np.testing.assert_allclose(engine.logits(pixels), logits.numpy(), atol=1e-4)


def test_a_size_the_model_was_not_made_for_has_its_positions_baked_in(tmp_path: Path):
    vit = model(small(**LITTLE | {"image_size": 32}))
    larger = vit.net.resized((24, 40))
    info = vit.info.replace(config=larger.config, preprocess=vit.info.preprocess.replace(image_size=(24, 40)))
    metadata = ExportMetadata(info=info, to="pt2", normalize_inside=False)
    formats.write(trace(larger, metadata), metadata, tmp_path / "larger.pt2")
    pixels = np.random.default_rng(0).integers(0, 256, (2, 24, 40, 3), dtype=np.uint8)
    images = vit.preprocess.normalize(torch.from_numpy(pixels).permute(0, 3, 1, 2))
    with torch.no_grad():
        expected = vit.net(images).numpy()  # resampled on the fly
    np.testing.assert_allclose(open_file(tmp_path / "larger.pt2").logits(pixels), expected, atol=1e-5)

"""Hugging Face sidecars: the settings read from them, the defaults without them, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare import randomized, relative
from conftest import import_peer
from PIL import Image

from vitrail.config import BiTConfig, PreprocessConfig, StemConfig, ViTConfig
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConversionError, FormatError
from vitrail.weights import checkpoint
from vitrail.weights.archive import Archive, LazyTensors
from vitrail.weights.huggingface import HUGGINGFACE
from vitrail.weights.huggingface_preprocess import preprocessor_json, read_preprocess
from vitrail.weights.model_info import ModelInfo

transformers: Any = import_peer("transformers")
transformers.logging.set_verbosity_error()

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
VIT = TINY | {"intermediate_size": 48}


def archive_of(model: str, config: Any, sidecar: dict[str, Any] | None = None, **files: Any) -> Archive:
    """Archive of a transformers class, without weights; `sidecar` adds its config.json with these changes."""
    with torch.device("meta"):
        tensors = getattr(transformers, model)(config).state_dict()
    renamed = LazyTensors.from_tensors(tensors).rename(HUGGINGFACE.normalize_name)
    sidecars = {f"{name}.json": value for name, value in files.items()}
    if sidecar is not None:
        sidecars["config.json"] = {**json.loads(config.to_json_string(use_diff=False)), **sidecar}
    return Archive("memory", renamed, sidecars=sidecars)


def vit(sidecar: dict[str, Any] | None = None, model: str = "ViTForImageClassification", **files: Any) -> Archive:
    return archive_of(model, transformers.ViTConfig(**VIT, num_labels=3), sidecar, **files)


def bit(sidecar: dict[str, Any]) -> Archive:
    config = transformers.BitConfig(embedding_size=32, hidden_sizes=[128, 256], depths=[1, 1])
    return archive_of("BitModel", config, sidecar)


LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
SO400M = {"hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16, "intermediate_size": 4304}
GIANT = {"hidden_size": 1536, "num_hidden_layers": 40, "num_attention_heads": 24, "use_swiglu_ffn": True}


@pytest.mark.peer
@pytest.mark.parametrize(
    ("model", "config", "options"),
    [
        ("ViTForImageClassification", "ViTConfig", {"num_labels": 1000}),
        ("ViTModel", "ViTConfig", {}),
        ("DeiTForImageClassificationWithTeacher", "DeiTConfig", {"num_labels": 1000}),
        ("Dinov2Model", "Dinov2Config", {"image_size": 518}),
        ("Dinov2Model", "Dinov2Config", GIANT | {"image_size": 518}),
        ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", {"patch_size": 14, "image_size": 518}),
        ("CLIPVisionModelWithProjection", "CLIPVisionConfig", LARGE | {"patch_size": 14, "projection_dim": 768}),
        ("SiglipVisionModel", "SiglipVisionConfig", SO400M | {"patch_size": 14}),
    ],
)
def test_published_sizes_are_inferred_without_config_json(model: str, config: str, options: dict[str, Any]) -> None:
    settings = getattr(transformers, config)(**options)
    with_config = HUGGINGFACE.infer_info(archive_of(model, settings, {}))
    bare = archive_of(model, settings)
    bare.hints |= {"activation": "gelu-quick"} if config.startswith("CLIP") else {}
    without_config = HUGGINGFACE.infer_info(bare)
    assert without_config.config == with_config.config
    assert any("there is no config.json" in note for note in without_config.notes)
    assert not any("config.json" in note for note in with_config.notes if "preprocessor" not in note)


def test_unusual_num_heads_are_an_error_without_config_json() -> None:
    with pytest.raises(FormatError, match="the number of heads at width 32"):
        HUGGINGFACE.infer_info(vit())


def test_config_json_of_another_library_is_ignored() -> None:
    config = transformers.ViTConfig(hidden_size=192, num_attention_heads=3, intermediate_size=768)
    archive = archive_of("ViTModel", config)
    archive.sidecars["config.json"] = {"architecture": "vit_tiny_patch16_224", "num_classes": 7}
    assert HUGGINGFACE.infer_info(archive).config.num_heads == 3  # type: ignore[union-attr]


def test_class_names_are_read_and_placeholders_are_not() -> None:
    names = {"0": "cat", "1": "dog", "2": "owl"}
    assert HUGGINGFACE.infer_info(vit({"id2label": names})).labels == ("cat", "dog", "owl")
    assert HUGGINGFACE.infer_info(vit({})).labels is None
    assert HUGGINGFACE.infer_info(vit({"id2label": names}, "ViTModel")).labels is None
    short = HUGGINGFACE.infer_info(vit({"id2label": {"0": "cat", "1": "dog"}}))
    assert short.labels is None
    assert any("2 class names for 3 classes" in note for note in short.notes)


def test_vision_config_dict_overrides_vision_config() -> None:
    config = transformers.CLIPVisionConfig(**VIT)
    sidecar: dict[str, Any] = {
        "model_type": "clip",
        "vision_config": VIT | {"hidden_act": "gelu"},
        "vision_config_dict": VIT,
    }
    assert HUGGINGFACE.infer_info(archive_of("CLIPVisionModel", config, sidecar)).config.activation == "gelu-quick"  # type: ignore[union-attr]
    sidecar["vision_config_dict"] = None
    assert HUGGINGFACE.infer_info(archive_of("CLIPVisionModel", config, sidecar)).config.activation == "gelu"  # type: ignore[union-attr]


def test_empty_nested_config_uses_the_defaults() -> None:
    config = transformers.SiglipVisionConfig()
    info = HUGGINGFACE.infer_info(
        archive_of("SiglipVisionModel", config, {"model_type": "siglip", "vision_config": {}})
    )
    assert isinstance(info.config, ViTConfig)
    assert (info.config.num_heads, info.config.activation, info.config.norm_eps) == (12, "gelu-tanh", 1e-6)


def test_image_not_covered_by_patches_matches_transformers(tmp_path: Path) -> None:
    """google/siglip-so400m-patch14-384: transformers' convolution ignores the last pixels, and so does vitrail."""
    config = transformers.SiglipVisionConfig(**VIT | {"image_size": 30})
    theirs = randomized(transformers.SiglipVisionModel(config))
    theirs.save_pretrained(tmp_path)
    processor = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 30, "width": 30}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    net, info = checkpoint.read(tmp_path)
    assert info.config.image_size == info.preprocess.image_size == (30, 30)
    assert info.config.uncovered == "ignore"
    images = torch.randn(2, 3, 30, 30)
    with torch.no_grad():
        assert relative(net(images), theirs(images).pooler_output) <= 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act='relu', which vitrail does not support; supported: gelu"),
        ({"model_type": "beit"}, "model_type='beit', but the tensors are those of vit"),
        ({"hidden_size": 64}, "hidden_size=64, but the tensors have 32"),
        ({"num_hidden_layers": 3}, "num_hidden_layers=3, but the tensors have 2"),
        ({"patch_size": 16}, "patch_size=16, but the tensors have"),
        ({"image_size": 40}, r"image_size=40 \(5x5 patches\), but the tensors have 16 positions"),
        ({"pooler_act": "relu"}, "pooler_act='relu'"),
    ],
)
def test_mismatched_config_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        HUGGINGFACE.infer_info(vit(change, "ViTModel"))


@pytest.mark.parametrize(
    "change",
    [
        {"layer_type": "bottleneck"},
        {"global_padding": "SAME"},
        {"hidden_act": "gelu"},
        {"num_groups": 16},
        {"embedding_dynamic_padding": True},
        {"output_stride": 16},
    ],
)
def test_unsupported_resnet_settings_are_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match=next(iter(change))):
        HUGGINGFACE.infer_info(bit(change))


def test_similar_architectures_are_refused_by_name() -> None:
    archive = vit({})
    archive.tensors.entries["encoder.layer.0.lambda_1"] = archive.tensors.entries["layernorm.weight"]
    with pytest.raises(FormatError, match="BEiT"):
        HUGGINGFACE.infer_info(archive)
    config = transformers.Siglip2VisionConfig(**{k: v for k, v in VIT.items() if k != "image_size"}, num_patches=16)
    with pytest.raises(FormatError, match="NaFlex"):
        HUGGINGFACE.infer_info(archive_of("Siglip2VisionModel", config))


def test_zero_registers_are_read() -> None:
    config = transformers.Dinov2WithRegistersConfig(**TINY, mlp_ratio=2, num_register_tokens=0)
    info = HUGGINGFACE.infer_info(archive_of("Dinov2WithRegistersModel", config, {}))
    assert isinstance(info.config, ViTConfig)
    assert (info.config.num_registers, info.config.resample) == (0, "timm")


def test_non_square_positions_require_image_size() -> None:
    config = transformers.ViTConfig(**VIT | {"image_size": [16, 40]})
    assert HUGGINGFACE.infer_info(archive_of("ViTModel", config, {})).config.image_size == (16, 40)
    with pytest.raises(FormatError, match="10 positions are not a square grid"):
        HUGGINGFACE.infer_info(archive_of("ViTModel", config, {"image_size": None}))


def test_other_formats_are_not_detected() -> None:
    for name in ("patch_embed.proj.weight", "conv_proj.weight", "embedding/kernel", "visual.conv1.weight"):
        assert HUGGINGFACE.detect(Archive("memory", LazyTensors.from_tensors({name: torch.zeros(1)}))) is None


HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
BOX = {"height": 40, "width": 40}
PROCESSORS: dict[str, dict[str, Any]] = {
    "vit, old": {"feature_extractor_type": "ViTFeatureExtractor", "resample": 2, "size": 40, **HALF},
    "vit": {"image_processor_type": "ViTImageProcessor", "resample": 3, "size": BOX, **IMAGENET},
    "vit, not square": {"image_processor_type": "ViTImageProcessor", "size": {"height": 24, "width": 40}},
    "vit, no normalizing": {"image_processor_type": "ViTImageProcessor", "size": BOX, "do_normalize": False},
    "vit, another range": {"image_processor_type": "ViTImageProcessor", "size": BOX, "rescale_factor": 1 / 127.5},
    "vit, no range": {"image_processor_type": "ViTImageProcessor", "size": BOX, "do_rescale": False},
    "deit": {
        "feature_extractor_type": "DeiTFeatureExtractor",
        "crop_size": 40,
        "do_center_crop": True,
        "size": 48,
        "resample": 3,
        **IMAGENET,
    },
    "clip, old": {"feature_extractor_type": "CLIPFeatureExtractor", "crop_size": 40, "size": 40, "resample": 3},
    "clip": {"image_processor_type": "CLIPImageProcessorFast", "crop_size": BOX, "size": {"shortest_edge": 48}},
    "dinov2": {
        "image_processor_type": "BitImageProcessor",
        "crop_size": BOX,
        "do_center_crop": True,
        "size": {"shortest_edge": 48},
        "resample": 3,
        "rescale_factor": 0.00392156862745098,
        **IMAGENET,
    },
    "siglip": {"image_processor_type": "SiglipImageProcessor", "size": BOX, "resample": 3, "do_convert_rgb": None},
}


def photograph(width: int = 90, height: int = 61) -> Image.Image:
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / 7 + y / 11), np.cos(x * y / 300), np.sin(x / 3)]
    return Image.fromarray(((np.stack(waves, -1) + 1) * 127.5).astype(np.uint8))


def transformers_pixels(processor_config: dict[str, Any], folder: Path) -> torch.Tensor:
    (folder / "preprocessor_config.json").write_text(json.dumps(processor_config))
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    return processor(photograph(), return_tensors="pt")["pixel_values"].float()


@pytest.mark.peer
@pytest.mark.parametrize("name", PROCESSORS)
def test_preprocessing_matches_transformers(name: str, tmp_path: Path) -> None:
    processor_config = PROCESSORS[name]
    preprocess, notes = read_preprocess(processor_config, "vit", (40, 40), 3)
    assert not notes
    ours = Preprocess(preprocess)(photograph())
    theirs = transformers_pixels(processor_config, tmp_path)
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.peer
@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("kind", ["vit", "clip", "siglip", "dinov2"])
def test_written_processor_round_trips_and_matches_transformers(name: str, kind: str, tmp_path: Path) -> None:
    preprocess, _ = read_preprocess(PROCESSORS[name], kind, (40, 40), 3)
    reread, notes = read_preprocess(preprocessor_json(preprocess, kind), kind, (40, 40), 3)
    assert not notes
    assert reread == preprocess
    theirs = transformers_pixels(preprocessor_json(preprocess, kind), tmp_path)
    assert (Preprocess(preprocess)(photograph()) - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_image_processor_in_a_joint_config_is_read() -> None:
    joint = {"image_processor": {"image_processor_type": "ViTImageProcessor", "size": BOX}, "processor_class": "X"}
    assert HUGGINGFACE.infer_info(vit({}, processor_config=joint)).preprocess.image_size == (40, 40)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"do_resize": False}, "do_resize=false"),
        ({"size": {"longest_edge": 40}}, "an unsupported size"),
        ({"size": {"shortest_edge": 40}}, "does not crop"),
        ({"resample": 5}, "resample=5, which is not supported"),
        ({"image_processor_type": "LevitImageProcessor"}, "anything else that this class does is ignored"),
        ({"size": {"height": 40, "width": 60}, "crop_size": 40, "do_center_crop": True}, "crops"),
    ],
)
def test_unsupported_processor_settings_are_noted(change: dict[str, Any], message: str) -> None:
    _, notes = read_preprocess({"image_processor_type": "ViTImageProcessor", **change}, "vit", (40, 40), 3)
    assert len(notes) == 1
    assert message in notes[0]


def test_invalid_processor_config_is_named() -> None:
    with pytest.raises(FormatError, match=r"preprocessor_config\.json is invalid"):
        HUGGINGFACE.infer_info(vit({}, preprocessor_config={"size": {"height": 40}}))


def test_one_channel_preprocessing_has_one_channel() -> None:
    preprocess, _ = read_preprocess(PROCESSORS["vit"], "vit", (40, 40), 1)
    assert preprocess.channels == 1


PLAIN = ViTConfig(image_size=32, patch_size=8, num_classes=5, width=32, depth=1, num_heads=2, mlp_dim=64)
SCALED = PLAIN.replace(layer_scale=1.0, pool="token+gap")
CLIP = PLAIN.replace(pre_norm=True, patch_bias=False, head_bias=False)
SIGLIP = PLAIN.replace(class_token=False, pool="map", num_classes=0)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (PLAIN, {"position": "none"}, "a network without positions"),
        (PLAIN, {"position": "learned-2d"}, "learned-2d positions"),
        (PLAIN, {"position": "relative"}, "relative positions"),
        (PLAIN, {"position": "sincos-2d"}, "sincos-2d positions"),
        (PLAIN, {"position": "rope-2d"}, "rope-2d positions"),
        (PLAIN, {"position_at": "layers"}, "position embeddings added at every layer"),
        (PLAIN, {"position_on_class": False}, "a class token without a position"),
        (PLAIN, {"norm": "rms"}, "RMSNorm"),
        (PLAIN, {"qk_norm": True}, "qk-norm"),
        (PLAIN, {"proj_bias": False}, "attention and MLP outputs without bias"),
        (PLAIN, {"stem": StemConfig(layers=(1,)), "patch_size": 1}, "a ResNet stem"),
        (PLAIN, {"patch_size": (8, 4)}, "patches that are not square"),
        (PLAIN, {"patch_bias": False}, "a patch projection without bias"),
        (PLAIN, {"head_bias": False}, "a head without bias"),
        (PLAIN, {"pre_logits": 16}, "a tanh layer before the head"),
        (PLAIN, {"activation": "swiglu"}, "SwiGLU without LayerScale"),
        (PLAIN, {"pool": "gap"}, "pool='gap' after the norm with a head in ViTModel"),
        (PLAIN, {"pool": "gap", "pool_norm": "after"}, "pool='gap' before the norm"),
        (PLAIN, {"pool_norm": "none"}, "pool='token' without a norm"),
        (PLAIN, {"num_registers": 4}, "registers without LayerScale"),
        (PLAIN, {"distilled": True, "num_registers": 1}, "a distillation token beside other changes"),
        (PLAIN, {"distilled": True, "layer_scale": 1.0}, "a distillation token beside other changes"),
        (SCALED, {"pool": "token"}, "pool='token' after the norm with a head in Dinov2Model"),
        (SCALED, {"num_classes": 0}, "pool='token\\+gap' after the norm without a head"),
        (SCALED, {"mlp_dim": 72}, "an MLP of 72 at width 32"),
        (SCALED, {"image_size": (32, 16)}, "an image that is not square in Dinov2Model"),
        (CLIP, {"head_bias": True}, "a head with bias on the class token"),
        (CLIP, {"patch_bias": True}, "a patch bias beside a norm before the blocks"),
        (CLIP, {"qkv_bias": False}, "query, key and value projections without bias"),
        (CLIP, {"layer_scale": 1.0}, "LayerScale beside other changes"),
        (CLIP, {"num_registers": 4}, "registers beside a norm before the blocks"),
        (CLIP, {"image_size": (32, 16)}, "an image that is not square in CLIPVisionModel"),
        (SIGLIP, {"num_classes": 5}, "pool='map' after the norm with a head in SiglipVisionModel"),
        (SIGLIP, {"class_token": True}, "attention pooling beside a class token"),
        (SIGLIP, {"num_registers": 4}, "registers without a class token"),
    ],
)
def test_unsupported_part_is_refused_by_name(config: ViTConfig, changes: dict[str, Any], message: str) -> None:
    HUGGINGFACE.check_writable(ModelInfo(config=config, preprocess=PreprocessConfig()))
    with pytest.raises(ConversionError, match=message):
        HUGGINGFACE.check_writable(ModelInfo(config=config.replace(**changes), preprocess=PreprocessConfig()))


def test_class_names_for_a_projection_are_refused() -> None:
    with pytest.raises(ConversionError, match="class names for CLIP's projection"):
        HUGGINGFACE.check_writable(ModelInfo(config=CLIP, preprocess=PreprocessConfig(), labels=tuple("abcde")))


def test_original_bit_conventions_require_approximate() -> None:
    info = ModelInfo(config=BiTConfig(), preprocess=PreprocessConfig(), family="BiT")
    with pytest.raises(ConversionError, match="standardize_eps=1e-10"):
        HUGGINGFACE.check_writable(info)
    HUGGINGFACE.check_writable(info, approximate=True)
    HUGGINGFACE.check_writable(info.replace(config=BiTConfig(standardize_eps=1e-8)))

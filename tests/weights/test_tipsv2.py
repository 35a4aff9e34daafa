"""Files of TIPSv2's image towers: agreement with transformers and timm, round trips, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compare import randomized, relative
from conftest import import_peer

from vitrail.config import PreprocessConfig, ViTConfig
from vitrail.errors import ConversionError
from vitrail.models import ViT
from vitrail.weights import checkpoint, conversion
from vitrail.weights.model_info import ModelInfo

pytestmark = pytest.mark.peer

SMALL: dict[str, Any] = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 2, "image_size": 56,
    "patch_size": 14,
}  # fmt: skip
TEXT = {"hidden_size": 128, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
SIZES = ((56, 56), (84, 42), (98, 126))


def tower(**options: Any) -> Any:
    transformers = import_peer("transformers")
    return randomized(transformers.Tipsv2VisionModel(transformers.Tipsv2VisionConfig(**SMALL | options)))


def read(path: Path, **options: Any) -> tuple[ViT, ModelInfo]:
    net, info = checkpoint.read(path, **options)
    assert isinstance(net, ViT)
    return net, info


@torch.no_grad()
def check(net: ViT, theirs: Any, sizes: tuple[tuple[int, int], ...] = SIZES) -> None:
    """Class token and patches are those of transformers at these sizes."""
    for height, width in sizes:
        images = torch.randn(2, 3, height, width)
        expected = theirs(pixel_values=images)
        found = net.features(images, ("patches", "logits"))
        patches = expected.last_hidden_state[:, net.config.num_prefix_tokens :]
        assert relative(found.logits, expected.pooler_output) <= 1e-5, (height, width)
        assert relative(found.patches.flatten(1, 2), patches) <= 1e-5, (height, width)


@pytest.mark.parametrize(
    "options", [{}, {"use_swiglu_ffn": True}, {"num_register_tokens": 3}, {"layer_norm_eps": 1e-5}]
)
def test_transformers_towers_are_read_and_written(options: dict[str, Any], tmp_path: Path) -> None:
    theirs = tower(**options)
    theirs.save_pretrained(tmp_path / "theirs")
    net, info = read(tmp_path / "theirs")
    assert (info.family, info.task, info.config.resample) == ("TIPSv2", "embed", "tipsv2")
    assert info.preprocess.mean == (0.0, 0.0, 0.0)
    assert info.preprocess.std == (1.0, 1.0, 1.0)
    check(net, theirs)
    report = conversion.convert(net, info, tmp_path / "again", to="huggingface")
    assert report.lost == ()
    again, _ = read(tmp_path / "again")
    for name, tensor in net.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    check(net, import_peer("transformers").Tipsv2VisionModel.from_pretrained(tmp_path / "again"), SIZES[:2])


def test_the_image_tower_of_a_whole_model_is_read(tmp_path: Path) -> None:
    """google/tipsv2-* have both towers in one file, with a config for each."""
    transformers = import_peer("transformers")
    config = transformers.Tipsv2Config(vision_config=SMALL, text_config=TEXT)
    theirs = randomized(transformers.Tipsv2Model(config))
    theirs.save_pretrained(tmp_path / "model")
    net, info = read(tmp_path / "model")
    assert info.family == "TIPSv2"
    check(net, theirs.vision_model, SIZES[:2])


def test_bare_files_need_nothing(tmp_path: Path) -> None:
    theirs = tower()
    theirs.save_pretrained(tmp_path / "theirs")
    (tmp_path / "tower.safetensors").hardlink_to(tmp_path / "theirs" / "model.safetensors")
    net, info = read(tmp_path / "tower.safetensors")
    assert (info.family, info.preprocess.mean) == ("TIPSv2", (0.0, 0.0, 0.0))
    assert any("2 heads of width 64 are assumed" in note for note in info.notes)
    check(net, theirs)


def test_files_of_timm_keep_their_own_resampling(tmp_path: Path) -> None:
    timm = import_peer("timm")
    args = {"embed_dim": 128, "depth": 2, "num_heads": 2, "img_size": 56, "dynamic_img_size": True}
    theirs = randomized(timm.create_model("vit_base_patch14_reg1_tipsv2", **args))
    timm.models.save_for_hf(theirs, tmp_path / "timm", model_args=args, safe_serialization=True)
    net, info = read(tmp_path / "timm")
    assert (info.family, info.preprocess.mean, info.config.resample) == ("TIPSv2", (0.0, 0.0, 0.0), "timm")
    for size in SIZES:
        images = torch.randn(2, 3, *size)
        with torch.no_grad():
            assert relative(net(images), theirs(images)) <= 1e-5


def test_what_the_format_cannot_express_is_refused(tmp_path: Path) -> None:
    theirs = tower()
    theirs.save_pretrained(tmp_path / "theirs")
    net, info = read(tmp_path / "theirs")
    with_head = net.with_classes(5)
    with pytest.raises(ConversionError, match="huggingface's format cannot represent a head"):
        conversion.convert(
            with_head, info.replace(config=with_head.config, task="classify"), tmp_path / "head", to="huggingface"
        )
    assert isinstance(info.config, ViTConfig)
    assert isinstance(info.preprocess, PreprocessConfig)

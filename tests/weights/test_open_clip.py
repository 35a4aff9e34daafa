"""OpenAI's CLIP and open_clip: outputs of the original code, detection of the activation, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from clip_files import (
    golden_value,
    images,
    open_clip_config,
    openai_state_dict,
    save_repository,
    save_torchscript,
    state_dict_of,
)
from compare import relative
from safetensors.torch import save_file
from torch import Tensor

import vitrail
from vitrail.config import ViTConfig, pair
from vitrail.config.image import CLIP_MEAN, CLIP_STD
from vitrail.errors import ConversionError, FormatError
from vitrail.models import ViT
from vitrail.models.position import resample
from vitrail.weights import checkpoint
from vitrail.weights.model_info import ModelInfo

CASES = (
    "vit",
    "quickgelu",
    "tanh",
    "wide-heads",
    "layer-scale",
    "qk-norm",
    "clipa",
    "uncovered",
    "coca",
    "coca-same-width",
)
SCRIPTING = pytest.mark.filterwarnings("ignore:`torch.jit.*` is:DeprecationWarning")


def saved(value: Any, folder: Path, name: str = "weights.pt") -> Path:
    torch.save(value, folder / name)
    return folder / name


def read(path: Path, **options: Any) -> tuple[ViT, ModelInfo]:
    net, info = checkpoint.read(path, **options)
    assert isinstance(net, ViT)
    return net, info


def embedding_of(net: ViT) -> Tensor:
    with torch.no_grad():
        return net(images(*pair(net.config.image_size)))


# Outputs


@pytest.mark.parametrize("case", CASES)
def test_open_clip_repository_gives_the_original_embeddings(case: str, tmp_path: Path) -> None:
    net, info = read(save_repository(case, tmp_path))
    assert info.family == "CLIP"
    assert info.task == "embed"
    assert relative(embedding_of(net), golden_value(f"{case}.embedding")) <= 1e-5


@pytest.mark.parametrize("half", [True, False])
def test_openai_state_dict_gives_the_original_embeddings(half: bool, tmp_path: Path) -> None:
    net, info = read(saved(openai_state_dict(half), tmp_path))
    assert info.config.activation == "gelu-quick"
    assert info.config.num_heads == 2
    assert relative(embedding_of(net), golden_value("openai.embedding")) <= (1e-5 if half else 1e-3)
    assert not [n for n in info.notes if "assumed" in n or "preprocessing" in n]  # OpenAI's preprocessing is known


@SCRIPTING
@pytest.mark.parametrize("half", [True, False])
def test_openai_torchscript_archive_gives_the_same_network_as_its_state_dict(half: bool, tmp_path: Path) -> None:
    net, info = read(save_torchscript(openai_state_dict(half), tmp_path / "ViT-B-32.pt"))
    expected, _ = read(saved(openai_state_dict(half), tmp_path))
    assert info.config == expected.config
    for name, value in expected.state_dict().items():
        assert torch.equal(net.state_dict()[name], value), name
    assert any("none of its code was executed" in note for note in info.notes)


def test_embed_gives_the_projected_embedding(tmp_path: Path) -> None:
    model = vitrail.load(saved(openai_state_dict(), tmp_path))
    image = torch.randint(256, (40, 50, 3), dtype=torch.uint8).numpy()
    with torch.no_grad():
        expected = model.net(model.preprocess(image))
    assert expected.shape == (1, 48)
    assert relative(model.embed([image]), expected) <= 1e-6


def test_positions_are_resampled_as_in_open_clip(tmp_path: Path) -> None:
    net, _ = read(save_repository("vit", tmp_path))
    prefix, table = net.resized(56).positions[0].state_dict().values()
    expected = golden_value("vit.resized")
    assert relative(torch.cat([prefix, table.flatten(0, 1)]), expected) <= 1e-6
    assert relative(resample(net.positions[0].table, (7, 7), "timm").flatten(0, 1), expected[1:]) <= 1e-6


# Options that the tensors do not determine


def test_run_name_in_a_training_checkpoint_gives_the_activation(tmp_path: Path) -> None:
    state = {f"module.{name}": value for name, value in state_dict_of("quickgelu").items()}
    name = "2024_01_01-00_00_00-model_ViT-B-32-quickgelu-lr_0.001-b_64-j_4-p_amp"
    net, info = read(saved({"epoch": 3, "name": name, "state_dict": state}, tmp_path))
    assert info.config.activation == "gelu-quick"
    assert relative(embedding_of(net), golden_value("quickgelu.embedding")) <= 1e-5


@pytest.mark.parametrize("name", ["my-run", "2024_01_01-00_00_00-model_ViT-B-32-lr_0.001-b_64-j_4-p_amp"])
def test_file_with_an_unknown_gelu_requires_the_activation_option(name: str, tmp_path: Path) -> None:
    """The model name does not decide: open_clip has an option that forces QuickGELU."""
    path = saved({"name": name, "state_dict": state_dict_of("vit")}, tmp_path)
    with pytest.raises(FormatError, match=r"pass activation='gelu-quick' .* activation='gelu'") as caught:
        read(path)
    assert "\n" not in str(caught.value)
    for activation, case in (("gelu", "vit"), ("gelu-quick", "quickgelu")):
        net, info = read(path, overrides={"activation": activation})
        assert relative(embedding_of(net), golden_value(f"{case}.embedding")) <= 1e-5
        assert any("2 heads of width 64 are assumed" in note for note in info.notes)
        assert any("the file does not store preprocessing" in note for note in info.notes)


@SCRIPTING
def test_activation_class_in_a_torchscript_archive_gives_the_activation(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="GELU or QuickGELU"):
        read(save_torchscript(state_dict_of("vit"), tmp_path / "plain.pt"))
    net, _ = read(save_torchscript(state_dict_of("quickgelu"), tmp_path / "quick.pt", quick=True))
    assert relative(embedding_of(net), golden_value("quickgelu.embedding")) <= 1e-5


def test_image_tower_alone_is_read(tmp_path: Path) -> None:
    tower = {n.removeprefix("visual."): t for n, t in state_dict_of("vit").items() if n.startswith("visual.")}
    net, _ = read(saved(tower, tmp_path), overrides={"activation": "gelu"})
    assert relative(embedding_of(net), golden_value("vit.embedding")) <= 1e-5


def test_clipa_without_its_config_requires_the_pool_option(tmp_path: Path) -> None:
    path = saved(state_dict_of("clipa"), tmp_path)
    with pytest.raises(FormatError, match="pool='gap', pool_norm='after' for CLIPA"):
        read(path, overrides={"activation": "gelu"})
    net, _ = read(path, overrides={"activation": "gelu", "pool": "gap", "pool_norm": "after"})
    assert relative(embedding_of(net), golden_value("clipa.embedding")) <= 1e-5


def test_coca_without_its_config_notes_the_assumed_pooling_heads(tmp_path: Path) -> None:
    path = saved(state_dict_of("coca"), tmp_path)
    _, info = read(path, overrides={"activation": "gelu"})
    assert any("8 pooling heads are assumed" in note for note in info.notes)
    net, _ = read(path, overrides={"activation": "gelu", "pool_heads": 4})
    assert relative(embedding_of(net), golden_value("coca.embedding")) <= 1e-5


# Folders and preprocessing


def test_preprocessing_is_openais_unless_the_config_states_another(tmp_path: Path) -> None:
    _, info = read(saved(openai_state_dict(), tmp_path))
    default = info.preprocess
    assert (default.resize, default.resize_to, default.interpolation) == ("short", 32, "bicubic")
    assert (default.mean, default.std) == (CLIP_MEAN, CLIP_STD)
    preprocess_cfg = {"mean": [0.5] * 3, "std": [0.25] * 3, "interpolation": "bilinear", "resize_mode": "squash"}
    (tmp_path / "repository").mkdir()
    _, info = read(save_repository("vit", tmp_path / "repository", **preprocess_cfg))
    stated = info.preprocess
    assert (stated.resize, stated.resize_to, stated.interpolation) == ("squash", None, "bilinear")
    assert (stated.mean, stated.std) == ((0.5,) * 3, (0.25,) * 3)
    assert not [n for n in info.notes if "preprocessing" in n]


def test_unsupported_padding_is_noted(tmp_path: Path) -> None:
    _, info = read(save_repository("vit", tmp_path, mean=CLIP_MEAN, std=CLIP_STD, resize_mode="longest"))
    assert any("resize_mode='longest' (with padding)" in note for note in info.notes)


def test_transformers_files_take_precedence_over_open_clip_files(tmp_path: Path) -> None:
    net, info = read(save_repository("quickgelu", tmp_path))
    checkpoint.write(net, info, tmp_path / "both", to="huggingface")
    save_repository("vit", tmp_path / "both")  # a different network, so that the outputs show which one is read
    reloaded, _ = read(tmp_path / "both")
    assert torch.equal(embedding_of(reloaded), embedding_of(net))
    open_clip_net, _ = read(tmp_path / "both" / "open_clip_model.safetensors")
    assert relative(embedding_of(open_clip_net), golden_value("vit.embedding")) <= 1e-5


def test_image_size_of_the_stored_positions_overrides_the_config(tmp_path: Path) -> None:
    config = open_clip_config("vit")
    config["model_cfg"]["vision_cfg"]["image_size"] = 64
    save_file(state_dict_of("vit"), tmp_path / "open_clip_model.safetensors")
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    net, info = read(tmp_path)
    assert pair(net.config.image_size) == (32, 32)
    assert any("image_size=64" in note for note in info.notes)


# Errors


BLOCK = "visual.transformer.resblocks.0."
UNSUPPORTED_TENSORS = {
    "Perception Encoder": {"visual.attn_pool.probe": (1, 1, 128)},
    "two attentional poolers": {"visual.attn_pool_contrastive.query": (1, 48)},
    "input_patchnorm": {"visual.patchnorm_pre_ln.weight": (192,)},
    "scaled cosine attention": {f"{BLOCK}attn.logit_scale": (2, 1, 1)},
    "scale_heads": {f"{BLOCK}attn.head_scale": (2, 1, 1)},
    "scale_attn_inner": {f"{BLOCK}attn.ln_inner.weight": (128,)},
    "scale_attn": {f"{BLOCK}ln_attn.weight": (128,)},
    "scale_fc": {f"{BLOCK}mlp.ln.weight": (512,)},
}


@pytest.mark.parametrize("part", UNSUPPORTED_TENSORS)
def test_unsupported_tower_is_refused_by_name(part: str, tmp_path: Path) -> None:
    tensors = {name: torch.ones(shape) for name, shape in UNSUPPORTED_TENSORS[part].items()}
    with pytest.raises(FormatError, match=part):
        read(saved(state_dict_of("vit") | tensors, tmp_path), overrides={"activation": "gelu"})


def test_the_modified_resnet_is_refused_by_name(tmp_path: Path) -> None:
    names = ["layer1.0.conv1.weight", "attnpool.q_proj.weight", "attnpool.c_proj.weight", "conv1.weight"]
    with pytest.raises(FormatError, match="modified ResNet"):
        read(saved({f"visual.{name}": torch.ones(2, 2, 1, 1) for name in names}, tmp_path))


@pytest.mark.parametrize("absent", ["visual.ln_post", "visual.class_embedding"])
def test_perception_encoder_without_its_pool_is_not_read_as_clip(absent: str, tmp_path: Path) -> None:
    """PE-Lang and PE-Spatial have CLIP's tensor names, no final norm, and rotary positions without tensors."""
    state = {n: t for n, t in state_dict_of("vit").items() if not n.startswith((absent, "visual.proj"))}
    with pytest.raises(FormatError, match="Perception Encoder"):
        read(saved(state, tmp_path), overrides={"activation": "gelu"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_average_pool": True}, "global_average_pool"),
        ({"timm_model_name": "vit_base_patch16_224"}, "timm_model_name"),
        ({"pool_type": "none"}, "pool_type='none'"),
        ({"width": 256}, "width=256, but the tensors have 128"),
        ({"layers": 3}, "layers=3, but the tensors have 2"),
    ],
)
def test_unsupported_or_mismatched_config_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = open_clip_config("vit")
    config["model_cfg"]["vision_cfg"] |= changes
    save_file(state_dict_of("vit"), tmp_path / "open_clip_model.safetensors")
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match=message):
        read(tmp_path)


def test_a_missing_and_an_unknown_tensor_are_named(tmp_path: Path) -> None:
    state = openai_state_dict()
    state["visual.conv1_alpha.weight"] = state.pop("visual.transformer.resblocks.1.ln_2.bias")
    with pytest.raises(
        FormatError, match=r"missing .*resblocks\.1\.ln_2\.bias; unexpected visual\.conv1_alpha\.weight"
    ):
        read(saved(state, tmp_path))


def test_open_clip_files_are_read_but_not_written(tmp_path: Path) -> None:
    net, info = read(saved(openai_state_dict(), tmp_path))
    with pytest.raises(ConversionError, match="open_clip files can be read but not written"):
        checkpoint.write(net, info, tmp_path / "out", to="open_clip")
    checkpoint.write(net, info, tmp_path / "transformers", to="huggingface")
    reloaded, _ = read(tmp_path / "transformers")
    assert torch.equal(embedding_of(reloaded), embedding_of(net))


def test_formats_without_coca_pooling_refuse_it(tmp_path: Path) -> None:
    net, info = read(save_repository("coca", tmp_path))
    assert isinstance(info.config, ViTConfig)
    plain = info.replace(
        config=info.config.replace(pre_norm=False, patch_bias=True, head_bias=True, position_on_class=False)
    )
    for to in ("timm", "huggingface", "google", "big_vision", "torchvision", "facebook"):
        for model_info in (info, plain):
            with pytest.raises(ConversionError, match=r"coca|CoCa|attention pool"):
                checkpoint.write(net, model_info, tmp_path / "out", to=to, approximate=True)
    checkpoint.write(net, info, tmp_path / "ours")
    assert torch.equal(embedding_of(read(tmp_path / "ours")[0]), embedding_of(net))

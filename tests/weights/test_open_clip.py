"""OpenAI's CLIP and open_clip: outputs of their own code, what decides the activation, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from clip_files import images, openai, recorded, repository, scripted, sidecar, state_of
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


def embedded(net: ViT) -> Tensor:
    with torch.no_grad():
        return net(images(*pair(net.config.image_size)))


# Outputs


@pytest.mark.parametrize("case", CASES)
def test_a_repository_of_open_clip_gives_the_originals_embeddings(case: str, tmp_path: Path) -> None:
    net, info = read(repository(case, tmp_path))
    assert info.family == "CLIP"
    assert info.task == "embed"
    assert relative(embedded(net), recorded(f"{case}.embedding")) <= 1e-5


@pytest.mark.parametrize("half", [True, False])
def test_openais_dictionary_gives_the_originals_embeddings(half: bool, tmp_path: Path) -> None:
    net, info = read(saved(openai(half), tmp_path))
    assert info.config.activation == "gelu-quick"
    assert info.config.num_heads == 2
    assert relative(embedded(net), recorded("openai.embedding")) <= (1e-5 if half else 1e-3)
    assert not [n for n in info.notes if "assumed" in n or "preprocessing" in n]  # OpenAI's is known


@SCRIPTING
@pytest.mark.parametrize("half", [True, False])
def test_openais_archive_of_torchscript_gives_the_same_network_as_its_dictionary(half: bool, tmp_path: Path) -> None:
    net, info = read(scripted(openai(half), tmp_path / "ViT-B-32.pt"))
    expected, _ = read(saved(openai(half), tmp_path))
    assert info.config == expected.config
    for name, value in expected.state_dict().items():
        assert torch.equal(net.state_dict()[name], value), name
    assert any("none of its code was executed" in note for note in info.notes)


def test_the_model_embeds_images_into_the_space_of_the_texts(tmp_path: Path) -> None:
    model = vitrail.load(saved(openai(), tmp_path))
    image = torch.randint(256, (40, 50, 3), dtype=torch.uint8).numpy()
    with torch.no_grad():
        expected = model.net(model.preprocess(image))
    assert expected.shape == (1, 48)
    assert relative(model.embed([image]), expected) <= 1e-6


def test_positions_are_resized_as_open_clip_does(tmp_path: Path) -> None:
    net, _ = read(repository("vit", tmp_path))
    prefix, table = net.resized(56).positions[0].state_dict().values()
    expected = recorded("vit.resized")
    assert relative(torch.cat([prefix, table.flatten(0, 1)]), expected) <= 1e-6
    assert relative(resample(net.positions[0].table, (7, 7), "timm").flatten(0, 1), expected[1:]) <= 1e-6


# What decides the activation


def test_open_clips_training_checkpoint_is_read_and_its_run_name_counts(tmp_path: Path) -> None:
    state = {f"module.{name}": value for name, value in state_of("quickgelu").items()}
    name = "2024_01_01-00_00_00-model_ViT-B-32-quickgelu-lr_0.001-b_64-j_4-p_amp"
    net, info = read(saved({"epoch": 3, "name": name, "state_dict": state}, tmp_path))
    assert info.config.activation == "gelu-quick"
    assert relative(embedded(net), recorded("quickgelu.embedding")) <= 1e-5


@pytest.mark.parametrize("name", ["my-run", "2024_01_01-00_00_00-model_ViT-B-32-lr_0.001-b_64-j_4-p_amp"])
def test_a_file_that_does_not_tell_its_gelu_is_asked_about(name: str, tmp_path: Path) -> None:
    """open_clip can be forced to QuickGELU, so that the name of a plain model proves nothing."""
    path = saved({"name": name, "state_dict": state_of("vit")}, tmp_path)
    with pytest.raises(FormatError, match=r"pass activation='gelu-quick' .* activation='gelu'") as caught:
        read(path)
    assert "\n" not in str(caught.value)
    for activation, case in (("gelu", "vit"), ("gelu-quick", "quickgelu")):
        net, info = read(path, overrides={"activation": activation})
        assert relative(embedded(net), recorded(f"{case}.embedding")) <= 1e-5
        assert any("2 heads of width 64 are assumed" in note for note in info.notes)
        assert any("the file does not store preprocessing" in note for note in info.notes)


@SCRIPTING
def test_the_class_of_the_activation_in_a_program_counts(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="GELU or QuickGELU"):
        read(scripted(state_of("vit"), tmp_path / "plain.pt"))
    net, _ = read(scripted(state_of("quickgelu"), tmp_path / "quick.pt", quick=True))
    assert relative(embedded(net), recorded("quickgelu.embedding")) <= 1e-5


def test_the_image_tower_alone_is_read_too(tmp_path: Path) -> None:
    tower = {n.removeprefix("visual."): t for n, t in state_of("vit").items() if n.startswith("visual.")}
    net, _ = read(saved(tower, tmp_path), overrides={"activation": "gelu"})
    assert relative(embedded(net), recorded("vit.embedding")) <= 1e-5


def test_clipa_without_its_config_is_asked_how_it_pools(tmp_path: Path) -> None:
    path = saved(state_of("clipa"), tmp_path)
    with pytest.raises(FormatError, match="pool='gap', pool_norm='after' for CLIPA"):
        read(path, overrides={"activation": "gelu"})
    net, _ = read(path, overrides={"activation": "gelu", "pool": "gap", "pool_norm": "after"})
    assert relative(embedded(net), recorded("clipa.embedding")) <= 1e-5


def test_coca_without_its_config_says_what_it_assumes(tmp_path: Path) -> None:
    path = saved(state_of("coca"), tmp_path)
    _, info = read(path, overrides={"activation": "gelu"})
    assert any("8 pooling heads are assumed" in note for note in info.notes)
    net, _ = read(path, overrides={"activation": "gelu", "pool_heads": 4})
    assert relative(embedded(net), recorded("coca.embedding")) <= 1e-5


# Folders and preprocessing


def test_the_preprocessing_is_openais_unless_the_config_says_another(tmp_path: Path) -> None:
    _, info = read(saved(openai(), tmp_path))
    usual = info.preprocess
    assert (usual.resize, usual.resize_to, usual.interpolation) == ("short", 32, "bicubic")
    assert (usual.mean, usual.std) == (CLIP_MEAN, CLIP_STD)
    preprocess_cfg = {"mean": [0.5] * 3, "std": [0.25] * 3, "interpolation": "bilinear", "resize_mode": "squash"}
    (tmp_path / "repository").mkdir()
    _, info = read(repository("vit", tmp_path / "repository", **preprocess_cfg))
    other = info.preprocess
    assert (other.resize, other.resize_to, other.interpolation) == ("squash", None, "bilinear")
    assert (other.mean, other.std) == ((0.5,) * 3, (0.25,) * 3)
    assert not [n for n in info.notes if "preprocessing" in n]


def test_padding_which_is_not_done_is_said(tmp_path: Path) -> None:
    _, info = read(repository("vit", tmp_path, mean=CLIP_MEAN, std=CLIP_STD, resize_mode="longest"))
    assert any("resize_mode='longest' (with padding)" in note for note in info.notes)


def test_a_repository_of_transformers_with_open_clips_files_is_read_as_transformers(tmp_path: Path) -> None:
    net, info = read(repository("quickgelu", tmp_path))
    checkpoint.write(net, info, tmp_path / "both", to="huggingface")
    repository("vit", tmp_path / "both")  # another network, so that the choice shows
    again, _ = read(tmp_path / "both")
    assert torch.equal(embedded(again), embedded(net))
    inner, _ = read(tmp_path / "both" / "open_clip_model.safetensors")
    assert relative(embedded(inner), recorded("vit.embedding")) <= 1e-5


def test_positions_of_another_size_than_the_config_says_are_read_as_they_are(tmp_path: Path) -> None:
    whole = sidecar("vit")
    whole["model_cfg"]["vision_cfg"]["image_size"] = 64
    save_file(state_of("vit"), tmp_path / "open_clip_model.safetensors")
    (tmp_path / "open_clip_config.json").write_text(json.dumps(whole))
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


@pytest.mark.parametrize("what", UNSUPPORTED_TENSORS)
def test_a_tower_that_computes_something_else_is_refused_by_name(what: str, tmp_path: Path) -> None:
    strange = {name: torch.ones(shape) for name, shape in UNSUPPORTED_TENSORS[what].items()}
    with pytest.raises(FormatError, match=what):
        read(saved(state_of("vit") | strange, tmp_path), overrides={"activation": "gelu"})


def test_the_modified_resnet_is_refused_by_name(tmp_path: Path) -> None:
    names = ["layer1.0.conv1.weight", "attnpool.q_proj.weight", "attnpool.c_proj.weight", "conv1.weight"]
    with pytest.raises(FormatError, match="modified ResNet"):
        read(saved({f"visual.{name}": torch.ones(2, 2, 1, 1) for name in names}, tmp_path))


@pytest.mark.parametrize("absent", ["visual.ln_post", "visual.class_embedding"])
def test_perception_encoder_without_its_pool_is_not_taken_for_clip(absent: str, tmp_path: Path) -> None:
    """PE-Lang and PE-Spatial have the names of CLIP, no final norm, and rotary positions that no tensor shows."""
    state = {n: t for n, t in state_of("vit").items() if not n.startswith((absent, "visual.proj"))}
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
def test_a_config_that_says_what_is_not_built_or_not_there_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    whole = sidecar("vit")
    whole["model_cfg"]["vision_cfg"] |= changes
    save_file(state_of("vit"), tmp_path / "open_clip_model.safetensors")
    (tmp_path / "open_clip_config.json").write_text(json.dumps(whole))
    with pytest.raises(FormatError, match=message):
        read(tmp_path)


def test_a_missing_and_an_unknown_tensor_are_named(tmp_path: Path) -> None:
    state = openai()
    state["visual.conv1_alpha.weight"] = state.pop("visual.transformer.resblocks.1.ln_2.bias")
    with pytest.raises(
        FormatError, match=r"missing .*resblocks\.1\.ln_2\.bias; unexpected visual\.conv1_alpha\.weight"
    ):
        read(saved(state, tmp_path))


def test_it_is_read_and_written_for_others_but_not_written(tmp_path: Path) -> None:
    net, info = read(saved(openai(), tmp_path))
    with pytest.raises(ConversionError, match="open_clip files can be read but not written"):
        checkpoint.write(net, info, tmp_path / "out", to="open_clip")
    checkpoint.write(net, info, tmp_path / "transformers", to="huggingface")
    again, _ = read(tmp_path / "transformers")
    assert torch.equal(embedded(again), embedded(net))


def test_formats_without_cocas_pool_refuse_it(tmp_path: Path) -> None:
    net, info = read(repository("coca", tmp_path))
    assert isinstance(info.config, ViTConfig)
    plain = info.replace(
        config=info.config.replace(pre_norm=False, patch_bias=True, head_bias=True, position_on_class=False)
    )
    for to in ("timm", "huggingface", "google", "big_vision", "torchvision", "facebook"):
        for tried in (info, plain):
            with pytest.raises(ConversionError, match=r"coca|CoCa|attention pool"):
                checkpoint.write(net, tried, tmp_path / "out", to=to, approximate=True)
    checkpoint.write(net, info, tmp_path / "ours")
    assert torch.equal(embedded(read(tmp_path / "ours")[0]), embedded(net))

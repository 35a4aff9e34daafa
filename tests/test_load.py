"""`vitrail.load`: resolution of names and paths, errors for unknown names, and options that change the model."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import LABELS, model, small

import vitrail
from vitrail.config import PreprocessConfig
from vitrail.errors import CheckpointError, ConfigError, ImageError, NotFoundError
from vitrail.weights import hub
from vitrail.weights.locate import ModelLocation, locate


@pytest.fixture
def fetched_names(monkeypatch, model_folder) -> list[str]:
    """A fake hub with one model under every name; returns the list of fetched names."""
    names: list[str] = []

    def fetch(name: str, revision: str | None = None) -> Path:
        names.append(name)
        return model_folder

    monkeypatch.setattr(hub, "fetch", fetch)
    return names


# Resolution


def test_a_folder_and_the_file_in_it_give_the_same_model(vit, model_folder, photograph):
    from_folder, from_file = vitrail.load(model_folder), vitrail.load(model_folder / "model.safetensors")
    assert from_folder.info.to_dict() == from_file.info.to_dict() == vit.info.to_dict()
    assert torch.equal(from_folder.logits(photograph), vit.logits(photograph))
    assert torch.equal(from_file.logits(photograph), vit.logits(photograph))


@pytest.mark.parametrize("to", ["timm", "huggingface"])
def test_folders_of_other_libraries_load_with_labels_and_preprocessing(vit, tmp_path, photograph, to):
    vit.save(tmp_path / "theirs", to=to)
    reloaded = vitrail.load(str(tmp_path / "theirs"))
    assert reloaded.labels == LABELS
    assert torch.equal(reloaded.logits(photograph), vit.logits(photograph))


def test_a_home_directory_is_expanded(model_folder, monkeypatch):
    monkeypatch.setenv("HOME", str(model_folder.parent))
    assert locate("~/small") == ModelLocation(model_folder)


@pytest.mark.parametrize(
    ("name", "hub_id"),
    [
        ("ViT-Ti/16", "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"),
        ("vit-ti/16", "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"),
        ("vit_tiny_patch16_224", "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"),
        ("timm/vit_tiny_patch16_224", "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"),
        ("vit_tiny_patch16_224.augreg_in21k_ft_in1k", "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"),
        ("CLIP-B/32", "openai/clip-vit-base-patch32"),
    ],
)
def test_model_name_resolves_to_a_checkpoint_with_a_note(fetched_names, caplog, name, hub_id):
    assert vitrail.load(name).info.origin == hub_id
    assert fetched_names == [hub_id]
    assert f"{name} stands for {hub_id}." in caplog.text


def test_unavailable_checkpoint_error_gives_the_resolved_hub_id(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        NotFoundError, match=r"^DINO-S/8 stands for timm/vit_small_patch8_224\.dino: timm/vit_small_patch8"
    ):
        vitrail.load("DINO-S/8")


@pytest.mark.parametrize(
    "name",
    [
        "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k",
        "google/vit-base-patch16-224",  # another copy of a known model: that copy is used
        "somebody/something",
        "somebody/something.v2@main",
    ],
)
def test_hub_id_is_fetched_unchanged(fetched_names, caplog, name):
    assert vitrail.load(name).info.origin == name
    assert fetched_names == [name]
    assert "stands for" not in caplog.text


def test_hub_url_is_fetched(fetched_names):
    assert locate("https://huggingface.co/somebody/something").origin == "somebody/something"
    assert fetched_names == ["https://huggingface.co/somebody/something"]


def test_model_name_is_found_in_the_hub_cache(vit, tmp_path, monkeypatch, photograph):
    """The real lookup, offline, in a cache with the layout of huggingface_hub."""
    from huggingface_hub import constants

    repo = tmp_path / "models--timm--vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("a" * 40)
    (repo / "snapshots").mkdir()
    vit.save(repo / "snapshots" / ("a" * 40), to="timm")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    reloaded = vitrail.load("ViT-Ti/16")
    assert reloaded.info.origin == "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    assert torch.equal(reloaded.logits(photograph), vit.logits(photograph))


def test_existing_path_takes_precedence_over_a_model_name(fetched_names, model_folder, tmp_path, monkeypatch):
    (tmp_path / "ViT-B").mkdir()
    (tmp_path / "ViT-B" / "16").symlink_to(model_folder)
    monkeypatch.chdir(tmp_path)
    assert locate("ViT-B/16") == ModelLocation(Path("ViT-B/16"))
    assert fetched_names == []


# Unknown names and paths


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ViT-Tii/16", "there is no size 'Tii'; the sizes are Ti, S,"),
        ("ViTT-Ti/16", "did you mean 'ViT-Ti/16'?"),
        ("VTi-B/16@384", "did you mean 'ViT-B/16@384'?"),
        ("vit_tiny_patch16_225", "did you mean 'vit_tiny_patch16_224'?"),
        ("ViT-X/16", "there is no size 'X'"),
        ("ViT-G/14", "are not public; vitrail.create('ViT-G/14')"),
        ("ViT-B/4", "has no public weights; vitrail.create('ViT-B/4')"),
        ("ViT-Ti/16@288", "load ViT-Ti/16 with image_size=288"),
        ("something-else", "`vitrail models` lists the names"),
        ("", "got an empty name"),
        ("x" * 5000, "no file, folder or model"),
        ("bad\0name", "no file, folder or model"),
    ],
)
def test_unknown_name_suggests_the_nearest_name_without_a_hub_request(fetched_names, name, message):
    with pytest.raises(NotFoundError) as caught:
        vitrail.load(name)
    assert message in str(caught.value)
    assert fetched_names == []


@pytest.mark.parametrize(
    "typo", ["smal/model.safetensors", "small/modle.safetensors", "./smal", "smal/", "small/deep/er", "small/modle"]
)
def test_typo_in_a_path_is_a_missing_file_without_a_hub_request(fetched_names, model_folder, monkeypatch, typo):
    monkeypatch.chdir(model_folder.parent)
    with pytest.raises(NotFoundError, match=r"no such file") as caught:
        vitrail.load(typo)
    assert "hub" not in str(caught.value)
    assert fetched_names == []


def test_similar_file_name_is_suggested(model_folder, monkeypatch):
    monkeypatch.chdir(model_folder)
    with pytest.raises(NotFoundError, match=r"did you mean 'model\.safetensors'"):
        vitrail.load("model.safetensor")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("runs/mask2", "no such file: runs/mask2; did you mean 'runs/mask1'?"),
        ("runs/zzz", "no such file: runs/zzz; found runs/a.npz, runs/mask1, runs/tuned."),
        ("runs/empty/zzz", "no such file: runs/empty/zzz; the folder runs/empty contains no models."),
        ("runs/" + "z" * 300, "found runs/a.npz, runs/mask1, runs/tuned."),
    ],
)
def test_only_possible_models_are_suggested(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    for file in ("mask1/config.json", "tuned/weights.bin", "a.npz", "mask2.log", "zzz.txt", "mask3/notes.md", ".b.pt"):
        Path("runs", file).parent.mkdir(parents=True, exist_ok=True)
        Path("runs", file).touch()
    Path("runs/empty").mkdir()
    for source in (name, Path(name)):
        with pytest.raises(NotFoundError) as caught:
            vitrail.load(source)
        assert str(caught.value).endswith(message)


def test_error_for_a_path_or_hub_id_explains_both(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(NotFoundError) as caught:
        vitrail.load("timm/vit_tiny_patch16_224.augreg_in21k_ft_in2k")
    message = str(caught.value)
    assert message.startswith("there is no file or folder timm/vit_tiny")
    assert "HF_HUB_OFFLINE" in message
    assert message.endswith("Did you mean timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k?")


def test_path_object_is_not_a_model_name(fetched_names):
    with pytest.raises(NotFoundError, match="no such file"):
        vitrail.load(Path("ViT-Ti/16"))
    assert fetched_names == []


# Options


def test_image_size_resamples_positions_with_a_note(model_folder, photograph, caplog):
    wide = vitrail.load(model_folder, image_size=(32, 64))
    assert wide.config.image_size == wide.info.preprocess.image_size == (32, 64)
    assert "position embeddings were resampled to 32x64 (timm method)." in caplog.text
    assert wide.logits(photograph).shape == (1, 5)
    with pytest.raises(ConfigError, match="uncovered; try height 24 or 32"):
        vitrail.load(model_folder, image_size=30)


def test_image_size_keeps_the_crop_ratio(tmp_path):
    preprocess = PreprocessConfig(image_size=32, resize="short", resize_to=36)
    model(small(), preprocess=preprocess).save(tmp_path / "m")
    assert vitrail.load(tmp_path / "m", image_size=64).info.preprocess.resize_to == 72


def test_image_size_of_the_network_can_be_set_for_the_preprocessing(tmp_path):
    """As in DINOv2's repositories: the network is for 518 pixels, the preprocessing for 224."""
    model(small(), preprocess=PreprocessConfig(image_size=24)).save(tmp_path / "m")
    assert vitrail.load(tmp_path / "m").info.preprocess.image_size == (24, 24)
    assert vitrail.load(tmp_path / "m", image_size=32).info.preprocess.image_size == (32, 32)


def test_one_channel_gives_the_logits_of_three_on_gray_images(vit, model_folder, photograph, caplog):
    gray = vitrail.load(model_folder, channels=1)
    assert "for 1 channel the first filters were summed over the 3 channels." in caplog.text
    image = photograph.convert("L")
    torch.testing.assert_close(gray.logits(image), vit.logits(image), rtol=1e-5, atol=1e-5)
    assert gray.predict(photograph)[0].label in LABELS  # color images are converted to gray
    assert gray.predict(np.asarray(image)) == gray.predict(image)


def test_four_channels_include_the_alpha_channel(model_folder, photograph, caplog):
    rgba = vitrail.load(model_folder, channels=4)
    assert "for 4 channels the first filters were repeated from 3 to 4 and scaled by 3/4." in caplog.text
    image = photograph.convert("RGBA")
    opaque_logits = rgba.logits(image)
    image.putalpha(0)
    assert not torch.allclose(rgba.logits(image), opaque_logits)
    assert rgba.preprocess(image).shape == (1, 4, 32, 32)
    assert torch.equal(rgba.logits(photograph), opaque_logits)


def test_two_channels_require_arrays(model_folder, photograph):
    two_channel = vitrail.load(model_folder, channels=2)
    assert two_channel.logits(np.zeros((40, 50, 2), np.uint8)).shape == (1, 5)
    with pytest.raises(ImageError, match="cannot be converted to 2 channels"):
        two_channel.predict(photograph)


def test_new_classes_get_a_zero_head(model_folder, photograph, caplog):
    changed = vitrail.load(model_folder, num_classes=3, labels=["a", "b", "c"])
    assert "the head is new: 3 classes, all zeros until trained." in caplog.text
    assert [p.label for p in changed.predict(photograph)] == ["a", "b", "c"]
    assert changed.logits(photograph).eq(0).all()
    assert vitrail.load(model_folder, num_classes=3).labels is None


def test_same_number_of_classes_keeps_the_head_with_a_note(vit, model_folder, photograph, caplog):
    reloaded = vitrail.load(model_folder, num_classes=5)
    assert "its head is kept" in caplog.text
    assert torch.equal(reloaded.logits(photograph), vit.logits(photograph))


def test_num_classes_zero_removes_the_head(vit, model_folder, photograph):
    headless = vitrail.load(model_folder, num_classes=0)
    torch.testing.assert_close(headless.embed(photograph), vit.embed(photograph))


def test_labels_are_read_from_a_file_and_their_number_is_checked(model_folder, tmp_path):
    (tmp_path / "names.txt").write_text("\n".join("abcde"))
    assert vitrail.load(model_folder, labels=tmp_path / "names.txt").labels == tuple("abcde")
    with pytest.raises(ConfigError, match="got 2 names, expected 5"):
        vitrail.load(model_folder, labels=["a", "b"])


def test_family_selects_the_defaults_of_a_bare_file(vit, tmp_path):
    vit.save(tmp_path / "bare.pth", to="torchvision")
    assert vitrail.load(tmp_path / "bare.pth").info.family == "ViT"
    deit = vitrail.load(tmp_path / "bare.pth", family="DeiT")
    assert (deit.info.family, deit.info.preprocess.interpolation) == ("DeiT", "bicubic")
    with pytest.raises(NotFoundError, match="did you mean 'DeiT'"):
        vitrail.load(tmp_path / "bare.pth", family="DeiTT")


def test_other_keywords_override_the_config(model_folder):
    assert vitrail.load(model_folder, activation="gelu-quick").config.activation == "gelu-quick"
    with pytest.raises(ConfigError, match="did you mean 'activation'"):
        vitrail.load(model_folder, activatoin="gelu")


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # emitted by the TF32 switch itself
@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_bfloat16_model_returns_float32(vit, model_folder, photograph, dtype):
    half = vitrail.load(model_folder, dtype=dtype)
    assert half.dtype == torch.bfloat16
    with torch.backends.mkldnn.flags(enabled=False):  # some virtual machines report AMX and crash in its kernels
        logits, features = half.logits(photograph), half.embed(photograph)
    assert logits.dtype == features.dtype == torch.float32
    torch.testing.assert_close(logits, vit.logits(photograph), rtol=0.1, atol=0.1)


def test_float64_model_returns_float64(vit, model_folder, photograph):
    double = vitrail.load(model_folder, dtype="float64").logits(photograph)
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), vit.logits(photograph), rtol=1e-5, atol=1e-5)


def test_unknown_dtypes_and_devices_are_one_sentence_errors(model_folder):
    with pytest.raises(ConfigError, match=r"unknown dtype 'bfloat'.*did you mean 'bfloat16'"):
        vitrail.load(model_folder, dtype="bfloat")
    with pytest.raises(ConfigError, match="unknown device 'gpu'; try cpu, cuda"):
        vitrail.load(model_folder, device="gpu")
    with pytest.raises(ConfigError, match="unknown device 'gpu'"):
        vitrail.load(model_folder).to("gpu")


def test_notes_name_the_model_and_are_logged_once(model_folder, caplog):
    vitrail.load(model_folder, channels=1)
    vitrail.load(model_folder, channels=1)
    assert [r.getMessage() for r in caplog.records] == [
        "small: for 1 channel the first filters were summed over the 3 channels."
    ]
    assert caplog.records[0].levelno == logging.WARNING


def test_checkpoint_errors_propagate_unchanged(tmp_path):
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(CheckpointError, match=r"cut\.safetensors"):
        vitrail.load(tmp_path / "cut.safetensors")

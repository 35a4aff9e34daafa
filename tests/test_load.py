"""`vitrail.load`: where models come from, what a wrong name is told, what can be changed on the way in."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_models import LABELS, gradient, model, small

import vitrail
from vitrail.config import PreprocessConfig
from vitrail.errors import CheckpointError, ConfigError, ImageError, NotFoundError
from vitrail.weights import hub
from vitrail.weights.locate import ModelLocation, locate


@pytest.fixture(scope="module")
def vit() -> vitrail.Model:
    return model(small())


@pytest.fixture(scope="module")
def folder(vit, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small"
    vit.save(path)
    return path


@pytest.fixture(scope="module")
def photograph() -> Image.Image:
    return gradient()


@pytest.fixture
def fetched(monkeypatch, folder) -> list[str]:
    """The hub, with one model under every name; what it was asked for."""
    asked: list[str] = []

    def fetch(name: str, revision: str | None = None) -> Path:
        asked.append(name)
        return folder

    monkeypatch.setattr(hub, "fetch", fetch)
    return asked


# Where models come from


def test_a_folder_and_the_file_in_it_give_the_same_model(vit, folder, photograph):
    whole, alone = vitrail.load(folder), vitrail.load(folder / "model.safetensors")
    assert whole.info.to_dict() == alone.info.to_dict() == vit.info.to_dict()
    assert torch.equal(whole.logits(photograph), vit.logits(photograph))
    assert torch.equal(alone.logits(photograph), vit.logits(photograph))


@pytest.mark.parametrize("to", ["timm", "huggingface"])
def test_other_libraries_folders_load_with_labels_and_preprocessing(vit, tmp_path, photograph, to):
    vit.save(tmp_path / "theirs", to=to)
    again = vitrail.load(str(tmp_path / "theirs"))
    assert again.labels == LABELS
    assert torch.equal(again.logits(photograph), vit.logits(photograph))


def test_a_home_directory_is_expanded(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert locate("~/small") == ModelLocation(folder)


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
def test_a_name_says_which_checkpoint_it_stands_for(fetched, caplog, name, hub_id):
    assert vitrail.load(name).info.origin == hub_id
    assert fetched == [hub_id]
    assert f"{name} stands for {hub_id}." in caplog.text


def test_a_name_whose_checkpoint_cannot_be_had_says_what_it_stands_for(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        NotFoundError, match=r"^DINO-S/8 stands for timm/vit_small_patch8_224\.dino: timm/vit_small_patch8"
    ):
        vitrail.load("DINO-S/8")


@pytest.mark.parametrize(
    "name",
    [
        "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k",
        "google/vit-base-patch16-224",  # a model we know, in another's copy: that copy is meant
        "somebody/something",
        "somebody/something.v2@main",
    ],
)
def test_a_hub_id_is_fetched_as_it_is(fetched, caplog, name):
    assert vitrail.load(name).info.origin == name
    assert fetched == [name]
    assert "stands for" not in caplog.text


def test_an_address_of_the_hub_is_fetched(fetched):
    assert locate("https://huggingface.co/somebody/something").origin == "somebody/something"
    assert fetched == ["https://huggingface.co/somebody/something"]


def test_a_name_is_found_in_the_hubs_cache(vit, tmp_path, monkeypatch, photograph):
    """The real look-up, offline, in a cache as huggingface_hub lays it out."""
    from huggingface_hub import constants

    repo = tmp_path / "models--timm--vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("a" * 40)
    (repo / "snapshots").mkdir()
    vit.save(repo / "snapshots" / ("a" * 40), to="timm")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again = vitrail.load("ViT-Ti/16")
    assert again.info.origin == "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    assert torch.equal(again.logits(photograph), vit.logits(photograph))


def test_an_existing_path_comes_before_a_name(fetched, folder, tmp_path, monkeypatch):
    (tmp_path / "ViT-B").mkdir()
    (tmp_path / "ViT-B" / "16").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    assert locate("ViT-B/16") == ModelLocation(Path("ViT-B/16"))
    assert fetched == []


# What is not there


@pytest.mark.parametrize(
    ("name", "said"),
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
def test_a_wrong_name_gets_a_suggestion_and_the_hub_is_not_asked(fetched, name, said):
    with pytest.raises(NotFoundError) as caught:
        vitrail.load(name)
    assert said in str(caught.value)
    assert fetched == []


@pytest.mark.parametrize(
    "typo", ["smal/model.safetensors", "small/modle.safetensors", "./smal", "smal/", "small/deep/er", "small/modle"]
)
def test_a_typing_error_in_a_path_stays_a_matter_of_files(fetched, folder, monkeypatch, typo):
    monkeypatch.chdir(folder.parent)
    with pytest.raises(NotFoundError, match=r"no such file") as caught:
        vitrail.load(typo)
    assert "hub" not in str(caught.value)
    assert fetched == []


def test_a_near_file_is_suggested(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(NotFoundError, match=r"did you mean 'model\.safetensors'"):
        vitrail.load("model.safetensor")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("runs/mask2", "no such file: runs/mask2; did you mean 'runs/mask1'?"),
        ("runs/zzz", "no such file: runs/zzz; found runs/a.npz, runs/mask1, runs/tuned."),
        ("runs/empty/zzz", "no such file: runs/empty/zzz; runs/empty contains no models."),
        ("runs/" + "z" * 300, "found runs/a.npz, runs/mask1, runs/tuned."),
    ],
)
def test_only_what_could_be_a_model_is_suggested(tmp_path, monkeypatch, name, said):
    monkeypatch.chdir(tmp_path)
    for file in ("mask1/config.json", "tuned/weights.bin", "a.npz", "mask2.log", "zzz.txt", "mask3/notes.md", ".b.pt"):
        Path("runs", file).parent.mkdir(parents=True, exist_ok=True)
        Path("runs", file).touch()
    Path("runs/empty").mkdir()
    for source in (name, Path(name)):
        with pytest.raises(NotFoundError) as caught:
            vitrail.load(source)
        assert str(caught.value).endswith(said)


def test_what_may_be_a_path_or_a_hub_id_is_explained_as_both(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(NotFoundError) as caught:
        vitrail.load("timm/vit_tiny_patch16_224.augreg_in21k_ft_in2k")
    text = str(caught.value)
    assert text.startswith("there is no file or folder timm/vit_tiny")
    assert "HF_HUB_OFFLINE" in text
    assert text.endswith("Did you mean timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k?")


def test_a_path_object_is_never_a_name(fetched):
    with pytest.raises(NotFoundError, match="no such file"):
        vitrail.load(Path("ViT-Ti/16"))
    assert fetched == []


# Changes on the way in


def test_another_size_resamples_positions_and_says_so(folder, photograph, caplog):
    wide = vitrail.load(folder, image_size=(32, 64))
    assert wide.config.image_size == wide.info.preprocess.image_size == (32, 64)
    assert "position embeddings were resampled to 32x64 (timm method)." in caplog.text
    assert wide.logits(photograph).shape == (1, 5)
    with pytest.raises(ConfigError, match="uncovered; try height 24 or 32"):
        vitrail.load(folder, image_size=30)


def test_another_size_keeps_the_share_of_the_image_that_is_seen(tmp_path):
    preprocess = PreprocessConfig(image_size=32, resize="short", resize_to=36)
    model(small(), preprocess=preprocess).save(tmp_path / "m")
    assert vitrail.load(tmp_path / "m", image_size=64).info.preprocess.resize_to == 72


def test_a_size_that_only_the_preprocessing_lacks_is_given_to_it(tmp_path):
    """DINOv2's repositories: a network for 518 pixels, a preprocessing for 224."""
    model(small(), preprocess=PreprocessConfig(image_size=24)).save(tmp_path / "m")
    assert vitrail.load(tmp_path / "m").info.preprocess.image_size == (24, 24)
    assert vitrail.load(tmp_path / "m", image_size=32).info.preprocess.image_size == (32, 32)


def test_one_channel_answers_to_gray_images_as_three_do(vit, folder, photograph, caplog):
    gray = vitrail.load(folder, channels=1)
    assert "for 1 channel the first filters were summed over the 3 channels." in caplog.text
    image = photograph.convert("L")
    torch.testing.assert_close(gray.logits(image), vit.logits(image), rtol=1e-5, atol=1e-5)
    assert gray.predict(photograph)[0].label in LABELS  # colors are turned to gray
    assert gray.predict(np.asarray(image)) == gray.predict(image)


def test_four_channels_take_transparency_as_it_is(folder, photograph, caplog):
    clear = vitrail.load(folder, channels=4)
    assert "for 4 channels the first filters were repeated from 3 to 4 and scaled by 3/4." in caplog.text
    image = photograph.convert("RGBA")
    opaque = clear.logits(image)
    image.putalpha(0)
    assert not torch.allclose(clear.logits(image), opaque)
    assert clear.preprocess(image).shape == (1, 4, 32, 32)
    assert torch.equal(clear.logits(photograph), opaque)


def test_two_channels_need_arrays(folder, photograph):
    two = vitrail.load(folder, channels=2)
    assert two.logits(np.zeros((40, 50, 2), np.uint8)).shape == (1, 5)
    with pytest.raises(ImageError, match="cannot be given 2 channels"):
        two.predict(photograph)


def test_new_classes_get_a_head_of_zeros(folder, photograph, caplog):
    new = vitrail.load(folder, num_classes=3, labels=["a", "b", "c"])
    assert "the head is new: 3 classes, all zeros until trained." in caplog.text
    assert [p.label for p in new.predict(photograph)] == ["a", "b", "c"]
    assert new.logits(photograph).eq(0).all()
    assert vitrail.load(folder, num_classes=3).labels is None


def test_as_many_classes_as_there_are_keeps_the_head_and_says_so(vit, folder, photograph, caplog):
    same = vitrail.load(folder, num_classes=5)
    assert "its head is kept" in caplog.text
    assert torch.equal(same.logits(photograph), vit.logits(photograph))


def test_classes_zero_takes_the_head_off(vit, folder, photograph):
    bare = vitrail.load(folder, num_classes=0)
    torch.testing.assert_close(bare.embed(photograph), vit.embed(photograph))


def test_labels_come_from_a_file_a_list_or_an_installed_package(folder, tmp_path):
    (tmp_path / "names.txt").write_text("\n".join("abcde"))
    assert vitrail.load(folder, labels=tmp_path / "names.txt").labels == tuple("abcde")
    with pytest.raises(ConfigError, match="got 2 names, expected 5"):
        vitrail.load(folder, labels=["a", "b"])


def test_the_family_settles_what_a_bare_file_does_not_say(vit, tmp_path):
    vit.save(tmp_path / "bare.pth", to="torchvision")
    assert vitrail.load(tmp_path / "bare.pth").info.family == "ViT"
    deit = vitrail.load(tmp_path / "bare.pth", family="DeiT")
    assert (deit.info.family, deit.info.preprocess.interpolation) == ("DeiT", "bicubic")
    with pytest.raises(NotFoundError, match="did you mean 'DeiT'"):
        vitrail.load(tmp_path / "bare.pth", family="DeiTT")


def test_further_keywords_change_the_config(folder):
    assert vitrail.load(folder, activation="gelu-quick").config.activation == "gelu-quick"
    with pytest.raises(ConfigError, match="did you mean 'activation'"):
        vitrail.load(folder, activatoin="gelu")


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # said by the switch itself
@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_half_the_precision_runs_and_answers_in_float32(vit, folder, photograph, dtype):
    half = vitrail.load(folder, dtype=dtype)
    assert half.dtype == torch.bfloat16
    with torch.backends.mkldnn.flags(enabled=False):  # some virtual machines promise its AMX kernels and die in them
        logits, features = half.logits(photograph), half.embed(photograph)
    assert logits.dtype == features.dtype == torch.float32
    torch.testing.assert_close(logits, vit.logits(photograph), rtol=0.1, atol=0.1)


def test_double_the_precision_stays_double(vit, folder, photograph):
    double = vitrail.load(folder, dtype="float64").logits(photograph)
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), vit.logits(photograph), rtol=1e-5, atol=1e-5)


def test_wrong_dtypes_and_devices_are_one_sentence(folder):
    with pytest.raises(ConfigError, match=r"no dtype 'bfloat'.*did you mean 'bfloat16'"):
        vitrail.load(folder, dtype="bfloat")
    with pytest.raises(ConfigError, match="there is no device 'gpu'; try cpu, cuda"):
        vitrail.load(folder, device="gpu")
    with pytest.raises(ConfigError, match="there is no device 'gpu'"):
        vitrail.load(folder).to("gpu")


def test_notes_name_the_model_and_are_said_once(folder, caplog):
    vitrail.load(folder, channels=1)
    vitrail.load(folder, channels=1)
    assert [r.getMessage() for r in caplog.records] == [
        "small: for 1 channel the first filters were summed over the 3 channels."
    ]
    assert caplog.records[0].levelno == logging.WARNING


def test_a_sentence_of_checkpoint_reading_passes_through(tmp_path):
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(CheckpointError, match=r"cut\.safetensors"):
        vitrail.load(tmp_path / "cut.safetensors")

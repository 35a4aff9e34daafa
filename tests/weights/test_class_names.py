"""Class names: accepted file formats, validation, and the ImageNet names assumed for 1000 unnamed classes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

import vitrail
from vitrail.config import PreprocessConfig, ViTConfig
from vitrail.errors import ConfigError, NotFoundError
from vitrail.models import Net, build
from vitrail.weights import class_names as module
from vitrail.weights.class_names import (
    ASSUMED_IMAGENET,
    assume_imagenet_labels,
    from_id2label,
    imagenet_1k,
    read_labels,
    stated_labels,
)
from vitrail.weights.model_info import ModelInfo

NAMES = ("cat", "dog, hound", "é")
FILES = {
    "lines.txt": "cat\ndog, hound\né\n",
    "windows.txt": "\ufeffcat\r\ndog, hound\r\né\r\n\r\n",
    "no end": "cat\ndog, hound\né",
    "list.json": json.dumps(NAMES),
    "list without a suffix": json.dumps(NAMES),
    "id2label.json": json.dumps({"2": "é", "0": "cat", "1": "dog, hound"}),
    "label2id.json": json.dumps({"é": 2, "cat": 0, "dog, hound": 1}),
    "config.json": json.dumps({"model_type": "vit", "id2label": dict(enumerate(NAMES))}),
    "timm.json": json.dumps({"architecture": "vit", "label_names": NAMES}),
    "vitrail.json": json.dumps({"format": "vitrail", "labels": NAMES}),
}


@pytest.mark.parametrize("name", FILES)
def test_class_names_are_read_from_every_file_format(tmp_path: Path, name: str):
    (tmp_path / name).write_text(FILES[name], encoding="utf-8", newline="")
    assert read_labels(tmp_path / name) == NAMES
    assert read_labels(str(tmp_path / name), count=3) == NAMES


def test_class_names_are_read_from_sequences_and_mappings():
    assert read_labels(NAMES) == read_labels(list(NAMES)) == read_labels(dict(enumerate(NAMES))) == NAMES


def test_bracket_in_a_text_file_is_part_of_a_name(tmp_path: Path):
    (tmp_path / "labels.txt").write_text("[unknown]\ncat\n")
    assert read_labels(tmp_path / "labels.txt") == ("[unknown]", "cat")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no class names"),
        ("cat\n\ndog\n", "class 1 has no name"),
        ('["cat", 3]', "class 1 has no name"),
        ("[]", "no class names"),
        ('{"0": "cat", "2": "dog"}', r"index 1 of 0 to 1 has no name"),
        ('{"cat": "dog"}', "expected indices"),
        ('{"00": "cat", "0": "dog"}', "index 1"),
    ],
)
def test_list_with_missing_names_is_refused(tmp_path: Path, text: str, message: str):
    (tmp_path / "labels").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_labels(tmp_path / "labels")
    assert str(tmp_path / "labels") in str(caught.value)


def test_unreadable_label_files_are_refused_with_the_reason(tmp_path: Path):
    (tmp_path / "x.json").write_text('["cat"')
    with pytest.raises(ConfigError, match=r"x\.json is not valid JSON"):
        read_labels(tmp_path / "x.json")
    (tmp_path / "x.json").write_text('"cat"')
    with pytest.raises(ConfigError, match="expected a list of names"):
        read_labels(tmp_path / "x.json")
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_labels(tmp_path / "x.txt")
    with pytest.raises(ConfigError, match="cannot read"):
        read_labels(tmp_path)


def test_wrong_count_error_gives_both_numbers():
    with pytest.raises(ConfigError, match="got 3 names, expected 1000"):
        read_labels(NAMES, count=1000)


def test_missing_file_error_suggests_a_similar_name(tmp_path: Path):
    (tmp_path / "labels.txt").touch()
    with pytest.raises(NotFoundError, match=r"did you mean 'labels\.txt'"):
        read_labels(tmp_path / "label.txt")
    with pytest.raises(NotFoundError, match="did you mean 'imagenet-1k'"):
        read_labels("imagenet1k")


def test_transformers_placeholder_labels_are_ignored():
    assert from_id2label({0: "LABEL_0", 1: "LABEL_1"}) is None
    assert from_id2label({"0": "cat", "1": "LABEL_1"}) == ("cat", "LABEL_1")


def patch_installed_packages(monkeypatch: pytest.MonkeyPatch, **folders: Path | None) -> None:
    """Makes only these packages appear installed, in these folders."""
    origins = {name: folder / "__init__.py" for name, folder in folders.items() if folder is not None}
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: ModuleSpec(name, None, origin=str(origins[name])) if name in origins else None,
    )


def package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        pytest.skip(f"{name} is not installed")
    return Path(spec.origin).parent


@pytest.mark.parametrize("package", ["timm", "torchvision"])
def test_package_class_names_match_imagenet(monkeypatch: pytest.MonkeyPatch, imagenet_val: Path, package: str):
    patch_installed_packages(monkeypatch, **{package: package_folder(package)})
    names = imagenet_1k()
    assert names is not None
    assert len(set(names)) == 1000
    expected = [n.replace("_", " ") for n in json.loads((imagenet_val / "classes.json").read_text())]
    different = {i for i, (ours, theirs) in enumerate(zip(names, expected, strict=True)) if ours != theirs}
    assert different <= {134, 517, 639}  # "crane" and "maillot" each name two classes
    assert all(names[i].startswith(expected[i]) for i in different)


def test_timm_class_order_matches_imagenet(imagenet_val: Path):
    synsets = (package_folder("timm") / "data" / "_info" / "imagenet_synsets.txt").read_text().split()
    assert synsets == json.loads((imagenet_val / "synsets.json").read_text())


def test_imagenet_1k_selects_the_imagenet_names():
    package_folder("timm")
    names = read_labels("imagenet-1k", count=1000)
    assert (names[0], names[281], names[999]) == ("tench", "tabby", "toilet tissue")


def test_imagenet_names_require_an_installed_package(monkeypatch: pytest.MonkeyPatch):
    patch_installed_packages(monkeypatch)
    assert imagenet_1k() is None
    with pytest.raises(NotFoundError, match="pip install timm"):
        read_labels("imagenet-1k")


def test_package_with_missing_or_incomplete_names_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    patch_installed_packages(monkeypatch, timm=tmp_path, torchvision=None)
    assert imagenet_1k() is None
    info = tmp_path / "data" / "_info"
    info.mkdir(parents=True)
    (info / "imagenet_synsets.txt").write_text("n1\nn2\n")
    (info / "imagenet_synset_to_lemma.txt").write_text("n1\tcat, felis\nn2\tdog\n")
    assert imagenet_1k() is None
    assert module._from_timm(tmp_path) == ("cat", "dog")
    patch_installed_packages(monkeypatch, timm=tmp_path, torchvision=(tmp_path / "tv"))
    (tmp_path / "tv" / "models").mkdir(parents=True)
    (tmp_path / "tv" / "models" / "_meta.py").write_text(f"_IMAGENET_CATEGORIES = {[str(i) for i in range(1000)]}")
    assert imagenet_1k() == tuple(map(str, range(1000)))


def test_imagenet_names_are_found_without_importing_packages():
    code = (
        "import sys; from vitrail.weights.class_names import imagenet_1k; before = set(sys.modules); imagenet_1k();"
        "print(sorted({name.split('.')[0] for name in set(sys.modules) - before} & {'timm', 'torch', 'torchvision'}))"
    )
    environment = {"PYTHONPATH": str(Path(module.__file__).parents[2])}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert process.stdout == "[]\n"


# Checkpoints without class names


def model_with_1000_classes(**fields: object) -> tuple[Net, ModelInfo]:
    config = ViTConfig(image_size=16, patch_size=8, num_classes=1000, width=8, depth=1, num_heads=1, mlp_dim=8)
    info = ModelInfo(config=config, preprocess=PreprocessConfig(image_size=16), **fields)
    net = build(config)
    torch.nn.init.normal_(net.head.weight)
    return net, info


def test_1000_unnamed_classes_get_imagenet_names_and_a_note(monkeypatch: pytest.MonkeyPatch):
    patch_installed_packages(monkeypatch, timm=package_folder("timm"))
    info = assume_imagenet_labels(*model_with_1000_classes(origin="tiny.safetensors"))
    assert info.labels == imagenet_1k()
    assert info.notes == (ASSUMED_IMAGENET,)
    assert stated_labels(info) is None


def test_imagenet_names_are_not_assumed_for_named_or_other_classes(monkeypatch: pytest.MonkeyPatch):
    patch_installed_packages(monkeypatch, timm=package_folder("timm"))
    names = tuple(f"thing {i}" for i in range(1000))
    for fields in (
        {"labels": names},
        {"multi_label": True},
        {"task": "embed"},
        {"origin": "fine-tuned from timm/vit_tiny"},
        {"origin": "trained on photos"},
    ):
        net, info = model_with_1000_classes(**fields)
        assert assume_imagenet_labels(net, info) == info
        assert stated_labels(info) == info.labels
    net, info = model_with_1000_classes()
    for tensor in net.head.parameters():  # a new, untrained head
        torch.nn.init.zeros_(tensor)
    assert assume_imagenet_labels(net, info) == info
    config_with_999_classes = info.config.replace(num_classes=999)
    assert (
        assume_imagenet_labels(build(config_with_999_classes), info.replace(config=config_with_999_classes)).labels
        is None
    )


def test_without_packages_1000_classes_stay_unnamed(monkeypatch: pytest.MonkeyPatch):
    patch_installed_packages(monkeypatch)
    assert assume_imagenet_labels(*model_with_1000_classes()).labels is None


def test_published_checkpoint_has_class_names_with_every_load_option(
    real_checkpoint: Path, caplog: pytest.LogCaptureFixture
):
    assert vitrail.load(real_checkpoint).label(285) == "Egyptian cat"
    assert ASSUMED_IMAGENET in caplog.text
    assert vitrail.load(real_checkpoint, labels=[f"thing {i}" for i in range(1000)]).label(285) == "thing 285"
    assert vitrail.load(real_checkpoint, num_classes=1000).label(285) == "Egyptian cat"
    assert vitrail.load(real_checkpoint, num_classes=7).label(5) == "class 5"

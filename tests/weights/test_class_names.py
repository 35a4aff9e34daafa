"""Class names are read as they are written and checked; what is assumed is noted."""

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
def test_every_way_of_writing_names_is_read(tmp_path: Path, name: str):
    (tmp_path / name).write_text(FILES[name], encoding="utf-8", newline="")
    assert read_labels(tmp_path / name) == NAMES
    assert read_labels(str(tmp_path / name), count=3) == NAMES


def test_names_in_memory_are_read():
    assert read_labels(NAMES) == read_labels(list(NAMES)) == read_labels(dict(enumerate(NAMES))) == NAMES


def test_a_bracket_begins_a_name_where_it_is_no_json(tmp_path: Path):
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
def test_a_list_with_a_hole_is_refused(tmp_path: Path, text: str, message: str):
    (tmp_path / "labels").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_labels(tmp_path / "labels")
    assert str(tmp_path / "labels") in str(caught.value)


def test_broken_json_and_other_bytes_are_named(tmp_path: Path):
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


def test_a_wrong_count_says_both_numbers():
    with pytest.raises(ConfigError, match="got 3 names, expected 1000"):
        read_labels(NAMES, count=1000)


def test_a_missing_file_is_told_with_what_is_near(tmp_path: Path):
    (tmp_path / "labels.txt").touch()
    with pytest.raises(NotFoundError, match=r"did you mean 'labels\.txt'"):
        read_labels(tmp_path / "label.txt")
    with pytest.raises(NotFoundError, match="did you mean 'imagenet-1k'"):
        read_labels("imagenet1k")


def test_placeholders_of_transformers_are_no_names():
    assert from_id2label({0: "LABEL_0", 1: "LABEL_1"}) is None
    assert from_id2label({"0": "cat", "1": "LABEL_1"}) == ("cat", "LABEL_1")


def packages(monkeypatch: pytest.MonkeyPatch, **folders: Path | None) -> None:
    """Only these are installed, there."""
    origins = {name: folder / "__init__.py" for name, folder in folders.items() if folder is not None}
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: ModuleSpec(name, None, origin=str(origins[name])) if name in origins else None,
    )


def installed(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        pytest.skip(f"{name} is not installed")
    return Path(spec.origin).parent


@pytest.mark.parametrize("package", ["timm", "torchvision"])
def test_the_packages_agree_with_imagenet_itself(monkeypatch: pytest.MonkeyPatch, imagenet_val: Path, package: str):
    packages(monkeypatch, **{package: installed(package)})
    names = imagenet_1k()
    assert names is not None
    assert len(set(names)) == 1000
    expected = [n.replace("_", " ") for n in json.loads((imagenet_val / "classes.json").read_text())]
    different = {i for i, (ours, theirs) in enumerate(zip(names, expected, strict=True)) if ours != theirs}
    assert different <= {134, 517, 639}  # two cranes and two maillots are told apart
    assert all(names[i].startswith(expected[i]) for i in different)


def test_timms_order_is_imagenets(imagenet_val: Path):
    synsets = (installed("timm") / "data" / "_info" / "imagenet_synsets.txt").read_text().split()
    assert synsets == json.loads((imagenet_val / "synsets.json").read_text())


def test_the_word_imagenet_1k_stands_for_them():
    installed("timm")
    names = read_labels("imagenet-1k", count=1000)
    assert (names[0], names[281], names[999]) == ("tench", "tabby", "toilet tissue")


def test_without_a_package_there_are_no_names(monkeypatch: pytest.MonkeyPatch):
    packages(monkeypatch)
    assert imagenet_1k() is None
    with pytest.raises(NotFoundError, match="pip install timm"):
        read_labels("imagenet-1k")


def test_a_package_that_keeps_them_elsewhere_or_not_whole_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    packages(monkeypatch, timm=tmp_path, torchvision=None)
    assert imagenet_1k() is None
    info = tmp_path / "data" / "_info"
    info.mkdir(parents=True)
    (info / "imagenet_synsets.txt").write_text("n1\nn2\n")
    (info / "imagenet_synset_to_lemma.txt").write_text("n1\tcat, felis\nn2\tdog\n")
    assert imagenet_1k() is None
    assert module._from_timm(tmp_path) == ("cat", "dog")
    packages(monkeypatch, timm=tmp_path, torchvision=(tmp_path / "tv"))
    (tmp_path / "tv" / "models").mkdir(parents=True)
    (tmp_path / "tv" / "models" / "_meta.py").write_text(f"_IMAGENET_CATEGORIES = {[str(i) for i in range(1000)]}")
    assert imagenet_1k() == tuple(map(str, range(1000)))


def test_finding_names_imports_no_package():
    code = (
        "import sys; from vitrail.weights.class_names import imagenet_1k; before = set(sys.modules); imagenet_1k();"
        "print(sorted({name.split('.')[0] for name in set(sys.modules) - before} & {'timm', 'torch', 'torchvision'}))"
    )
    paths = {"PYTHONPATH": str(Path(module.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=paths, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# A checkpoint that names no classes


def thousand(**about: object) -> tuple[Net, ModelInfo]:
    config = ViTConfig(image_size=16, patch_size=8, num_classes=1000, width=8, depth=1, num_heads=1, mlp_dim=8)
    info = ModelInfo(config=config, preprocess=PreprocessConfig(image_size=16), **about)
    net = build(config)
    torch.nn.init.normal_(net.head.weight)
    return net, info


def test_a_thousand_classes_without_names_are_imagenets_and_a_note_says_so(monkeypatch: pytest.MonkeyPatch):
    packages(monkeypatch, timm=installed("timm"))
    info = assume_imagenet_labels(*thousand(origin="tiny.safetensors"))
    assert info.labels == imagenet_1k()
    assert info.notes == (ASSUMED_IMAGENET,)
    assert stated_labels(info) is None


def test_names_that_are_stated_and_classes_that_are_others_stay_as_they_are(monkeypatch: pytest.MonkeyPatch):
    packages(monkeypatch, timm=installed("timm"))
    names = tuple(f"thing {i}" for i in range(1000))
    for about in (
        {"labels": names},
        {"multi_label": True},
        {"task": "embed"},
        {"origin": "fine-tuned from timm/vit_tiny"},
        {"origin": "trained on photos"},
    ):
        net, info = thousand(**about)
        assert assume_imagenet_labels(net, info) == info
        assert stated_labels(info) == info.labels
    net, info = thousand()
    for tensor in net.head.parameters():  # a new head, or one that was never trained
        torch.nn.init.zeros_(tensor)
    assert assume_imagenet_labels(net, info) == info
    small = info.config.replace(num_classes=999)
    assert assume_imagenet_labels(build(small), info.replace(config=small)).labels is None


def test_without_a_package_that_has_the_names_classes_stay_numbers(monkeypatch: pytest.MonkeyPatch):
    packages(monkeypatch)
    assert assume_imagenet_labels(*thousand()).labels is None


def test_the_published_file_has_names_in_every_way_of_loading_it(
    real_checkpoint: Path, caplog: pytest.LogCaptureFixture
):
    assert vitrail.load(real_checkpoint).label(285) == "Egyptian cat"
    assert ASSUMED_IMAGENET in caplog.text
    assert vitrail.load(real_checkpoint, labels=[f"thing {i}" for i in range(1000)]).label(285) == "thing 285"
    assert vitrail.load(real_checkpoint, num_classes=1000).label(285) == "Egyptian cat"
    assert vitrail.load(real_checkpoint, num_classes=7).label(5) == "class 5"

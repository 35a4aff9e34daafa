"""Matching classes of data to outputs of a model: by WordNet ID, by name or by order, or an error."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from image_source import Images

from vitrail.config import PreprocessConfig, ViTConfig
from vitrail.errors import DataError
from vitrail.evaluation import synsets
from vitrail.evaluation.class_matching import MappedSource, labels_for_matching, match_classes
from vitrail.weights.class_names import ASSUMED_IMAGENET, imagenet_1k
from vitrail.weights.model_info import ModelInfo

TIMM = synsets.timm_synsets()
needs_timm = pytest.mark.skipif(TIMM is None, reason="timm is not installed; make test installs it")


def source(labels: list[str], targets: object = None) -> Images:
    images = Images([b""] * (len(labels) if targets is None else len(targets)), targets, classes=len(labels))  # type: ignore[arg-type]
    images.labels = tuple(labels)
    return images


@needs_timm
def test_imagenet_folders_are_matched_to_their_outputs_by_synset():
    folders = ["n01440764", "n02102040", "n03888257"]  # tench, English springer, parachute
    match = match_classes(source(folders), None, 1000)
    assert match.outputs.tolist() == [0, 217, 701]
    assert match.method == "synset"
    assert [match.labels[k] for k in match.outputs] == ["tench", "English springer", "parachute"]
    assert match.notes == (ASSUMED_IMAGENET,)


@needs_timm
def test_imagenet_1k_synsets_are_sorted():
    assert list(TIMM) == sorted(TIMM)


@needs_timm
def test_imagenet_21k_outputs_are_recognized_by_their_number():
    match = match_classes(source(["n01440764"]), None, 21843)
    assert synsets.timm_synsets(21843)[match.outputs[0]] == "n01440764"
    assert match.labels[match.outputs[0]] == "n01440764"


@needs_timm
def test_imagenet_class_names_identify_the_outputs():
    names = [f"{name}, and more" for name in imagenet_1k()]
    match = match_classes(source(["n03888257"]), names, 1000)
    assert (match.outputs.tolist(), match.method, match.notes) == ([701], "synset", ())


@needs_timm
def test_assumed_names_are_used_unless_the_data_has_as_many_other_classes():
    names = imagenet_1k()
    assert names is not None
    config = ViTConfig(image_size=16, patch_size=8, num_classes=1000, width=8, depth=1, num_heads=1, mlp_dim=8)
    info = ModelInfo(config=config, preprocess=PreprocessConfig(image_size=16), labels=names, notes=(ASSUMED_IMAGENET,))
    other_names = [f"thing {k}" for k in range(1000)]
    assert labels_for_matching(info, source(["church", "chain saw"])) == names
    assert labels_for_matching(info, source(sorted(names))) == names  # in alphabetical order, as folders are
    assert labels_for_matching(info, source(other_names)) is None
    assert labels_for_matching(info.replace(notes=()), source(other_names)) == names  # the checkpoint names them


@needs_timm
def test_1000_other_names_are_not_treated_as_imagenet():
    with pytest.raises(DataError, match="has none of the 1 classes"):
        match_classes(source(["n03888257"]), [f"thing {k}" for k in range(1000)], 1000)


def test_all_1000_synset_folders_are_matched_without_timm(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(synsets, "_read_timm_file", lambda name: None)
    synset_ids = [f"n{k:08d}" for k in range(1000)]
    reversed_ids = synset_ids[::-1]
    assert match_classes(source(reversed_ids), None, 1000).outputs.tolist() == list(range(999, -1, -1))
    with pytest.raises(DataError, match="pip install timm"):
        match_classes(source(synset_ids[:3]), None, 1000, require_synsets=True)


def test_outputs_may_be_named_by_synsets():
    labels = ["n00000003", "n00000001", "n00000002"]
    match = match_classes(source(["n00000001_one", "n00000003_three"]), labels, 3)
    assert match.outputs.tolist() == [1, 0]
    assert match.labels == ("n00000003_three", "n00000001_one", "n00000002")


def test_synsets_of_the_data_take_precedence_over_names():
    labels = ["n00000003", "n00000001"]
    match = match_classes(source(["crane", "crane "]), labels, 2, synsets=("n00000001", "n00000003"))
    assert match.outputs.tolist() == [1, 0]


def test_names_match_regardless_of_case_and_hyphens():
    match = match_classes(source(["Great_White-Shark", "tench"]), ["tench, Tinca", "great white shark", "hen"], 3)
    assert (match.outputs.tolist(), match.method) == ([1, 0], "name")
    assert match.labels == ("tench, Tinca", "great white shark", "hen")


def test_name_of_two_outputs_is_not_matched():
    with pytest.raises(DataError, match=r"has 1 of the 2 classes of images \(missing: crane\)"):
        match_classes(source(["crane", "hen"]), ["crane", "Crane", "hen"], 3)


def test_unknown_classes_are_refused_with_suggestions():
    labels = [f"thing {k}" for k in range(1000)]
    with pytest.raises(DataError) as error:
        match_classes(source(["cat", "dog", "bird"]), labels, 1000)
    assert str(error.value) == (
        "the model has none of the 3 classes of images (missing: cat, dog, bird); it has 1,000 outputs, such as "
        "thing 0, thing 1, thing 2. Use data with the model's classes, name the outputs with --labels FILE, or train "
        "the model on the classes of the data with vitrail finetune."
    )


def test_a_class_without_images_may_be_unknown():
    match = match_classes(source(["cat", "unicorn"], targets=[0, 0, -1]), ["dog", "cat"], 2)
    assert match.outputs.tolist() == [1, -1]
    assert MappedSource(source(["cat", "unicorn"], targets=[0, 0, -1]), match).targets.tolist() == [1, 1, -1]


def test_unnamed_outputs_are_matched_by_order_with_a_note():
    match = match_classes(source(["cat", "dog"]), None, 2)
    assert (match.outputs.tolist(), match.method, match.labels) == ([0, 1], "order", ("cat", "dog"))
    assert "by order" in match.notes[0]


def test_numbered_classes_are_matched_by_order():
    match = match_classes(source(["0", "1"]), ["cat", "dog"], 2)
    assert (match.method, match.labels) == ("order", ("cat", "dog"))
    match = match_classes(source(["cat", "dog"]), ["0", "1"], 2)
    assert (match.method, match.labels) == ("order", ("cat", "dog"))


def test_numbers_on_both_sides_are_matched_by_name():
    match = match_classes(source(["1", "0"]), ["0", "1", "2"], 3)
    assert (match.outputs.tolist(), match.method) == ([1, 0], "name")


def test_matching_by_order_requires_equal_counts():
    with pytest.raises(DataError, match="3 classes and the model 7 outputs without names"):
        match_classes(source(["cat", "dog", "hen"]), None, 7)


def test_imagenet_protocol_requires_synsets():
    with pytest.raises(DataError, match="no WordNet IDs"):
        match_classes(source(["cat"]), ["cat"], 1, require_synsets=True)


def test_images_without_labels_are_refused():
    with pytest.raises(DataError, match="have no labels, so accuracy cannot be measured"):
        match_classes(source([], targets=[-1]), ["cat"], 1)


def test_mapped_source_changes_only_targets_and_labels():
    images = source(["cat", "dog"], targets=[1, 0, -1])
    mapped = MappedSource(images, match_classes(images, ["hen", "dog", "cat"], 3))
    assert mapped.targets.tolist() == [1, 2, -1]
    assert mapped[0].target == 1
    assert (mapped[0].key, mapped.key(2), len(mapped), mapped.labels) == ("0", "2", 3, ("hen", "dog", "cat"))


def test_multi_label_targets_are_mapped_to_outputs():
    images = source(["cat", "dog"], targets=np.array([[True, False], [True, True], [False, False]]))
    mapped = MappedSource(images, match_classes(images, ["hen", "dog", "cat"], 3))
    assert mapped.targets.tolist() == [[False, False, True], [False, True, True], [False, False, False]]
    assert mapped[1].target == (1, 2)


def test_synsets_file_of_a_data_folder_is_read(tmp_path: Path):
    (tmp_path / "cat").mkdir()
    assert synsets.read_synsets_file(str(tmp_path), ["cat"]) is None
    (tmp_path / "synsets.json").write_text(json.dumps(["n02123045"]))
    assert synsets.read_synsets_file(str(tmp_path), ["cat"]) == ("n02123045",)
    assert synsets.read_synsets_file("digits", ["cat"]) is None


@pytest.mark.parametrize("text", ['["n02123045"]', '["cat", "dog"]', '["n02123045", "n02123045"]', '{"a": 1}', "["])
def test_invalid_synsets_files_are_refused(tmp_path: Path, text: str):
    (tmp_path / "synsets.json").write_text(text)
    with pytest.raises(DataError, match=r"synsets\.json"):
        synsets.read_synsets_file(f"folder:{tmp_path}", ["cat", "dog"])


def test_imagenet_shards_have_a_synsets_file(imagenet_val: Path):
    labels = json.loads((imagenet_val / "classes.json").read_text())
    synset_ids = synsets.read_synsets_file(str(imagenet_val), labels)
    assert synset_ids[0] == "n01440764"
    if TIMM is not None:
        assert synset_ids == TIMM


def test_reordered_outputs_are_named_by_their_synsets(monkeypatch: pytest.MonkeyPatch):
    synset_ids = tuple(f"n{k:08d}" for k in range(1000))
    monkeypatch.setattr("vitrail.evaluation.class_matching.timm_synsets", lambda: synset_ids)
    monkeypatch.setattr(
        "vitrail.evaluation.class_matching.imagenet_1k", lambda: tuple(f"thing {k}" for k in range(1000))
    )
    match = match_classes(source(["n00000003"]), synset_ids[::-1], 1000)
    assert (match.outputs.tolist(), match.labels[996], match.labels[0]) == ([996], "thing 3", "thing 999")
    other_match = match_classes(source(["n90000003"]), [f"n{90000000 + k}" for k in range(1000)], 1000)
    assert other_match.labels[3] == "n90000003"


def test_labels_that_are_names_are_not_matched_by_order():
    """Ten digits must not be matched with ten other classes just because the counts are equal."""
    digits = source([str(i) for i in range(10)])
    other_names = [f"thing {chr(97 + i)}" for i in range(10)]
    assert match_classes(digits, other_names, 10).method == "order"
    with pytest.raises(DataError, match="the model has none of the 10 classes"):
        match_classes(digits, other_names, 10, labels_are_names=True)

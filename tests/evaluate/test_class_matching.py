"""The classes of data and the outputs of a model: by WordNet's numbers, by name, by order, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from image_source import Images

from vitrail.config import PreprocessConfig, ViTConfig
from vitrail.errors import DataError
from vitrail.evaluate import synsets
from vitrail.evaluate.class_matching import MappedSource, labels_for_matching, match_classes
from vitrail.weights.class_names import ASSUMED_IMAGENET, imagenet_1k
from vitrail.weights.model_info import ModelInfo

TIMM = synsets.timm_synsets()
needs_timm = pytest.mark.skipif(TIMM is None, reason="timm is not installed; make test installs it")


def source(labels: list[str], targets: object = None) -> Images:
    found = Images([b""] * (len(labels) if targets is None else len(targets)), targets, classes=len(labels))  # type: ignore[arg-type]
    found.labels = tuple(labels)
    return found


@needs_timm
def test_ten_folders_of_imagenet_are_ten_of_a_thousand_outputs():
    folders = ["n01440764", "n02102040", "n03888257"]  # tench, English springer, parachute
    found = match_classes(source(folders), None, 1000)
    assert found.outputs.tolist() == [0, 217, 701]
    assert found.method == "synset"
    assert [found.labels[k] for k in found.outputs] == ["tench", "English springer", "parachute"]
    assert found.notes == (ASSUMED_IMAGENET,)


@needs_timm
def test_the_thousand_numbers_are_in_the_order_that_sorting_gives():
    assert list(TIMM) == sorted(TIMM)


@needs_timm
def test_a_model_of_the_larger_imagenet_is_found_by_its_size():
    found = match_classes(source(["n01440764"]), None, 21843)
    assert synsets.timm_synsets(21843)[found.outputs[0]] == "n01440764"
    assert found.labels[found.outputs[0]] == "n01440764"


@needs_timm
def test_names_that_are_imagenets_tell_which_output_is_which():
    names = [f"{name}, and more" for name in imagenet_1k()]
    found = match_classes(source(["n03888257"]), names, 1000)
    assert (found.outputs.tolist(), found.method, found.notes) == ([701], "synset", ())


@needs_timm
def test_assumed_names_are_matched_unless_as_many_others_go_by_order():
    names = imagenet_1k()
    assert names is not None
    config = ViTConfig(image_size=16, patch_size=8, num_classes=1000, width=8, depth=1, num_heads=1, mlp_dim=8)
    info = ModelInfo(config=config, preprocess=PreprocessConfig(image_size=16), labels=names, notes=(ASSUMED_IMAGENET,))
    others = [f"thing {k}" for k in range(1000)]
    assert labels_for_matching(info, source(["church", "chain saw"])) == names
    assert labels_for_matching(info, source(sorted(names))) == names  # in another order, as folders are
    assert labels_for_matching(info, source(others)) is None
    assert labels_for_matching(info.replace(notes=()), source(others)) == names  # the checkpoint names them


@needs_timm
def test_a_thousand_other_names_are_not_taken_for_imagenet():
    with pytest.raises(DataError, match="has none of the 1 classes"):
        match_classes(source(["n03888257"]), [f"thing {k}" for k in range(1000)], 1000)


def test_without_timm_all_thousand_folders_tell_the_order_themselves(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(synsets, "_read_timm_file", lambda name: None)
    numbers = [f"n{k:08d}" for k in range(1000)]
    mixed = numbers[::-1]
    assert match_classes(source(mixed), None, 1000).outputs.tolist() == list(range(999, -1, -1))
    with pytest.raises(DataError, match="pip install timm"):
        match_classes(source(numbers[:3]), None, 1000, require_synsets=True)


def test_outputs_may_be_called_by_their_numbers():
    labels = ["n00000003", "n00000001", "n00000002"]
    found = match_classes(source(["n00000001_one", "n00000003_three"]), labels, 3)
    assert found.outputs.tolist() == [1, 0]
    assert found.labels == ("n00000003_three", "n00000001_one", "n00000002")


def test_what_lies_beside_the_data_counts_more_than_names():
    labels = ["n00000003", "n00000001"]
    found = match_classes(source(["crane", "crane "]), labels, 2, synsets=("n00000001", "n00000003"))
    assert found.outputs.tolist() == [1, 0]


def test_names_match_whatever_their_capitals_and_hyphens():
    found = match_classes(source(["Great_White-Shark", "tench"]), ["tench, Tinca", "great white shark", "hen"], 3)
    assert (found.outputs.tolist(), found.method) == ([1, 0], "name")
    assert found.labels == ("tench, Tinca", "great white shark", "hen")


def test_a_name_of_two_outputs_is_no_match():
    with pytest.raises(DataError, match=r"has 1 of the 2 classes of images \(not crane\)"):
        match_classes(source(["crane", "hen"]), ["crane", "Crane", "hen"], 3)


def test_other_classes_are_refused_in_one_sentence_with_what_to_try():
    labels = [f"thing {k}" for k in range(1000)]
    with pytest.raises(DataError) as caught:
        match_classes(source(["cat", "dog", "bird"]), labels, 1000)
    assert str(caught.value) == (
        "the model has none of the 3 classes of images (not cat, dog, bird); it has 1,000 outputs, such as "
        "thing 0, thing 1, thing 2. Use data with those classes, name the outputs with --labels FILE, or train the "
        "model on these classes with vitrail finetune."
    )


def test_a_class_without_images_may_be_unknown():
    found = match_classes(source(["cat", "unicorn"], targets=[0, 0, -1]), ["dog", "cat"], 2)
    assert found.outputs.tolist() == [1, -1]
    assert MappedSource(source(["cat", "unicorn"], targets=[0, 0, -1]), found).targets.tolist() == [1, 1, -1]


def test_where_nobody_names_the_outputs_the_order_decides_and_is_said():
    found = match_classes(source(["cat", "dog"]), None, 2)
    assert (found.outputs.tolist(), found.method, found.labels) == ([0, 1], "order", ("cat", "dog"))
    assert "by order" in found.notes[0]


def test_classes_that_are_only_numbered_go_by_order():
    found = match_classes(source(["0", "1"]), ["cat", "dog"], 2)
    assert (found.method, found.labels) == ("order", ("cat", "dog"))
    found = match_classes(source(["cat", "dog"]), ["0", "1"], 2)
    assert (found.method, found.labels) == ("order", ("cat", "dog"))


def test_numbers_that_are_names_on_both_sides_go_by_name():
    found = match_classes(source(["1", "0"]), ["0", "1", "2"], 3)
    assert (found.outputs.tolist(), found.method) == ([1, 0], "name")


def test_the_order_cannot_decide_where_counts_differ():
    with pytest.raises(DataError, match="3 classes and the model 7 outputs without names"):
        match_classes(source(["cat", "dog", "hen"]), None, 7)


def test_the_imagenet_protocol_insists_on_numbers():
    with pytest.raises(DataError, match="no WordNet IDs"):
        match_classes(source(["cat"]), ["cat"], 1, require_synsets=True)


def test_images_without_labels_are_refused():
    with pytest.raises(DataError, match="have no labels, so accuracy cannot be measured"):
        match_classes(source([], targets=[-1]), ["cat"], 1)


def test_images_keep_everything_but_their_numbers():
    plain = source(["cat", "dog"], targets=[1, 0, -1])
    mapped = MappedSource(plain, match_classes(plain, ["hen", "dog", "cat"], 3))
    assert mapped.targets.tolist() == [1, 2, -1]
    assert mapped[0].target == 1
    assert (mapped[0].key, mapped.key(2), len(mapped), mapped.labels) == ("0", "2", 3, ("hen", "dog", "cat"))


def test_several_labels_are_moved_as_a_whole():
    plain = source(["cat", "dog"], targets=np.array([[True, False], [True, True], [False, False]]))
    mapped = MappedSource(plain, match_classes(plain, ["hen", "dog", "cat"], 3))
    assert mapped.targets.tolist() == [[False, False, True], [False, True, True], [False, False, False]]
    assert mapped[1].target == (1, 2)


def test_numbers_beside_the_data_are_read(tmp_path: Path):
    (tmp_path / "cat").mkdir()
    assert synsets.read_synsets_file(str(tmp_path), ["cat"]) is None
    (tmp_path / "synsets.json").write_text(json.dumps(["n02123045"]))
    assert synsets.read_synsets_file(str(tmp_path), ["cat"]) == ("n02123045",)
    assert synsets.read_synsets_file("digits", ["cat"]) is None


@pytest.mark.parametrize("text", ['["n02123045"]', '["cat", "dog"]', '["n02123045", "n02123045"]', '{"a": 1}', "["])
def test_numbers_that_do_not_fit_the_classes_are_refused(tmp_path: Path, text: str):
    (tmp_path / "synsets.json").write_text(text)
    with pytest.raises(DataError, match=r"synsets\.json"):
        synsets.read_synsets_file(f"folder:{tmp_path}", ["cat", "dog"])


def test_the_shards_of_imagenet_have_theirs_beside_them(imagenet_val: Path):
    labels = json.loads((imagenet_val / "classes.json").read_text())
    found = synsets.read_synsets_file(str(imagenet_val), labels)
    assert found[0] == "n01440764"
    if TIMM is not None:
        assert found == TIMM


def test_outputs_in_another_order_are_called_what_their_numbers_say(monkeypatch: pytest.MonkeyPatch):
    numbers = tuple(f"n{k:08d}" for k in range(1000))
    monkeypatch.setattr("vitrail.evaluate.class_matching.timm_synsets", lambda: numbers)
    monkeypatch.setattr("vitrail.evaluate.class_matching.imagenet_1k", lambda: tuple(f"thing {k}" for k in range(1000)))
    found = match_classes(source(["n00000003"]), numbers[::-1], 1000)
    assert (found.outputs.tolist(), found.labels[996], found.labels[0]) == ([996], "thing 3", "thing 999")
    others = match_classes(source(["n90000003"]), [f"n{90000000 + k}" for k in range(1000)], 1000)
    assert others.labels[3] == "n90000003"


def test_numbers_that_are_names_are_not_matched_by_order():
    """Handwritten digits are no aeroplanes, though there are ten of both."""
    digits = source([str(i) for i in range(10)])
    words = [f"thing {chr(97 + i)}" for i in range(10)]
    assert match_classes(digits, words, 10).method == "order"
    with pytest.raises(DataError, match="the model has none of the 10 classes"):
        match_classes(digits, words, 10, labels_are_names=True)

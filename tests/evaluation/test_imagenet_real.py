"""ImageNet-ReaL accuracy, where images have several correct labels, by hand and against timm's code."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import import_peer

from vitrail.errors import ConfigError, DataError, NotFoundError
from vitrail.evaluation import SampleResults, synsets
from vitrail.evaluation.imagenet_real import outputs_by_class, read_real_labels, real_accuracy, valid_outputs


def samples(best: np.ndarray) -> SampleResults:
    count = len(best)
    ones = np.ones(count)
    return SampleResults(
        index=np.arange(count), truth=best[:, 0], prediction=best[:, 0], score=ones, truth_score=ones, top_classes=best
    )


def val_paths(count: int) -> list[str]:
    return [f"val/n01440764/ILSVRC2012_val_{i + 1:08d}.JPEG" for i in range(count)]


def test_prediction_is_correct_if_it_is_one_of_the_labels():
    best = np.array([[1, 2, 3, 4, 5], [9, 1, 7, 6, 2], [5, 4, 3, 2, 1], [8, 0, 1, 2, 3]])
    labels = [[1, 30], [2, 40], [6], []]
    accuracy = real_accuracy(samples(best), valid_outputs(val_paths(4), labels, range(1000)))
    assert accuracy.top1.value == pytest.approx(1 / 3)  # the first
    assert accuracy.top5.value == pytest.approx(2 / 3)  # the first and the second
    assert (accuracy.count, accuracy.excluded) == (3, 1)


@pytest.mark.peer
def test_accuracy_equals_timms(tmp_path: Path):
    import_peer("timm")
    from timm.data.real_labels import RealLabelsImagenet

    rng = np.random.default_rng(0)
    logits = rng.normal(size=(200, 1000))
    labels = [rng.choice(1000, rng.integers(0, 250), replace=False).tolist() for _ in range(200)]
    (tmp_path / "real.json").write_text(json.dumps(labels))
    peer = RealLabelsImagenet(val_paths(200), str(tmp_path / "real.json"))
    peer.add_result(torch.from_numpy(logits))
    best = np.argsort(-logits, 1)[:, :5]
    valid = valid_outputs(val_paths(200), read_real_labels(tmp_path / "real.json"), range(1000))
    accuracy = real_accuracy(samples(best), valid)
    assert 100 * accuracy.top1.value == pytest.approx(peer.get_accuracy(1))
    assert 100 * accuracy.top5.value == pytest.approx(peer.get_accuracy(5))


def test_published_labels_are_of_50_000_images():
    if synsets.timm_real_labels() is None:
        pytest.skip("timm is not installed; make test installs it")
    labels = read_real_labels(None)
    assert len(labels) == 50_000
    assert sum(not row for row in labels) == 3163  # 46,837 images have labels, as the paper says


def test_without_timm_a_label_file_is_required(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("vitrail.evaluation.imagenet_real.timm_real_labels", lambda: None)
    with pytest.raises(NotFoundError, match="--real"):
        read_real_labels(None)


def test_label_dictionary_is_matched_by_file_name():
    labels = {"photos/a.jpg": [1], "b.jpg": [2], "c": [3]}
    keys = ["photos/a.jpg", "more/b.jpg", "val-00000/c", "d.jpg"]
    assert valid_outputs(keys, labels, range(1000)) == [[1], [2], [3], None]


def test_label_list_is_matched_by_the_one_based_number_in_the_name():
    assert valid_outputs(["x/ILSVRC2012_val_00000002.JPEG", "y"], [[5], [7]], range(1000)) == [[7], None]


@pytest.mark.parametrize("labels", [[[1], [2]], {"other.jpg": [1]}])
def test_names_that_do_not_match_are_refused(labels: list[list[int]] | dict[str, list[int]]):
    with pytest.raises(DataError, match="do not match these images: their names are like 000000"):
        valid_outputs(["000000", "000001"], labels, range(1000))


@pytest.mark.parametrize("text", ["[[1000]]", "[[-1]]", '[["cat"]]', "[]", '"x"', '{"a": 3}', "[[true]]"])
def test_files_without_valid_real_labels_are_refused(tmp_path: Path, text: str):
    (tmp_path / "real.json").write_text(text)
    with pytest.raises(ConfigError, match="has no ReaL labels"):
        read_real_labels(tmp_path / "real.json")


def test_invalid_json_and_missing_files_are_refused(tmp_path: Path):
    (tmp_path / "real.json").write_text("[[1]")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        read_real_labels(tmp_path / "real.json")
    with pytest.raises(NotFoundError, match="cannot be read"):
        read_real_labels(tmp_path / "none.json")


def test_outputs_of_a_larger_imagenet_are_matched_by_synset():
    if synsets.timm_synsets() is None:
        pytest.skip("timm is not installed; make test installs it")
    wider = (*reversed(synsets.timm_synsets()), "n99999999")
    outputs, note = outputs_by_class(1001, wider, None)
    assert (outputs[0], outputs[999], note) == (999, 0, "")
    with pytest.raises(DataError, match="10 outputs"):
        outputs_by_class(10, None, None)


def synset_ids() -> list[str]:
    return [f"n{k:08d}" for k in range(1000)]


def test_reordered_outputs_are_matched_by_synset(monkeypatch: pytest.MonkeyPatch):
    shuffled = np.random.default_rng(0).permutation(1000).tolist()
    output_synsets = tuple(synset_ids()[k] for k in shuffled)  # output i is class shuffled[i]
    for listed in (tuple(synset_ids()), None):
        monkeypatch.setattr("vitrail.evaluation.imagenet_real.timm_synsets", lambda listed=listed: listed)
        outputs, note = outputs_by_class(1000, output_synsets, output_synsets)
        assert [shuffled[output] for output in outputs] == list(range(1000))
        assert note == ("" if listed else "the outputs' 1,000 WordNet IDs are assumed to be ImageNet-1k's")


def test_synsets_outside_imagenet_1k_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("vitrail.evaluation.imagenet_real.timm_synsets", lambda: tuple(synset_ids()))
    with pytest.raises(DataError, match="none of the model's 2 outputs is an ImageNet-1k class"):
        outputs_by_class(2, ("n90000001", "n90000002"), None)


def test_without_synsets_outputs_are_matched_by_name_or_by_order_with_a_note(monkeypatch: pytest.MonkeyPatch):
    standard_names = tuple(f"thing {k}, other name" for k in range(1000))
    monkeypatch.setattr("vitrail.evaluation.synsets.imagenet_1k", lambda: standard_names)
    assert outputs_by_class(1000, None, standard_names) == (list(range(1000)), "")
    for unnamed in (None, tuple(map(str, range(1000)))):
        outputs, note = outputs_by_class(1000, None, unnamed)
        assert outputs == list(range(1000))
        assumed = "assumed to be ImageNet-1k's in the standard order"
        assert note == f"for ImageNet-ReaL, the model's 1,000 outputs are {assumed}"
    with pytest.raises(DataError, match=r"are not ImageNet-1k's in the standard order.*--labels FILE"):
        outputs_by_class(1000, None, standard_names[::-1])


def test_images_without_any_real_label_are_refused():
    with pytest.raises(DataError, match="none of the 1 images has a ReaL label"):
        real_accuracy(samples(np.array([[1, 2]])), [[]])

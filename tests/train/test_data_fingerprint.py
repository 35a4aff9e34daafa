"""A run goes on with the classes it began with, or not at all; other changes of its data are said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import model, small
from train.small_runs import contents, digits, interrupted, on_photos, photos, resumed, same_bits, trained

import vitrail
from vitrail import runtime
from vitrail.config import PreprocessConfig, override
from vitrail.data.sources import open_data
from vitrail.data.sources.arrays import ArraySource
from vitrail.data.sources.base import Splits
from vitrail.data.sources.fingerprint import fingerprint
from vitrail.data.sources.folder import FolderSource
from vitrail.data.sources.packed_strings import PackedStrings
from vitrail.data.sources.subset import Subset
from vitrail.errors import DataError, TrainError
from vitrail.train.data_fingerprint import check_splits, describe_class_changes
from vitrail.train.distributed import DistributedContext
from vitrail.train.setup import prepare_run

pytestmark = pytest.mark.usefixtures("quick_disk")
ALONE = DistributedContext(torch.device("cpu"))


@pytest.fixture(autouse=True)
def everything_is_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_logged", set())


@pytest.fixture
def album(tmp_path: Path) -> Path:
    return photos(tmp_path / "album", {"apple": 8, "bed": 8, "bowl": 8, "camel": 8}, side=16)


def without_what_is_new(run: Path) -> None:
    """As an older version wrote its checkpoints."""
    for state in (run / "checkpoint").glob("*/state.json"):
        old = json.loads(state.read_text())
        state.write_text(
            json.dumps(
                {k: v for k, v in old.items() if k not in ("data_fingerprint", "total_steps", "evaluation_pending")}
            )
        )


# Classes


def test_classes_in_another_order_are_refused_and_the_folder_is_left_alone(album: Path, tmp_path: Path):
    """Renamed, a class stands at another place, and the head's outputs would stand for other classes."""
    interrupted(on_photos(album), tmp_path / "run", 3)
    before = contents(tmp_path / "run")
    (album / "apple").rename(album / "zebra")
    with pytest.raises(TrainError) as caught:
        resumed(tmp_path / "run")
    assert str(caught.value) == (
        f"{album} has other classes than at the start of the run, and the model's outputs would stand for the wrong "
        "ones: they were apple, bed, bowl, camel and are bed, bowl, camel, zebra. Restore the classes, or start a new "
        "run."
    )
    assert contents(tmp_path / "run") == before
    (album / "zebra").rename(album / "apple")
    resumed(tmp_path / "run")
    assert vitrail.load(tmp_path / "run").labels == ("apple", "bed", "bowl", "camel")


def test_a_finished_run_keeps_the_names_of_its_classes(album: Path, tmp_path: Path):
    """Resuming it would write its model again, under the names of today."""
    trained(on_photos(album, 2), tmp_path / "run")
    (album / "apple").rename(album / "zebra")
    with pytest.raises(TrainError, match="they were apple, bed, bowl, camel and are bed, bowl, camel, zebra"):
        resumed(tmp_path / "run")
    assert vitrail.load(tmp_path / "run").labels == ("apple", "bed", "bowl", "camel")


def test_fine_tuning_and_comparisons_refuse_other_classes_too(
    album: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    model(small(num_classes=3, image_size=16)).save("start")
    short = ["duration=2 steps", "data.workers=0", "device=cpu", "compare=('seed=1',)"]
    vitrail.finetune("start", "album", overrides=short, out="run", report=False)
    (album / "camel").rename(album / "ant")
    for folder in ("run", "run/compare/seed-1"):
        with pytest.raises(TrainError, match="are ant, apple, bed, bowl"):
            vitrail.finetune("", "", resume=True, out=folder, report=False)


def test_how_classes_differ_is_said_in_few_words():
    many = [f"class {i:03d}" for i in range(100)]

    def words(then: list[str], now: list[str]) -> str:
        return describe_class_changes({"labels": then, "multi_label": False}, {"labels": now, "multi_label": False})

    assert words(many, many) == ""
    assert words(["a", "b"], ["a", "b", "c"]) == "they were a, b and are a, b, c"
    assert words(many, many[1:]) == (
        "there were 100 and are 99; gone: class 000; 99 moved, the first: class 0 was class 000, is class 001"
    )
    assert words(many, [*many[:98], "class 099", "class 098"]) == (
        "2 moved, the first: class 98 was class 098, is class 099"
    )
    one = {"labels": many, "multi_label": False}
    assert (
        describe_class_changes(one, one | {"multi_label": True})
        == "an image had one label and has any number of labels"
    )
    assert (
        describe_class_changes(one | {"multi_label": True}, one)
        == "an image had any number of labels and has one label"
    )


def test_classes_to_measure_on_are_those_that_are_learned():
    def source(*labels: str) -> ArraySource:
        return ArraySource("some", "train", np.zeros((2, 1, 1, 1), np.uint8), [0, 1], labels)

    check_splits(Splits(source("a", "b"), source("a", "b")), ("a", "b"), "data")
    for splits in (Splits(source("a", "b"), source("b", "a")), Splits(source("a", "b"), source("a", "b"), source("a"))):
        with pytest.raises(
            DataError, match=r"some has the classes .* the training images of data have a, b; give their order"
        ):
            check_splits(splits, ("a", "b"), "data")


def test_other_data_to_measure_on_have_the_classes_of_what_is_learned(album: Path, tmp_path: Path):
    """A folder whose names sort differently is read with the numbers of the training classes."""
    other = photos(tmp_path / "other", {"camel": 2, "apple": 3}, side=16)
    splits = open_data(on_photos(album, data={"source": str(album), "validation": str(other)}).data)
    assert splits.validation.labels == splits.train.labels
    assert [splits.validation.labels[t] for t in splits.validation.targets] == ["apple"] * 3 + ["camel"] * 2


def test_a_head_is_kept_only_for_the_same_classes_in_the_same_order(album: Path, tmp_path: Path):
    for name, labels in {"same": ("apple", "bed", "bowl", "camel"), "other": ("bed", "apple", "bowl", "camel")}.items():
        model(small(num_classes=4, image_size=16), labels=labels).save(tmp_path / name)
        net = prepare_run(on_photos(album, init_from=str(tmp_path / name), model=None, preprocess=None), ALONE).net
        assert bool(net.head.weight.any()) == (name == "same")


# Other changes


def test_images_that_change_their_label_are_said(album: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """As many as before, of the same names and classes."""
    rows = [(f"{path.parent.name}/{path.name}", path.parent.name) for path in sorted(album.glob("*/*.jpg"))]
    table = album / "table.csv"
    table.write_text("\n".join(["path,label", *(f"{p},{label}" for p, label in rows)]))
    config = on_photos(album, data={"source": f"table:{table}", "workers": 0})
    interrupted(config, tmp_path / "run", 3)
    table.write_text(
        "\n".join(["path,label", *(f"{p},{'bed' if p == 'apple/005.jpg' else label}" for p, label in rows)])
    )
    resumed(tmp_path / "run")
    assert "have changed since the start of the run (27 as before, with other names or labels)" in caplog.text
    assert "the order of samples differs" in caplog.text
    assert "validation images" not in caplog.text


def test_nothing_is_said_of_data_that_are_the_same(album: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Wherever they lie."""
    trained(on_photos(album), tmp_path / "whole")
    interrupted(on_photos(album), tmp_path / "run", 3)
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    shutil.copytree(album, tmp_path / "moved" / "album")
    settings["data"]["source"] = str(tmp_path / "moved" / "album")
    (tmp_path / "run" / "config.json").write_text(json.dumps(settings))
    resumed(tmp_path / "run")
    assert "since the start of the run" not in caplog.text
    assert same_bits(tmp_path / "run", tmp_path / "whole")


def test_without_labels_names_of_folders_are_names_of_images(
    album: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Nothing is learned of classes: other folders are other images, which is said."""
    config = override(on_photos(album), ["objective=masked-patch"])
    interrupted(config, tmp_path / "run", 3)
    (album / "apple").rename(album / "zebra")
    resumed(tmp_path / "run")
    assert "the training images of" in caplog.text


def test_resuming_warns_if_the_teacher_has_different_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    gray = PreprocessConfig(image_size=8, mean=(0.5,), std=(0.5,))
    for depth in (1, 2):
        config = small(image_size=8, patch_size=4, channels=1, num_classes=10, depth=depth)
        model(config, labels=tuple("0123456789"), preprocess=gray).save(tmp_path / f"{depth}")
    teacher = (tmp_path / "1").rename(tmp_path / "teacher")
    interrupted(override(digits(4), ["objective=distill", f"distill.teacher={teacher}"]), tmp_path / "run", 2)
    shutil.copytree(tmp_path / "run", tmp_path / "same")
    resumed(tmp_path / "same")
    assert "has different weights" not in caplog.text
    shutil.rmtree(teacher)
    (tmp_path / "2").rename(teacher)
    resumed(tmp_path / "run")
    assert f"the teacher {teacher} has different weights than at the start of the run" in caplog.text


@pytest.mark.parametrize("mixup", [0, 0.2])
def test_what_older_versions_did_otherwise_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture, mixup: float):
    interrupted(override(digits(4), [f"augment.mixup={mixup}", "classify.class_weights=balanced"]), tmp_path / "run", 2)
    without_what_is_new(tmp_path / "run")
    resumed(tmp_path / "run")
    words = "this version trains differently from here on: images are mixed within groups of augment.mix_group=8, not "
    assert (words in caplog.text) == bool(mixup)


def test_checkpoints_of_older_versions_are_read_and_said_to_be_unchecked(
    album: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    trained(on_photos(album), tmp_path / "whole")
    interrupted(on_photos(album), tmp_path / "run", 3)
    without_what_is_new(tmp_path / "run")
    resumed(tmp_path / "run")
    assert f"whether {album} is unchanged is not checked" in caplog.text
    assert same_bits(tmp_path / "run", tmp_path / "whole")
    caplog.clear()
    resumed(tmp_path / "run")  # what it has written itself is checked again
    assert "not checked" not in caplog.text


# Digests


def folder(names: list[str], targets: list[int]) -> FolderSource:
    return FolderSource("some", Path("some"), PackedStrings(names), np.array(targets), ("a", "b", "c"))


def test_a_digest_is_of_keys_labels_and_order():
    names = [f"a/{i}.jpg" for i in range(9)]
    plain = fingerprint(folder(names, [0] * 9))
    assert plain == fingerprint(folder(list(names), [0] * 9))
    others = [
        folder(names, [0] * 8 + [1]),
        folder([*names[:8], "a/9.jpg"], [0] * 9),
        folder([*names[1:], names[0]], [0] * 9),
        folder(names[:8], [0] * 8),
        folder([*names[:7], "a/7.jpga", "/8.jpg"], [0] * 9),  # the same letters
        Subset(folder(names, [0] * 9), [0, 1, 2, 3, 4, 5, 6, 7]),
    ]
    found = {plain, *map(fingerprint, others)}
    assert len(found) == len(others)  # the last one is the fourth
    assert fingerprint(others[3]) == fingerprint(others[5])


def test_a_part_has_the_digest_of_its_own_images():
    """Whatever else its source holds, in whatever part of a part: what is held out may change unseen."""
    names = [f"{c}/{i}.jpg" for c in "abc" for i in range(4)]
    some = Subset(folder(names, [0] * 12), [0, 1, 2, 5, 9, 10])
    again = folder([names[i] for i in (0, 1, 2, 5, 9, 10)], [0] * 6)
    assert fingerprint(some) == fingerprint(again)
    assert fingerprint(Subset(some, [1, 3, 2])) == fingerprint(Subset(again, [1, 3, 2]))
    assert fingerprint(Subset(some, [1, 3, 2])) != fingerprint(Subset(again, [1, 2, 3]))


def test_a_source_of_ones_own_has_a_digest_too():
    class Own:
        targets = np.arange(5000) % 3

        def __init__(self, last: str) -> None:
            self.last = last

        def __len__(self) -> int:
            return 5000

        def key(self, index: int) -> str:
            return self.last if index == 4999 else str(index)

    assert fingerprint(Own("x")) == fingerprint(Own("x")) != fingerprint(Own("y"))
    assert fingerprint(object()) is None, "a stream"

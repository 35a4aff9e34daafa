"""A run resumes only with the same classes; other changes of its data are reported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from small_models import model, small
from training.small_objective import SINGLE_PROCESS
from training.small_runs import (
    digits_config,
    file_contents,
    identical_weights,
    interrupt_run,
    make_photos,
    photo_config,
    resume_run,
    train_run,
)

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
from vitrail.training.data_fingerprint import check_splits, describe_class_changes
from vitrail.training.setup import prepare_run

pytestmark = pytest.mark.usefixtures("quick_disk")


@pytest.fixture(autouse=True)
def reset_logged_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.notes, "_logged", set())


@pytest.fixture
def album(tmp_path: Path) -> Path:
    return make_photos(tmp_path / "album", {"apple": 8, "bed": 8, "bowl": 8, "camel": 8}, side=16)


def remove_newer_fields(run: Path) -> None:
    """Make the checkpoints look as if an older version had written them."""
    for state in (run / "checkpoint").glob("*/state.json"):
        fields = json.loads(state.read_text())
        state.write_text(
            json.dumps(
                {k: v for k, v in fields.items() if k not in ("data_fingerprint", "total_steps", "evaluation_pending")}
            )
        )


# Classes


def test_changed_class_order_is_refused_and_the_run_folder_is_unchanged(album: Path, tmp_path: Path):
    """A renamed class changes the order, so that the head's outputs would mean other classes."""
    interrupt_run(photo_config(album), tmp_path / "run", 3)
    before = file_contents(tmp_path / "run")
    (album / "apple").rename(album / "zebra")
    with pytest.raises(TrainError) as caught:
        resume_run(tmp_path / "run")
    assert str(caught.value) == (
        f"the classes of {album} have changed since the start of the run, so the model's outputs would no longer match "
        "them: they were apple, bed, bowl, camel and are now bed, bowl, camel, zebra. Restore the classes, or start a "
        "new run."
    )
    assert file_contents(tmp_path / "run") == before
    (album / "zebra").rename(album / "apple")
    resume_run(tmp_path / "run")
    assert vitrail.load(tmp_path / "run").labels == ("apple", "bed", "bowl", "camel")


def test_finished_run_keeps_its_class_names(album: Path, tmp_path: Path):
    """Resuming would write the model again, with the changed class names."""
    train_run(photo_config(album, 2), tmp_path / "run")
    (album / "apple").rename(album / "zebra")
    with pytest.raises(TrainError, match="they were apple, bed, bowl, camel and are now bed, bowl, camel, zebra"):
        resume_run(tmp_path / "run")
    assert vitrail.load(tmp_path / "run").labels == ("apple", "bed", "bowl", "camel")


def test_fine_tuning_and_comparisons_refuse_changed_classes(
    album: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    model(small(num_classes=3, image_size=16)).save("start")
    overrides = ["duration=2 steps", "data.workers=0", "device=cpu", "compare=('seed=1',)"]
    vitrail.finetune("start", "album", overrides=overrides, out="run", report=False)
    (album / "camel").rename(album / "ant")
    for folder in ("run", "run/compare/seed-1"):
        with pytest.raises(TrainError, match="are now ant, apple, bed, bowl"):
            vitrail.finetune("", "", resume=True, out=folder, report=False)


def test_class_changes_are_described_briefly():
    labels = [f"class {i:03d}" for i in range(100)]

    def describe(before: list[str], after: list[str]) -> str:
        return describe_class_changes({"labels": before, "multi_label": False}, {"labels": after, "multi_label": False})

    assert describe(labels, labels) == ""
    assert describe(["a", "b"], ["a", "b", "c"]) == "they were a, b and are now a, b, c"
    assert describe(labels, labels[1:]) == (
        "there were 100 and are now 99; missing: class 000; 99 have another index, the first is class 0: it was class "
        "000 and is now class 001"
    )
    assert describe(labels, [*labels[:98], "class 099", "class 098"]) == (
        "2 have another index, the first is class 98: it was class 098 and is now class 099"
    )
    single_label = {"labels": labels, "multi_label": False}
    assert (
        describe_class_changes(single_label, single_label | {"multi_label": True})
        == "an image had one label and now has any number of labels"
    )
    assert (
        describe_class_changes(single_label | {"multi_label": True}, single_label)
        == "an image had any number of labels and now has one label"
    )


def test_validation_classes_must_match_training_classes():
    def source(*labels: str) -> ArraySource:
        return ArraySource("some", "train", np.zeros((2, 1, 1, 1), np.uint8), [0, 1], labels)

    check_splits(Splits(source("a", "b"), source("a", "b")), ("a", "b"), "data")
    for splits in (Splits(source("a", "b"), source("b", "a")), Splits(source("a", "b"), source("a", "b"), source("a"))):
        with pytest.raises(
            DataError, match=r"some has the classes .* the training images of data have a, b; give their order"
        ):
            check_splits(splits, ("a", "b"), "data")


def test_separate_validation_data_use_the_training_class_indices(album: Path, tmp_path: Path):
    """Class indices are those of the training data, even if the validation folders sort differently."""
    validation = make_photos(tmp_path / "validation", {"camel": 2, "apple": 3}, side=16)
    splits = open_data(photo_config(album, data={"source": str(album), "validation": str(validation)}).data)
    assert splits.validation.labels == splits.train.labels
    assert [splits.validation.labels[t] for t in splits.validation.targets] == ["apple"] * 3 + ["camel"] * 2


def test_head_is_kept_only_for_the_same_classes_in_the_same_order(album: Path, tmp_path: Path):
    for name, labels in {"same": ("apple", "bed", "bowl", "camel"), "other": ("bed", "apple", "bowl", "camel")}.items():
        model(small(num_classes=4, image_size=16), labels=labels).save(tmp_path / name)
        net = prepare_run(
            photo_config(album, init_from=str(tmp_path / name), model=None, preprocess=None), SINGLE_PROCESS
        ).net
        assert bool(net.head.weight.any()) == (name == "same")


# Other changes


def test_changed_labels_are_reported(album: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """The number of images, their names and the classes stay the same."""
    rows = [(f"{path.parent.name}/{path.name}", path.parent.name) for path in sorted(album.glob("*/*.jpg"))]
    table = album / "table.csv"
    table.write_text("\n".join(["path,label", *(f"{p},{label}" for p, label in rows)]))
    config = photo_config(album, data={"source": f"table:{table}", "workers": 0})
    interrupt_run(config, tmp_path / "run", 3)
    table.write_text(
        "\n".join(["path,label", *(f"{p},{'bed' if p == 'apple/005.jpg' else label}" for p, label in rows)])
    )
    resume_run(tmp_path / "run")
    assert "have changed since the start of the run (27 as before, with other names or labels)" in caplog.text
    assert "the order of samples differs" in caplog.text
    assert "validation images" not in caplog.text


def test_unchanged_data_are_not_reported(album: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Even if the folder was moved."""
    train_run(photo_config(album), tmp_path / "uninterrupted")
    interrupt_run(photo_config(album), tmp_path / "run", 3)
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    shutil.copytree(album, tmp_path / "moved" / "album")
    settings["data"]["source"] = str(tmp_path / "moved" / "album")
    (tmp_path / "run" / "config.json").write_text(json.dumps(settings))
    resume_run(tmp_path / "run")
    assert "since the start of the run" not in caplog.text
    assert identical_weights(tmp_path / "run", tmp_path / "uninterrupted")


def test_renamed_folder_changes_image_names_without_labels(
    album: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """An objective without classes reports a renamed folder as changed images."""
    config = override(photo_config(album), ["objective=masked-patch"])
    interrupt_run(config, tmp_path / "run", 3)
    (album / "apple").rename(album / "zebra")
    resume_run(tmp_path / "run")
    assert "the training images of" in caplog.text


def test_resuming_warns_if_the_teacher_has_different_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    gray = PreprocessConfig(image_size=8, mean=(0.5,), std=(0.5,))
    for depth in (1, 2):
        config = small(image_size=8, patch_size=4, channels=1, num_classes=10, depth=depth)
        model(config, labels=tuple("0123456789"), preprocess=gray).save(tmp_path / f"{depth}")
    teacher = (tmp_path / "1").rename(tmp_path / "teacher")
    interrupt_run(override(digits_config(4), ["objective=distill", f"distill.teacher={teacher}"]), tmp_path / "run", 2)
    shutil.copytree(tmp_path / "run", tmp_path / "same")
    resume_run(tmp_path / "same")
    assert "has different weights" not in caplog.text
    shutil.rmtree(teacher)
    (tmp_path / "2").rename(teacher)
    resume_run(tmp_path / "run")
    assert f"the teacher {teacher} has different weights than at the start of the run" in caplog.text


@pytest.mark.parametrize("mixup", [0, 0.2])
def test_changes_since_older_versions_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture, mixup: float):
    interrupt_run(
        override(digits_config(4), [f"augment.mixup={mixup}", "classify.class_weights=balanced"]), tmp_path / "run", 2
    )
    remove_newer_fields(tmp_path / "run")
    resume_run(tmp_path / "run")
    message = "the run trains differently than before: images are mixed within groups of augment.mix_group=8, not "
    assert (message in caplog.text) == bool(mixup)


def test_older_checkpoints_load_with_a_note_that_data_are_not_checked(
    album: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    train_run(photo_config(album), tmp_path / "uninterrupted")
    interrupt_run(photo_config(album), tmp_path / "run", 3)
    remove_newer_fields(tmp_path / "run")
    resume_run(tmp_path / "run")
    assert f"it was not checked whether {album} has changed" in caplog.text
    assert identical_weights(tmp_path / "run", tmp_path / "uninterrupted")
    caplog.clear()
    resume_run(tmp_path / "run")  # checkpoints of this version are checked
    assert "not checked" not in caplog.text


# Fingerprints


def folder_source(names: list[str], targets: list[int]) -> FolderSource:
    return FolderSource("some", Path("some"), PackedStrings(names), np.array(targets), ("a", "b", "c"))


def test_fingerprint_covers_keys_labels_and_order():
    names = [f"a/{i}.jpg" for i in range(9)]
    base = fingerprint(folder_source(names, [0] * 9))
    assert base == fingerprint(folder_source(list(names), [0] * 9))
    variants = [
        folder_source(names, [0] * 8 + [1]),
        folder_source([*names[:8], "a/9.jpg"], [0] * 9),
        folder_source([*names[1:], names[0]], [0] * 9),
        folder_source(names[:8], [0] * 8),
        folder_source([*names[:7], "a/7.jpga", "/8.jpg"], [0] * 9),  # same letters when joined
        Subset(folder_source(names, [0] * 9), [0, 1, 2, 3, 4, 5, 6, 7]),
    ]
    fingerprints = {base, *map(fingerprint, variants)}
    assert len(fingerprints) == len(variants)  # the last variant equals the fourth
    assert fingerprint(variants[3]) == fingerprint(variants[5])


def test_subset_has_the_fingerprint_of_its_own_images():
    """Other images of its source, such as held-out ones, do not matter; this also holds for nested subsets."""
    names = [f"{c}/{i}.jpg" for c in "abc" for i in range(4)]
    subset = Subset(folder_source(names, [0] * 12), [0, 1, 2, 5, 9, 10])
    same_images = folder_source([names[i] for i in (0, 1, 2, 5, 9, 10)], [0] * 6)
    assert fingerprint(subset) == fingerprint(same_images)
    assert fingerprint(Subset(subset, [1, 3, 2])) == fingerprint(Subset(same_images, [1, 3, 2]))
    assert fingerprint(Subset(subset, [1, 3, 2])) != fingerprint(Subset(same_images, [1, 2, 3]))


def test_custom_source_has_a_fingerprint():
    class CustomSource:
        targets = np.arange(5000) % 3

        def __init__(self, last: str) -> None:
            self.last = last

        def __len__(self) -> int:
            return 5000

        def key(self, index: int) -> str:
            return self.last if index == 4999 else str(index)

    assert fingerprint(CustomSource("x")) == fingerprint(CustomSource("x")) != fingerprint(CustomSource("y"))
    assert fingerprint(object()) is None, "streams have none"

"""VTAB-1k: the tasks, their folders, and their training and validation images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from image_source import Images
from PIL import Image

from vitrail.errors import DataError, NotFoundError
from vitrail.evaluation.vtab_tasks import (
    GROUPS,
    TASKS,
    group_means,
    locate_tasks,
    open_task,
    sample_train_validation,
    select_tasks,
)

DTD = TASKS["dtd"]


def write_image(path: Path, shade: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8, 3), shade, np.uint8)).save(path)


def test_there_are_19_tasks_in_three_groups():
    counts = {group: sum(task.group == group for task in TASKS.values()) for group in GROUPS}
    assert counts == {"Natural": 7, "Specialized": 4, "Structured": 8}


def test_tasks_are_selected_by_any_of_their_names():
    assert [t.name for t in select_tasks(["smallnorb_azi", "CIFAR-100", "Clevr/count"])] == [
        "cifar100",
        "clevr_count",
        "smallnorb_azimuth",
    ]
    assert len(select_tasks([])) == 19
    with pytest.raises(NotFoundError, match="unknown VTAB task 'dtt'; did you mean 'dtd'"):
        select_tasks(["dtt"])


def test_tasks_are_located_by_their_folders(tmp_path):
    for name in ("oxford_flowers102", "DTD"):
        write_image(tmp_path / name / "x.png")
    (tmp_path / "svhn").mkdir()  # empty
    located = locate_tasks(tmp_path, select_tasks([]))
    assert located == {"flowers102": str(tmp_path / "oxford_flowers102"), "dtd": str(tmp_path / "DTD")}


def test_missing_folder_is_refused(tmp_path):
    with pytest.raises(NotFoundError, match="expected one that contains a folder for each task"):
        locate_tasks(tmp_path / "none", select_tasks([]))


def test_published_split_lists_are_read(tmp_path):
    folder = tmp_path / "dtd"
    lines = {"train800": "a.png 0\nsome where/b.png 2\n", "val200": "c.png 1\n", "test": "d.png 2\n\ne.png 0\n"}
    for name, text in lines.items():
        (folder / "images").mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.txt").write_text(text)
    data = open_task(DTD, str(folder), tmp_path)
    assert (len(data.train), len(data.validation), len(data.test)) == (2, 1, 2)
    assert data.train.key(1) == "some where/b.png"
    assert data.train[1].image == str(folder / "some where/b.png")
    assert data.train.labels == data.test.labels == ("0", "1", "2")
    assert data.test.targets.tolist() == [2, 0]


@pytest.mark.parametrize("text", ["a.png\n", "a.png x\n", ""])
def test_invalid_split_lists_are_refused(tmp_path, text):
    folder = tmp_path / "dtd"
    folder.mkdir()
    for name in ("train800", "val200", "test"):
        (folder / f"{name}.txt").write_text(text)
    with pytest.raises(DataError, match=r"expected a path, a space and a class index|lists no images"):
        open_task(DTD, str(folder), tmp_path)


def test_split_folders_are_used_as_they_are(tmp_path):
    for part, count in (("train800", 4), ("val200", 2), ("test", 3)):
        for i in range(count):
            write_image(tmp_path / "dtd" / part / "ab"[i % 2] / f"{i}.png")
    data = open_task(DTD, str(tmp_path / "dtd"), tmp_path)
    assert (len(data.train), len(data.validation), len(data.test)) == (4, 2, 3)
    assert data.test.labels == ("a", "b")


def test_1000_images_are_sampled_and_split_800_to_200():
    source = Images([b""] * 3000)
    train, validation = sample_train_validation(source, None, DTD)
    keys = [{part.key(i) for i in range(len(part))} for part in (train, validation)]
    assert (len(keys[0]), len(keys[1]), keys[0] & keys[1]) == (800, 200, set())
    repeated = sample_train_validation(source, None, DTD)
    assert [part.indices.tolist() for part in repeated] == [train.indices.tolist(), validation.indices.tolist()]


def test_validation_images_come_from_the_validation_split_if_there_is_one():
    train, validation = Images([b""] * 900, name="train"), Images([b""] * 300, name="validation")
    sampled_train, sampled_validation = sample_train_validation(train, validation, DTD)
    assert (sampled_train.source.name, len(sampled_train), sampled_validation.source.name, len(sampled_validation)) == (
        "train",
        800,
        "validation",
        200,
    )


def test_fewer_images_are_split_4_to_1_with_a_note(caplog):
    train, validation = sample_train_validation(Images([b""] * 50), None, DTD)
    assert (len(train), len(validation)) == (40, 10)
    assert "DTD has 50 images, not 1,000: 40 for training, 10 for validation." in caplog.text
    with pytest.raises(DataError, match="too few for a validation split"):
        sample_train_validation(Images([b""] * 3), None, DTD)


def test_data_without_a_test_split_is_refused(tmp_path):
    for i in range(4):
        write_image(tmp_path / "dtd" / "ab"[i % 2] / f"{i}.png")
    with pytest.raises(DataError, match="has no test split"):
        open_task(DTD, str(tmp_path / "dtd"), tmp_path)


def test_vtab_score_requires_all_tasks():
    scores = {name: (i / 19, 500) for i, name in enumerate(TASKS)}
    means = group_means(scores)
    assert means["VTAB"].value == pytest.approx(np.mean([value for value, _ in scores.values()]))
    assert means["Specialized"].value == pytest.approx(
        np.mean([scores[n][0] for n, t in TASKS.items() if t.group == "Specialized"])
    )
    assert means["VTAB"].high - means["VTAB"].low < means["Specialized"].high - means["Specialized"].low
    scores.pop("dmlab")
    assert set(group_means(scores)) == {"Natural", "Specialized"}

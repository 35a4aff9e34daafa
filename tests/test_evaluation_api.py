"""`vitrail.evaluate`: the same numbers however the images are batched and shared out, at every size."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import accuracy_score, log_loss
from small_models import LABELS, gradient, model, small
from train.processes import Processes

import vitrail
from vitrail.errors import ConfigError, DataError, ModelError, NotFoundError
from vitrail.report.evaluation_files import write_evaluation

QUICK: dict[str, Any] = {"device": "cpu", "workers": 0}


@pytest.fixture(scope="module")
def vit() -> vitrail.Model:
    return model(small())


@pytest.fixture(scope="module")
def album(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten images of three of the model's five classes."""
    return image_folder(tmp_path_factory.mktemp("album") / "album", {"bird": 3, "cat": 5, "dog": 2})


def image_folder(folder: Path, counts: dict[str, int]) -> Path:
    rng = np.random.default_rng(5)
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            noise = rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)
            Image.fromarray(noise).resize((40, 36)).save(folder / name / f"{i}.png")
    return folder


def evaluated(vit: vitrail.Model, data: Path | str, **options: Any) -> vitrail.Evaluation:
    return vitrail.evaluate(vit, str(data), **QUICK | options)


def test_the_numbers_are_those_of_the_models_own_answers(vit: vitrail.Model, album: Path):
    paths = sorted(album.rglob("*.png"))
    truth = [LABELS.index(path.parent.name) for path in paths]
    chances = vit.logits(paths).double().softmax(1).numpy()
    found = evaluated(vit, album)
    assert found.top1.value == accuracy_score(truth, chances.argmax(1))
    assert found.loss.value == pytest.approx(log_loss(truth, chances, labels=range(5)), rel=1e-5)
    assert found.top5 is None  # five classes: always right
    assert found.first.scores.count == 10
    assert found.first.image_size == (32, 32)
    assert (found.matched_by, found.labels, found.data) == ("name", LABELS, "album")
    assert found.first.per_class.support.tolist() == [5, 2, 3, 0, 0]
    assert [Path(found.keys[i]).parent.name for i in found.first.samples.index] == [p.parent.name for p in paths]
    assert found.first.throughput.network >= found.first.throughput.total > 0


@pytest.mark.parametrize("batch", [1, 3, 7, 64])
def test_the_size_of_batches_does_not_show(vit: vitrail.Model, album: Path, batch: int):
    expected, got = evaluated(vit, album, batch_size=10), evaluated(vit, album, batch_size=batch)
    assert same_counts(got, expected)
    assert got.loss.value == pytest.approx(expected.loss.value, rel=1e-6)


def same_counts(got: vitrail.Evaluation, expected: vitrail.Evaluation) -> bool:
    mine, other = got.first, expected.first
    arrays = (mine.scores.confusion, mine.samples.rank), (other.scores.confusion, other.samples.rank)
    return got.top1 == expected.top1 and all(np.array_equal(a, b) for a, b in zip(*arrays, strict=True))


def test_in_double_precision_only_the_last_digits_show_it(album: Path):
    exact = model(small()).to(dtype="float64")
    expected, got = evaluated(exact, album, batch_size=10), evaluated(exact, album, batch_size=3)
    assert got.loss.value == pytest.approx(expected.loss.value, rel=1e-13)
    assert got.calibration.error.value == pytest.approx(
        expected.calibration.error.value, rel=1e-6
    )  # scores are float32


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(3) as started:
        yield started


def in_a_process(weights: str, data: str, image: list[int] | None, flip: bool) -> dict[str, Any]:
    """What one of several processes finds."""
    found = vitrail.evaluate(weights, data, image_size=image, flip=flip, batch_size=3, dtype="float64", **QUICK)
    return plain(found)


def plain(found: vitrail.Evaluation) -> dict[str, Any]:
    values = found.to_dict()
    for size in values["sizes"]:
        size.pop("throughput")
    return values | {"index": [s.samples.index.tolist() for s in found.sizes]}


@pytest.mark.usefixtures("quick_disk")
def test_three_processes_that_do_not_divide_ten_images_find_what_one_does(
    processes: Processes, vit: vitrail.Model, album: Path, tmp_path: Path
):
    vit.save(tmp_path / "model")
    arguments = (str(tmp_path / "model"), str(album), [32, 48], True)
    expected = in_a_process(*arguments)
    assert expected["sizes"][0]["count"] == 10
    for got in processes.run(in_a_process, *arguments):
        assert json.dumps(rounded(got)) == json.dumps(rounded(expected))


def rounded(value: Any) -> Any:
    """To ten digits, which is further than any batch's rounding in float64 shows."""
    if isinstance(value, dict):
        return {name: rounded(v) for name, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{value:.10g}") if isinstance(value, float) else value


def test_a_broken_image_is_refused_by_all_processes(processes: Processes, vit: vitrail.Model, tmp_path: Path):
    vit.save(tmp_path / "model")
    folder = image_folder(tmp_path / "photos", {"cat": 5, "dog": 5})
    (folder / "dog" / "4.png").write_bytes(b"broken")
    found = processes.run(in_a_process, str(tmp_path / "model"), str(folder), None, False, survivors=True)
    assert len(found) == 3
    for error in found:
        assert isinstance(error, DataError)
        assert "1 of 10 images of photos cannot be read" in str(error)


def test_data_that_is_not_there_is_refused_by_all_processes_in_the_same_words(
    processes: Processes, vit: vitrail.Model, tmp_path: Path
):
    vit.save(tmp_path / "model")
    found = processes.run(in_a_process, str(tmp_path / "model"), str(tmp_path / "nowhere"), None, False, survivors=True)
    assert len({str(error) for error in found}) == 1
    assert all(isinstance(error, NotFoundError) for error in found)


def test_every_size_has_its_own_positions_preprocessing_and_difference(vit: vitrail.Model, album: Path):
    found = evaluated(vit, album, image_size=[32, 48, (24, 40)])
    assert [m.image_size for m in found.sizes] == [(32, 32), (48, 48), (24, 40)]
    for measured, size in zip(found.sizes, (32, 48, (24, 40)), strict=True):
        alone = evaluated(vit, album, image_size=size).first
        assert alone.loss.value == pytest.approx(measured.loss.value, rel=1e-6)
    first, second = found.sizes[:2]
    assert first.top1_change is None
    assert second.top1_change.value == pytest.approx(second.top1.value - first.top1.value)
    assert vit.config.image_size == (32, 32)  # the model itself stays as it is
    larger = vitrail.Model(vit.net.resized(48), vit.info.replace(config=vit.config.replace(image_size=48)))
    larger.info = larger.info.replace(preprocess=larger.info.preprocess.replace(image_size=48))
    assert evaluated(larger, album).loss.value == pytest.approx(second.loss.value, rel=1e-6)


def test_a_size_that_the_patches_do_not_divide_is_refused_before_any_work(vit: vitrail.Model, tmp_path: Path):
    folder = image_folder(tmp_path / "photos", {"cat": 1})
    (folder / "cat" / "0.png").write_bytes(b"would be refused, too")
    with pytest.raises(ConfigError, match="leaves 6 px of the image's height 30 uncovered; try height 24 or 32"):
        evaluated(vit, folder, image_size=[32, 30])


def test_relative_positions_keep_their_size(album: Path):
    fixed = model(small(position="relative"))
    assert evaluated(fixed, album, image_size=[32]).first.image_size == (32, 32)
    with pytest.raises(ModelError, match="relative positions cannot be resampled from 32 px to 48 px"):
        evaluated(fixed, album, image_size=[32, 48])


def test_a_flip_is_the_mean_of_an_image_and_its_mirror_image(vit: vitrail.Model, album: Path):
    paths = sorted(album.rglob("*.png"))
    plain = [Image.open(path) for path in paths]
    mirrored = [image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for image in plain]
    chances = sum(vit.logits(images).double().softmax(1) for images in (plain, mirrored)) / 2
    found = evaluated(vit, album, flip=True)
    assert np.array_equal(found.first.samples.prediction, chances.argmax(1).numpy())
    np.testing.assert_allclose(found.first.samples.score, chances.amax(1).numpy(), rtol=1e-4)


def test_several_labels_have_average_precisions_with_an_interval(tmp_path: Path):
    several = model(small(), multi_label=True)
    rows = ["image,label"]
    for i, words in enumerate(["cat|dog", "cat", "dog|bird", "bird", "cat|bird", "dog"] * 3):
        gradient(30 + i).save(tmp_path / f"{i}.png")
        rows.append(f"{i}.png,{words}")
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    found = evaluated(several, tmp_path / "labels.csv")
    precision = found.mean_average_precision
    assert found.multi_label
    assert precision.low <= precision.value <= precision.high
    assert precision.value == pytest.approx(np.nanmean(found.first.per_class.average_precision))
    assert found.calibration is None
    assert found.first.scores.average_precisions is not None
    assert "average_precision" in found.to_dict()["sizes"][0]["per_class"][0]
    assert evaluated(model(small()), tmp_path / "labels.csv").notes == (
        "the data is multi-label and the model single-label: each output is read as a separate probability",
    )
    written = write_evaluation(found, tmp_path / "out")
    assert {p.name for p in written} >= {"classes.png", "predictions.csv"}
    assert ",cat|dog," in (tmp_path / "out" / "predictions.csv").read_text()


def test_one_class_can_be_measured_and_what_cannot_be_said_is(vit: vitrail.Model, tmp_path: Path):
    found = evaluated(vit, image_folder(tmp_path / "photos", {"cat": 4}))
    assert found.first.scores.count == 4
    assert found.notes == ("all images have one class, 'cat': accuracy says nothing about the other classes",)
    write_evaluation(found, tmp_path / "out")
    assert not (tmp_path / "out" / "confusion.png").exists()


def test_images_that_cannot_be_read_are_left_out_if_asked(vit: vitrail.Model, tmp_path: Path):
    folder = image_folder(tmp_path / "photos", {"cat": 4, "dog": 2})
    (folder / "cat" / "1.png").write_bytes(b"broken")
    with pytest.raises(DataError, match="1 of 6 images of photos cannot be read"):
        evaluated(vit, folder)
    found = evaluated(vit, folder, skip_bad=True)
    assert list(found.unreadable) == ["cat/1.png"]
    assert found.first.scores.count == 5


def test_a_model_without_classes_is_refused(album: Path):
    with pytest.raises(ModelError, match="has no classes, only features"):
        evaluated(model(small(num_classes=0), task="embed"), album)


def test_data_without_images_is_refused(vit: vitrail.Model, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="contains no folders with images"):
        evaluated(vit, tmp_path / "empty")
    (tmp_path / "labels.csv").write_text("image,label\n")
    with pytest.raises(DataError):
        evaluated(vit, tmp_path / "labels.csv")


def test_real_labels_stand_beside_the_plain_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wide = model(small(num_classes=1000))
    folder = tmp_path / "val" / "n01440764"
    folder.mkdir(parents=True)
    for i in (1, 2, 3):
        gradient(30 + i).save(folder / f"ILSVRC2012_val_{i:08d}.png")
    said = wide.logits(sorted(folder.iterdir())).argmax(1).tolist()
    # Output k is class 999 - k: ReaL's labels are classes, in the order of their numbers.
    classes = [999 - k for k in said]
    (tmp_path / "real.json").write_text(json.dumps([[classes[0], 0], [(classes[1] + 1) % 1000], []]))
    synset = [f"n{1_440_764 + k:08d}" for k in range(1000)]
    for module in ("imagenet_real", "class_matching"):
        monkeypatch.setattr(f"vitrail.evaluate.{module}.timm_synsets", lambda: tuple(synset))
    named = vitrail.Model(wide.net, wide.info.replace(labels=tuple(reversed(synset))))
    found = evaluated(named, tmp_path / "val", real=tmp_path / "real.json")
    assert found.matched_by == "synset"
    assert (found.first.real.count, found.first.real.excluded) == (2, 1)
    assert found.first.real.top1.value == 0.5
    assert found.first.samples.truth.tolist() == [999, 999, 999]
    (tmp_path / "other.json").write_text('{"nobody.jpg": [1]}')
    with pytest.raises(DataError, match="do not match these images"):
        evaluated(named, tmp_path / "val", real=tmp_path / "other.json")
    with pytest.raises(NotFoundError):
        evaluated(named, tmp_path / "val", real=tmp_path / "none.json")


def test_a_protocol_that_does_not_exist_is_refused(vit: vitrail.Model, album: Path):
    with pytest.raises(ConfigError, match="did you mean 'imagenet'"):
        evaluated(vit, album, protocol="imagnet")
    with pytest.raises(DataError, match="no WordNet IDs"):
        evaluated(vit, album, protocol="imagenet")


def test_the_folder_evaluate_is_the_function_too():
    import vitrail.evaluate.scores

    assert callable(vitrail.evaluate)
    assert vitrail.evaluate.scores.wilson_interval(0, 0) == (0.0, 1.0)


def test_what_training_holds_out_can_be_measured_alone(vit: vitrail.Model, tmp_path: Path):
    folder = image_folder(tmp_path / "photos", {"cat": 30, "dog": 30})
    found = evaluated(vit, folder, held_out=True)
    assert 0 < found.first.scores.count < 20
    assert "held out" in found.data


def test_everything_is_written_and_reads_back(vit: vitrail.Model, album: Path, tmp_path: Path):
    found = evaluated(vit, album, image_size=[32, 40])
    written = write_evaluation(found, tmp_path / "out", ["png", "svg", "npz"])
    names = {path.name for path in written}
    figures = {f"{name}.{kind}" for name in ("reliability", "sizes", "confusion", "classes") for kind in ("png", "npz")}
    assert names >= figures | {"sizes.svg", "eval.json", "per_class.csv", "predictions.csv"}
    assert all(path.stat().st_size for path in written)
    values = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert values == found.to_dict()
    lines = (tmp_path / "out" / "predictions.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 * 10
    assert lines[1].startswith("32,bird/0.png,bird,")
    with np.load(tmp_path / "out" / "confusion.npz") as arrays:
        assert arrays["confusion"].sum() == 10
        assert arrays["classes"].tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match="there is no figure format 'jpg'"):
        write_evaluation(found, tmp_path / "out", ["jpg"])


def test_a_network_of_nans_is_measured_and_written_as_nothing(album: Path, tmp_path: Path):
    broken = model(small())
    torch.nn.init.constant_(broken.net.head.bias, math.nan)
    found = evaluated(broken, album)
    assert found.top1.value == 0
    write_evaluation(found, tmp_path / "out")
    values = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert values["sizes"][0]["loss"]["value"] is None


@pytest.mark.slow
def test_a_thousand_photographs_score_what_was_measured(real_checkpoint: Path, imagenet_val: Path):
    found = vitrail.evaluate(real_checkpoint, str(imagenet_val), device="cpu")
    assert found.top1.value == pytest.approx(0.743, abs=1e-9)
    assert found.top5.value == pytest.approx(0.930, abs=1e-9)
    assert found.loss.value == pytest.approx(0.9904, abs=5e-5)
    assert found.matched_by == "synset"

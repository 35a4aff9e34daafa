"""`vitrail.evaluate`: the same metrics for any batch size and number of processes, at every image size."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from images import write_noise_folder
from PIL import Image
from sklearn.metrics import accuracy_score, log_loss
from small_models import LABELS, gradient, model, small
from training.processes import Processes

import vitrail
from vitrail.errors import ConfigError, DataError, ModelError, NotFoundError
from vitrail.report.evaluation_files import write_evaluation

QUICK: dict[str, Any] = {"device": "cpu", "workers": 0}


@pytest.fixture(scope="module")
def album(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten images of three of the model's five classes."""
    return write_noise_folder(tmp_path_factory.mktemp("album") / "album", {"bird": 3, "cat": 5, "dog": 2})


def evaluate(vit: vitrail.Model, data: Path | str, **options: Any) -> vitrail.Evaluation:
    return vitrail.evaluate(vit, str(data), **QUICK | options)


def test_metrics_match_the_models_own_predictions(vit: vitrail.Model, album: Path):
    paths = sorted(album.rglob("*.png"))
    truth = [LABELS.index(path.parent.name) for path in paths]
    probabilities = vit.logits(paths).double().softmax(1).numpy()
    evaluation = evaluate(vit, album)
    assert evaluation.top1.value == accuracy_score(truth, probabilities.argmax(1))
    assert evaluation.loss.value == pytest.approx(log_loss(truth, probabilities, labels=range(5)), rel=1e-5)
    assert evaluation.top5 is None  # five classes: always right
    assert evaluation.first.scores.count == 10
    assert evaluation.first.image_size == (32, 32)
    assert (evaluation.matched_by, evaluation.labels, evaluation.data) == ("name", LABELS, "album")
    assert evaluation.first.per_class.support.tolist() == [5, 2, 3, 0, 0]
    assert [Path(evaluation.keys[i]).parent.name for i in evaluation.first.samples.index] == [
        p.parent.name for p in paths
    ]
    assert evaluation.first.throughput.network >= evaluation.first.throughput.total > 0


@pytest.mark.parametrize("batch", [1, 3, 7, 64])
def test_batch_size_does_not_change_the_metrics(vit: vitrail.Model, album: Path, batch: int):
    expected, got = evaluate(vit, album, batch_size=10), evaluate(vit, album, batch_size=batch)
    assert same_counts(got, expected)
    assert got.loss.value == pytest.approx(expected.loss.value, rel=1e-6)


def same_counts(got: vitrail.Evaluation, expected: vitrail.Evaluation) -> bool:
    got_first, expected_first = got.first, expected.first
    arrays = (
        (got_first.scores.confusion, got_first.samples.rank),
        (expected_first.scores.confusion, expected_first.samples.rank),
    )
    return got.top1 == expected.top1 and all(np.array_equal(a, b) for a, b in zip(*arrays, strict=True))


def test_batch_size_changes_only_the_last_digits_in_float64(album: Path):
    float64_model = model(small()).to(dtype="float64")
    expected, got = evaluate(float64_model, album, batch_size=10), evaluate(float64_model, album, batch_size=3)
    assert got.loss.value == pytest.approx(expected.loss.value, rel=1e-13)
    assert got.calibration.error.value == pytest.approx(
        expected.calibration.error.value, rel=1e-6
    )  # scores are float32


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(3) as started:
        yield started


def evaluate_in_process(weights: str, data: str, image: list[int] | None, flip: bool) -> dict[str, Any]:
    """The evaluation of one of several processes."""
    evaluation = vitrail.evaluate(weights, data, image_size=image, flip=flip, batch_size=3, dtype="float64", **QUICK)
    return without_throughput(evaluation)


def without_throughput(evaluation: vitrail.Evaluation) -> dict[str, Any]:
    values = evaluation.to_dict()
    for size in values["sizes"]:
        size.pop("throughput")
    return values | {"index": [s.samples.index.tolist() for s in evaluation.sizes]}


@pytest.mark.usefixtures("quick_disk")
def test_three_processes_with_uneven_shares_give_the_metrics_of_one(
    processes: Processes, vit: vitrail.Model, album: Path, tmp_path: Path
):
    vit.save(tmp_path / "model")
    arguments = (str(tmp_path / "model"), str(album), [32, 48], True)
    expected = evaluate_in_process(*arguments)
    assert expected["sizes"][0]["count"] == 10
    for got in processes.run(evaluate_in_process, *arguments):
        assert json.dumps(rounded(got)) == json.dumps(rounded(expected))


def rounded(value: Any) -> Any:
    """Floats rounded to ten digits, which hides the rounding errors of float64 at different batch sizes."""
    if isinstance(value, dict):
        return {name: rounded(v) for name, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{value:.10g}") if isinstance(value, float) else value


def test_a_broken_image_is_refused_by_all_processes(processes: Processes, vit: vitrail.Model, tmp_path: Path):
    vit.save(tmp_path / "model")
    folder = write_noise_folder(tmp_path / "photos", {"cat": 5, "dog": 5})
    (folder / "dog" / "4.png").write_bytes(b"broken")
    errors = processes.run(evaluate_in_process, str(tmp_path / "model"), str(folder), None, False, allow_failures=True)
    assert len(errors) == 3
    for error in errors:
        assert isinstance(error, DataError)
        assert "1 of 10 images of photos cannot be read" in str(error)


def test_missing_data_gives_the_same_error_in_all_processes(processes: Processes, vit: vitrail.Model, tmp_path: Path):
    vit.save(tmp_path / "model")
    errors = processes.run(
        evaluate_in_process, str(tmp_path / "model"), str(tmp_path / "nowhere"), None, False, allow_failures=True
    )
    assert len({str(error) for error in errors}) == 1
    assert all(isinstance(error, NotFoundError) for error in errors)


def test_every_size_has_its_own_positions_preprocessing_and_top1_change(vit: vitrail.Model, album: Path):
    evaluation = evaluate(vit, album, image_size=[32, 48, (24, 40)])
    assert [m.image_size for m in evaluation.sizes] == [(32, 32), (48, 48), (24, 40)]
    for measured, size in zip(evaluation.sizes, (32, 48, (24, 40)), strict=True):
        single = evaluate(vit, album, image_size=size).first
        assert single.loss.value == pytest.approx(measured.loss.value, rel=1e-6)
    first, second = evaluation.sizes[:2]
    assert first.top1_change is None
    assert second.top1_change.value == pytest.approx(second.top1.value - first.top1.value)
    assert vit.config.image_size == (32, 32)  # the model itself stays as it is
    larger = vitrail.Model(vit.net.resized(48), vit.info.replace(config=vit.config.replace(image_size=48)))
    larger.info = larger.info.replace(preprocess=larger.info.preprocess.replace(image_size=48))
    assert evaluate(larger, album).loss.value == pytest.approx(second.loss.value, rel=1e-6)


def test_size_that_the_patches_do_not_divide_is_refused_before_reading_data(vit: vitrail.Model, tmp_path: Path):
    folder = write_noise_folder(tmp_path / "photos", {"cat": 1})
    (folder / "cat" / "0.png").write_bytes(b"would be refused, too")
    with pytest.raises(ConfigError, match="leaves 6 px of the image's height 30 uncovered; try height 24 or 32"):
        evaluate(vit, folder, image_size=[32, 30])


def test_relative_positions_allow_only_the_models_own_size(album: Path):
    relative_model = model(small(position="relative"))
    assert evaluate(relative_model, album, image_size=[32]).first.image_size == (32, 32)
    with pytest.raises(ModelError, match="relative positions cannot be resampled from 32 px to 48 px"):
        evaluate(relative_model, album, image_size=[32, 48])


def test_flip_averages_an_image_and_its_mirror_image(vit: vitrail.Model, album: Path):
    paths = sorted(album.rglob("*.png"))
    images = [Image.open(path) for path in paths]
    flipped = [image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for image in images]
    probabilities = sum(vit.logits(batch).double().softmax(1) for batch in (images, flipped)) / 2
    evaluation = evaluate(vit, album, flip=True)
    assert np.array_equal(evaluation.first.samples.prediction, probabilities.argmax(1).numpy())
    np.testing.assert_allclose(evaluation.first.samples.score, probabilities.amax(1).numpy(), rtol=1e-4)


def test_multi_label_data_has_average_precisions_with_an_interval(tmp_path: Path):
    multi_label_model = model(small(), multi_label=True)
    rows = ["image,label"]
    for i, labels in enumerate(["cat|dog", "cat", "dog|bird", "bird", "cat|bird", "dog"] * 3):
        gradient(30 + i).save(tmp_path / f"{i}.png")
        rows.append(f"{i}.png,{labels}")
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    evaluation = evaluate(multi_label_model, tmp_path / "labels.csv")
    precision = evaluation.mean_average_precision
    assert evaluation.multi_label
    assert precision.low <= precision.value <= precision.high
    assert precision.value == pytest.approx(np.nanmean(evaluation.first.per_class.average_precision))
    assert evaluation.calibration is None
    assert evaluation.first.scores.average_precisions is not None
    assert "average_precision" in evaluation.to_dict()["sizes"][0]["per_class"][0]
    assert evaluate(model(small()), tmp_path / "labels.csv").notes == (
        "the data is multi-label and the model single-label: each output is read as a separate probability",
    )
    paths = write_evaluation(evaluation, tmp_path / "out")
    assert {p.name for p in paths} >= {"classes.png", "predictions.csv"}
    assert ",cat|dog," in (tmp_path / "out" / "predictions.csv").read_text()


def test_data_of_one_class_is_evaluated_with_a_note(vit: vitrail.Model, tmp_path: Path):
    evaluation = evaluate(vit, write_noise_folder(tmp_path / "photos", {"cat": 4}))
    assert evaluation.first.scores.count == 4
    assert evaluation.notes == ("all images have one class, 'cat': accuracy says nothing about the other classes",)
    write_evaluation(evaluation, tmp_path / "out")
    assert not (tmp_path / "out" / "confusion.png").exists()


def test_unreadable_images_are_skipped_with_skip_bad(vit: vitrail.Model, tmp_path: Path):
    folder = write_noise_folder(tmp_path / "photos", {"cat": 4, "dog": 2})
    (folder / "cat" / "1.png").write_bytes(b"broken")
    with pytest.raises(DataError, match="1 of 6 images of photos cannot be read"):
        evaluate(vit, folder)
    evaluation = evaluate(vit, folder, skip_bad=True)
    assert list(evaluation.unreadable) == ["cat/1.png"]
    assert evaluation.first.scores.count == 5


def test_a_model_without_classes_is_refused(album: Path):
    with pytest.raises(ModelError, match="has no classes, only features"):
        evaluate(model(small(num_classes=0), task="embed"), album)


def test_data_without_images_is_refused(vit: vitrail.Model, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="contains no folders with images"):
        evaluate(vit, tmp_path / "empty")
    (tmp_path / "labels.csv").write_text("image,label\n")
    with pytest.raises(DataError):
        evaluate(vit, tmp_path / "labels.csv")


def test_real_accuracy_is_reported_beside_the_standard_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    unnamed_model = model(small(num_classes=1000))
    folder = tmp_path / "val" / "n01440764"
    folder.mkdir(parents=True)
    for i in (1, 2, 3):
        gradient(30 + i).save(folder / f"ILSVRC2012_val_{i:08d}.png")
    predictions = unnamed_model.logits(sorted(folder.iterdir())).argmax(1).tolist()
    # Output k is class 999 - k: ReaL labels are class indices in the order of the synsets.
    classes = [999 - k for k in predictions]
    (tmp_path / "real.json").write_text(json.dumps([[classes[0], 0], [(classes[1] + 1) % 1000], []]))
    synset_ids = [f"n{1_440_764 + k:08d}" for k in range(1000)]
    for module in ("imagenet_real", "class_matching"):
        monkeypatch.setattr(f"vitrail.evaluation.{module}.timm_synsets", lambda: tuple(synset_ids))
    named_model = vitrail.Model(unnamed_model.net, unnamed_model.info.replace(labels=tuple(reversed(synset_ids))))
    evaluation = evaluate(named_model, tmp_path / "val", real=tmp_path / "real.json")
    assert evaluation.matched_by == "synset"
    assert (evaluation.first.real.count, evaluation.first.real.excluded) == (2, 1)
    assert evaluation.first.real.top1.value == 0.5
    assert evaluation.first.samples.truth.tolist() == [999, 999, 999]
    (tmp_path / "other.json").write_text('{"nobody.jpg": [1]}')
    with pytest.raises(DataError, match="do not match these images"):
        evaluate(named_model, tmp_path / "val", real=tmp_path / "other.json")
    with pytest.raises(NotFoundError):
        evaluate(named_model, tmp_path / "val", real=tmp_path / "none.json")


def test_unknown_and_inapplicable_protocols_are_refused(vit: vitrail.Model, album: Path):
    with pytest.raises(ConfigError, match="did you mean 'imagenet'"):
        evaluate(vit, album, protocol="imagnet")
    with pytest.raises(DataError, match="no WordNet IDs"):
        evaluate(vit, album, protocol="imagenet")


def test_vitrail_evaluate_is_both_a_package_and_a_function():
    import vitrail.evaluation.scores

    assert callable(vitrail.evaluate)
    assert vitrail.evaluation.scores.wilson_interval(0, 0) == (0.0, 1.0)


def test_held_out_part_of_a_folder_can_be_evaluated(vit: vitrail.Model, tmp_path: Path):
    folder = write_noise_folder(tmp_path / "photos", {"cat": 30, "dog": 30})
    evaluation = evaluate(vit, folder, held_out=True)
    assert 0 < evaluation.first.scores.count < 20
    assert "held out" in evaluation.data


def test_all_files_are_written_and_agree_with_the_evaluation(vit: vitrail.Model, album: Path, tmp_path: Path):
    evaluation = evaluate(vit, album, image_size=[32, 40])
    paths = write_evaluation(evaluation, tmp_path / "out", ["png", "svg", "npz"])
    names = {path.name for path in paths}
    figures = {f"{name}.{kind}" for name in ("reliability", "sizes", "confusion", "classes") for kind in ("png", "npz")}
    assert names >= figures | {"sizes.svg", "eval.json", "per_class.csv", "predictions.csv"}
    assert all(path.stat().st_size for path in paths)
    values = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert values == evaluation.to_dict()
    lines = (tmp_path / "out" / "predictions.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 * 10
    assert lines[1].startswith("32,bird/0.png,bird,")
    with np.load(tmp_path / "out" / "confusion.npz") as arrays:
        assert arrays["confusion"].sum() == 10
        assert arrays["classes"].tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match="unknown figure format 'jpg'"):
        write_evaluation(evaluation, tmp_path / "out", ["jpg"])


def test_nan_loss_is_written_as_null(album: Path, tmp_path: Path):
    nan_model = model(small())
    torch.nn.init.constant_(nan_model.net.head.bias, math.nan)
    evaluation = evaluate(nan_model, album)
    assert evaluation.top1.value == 0
    write_evaluation(evaluation, tmp_path / "out")
    values = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert values["sizes"][0]["loss"]["value"] is None


@pytest.mark.slow
def test_1000_imagenet_photographs_give_the_recorded_metrics(real_checkpoint: Path, imagenet_val: Path):
    evaluation = vitrail.evaluate(real_checkpoint, str(imagenet_val), device="cpu")
    assert evaluation.top1.value == pytest.approx(0.743, abs=1e-9)
    assert evaluation.top5.value == pytest.approx(0.930, abs=1e-9)
    assert evaluation.loss.value == pytest.approx(0.9904, abs=5e-5)
    assert evaluation.matched_by == "synset"

"""The model shipped with the package: loading offline, documented accuracy, measured accuracy."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from small_models import model, small

import vitrail
from vitrail.errors import NotFoundError
from vitrail.evaluation.scores import wilson_interval
from vitrail.recipes import RECIPES
from vitrail.weights import checkpoint, shipped
from vitrail.weights.locate import locate
from vitrail.weights.shipped import DEFAULT_MODEL, SHIPPED

ROOT = Path(__file__).resolve().parents[2]
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@pytest.fixture(scope="module")
def vit() -> vitrail.Model:
    return vitrail.load("vitrail/cifar10")


@pytest.fixture(scope="module")
def cifar10_images(shared: Path) -> tuple[list[np.ndarray[Any, Any]], torch.Tensor]:
    """The first 1000 test images of CIFAR-10 and their classes."""
    file = shared / "data" / "cifar10" / "test-00000-of-00001.parquet"
    if not file.exists():
        pytest.skip(f"no {file.name} beside the checkout")
    rows = next(pq.ParquetFile(file).iter_batches(1000))
    images = [np.asarray(Image.open(io.BytesIO(row["bytes"]))) for row in rows["img"].to_pylist()]
    return images, torch.tensor(rows["label"].to_pylist())


def num_correct(vit: vitrail.Model, images: list[np.ndarray[Any, Any]], classes: torch.Tensor) -> int:
    return int((vit.logits(images, batch_size=100).argmax(-1) == classes).sum())


def test_shipped_model_loads_by_name_without_the_hub(vit, monkeypatch):
    monkeypatch.setattr("vitrail.weights.hub.fetch", lambda name: pytest.fail(f"the hub received a request for {name}"))
    assert vitrail.load("vitrail/cifar10").labels == vit.labels == CIFAR10
    assert repr(vit) == "<vitrail.Model vitrail/cifar10: 4.0 M parameters, 32x32, 10 classes>"
    assert vit.dtype == torch.float32


def test_at_least_95_of_100_test_images_are_correct(vit, cifar10_images):
    images, classes = cifar10_images
    assert num_correct(vit, images[:100], classes[:100]) >= 95


@pytest.mark.slow
def test_at_least_960_of_1000_test_images_are_correct(vit, cifar10_images):
    assert num_correct(vit, *cifar10_images) >= 960


def test_documented_accuracy_and_interval_agree():
    match = re.search(r"test images: ([\d.]+) % \(95 % interval ([\d.]+) to\s+([\d.]+);", shipped.__doc__ or "")
    assert match is not None
    accuracy, low, high = (float(number) for number in match.groups())
    assert [low, high] == [round(100 * bound, 2) for bound in wilson_interval(round(100 * accuracy), 10_000)]
    assert f"top-1 accuracy {accuracy:.1f} % on CIFAR-10's test images" in DEFAULT_MODEL.description


def test_cat_photograph_is_predicted_as_cat(vit):
    data = pytest.importorskip("skimage.data")
    assert vit.predict(data.chelsea())[0].label == "cat"


def test_preprocessing_center_crops_and_keeps_small_images_unchanged(vit):
    wide = np.zeros((32, 64, 3), np.uint8)
    wide[:, 16:48] = np.random.default_rng(0).integers(256, size=(32, 32, 3))
    assert np.array_equal(vit.preprocess.pixels(wide), wide[:, 16:48])
    assert np.array_equal(vit.preprocess.pixels(wide[:, 16:48]), wide[:, 16:48])


def test_recipe_gives_the_config_of_the_shipped_model(vit):
    recipe = RECIPES["cifar10-small"]()
    assert recipe.model is not None
    # The model info has resolved values: sizes as pairs, and the number of classes.
    assert recipe.model.replace(num_classes=10, image_size=(32, 32), patch_size=(4, 4)) == vit.config
    assert recipe.preprocess == vit.info.preprocess


def test_folder_of_the_same_name_takes_precedence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model(small()).save("vitrail/cifar10")
    assert locate("vitrail/cifar10").path == Path("vitrail/cifar10")
    assert vitrail.load("vitrail/cifar10").labels != CIFAR10


def test_path_object_is_not_a_model_name():
    with pytest.raises(NotFoundError, match="no such file"):
        vitrail.load(Path("vitrail/cifar10"))


def test_part_of_the_name_suggests_the_model():
    with pytest.raises(NotFoundError, match="did you mean 'vitrail/cifar10'"):
        vitrail.load("cifar10")


@pytest.mark.parametrize("name", SHIPPED)
def test_info_matches_the_file_and_the_file_is_small(name):
    file = SHIPPED[name].path / "model.safetensors"
    assert file.stat().st_size < 8 * 2**20
    with safe_open(file, "pt") as stored:
        assert {stored.get_slice(tensor).get_dtype() for tensor in stored.keys()} == {"F16"}  # noqa: SIM118
    net, info = checkpoint.read(file)
    assert info.config == SHIPPED[name].info.config == net.config
    assert info.labels == SHIPPED[name].info.labels


def test_wheel_contains_the_shipped_models(tmp_path):
    pytest.importorskip("hatchling", reason="hatchling is not installed; pip install hatchling builds the wheel here")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        for shipped_model in SHIPPED.values():
            wheel_path = shipped_model.path.relative_to(ROOT / "src").as_posix()
            for file in ("config.json", "model.safetensors"):
                assert wheel.read(f"{wheel_path}/{file}") == (shipped_model.path / file).read_bytes()

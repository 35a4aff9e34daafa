"""The model in the package: there without a network, what it says of itself, and as good as it says."""

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
from vitrail.evaluate.scores import wilson_interval
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
def thousand(shared: Path) -> tuple[list[np.ndarray[Any, Any]], torch.Tensor]:
    """CIFAR-10's test images, the first thousand, and their classes."""
    file = shared / "data" / "cifar10" / "test-00000-of-00001.parquet"
    if not file.exists():
        pytest.skip(f"no {file.name} beside the checkout")
    rows = next(pq.ParquetFile(file).iter_batches(1000))
    images = [np.asarray(Image.open(io.BytesIO(row["bytes"]))) for row in rows["img"].to_pylist()]
    return images, torch.tensor(rows["label"].to_pylist())


def right(vit: vitrail.Model, images: list[np.ndarray[Any, Any]], classes: torch.Tensor) -> int:
    return int((vit.logits(images, batch_size=100).argmax(-1) == classes).sum())


def test_its_name_loads_it_and_nobody_is_asked(vit, monkeypatch):
    monkeypatch.setattr("vitrail.weights.hub.fetch", lambda name: pytest.fail(f"the hub was asked for {name}"))
    assert vitrail.load("vitrail/cifar10").labels == vit.labels == CIFAR10
    assert repr(vit) == "<vitrail.Model vitrail/cifar10: 4.0 M parameters, 32x32, 10 classes>"
    assert vit.dtype == torch.float32


def test_it_names_95_of_a_hundred_test_images(vit, thousand):
    images, classes = thousand
    assert right(vit, images[:100], classes[:100]) >= 95


@pytest.mark.slow
def test_it_names_960_of_a_thousand_test_images(vit, thousand):
    assert right(vit, *thousand) >= 960


def test_what_it_says_of_itself_is_what_was_measured():
    told = re.search(r"test images: ([\d.]+) % \(95 % interval ([\d.]+) to\s+([\d.]+);", shipped.__doc__ or "")
    assert told is not None
    share, low, high = (float(number) for number in told.groups())
    assert [low, high] == [round(100 * bound, 2) for bound in wilson_interval(round(100 * share), 10_000)]
    assert f"top-1 accuracy {share:.1f} % on CIFAR-10's test images" in DEFAULT_MODEL.description


def test_a_cat_is_a_cat(vit):
    data = pytest.importorskip("skimage.data")
    assert vit.predict(data.chelsea())[0].label == "cat"


def test_a_photograph_keeps_its_proportions_and_a_small_image_every_pixel(vit):
    wide = np.zeros((32, 64, 3), np.uint8)
    wide[:, 16:48] = np.random.default_rng(0).integers(256, size=(32, 32, 3))
    assert np.array_equal(vit.preprocess.pixels(wide), wide[:, 16:48])
    assert np.array_equal(vit.preprocess.pixels(wide[:, 16:48]), wide[:, 16:48])


def test_its_recipe_makes_such_a_model(vit):
    recipe = RECIPES["cifar10-small"]()
    assert recipe.model is not None
    # The model info holds what was resolved: sizes as pairs, the number of classes.
    assert recipe.model.replace(num_classes=10, image_size=(32, 32), patch_size=(4, 4)) == vit.config
    assert recipe.preprocess == vit.info.preprocess


def test_a_folder_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model(small()).save("vitrail/cifar10")
    assert locate("vitrail/cifar10").path == Path("vitrail/cifar10")
    assert vitrail.load("vitrail/cifar10").labels != CIFAR10


def test_a_path_object_is_never_a_name():
    with pytest.raises(NotFoundError, match="no such file"):
        vitrail.load(Path("vitrail/cifar10"))


def test_part_of_the_name_suggests_it():
    with pytest.raises(NotFoundError, match="did you mean 'vitrail/cifar10'"):
        vitrail.load("cifar10")


@pytest.mark.parametrize("name", SHIPPED)
def test_card_and_file_agree_and_the_file_is_small(name):
    file = SHIPPED[name].path / "model.safetensors"
    assert file.stat().st_size < 8 * 2**20
    with safe_open(file, "pt") as stored:
        assert {stored.get_slice(tensor).get_dtype() for tensor in stored.keys()} == {"F16"}  # noqa: SIM118
    net, info = checkpoint.read(file)
    assert info.config == SHIPPED[name].info.config == net.config
    assert info.labels == SHIPPED[name].info.labels


def test_the_wheel_has_it(tmp_path):
    pytest.importorskip("hatchling", reason="hatchling is not installed; pip install hatchling builds the wheel here")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        for ours in SHIPPED.values():
            inside = ours.path.relative_to(ROOT / "src").as_posix()
            for file in ("config.json", "model.safetensors"):
                assert wheel.read(f"{inside}/{file}") == (ours.path / file).read_bytes()

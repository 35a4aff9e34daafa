"""The numbers a network sees are those the code it came from would have given it."""

from __future__ import annotations

import io
import resource
import sys
import tarfile
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import import_peer
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_sample_image

from vitrail.config import PreprocessConfig
from vitrail.config.image import CLIP_MEAN, CLIP_STD, IMAGENET_MEAN, IMAGENET_STD
from vitrail.data import Preprocess, preprocess
from vitrail.errors import ImageError

PHOTO = load_sample_image("china.jpg")  # 427 x 640

# Height and width, before: landscape, portrait, odd, square, smaller than the crop, one pixel, long.
SIZES = [(427, 640), (427, 301), (257, 259), (225, 225), (100, 150), (37, 11), (1, 1), (60, 600)]

TIMM = PreprocessConfig(resize="short", resize_to=248, interpolation="bicubic")


def photo(height: int, width: int) -> Image.Image:
    return Image.fromarray(PHOTO[:height, :width])


def drawn(height: int, width: int) -> Image.Image:
    """Noise: every misplaced pixel shows."""
    return Image.fromarray(np.random.default_rng(height * 1000 + width).integers(0, 256, (height, width, 3), np.uint8))


# timm and torchvision


@pytest.fixture(scope="module")
def timm_eval() -> Callable[[Image.Image], torch.Tensor]:
    timm = import_peer("timm")
    net = timm.create_model("vit_tiny_patch16_224.augreg_in21k_ft_in1k", pretrained=False)
    settings = timm.data.resolve_data_config(net.pretrained_cfg)
    transform: Callable[[Image.Image], torch.Tensor] = timm.data.create_transform(**settings)
    return transform


@pytest.mark.peer
@pytest.mark.parametrize("size", SIZES)
def test_timm_vit_tiny_bit_for_bit(size: tuple[int, int], timm_eval: Callable[[Image.Image], torch.Tensor]) -> None:
    for image in (photo(*size), drawn(*size)):
        assert torch.equal(Preprocess(TIMM).prepare(image), timm_eval(image))


@pytest.mark.peer
def test_every_rounding_of_size_and_crop_is_timms(timm_eval: Callable[[Image.Image], torch.Tensor]) -> None:
    """Long sides of which the resized length passes every remainder, where the crop's place is decided."""
    prepare = Preprocess(TIMM).prepare
    for long in range(201, 206):  # 249, 250, 251, 252 and 254 pixels
        for size in ((200, long), (long, 200)):
            image = drawn(*size)
            assert torch.equal(prepare(image), timm_eval(image)), size


@pytest.mark.peer
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("crop", [(28, 28), (25, 20), (12, 24), (38, 8)])
@pytest.mark.parametrize("resize_to", [24, 29, 38])
def test_torchvision_bit_for_bit(resize_to: int, crop: tuple[int, int], interpolation: Any) -> None:
    """Crops larger than the image included: there is black around it."""
    transforms = import_peer("torchvision.transforms")
    theirs = transforms.Compose(
        [
            transforms.Resize(resize_to, transforms.InterpolationMode(interpolation)),
            transforms.CenterCrop(crop),
            transforms.ToTensor(),
            transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        ]
    )
    ours = Preprocess(
        PreprocessConfig(
            image_size=crop,
            resize="short",
            resize_to=resize_to,
            interpolation=interpolation,
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
        )
    )
    for size in [(57, 59), (10, 15), (35, 20), (1, 1)]:
        assert torch.equal(ours.prepare(drawn(*size)), theirs(drawn(*size)))


@pytest.mark.peer
def test_torchvisions_own_preset_for_its_vit() -> None:
    models = import_peer("torchvision.models")
    preset = models.ViT_B_16_Weights.IMAGENET1K_V1.transforms()
    config = PreprocessConfig(resize="short", resize_to=256, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    for size in SIZES:
        assert torch.equal(Preprocess(config).prepare(photo(*size)), preset(photo(*size)))


@pytest.mark.peer
def test_without_resize_to_a_crop_that_is_not_square_is_just_covered() -> None:
    """timm's rule for such crops; its factory forgets the filter there, so bilinear is what it does."""
    timm = import_peer("timm")
    for crop in ((192, 256), (256, 192), (97, 224)):
        plain = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bilinear"}
        theirs = timm.data.create_transform((3, *crop), crop_pct=1.0, **plain)
        ours = Preprocess(PreprocessConfig(image_size=crop, resize="short"))
        for size in SIZES[:-1:2]:
            assert torch.equal(ours.prepare(photo(*size)), theirs(photo(*size)))


@pytest.mark.peer
def test_timms_squash_with_a_crop() -> None:
    timm = import_peer("timm")
    theirs = timm.data.create_transform(
        224, interpolation="bicubic", crop_pct=0.9, crop_mode="squash", mean=[0.5] * 3, std=[0.5] * 3
    )
    ours = Preprocess(PreprocessConfig(resize_to=248, interpolation="bicubic"))
    for size in SIZES[1::2]:
        assert torch.equal(ours.prepare(photo(*size)), theirs(photo(*size)))


# Hugging Face


def hugging_face(name: str, **settings: Any) -> Callable[[Image.Image], torch.Tensor]:
    """One of its image processors, the one that uses Pillow."""
    processor = getattr(import_peer("transformers"), name)(**settings)
    assert processor.backend == "pil"
    return lambda image: processor(image, return_tensors="pt")["pixel_values"][0]


FAMILIES = {
    "ViT": (PreprocessConfig(), "ViTImageProcessorPil", {}),
    "SigLIP": (PreprocessConfig(interpolation="bicubic"), "SiglipImageProcessorPil", {}),
    "CLIP": (
        PreprocessConfig(resize="short", resize_to=224, interpolation="bicubic", mean=CLIP_MEAN, std=CLIP_STD),
        "CLIPImageProcessorPil",
        {},
    ),
    "CLIP 336": (
        PreprocessConfig(image_size=336, resize="short", interpolation="bicubic", mean=CLIP_MEAN, std=CLIP_STD),
        "CLIPImageProcessorPil",
        {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
    ),
    "DINOv2": (
        PreprocessConfig(resize="short", resize_to=256, interpolation="bicubic", mean=IMAGENET_MEAN, std=IMAGENET_STD),
        "BitImageProcessorPil",
        {
            "size": {"shortest_edge": 256},
            "crop_size": {"height": 224, "width": 224},
            "image_mean": list(IMAGENET_MEAN),
            "image_std": list(IMAGENET_STD),
        },
    ),
    "BiT": (
        PreprocessConfig(image_size=448, interpolation="bilinear"),
        "BitImageProcessorPil",
        {
            "size": {"height": 448, "width": 448},
            "crop_size": {"height": 448, "width": 448},
            "resample": 2,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        },
    ),
    "DeiT": (
        PreprocessConfig(resize="squash", resize_to=256, interpolation="bicubic", mean=IMAGENET_MEAN, std=IMAGENET_STD),
        "DeiTImageProcessorPil",
        {"image_mean": list(IMAGENET_MEAN), "image_std": list(IMAGENET_STD)},
    ),
}


@pytest.mark.peer
@pytest.mark.parametrize("family", FAMILIES)
def test_hugging_face_to_a_millionth(family: str) -> None:
    config, name, settings = FAMILIES[family]
    theirs, ours = hugging_face(name, **settings), Preprocess(config.replace(crop_rounding="floor"))
    for size in SIZES[::2]:
        torch.testing.assert_close(ours.prepare(drawn(*size)), theirs(drawn(*size)), rtol=0, atol=1e-6)


@pytest.mark.peer
def test_hugging_face_crops_and_pads_to_a_millionth_at_every_remainder() -> None:
    theirs = hugging_face("CLIPImageProcessorPil", size={"shortest_edge": 30}, crop_size={"height": 25, "width": 37})
    config = PreprocessConfig(
        image_size=(25, 37), resize="short", resize_to=30, interpolation="bicubic", mean=CLIP_MEAN, std=CLIP_STD
    )
    ours = Preprocess(config.replace(crop_rounding="floor"))
    for long in range(30, 50):
        for size in ((30, long), (long, 30)):
            torch.testing.assert_close(ours.prepare(drawn(*size)), theirs(drawn(*size)), rtol=0, atol=1e-6)


def test_the_two_crop_roundings_differ_by_at_most_one_pixel() -> None:
    for side in range(1, 60):
        for crop in range(1, 60):
            a, b = (
                Preprocess(TIMM.replace(crop_rounding=center))._span(side, crop)[0] for center in ("round", "floor")
            )
            assert a - b in (0, 1)
            assert a == b or (side - crop) % 2


# TensorFlow's resize


def by_definition(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """tf.image.resize, bilinear, antialias=False: each output looks at one point of the input."""
    out = np.zeros((height, width, pixels.shape[2]))
    for row in range(height):
        for column in range(width):
            y = (row + 0.5) * pixels.shape[0] / height - 0.5
            x = (column + 0.5) * pixels.shape[1] / width - 0.5
            top, left = int(np.floor(y)), int(np.floor(x))
            for i, wy in ((top, 1 - (y - top)), (top + 1, y - top)):
                for j, wx in ((left, 1 - (x - left)), (left + 1, x - left)):
                    inside = min(max(i, 0), pixels.shape[0] - 1), min(max(j, 0), pixels.shape[1] - 1)
                    out[row, column] += wy * wx * pixels[inside].astype(float)
    return out


@pytest.mark.parametrize("size", [(90, 130), (33, 57), (20, 9), (5, 7), (40, 40), (1, 1), (1, 80)])
def test_without_antialias_each_output_looks_at_one_point(size: tuple[int, int]) -> None:
    image = drawn(*size)
    got = Preprocess(PreprocessConfig(image_size=(32, 40), antialias=False)).pixels(image)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, by_definition(np.asarray(image), 32, 40), rtol=0, atol=2e-3)


@given(st.integers(1, 80), st.integers(1, 80), st.integers(1, 60), st.integers(1, 60))
def test_without_antialias_is_torchs_interpolate(height: int, width: int, rows: int, columns: int) -> None:
    image = np.array(drawn(height, width))
    got = Preprocess(PreprocessConfig(image_size=(rows, columns), antialias=False)).prepare(image)
    floats = torch.from_numpy(image).permute(2, 0, 1)[None].float()
    expected = torch.nn.functional.interpolate(floats, (rows, columns), mode="bilinear", align_corners=False)[0]
    torch.testing.assert_close(got, expected / 127.5 - 1, rtol=0, atol=1e-5)


def test_antialias_makes_a_difference_only_when_shrinking() -> None:
    small, large = drawn(20, 20), drawn(400, 400)
    with_, without = PreprocessConfig(image_size=100), PreprocessConfig(image_size=100, antialias=False)
    assert np.abs(Preprocess(with_).pixels(small) - Preprocess(without).pixels(small)).max() <= 1
    assert np.abs(Preprocess(with_).pixels(large) - Preprocess(without).pixels(large)).max() > 50


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos"])
def test_every_filter_without_antialias_is_pillows_when_enlarging(interpolation: Any) -> None:
    """Enlarging, Pillow does not widen its filter either; in its float mode it does not round."""
    image = drawn(40, 60)
    ours = Preprocess(PreprocessConfig(image_size=(120, 150), interpolation=interpolation, antialias=False)).pixels(
        image
    )
    bands = (band.convert("F").resize((150, 120), preprocess.FILTERS[interpolation]) for band in image.split())
    np.testing.assert_allclose(ours, np.stack([np.asarray(band) for band in bands], axis=2), rtol=0, atol=2e-3)


def test_without_antialias_the_crop_is_a_part_of_the_whole() -> None:
    image = drawn(90, 131)
    whole = Preprocess(PreprocessConfig(image_size=(60, 87), antialias=False)).pixels(image)
    config = PreprocessConfig(image_size=(40, 50), resize="short", resize_to=60, antialias=False)
    np.testing.assert_allclose(Preprocess(config).pixels(image), whole[10:50, 18:68], rtol=0, atol=1e-3)
    config = PreprocessConfig(image_size=(64, 50), resize="short", resize_to=60, antialias=False)
    padded = Preprocess(config).pixels(image)
    np.testing.assert_allclose(padded[2:62], whole[:, 18:68], rtol=0, atol=1e-3)
    assert not padded[:2].any()
    assert not padded[62:].any()


# Images too long to be resized whole


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("crop", [48, (20, 77), (70, 30)])
@pytest.mark.parametrize("size", [(30, 500), (500, 30), (427, 640), (8, 90), (600, 300), (1, 50)])
def test_resizing_only_what_the_crop_needs_gives_the_same_pixels(
    size: tuple[int, int], crop: Any, interpolation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = Preprocess(PreprocessConfig(image_size=crop, resize="short", resize_to=56, interpolation=interpolation))
    whole = prepare.pixels(drawn(*size))
    monkeypatch.setattr(preprocess, "MAX_WHOLE_PIXELS", 0)
    part = prepare.pixels(drawn(*size))
    assert part.shape == whole.shape
    off = np.abs(part.astype(int) - whole)
    if interpolation == "nearest":  # two pixels may be equally near: either will do
        assert (off > 0).mean() < 0.05
    else:
        assert off.max() <= 1


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("size", [(1, 20_000), (20_000, 1), (2, 15_000)])
def test_a_strip_costs_little_memory_and_shows_its_middle(size: tuple[int, int], antialias: bool) -> None:
    strip = np.full((*size, 3), 250, np.uint8)
    middle = tuple(slice(side // 2 - 10, side // 2 + 10) if side > 20 else slice(None) for side in size)
    strip[middle] = 10
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pixels = Preprocess(TIMM.replace(antialias=antialias)).pixels(strip)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (1 if sys.platform == "darwin" else 1024)
    assert grown < 100e6  # whole, it would be gigabytes
    assert pixels.shape == (224, 224, 3)
    np.testing.assert_allclose(pixels, 10, atol=1e-3)


# What it takes and gives


def test_one_image_several_and_none() -> None:
    prepare = Preprocess(TIMM)
    images = [photo(100, 120), np.array(drawn(50, 40)), torch.zeros(3, 9, 9, dtype=torch.uint8)]
    several = prepare(images)
    assert several.shape == (3, 3, 224, 224)
    assert several.is_contiguous()
    assert several.dtype == torch.float32
    for one, image in zip(several, images, strict=True):
        assert torch.equal(one, prepare.prepare(image))
        assert torch.equal(one[None], prepare(image))
    assert torch.equal(prepare(iter(images)), several)
    assert prepare([]).shape == (0, 3, 224, 224)
    with pytest.raises(ImageError, match="got int, expected a path"):
        prepare(17)  # type: ignore[arg-type]


def test_the_two_halves_make_the_whole() -> None:
    for antialias in (True, False):
        prepare = Preprocess(TIMM.replace(antialias=antialias))
        pixels = prepare.pixels(photo(300, 200))
        assert pixels.dtype == prepare.dtype
        assert pixels.shape == (224, 224, 3)
        batch = torch.from_numpy(pixels).permute(2, 0, 1)[None]
        assert torch.equal(prepare.normalize(batch)[0], prepare.prepare(photo(300, 200)))


@pytest.mark.parametrize("channels", [1, 3, 4, 5])
@pytest.mark.parametrize("antialias", [True, False])
def test_any_number_of_channels(channels: int, antialias: bool) -> None:
    values = tuple(0.1 * (c + 1) for c in range(channels))
    config = PreprocessConfig(image_size=20, mean=values, std=values, antialias=antialias)
    flat = np.full((31, 17, channels), 255, np.uint8)
    got = Preprocess(config)(flat)
    assert got.shape == (1, channels, 20, 20)
    for c, value in enumerate(values):
        torch.testing.assert_close(got[0, c], torch.full((20, 20), (1 - value) / value))


def test_channels_resized_apart_are_those_resized_together() -> None:
    image = np.array(drawn(50, 60))
    five = np.concatenate([image, image[:, :, :2]], axis=2)
    config = PreprocessConfig(image_size=20, mean=(0.5,) * 5, std=(0.5,) * 5)
    together = Preprocess(PreprocessConfig(image_size=20)).pixels(image)
    assert np.array_equal(Preprocess(config).pixels(five), np.concatenate([together, together[:, :, :2]], axis=2))


def test_normalize_leaves_its_input_alone_and_carries_gradients() -> None:
    prepare = Preprocess(PreprocessConfig(image_size=8))
    floats = torch.rand(2, 3, 8, 8) * 255
    kept = floats.clone()
    preprocess._cached_constant.cache_clear()  # what the first caller's mode makes is what the next one gets
    with torch.inference_mode():
        prepare.normalize(floats)
    assert torch.equal(floats, kept)
    floats.requires_grad_()
    prepare.normalize(floats).sum().backward()
    assert floats.grad is not None
    torch.testing.assert_close(floats.grad, torch.full_like(floats, 1 / 127.5))


def test_normalize_expects_channels_first() -> None:
    with pytest.raises(ImageError, match=r"shape \(1, 8, 8, 3\), expected B 3 H W"):
        Preprocess(PreprocessConfig(image_size=8)).normalize(torch.zeros(1, 8, 8, 3, dtype=torch.uint8))


def test_normalize_can_be_exported_and_compiled() -> None:
    prepare = Preprocess(PreprocessConfig(image_size=8, mean=IMAGENET_MEAN, std=IMAGENET_STD))

    class Normalize(torch.nn.Module):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return prepare.normalize(batch)

    batch = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    preprocess._cached_constant.cache_clear()  # so that a tensor of the trace would be kept, were it kept
    exported = torch.export.export(Normalize(), (batch,)).module()
    compiled = torch.compile(Normalize(), backend="aot_eager", fullgraph=True)
    expected = prepare.normalize(batch)
    torch.testing.assert_close(exported(batch), expected)
    torch.testing.assert_close(compiled(batch), expected)


# Real images


def images(folder: Path, count: int) -> Iterator[bytes]:
    with tarfile.open(sorted(folder.glob("*.tar"))[0]) as shard:
        names = [name for name in shard.getnames() if name.endswith(".jpg")][:count]
        for name in names:
            member = shard.extractfile(name)
            assert member is not None
            yield member.read()


@pytest.mark.peer
def test_imagenet_images_are_timms_bit_for_bit(
    imagenet_val: Path, timm_eval: Callable[[Image.Image], torch.Tensor]
) -> None:
    for data in images(imagenet_val, 12):
        assert torch.equal(Preprocess(TIMM).prepare(data), timm_eval(Image.open(io.BytesIO(data)).convert("RGB")))


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "area"])
@pytest.mark.parametrize("resize", ["short", "squash"])
@pytest.mark.parametrize("size", [(8, 8), (8, 12)])
def test_images_of_a_size_that_is_kept_are_unchanged(interpolation: str, resize: str, size: tuple[int, int]):
    rng, kept = np.random.default_rng(0), set()
    for resize_to, antialias in product((None, 8, 10), (True, False)):
        fields = {"image_size": size, "resize": resize, "interpolation": interpolation, "antialias": antialias}
        preprocess = Preprocess(PreprocessConfig(resize_to=resize_to, **fields))
        for side in ((8, 8), (8, 12), (10, 10), (12, 12)):
            if preprocess.keeps(side):
                kept.add(side)
                pixels = rng.integers(0, 256, (*side, 3), dtype=np.uint8)
                assert np.array_equal(preprocess.pixels(pixels), pixels)
    assert kept == {size}

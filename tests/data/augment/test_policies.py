"""Color jitter, 3-Augment and RandAugment: the distribution of their parameters and their operations."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from conftest import import_peer
from PIL import Image
from scipy import ndimage, stats
from torch import Tensor

from vitrail import rng
from vitrail.data.augment import color
from vitrail.data.augment.color_jitter import JITTER_OPERATIONS, ColorJitter
from vitrail.data.augment.params import DeviceParams, HostParams, to_device
from vitrail.data.augment.rand_augment import AMOUNTS, GEOMETRIC_OPERATIONS, OPERATIONS, RandAugment
from vitrail.data.augment.three_augment import ThreeAugment

UNLIKELY = 1e-4
SIZE = (40, 56)
MEAN = (0.485, 0.456, 0.406)


def seeds(count: int, step: int = 0) -> rng.Seeds:
    return rng.sample_seeds(5, step, np.arange(count))


def on_cpu(params: HostParams, *, static_shapes: bool = False) -> DeviceParams:
    return to_device({"part": params}, torch.device("cpu"), static_shapes)["part"]


def uniform_between(values: np.ndarray, low: float, high: float) -> bool:
    return stats.kstest(values, "uniform", (low, high - low)).pvalue > UNLIKELY


# Color jitter.


def test_color_jitter_factors_are_uniform():
    params = ColorJitter((0.4, 1.5, 0.2, 0.1)).draw(seeds(20_000))
    assert uniform_between(params["brightness"], 0.6, 1.4)
    assert uniform_between(params["contrast"], 0.0, 2.5)
    assert uniform_between(params["saturation"], 0.8, 1.2)
    assert uniform_between(params["hue"], -0.1, 0.1)


def test_color_jitter_orders_are_equally_likely():
    params = ColorJitter((0.4, 0.4, 0.4, 0.1)).draw(seeds(24_000))
    places = np.stack(
        [np.stack([params[f"{name} {place}"] for name in JITTER_OPERATIONS]) for place in range(4)]
    )  # place name n
    assert np.all(places.sum(0) == 1)
    assert np.all(places.sum(1) == 1)
    orders = places.argmax(1).T
    counts = [np.all(orders == order, axis=1).sum() for order in itertools.permutations(range(4))]
    assert stats.chisquare(counts).pvalue > UNLIKELY


@pytest.mark.parametrize("strengths", [(0.4, 0.4, 0.4, 0.1), (0.3, 0.3, 0.3, 0.0), (0.0, 0.5, 0.0, 0.0)])
def test_color_jitter_applies_operations_in_the_drawn_order(images: Tensor, strengths):
    jitter = ColorJitter(strengths)
    params = jitter.draw(seeds(len(images)))
    ours = jitter.apply(images.clone(), on_cpu(params))
    names = [name for name, strength in zip(JITTER_OPERATIONS, strengths, strict=True) if strength]
    for number, photo in enumerate(images):
        one = photo[None]
        for place in range(len(names)):
            (name,) = [name for name in names if params[f"{name} {place}"][number]]
            one = JITTER_OPERATIONS[name](one, torch.tensor([params[name][number]]))
        assert torch.equal(ours[number], one[0])
    assert not torch.equal(ours, images)


# 3-Augment.


def test_three_augment_operations_are_equally_likely_and_blur_is_deits():
    params = ThreeAugment().draw(seeds(30_000))
    kinds = np.stack([params[name] for name in ("gray", "solarize", "blur")])
    assert np.all(kinds.sum(0) == 1)
    assert stats.chisquare(kinds.sum(1)).pvalue > UNLIKELY
    near = params["weights"][:, 1] / params["weights"][:, 0]  # exp(-1 / (2 deviation^2))
    visible = near > 1e-6
    deviations = np.sqrt(-0.5 / np.log(near[visible].astype(np.float64)))
    assert uniform_between(deviations[deviations > 0.3], 0.3, 2.0)
    assert stats.binomtest(int((deviations > 0.3).sum()), 30_000, 1.7 / 1.9).pvalue > UNLIKELY
    np.testing.assert_allclose(params["weights"][:, 0] + 2 * params["weights"][:, 1:].sum(1), 1, rtol=0, atol=1e-6)


def test_three_augment_applies_the_drawn_operation_to_each_image(images: Tensor):
    three = ThreeAugment()
    params = three.draw(seeds(len(images)))
    ours = three.apply(images.clone(), on_cpu(params))
    assert all(params[name].any() for name in ("gray", "solarize", "blur"))
    for number, photo in enumerate(images):
        if params["gray"][number]:
            expected = color.grayscale(photo[None])
        elif params["solarize"][number]:
            expected = torch.where(photo * 255 < 127.9, photo, 1 - photo)[None]
        else:
            expected = color.blur(photo[None], torch.from_numpy(params["weights"][number : number + 1]))
        assert torch.equal(ours[number], expected[0])


# RandAugment.

TIMM = {
    "brightness": "BrightnessIncreasing",
    "contrast": "ContrastIncreasing",
    "color": "ColorIncreasing",
    "sharpness": "SharpnessIncreasing",
    "posterize": "PosterizeIncreasing",
    "solarize": "SolarizeIncreasing",
    "solarize-add": "SolarizeAdd",
    "invert": "Invert",
    "auto-contrast": "AutoContrast",
    "equalize": "Equalize",
    "rotate": "Rotate",
    "shear x": "ShearX",
    "shear y": "ShearY",
    "translate x": "TranslateXRel",
    "translate y": "TranslateYRel",
}


@pytest.mark.peer
def test_rand_augment_has_timms_operations():
    peer = import_peer("timm.data.auto_augment")
    assert set(TIMM) == set(OPERATIONS)
    assert set(TIMM.values()) == set(peer._RAND_INCREASING_TRANSFORMS)


@pytest.mark.peer
@pytest.mark.parametrize("magnitude", [0.0, 4.0, 9.0, 10.0])
@pytest.mark.parametrize("name", OPERATIONS)
def test_rand_augment_operations_equal_timms_at_every_magnitude(
    photos: Tensor, name: str, magnitude: float, monkeypatch
):
    peer = import_peer("timm.data.auto_augment")
    policy = RandAugment(1, magnitude, 0.0, size=SIZE, fill=MEAN)
    count = len(photos)
    number = OPERATIONS.index(name)
    sign = np.where(np.arange(count) % 2, 1.0, -1.0)
    layer = policy._layer(np.full(count, number), np.full(count, magnitude / 10), sign)
    params = {"fill": policy.fill_for(count)} | {f"{key} 0": array for key, array in layer.items()}
    ours = policy.apply(photos / 255, on_cpu(params)).permute(0, 2, 3, 1).numpy()
    operation, level = peer.NAME_TO_OP[TIMM[name]], peer.LEVEL_TO_ARG[TIMM[name]]
    for photo, s, got in zip(photos, sign, ours, strict=True):
        monkeypatch.setattr(random, "random", lambda s=s: 0.9 if s < 0 else 0.1)  # timm negates above a half
        arguments = level(magnitude, {}) if level else ()
        if name == "posterize":
            arguments = (max(1, arguments[0]),)  # Pillow refuses 0
        fill = tuple(round(255 * m) for m in MEAN)
        image = Image.fromarray(photo.permute(1, 2, 0).numpy())
        expected = np.asarray(operation(image, *arguments, resample=Image.Resampling.BILINEAR, fillcolor=fill)) / 255.0
        gap = np.abs(got - expected).max(-1)
        if name in GEOMETRIC_OPERATIONS:  # at the border we blend with the fill, Pillow does not
            lit = np.asarray(operation(Image.new("RGB", image.size, "white"), *arguments, fillcolor=(0, 0, 0)))[..., 0]
            gap = gap[ndimage.binary_erosion(lit == 255, iterations=2)]
            assert gap.size > 300
        assert gap.max() < (2.1 if name == "sharpness" else 1.6) / 255


def test_rand_augment_operations_and_signs_are_equally_likely_and_half_are_applied():
    policy = RandAugment(2, 9.0, 0.0, size=SIZE, fill=MEAN)
    params = policy.draw(seeds(30_000))
    for layer in (0, 1):
        amount = params[f"amount {layer}"]
        inverted = params[f"solarize {layer}"] & (amount == 0)
        moves = params[f"affine {layer}"]
        counts = [params[f"{name} {layer}"].sum() for name in AMOUNTS if name not in ("invert", "solarize")]
        counts += [inverted.sum(), params[f"solarize {layer}"].sum() - inverted.sum()]
        matrix = params[f"matrix {layer}"][moves] - np.eye(2, 3)
        turned = np.abs(matrix[:, 0, 0]) > 1e-3
        parts = [turned, *(~turned & (matrix[:, i, j] != 0) for i, j in ((0, 1), (1, 0), (0, 2), (1, 2)))]
        counts += [part.sum() for part in parts]
        assert len(counts) == 15
        assert stats.chisquare(counts).pvalue > UNLIKELY
        assert stats.binomtest(int(sum(counts)), 30_000, 0.5).pvalue > UNLIKELY
        bright = amount[params[f"brightness {layer}"]]
        assert set(bright.tolist()) == {np.float32(0.19), np.float32(1.81)}
        assert stats.binomtest(int((bright > 1).sum()), len(bright), 0.5).pvalue > UNLIKELY
    both = params["equalize 0"] & params["equalize 1"]  # with replacement
    assert stats.binomtest(int(both.sum()), 30_000, 1 / 900).pvalue > UNLIKELY


def test_magnitude_is_normal_and_clipped_to_its_range():
    params = RandAugment(1, 9.0, 0.5, size=SIZE, fill=MEAN).draw(seeds(60_000))
    factor = params["amount 0"][params["brightness 0"]].astype(np.float64)
    strength = np.abs(factor - 1) / 0.9 * 10
    assert strength.max() <= 10 + 1e-5
    assert stats.kstest(strength[strength < 9.99], stats.truncnorm(-np.inf, 0.99 / 0.5, 9, 0.5).cdf).pvalue > UNLIKELY
    share = stats.norm.sf(1 / 0.5)  # what would lie above 10 is 10
    assert stats.binomtest(int((strength > 9.99999).sum()), len(strength), share).pvalue > UNLIKELY


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "policy",
    [ColorJitter((0.4, 0.4, 0.4, 0.1)), ThreeAugment(), RandAugment(3, 9.0, 0.5, size=SIZE, fill=(0.5,))],
    ids=["jitter", "three", "rand"],
)
def test_static_and_dynamic_shapes_give_the_same_bits(images: Tensor, policy, channels: int):
    photos = images[:, :channels].repeat(4, 1, 1, 1)
    params = policy.draw(seeds(len(photos)))
    some, everything = (
        policy.apply(photos.clone(), on_cpu(params, static_shapes=static_shapes)) for static_shapes in (False, True)
    )
    assert torch.equal(some, everything)
    assert some.isfinite().all()
    assert some.min() > -1e-5
    assert some.max() < 1 + 1e-5

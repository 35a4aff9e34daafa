"""Random erasing, against torchvision's draws and a loop over pixels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import import_peer
from scipy import stats
from torch import Tensor

from vitrail import rng
from vitrail.data.augment.params import to_device
from vitrail.data.augment.random_erasing import RandomErasing, erase

UNLIKELY = 1e-4
SCALE = (0.02, 1 / 3)
SIZE = (40, 56)


def seeds(count: int, step: int = 0) -> rng.Seeds:
    return rng.sample_seeds(5, step, np.arange(count))


def erased(images: Tensor, part: RandomErasing, seeds: rng.Seeds, *, static_shapes: bool = False) -> Tensor:
    params = to_device({"erase": part.draw(seeds)}, torch.device("cpu"), static_shapes)["erase"]
    params["quantiles"] = rng.normal_quantiles(torch.device("cpu"))
    return part.apply(images.clone(), params)


def test_only_the_box_is_replaced(images: Tensor):
    boxes = torch.tensor([[3, 5, 10, 20], [0, 0, 40, 56], [39, 55, 1, 1], [7, 7, 0, 0]])
    noise = torch.randn(4, 3, 40, 56)
    ours = erase(images[:4], boxes, noise)
    expected = images[:4].clone()
    for number, (top, left, height, width) in enumerate(boxes.tolist()):
        for row in range(top, top + height):
            for column in range(left, left + width):
                expected[number, :, row, column] = noise[number, :, row, column]
    assert torch.equal(ours, expected)


def test_erasing_has_the_requested_probability():
    params = RandomErasing(0.25, SCALE, SIZE).draw(seeds(20_000))
    assert stats.binomtest(int(params["which"].sum()), 20_000, 0.25).pvalue > UNLIKELY


@pytest.mark.peer
@pytest.mark.parametrize("size", [(224, 224), (32, 32), (30, 90)])
def test_boxes_are_distributed_as_torchvisions(size: tuple[int, int]):
    peer = import_peer("torchvision.transforms").RandomErasing
    params = RandomErasing(1.0, SCALE, size).draw(seeds(4000))
    ours = params["boxes"][params["which"]]
    blank = torch.zeros(1, *size)
    theirs = np.array([peer.get_params(blank, SCALE, (0.3, 1 / 0.3), [0.0])[:4] for _ in range(4000)])
    theirs = theirs[theirs[:, 2] < size[0]]  # where nothing fitted it erases the whole image, with itself
    assert abs(len(ours) - len(theirs)) < 60
    for measure in (
        lambda b: b[:, 2] * b[:, 3],
        lambda b: b[:, 3] / b[:, 2],
        lambda b: b[:, 0] + b[:, 2] / 2,
        lambda b: b[:, 1] + b[:, 3] / 2,
    ):
        a, b = (measure(boxes) + 1e-6 * np.random.rand(len(boxes)) for boxes in (ours, theirs))
        assert stats.ks_2samp(a, b).pvalue > UNLIKELY


def test_boxes_are_inside_the_image_and_smaller_than_its_sides():
    params = RandomErasing(1.0, (0.02, 1.0), SIZE).draw(seeds(2000))
    top, left, height, width = params["boxes"][params["which"]].T
    assert np.all((top >= 0) & (left >= 0) & (height > 0) & (width > 0))
    assert np.all((top + height <= 40) & (left + width <= 56))
    assert np.all((height < 40) & (width < 56))


def test_noise_is_normal_per_pixel_and_differs_between_images():
    part = RandomErasing(1.0, SCALE, SIZE)
    blank = torch.full((300, 3, 40, 56), 9.0)
    noise = erased(blank, part, seeds(300))
    changed = noise != 9
    assert stats.kstest(noise[changed].numpy()[::7], "norm").pvalue > UNLIKELY
    assert changed.all(1).sum() == changed.any(1).sum()  # all channels or none
    both = changed[:-1] & changed[1:]
    assert abs(np.corrcoef(noise[:-1][both].numpy(), noise[1:][both].numpy())[0, 1]) < 0.02
    red, green = noise[:, 0][changed[:, 0]].numpy(), noise[:, 1][changed[:, 1]].numpy()
    assert abs(np.corrcoef(red, green)[0, 1]) < 0.02


def test_static_and_dynamic_shapes_give_the_same_bits(images: Tensor):
    part = RandomErasing(0.5, SCALE, SIZE)
    some, everything = (erased(images, part, seeds(16), static_shapes=static_shapes) for static_shapes in (False, True))
    assert torch.equal(some, everything)
    assert not torch.equal(some, images)
    one_by_one = [erased(images[i : i + 1], part, seeds(16)[i : i + 1]) for i in range(16)]
    assert torch.equal(torch.cat(one_by_one), some)

"""The augmentation pipeline: a function of seed, step and slot alone, on any number of processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate, one_hot

from vitrail import rng
from vitrail.config import AugmentConfig, PreprocessConfig
from vitrail.data.augment import Augment, compose, crop_boxes
from vitrail.data.augment.rand_augment import COLOR_OPERATIONS, RandAugment
from vitrail.data.batch import Batch
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError, DataError

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
EVERYTHING = {
    "color_jitter": (0.4, 0.4, 0.4, 0.1),
    "policy": "rand",
    "magnitude_std": 0.5,
    "erase": 0.5,
    "mixup": 0.8,
    "cutmix": 1.0,
    "mix_prob": 0.8,
}
SETTINGS = {
    "plain": {},
    "bicubic": {"interpolation": "bicubic"},
    "shifted": {"crop": "pad", "pad": 3},
    "three": {"policy": "three", "color_jitter": (0.3, 0.3, 0.3, 0.0)},
    "everything": EVERYTHING,
}


def batch_of(photos: Tensor, step: int = 0, *, multi_label: bool = False) -> Batch:
    count = len(photos)
    targets = torch.arange(count) % 7
    if multi_label:
        targets = (torch.arange(count)[:, None] % torch.tensor([2, 3, 5, 1, 9, 9, 9]) == 0).float()
    places = torch.arange(count)
    return Batch(step, photos, targets, torch.ones(count), places, places)


def rows(batch: Batch, which: Tensor) -> Batch:
    names = ("images", "targets", "weights", "slots", "indices")
    return replace(batch, **{name: getattr(batch, name)[which] for name in names})


def augmentation(
    size: tuple[int, int] = (40, 56), batch: int = 16, seed: int = 1, compile: bool = False, **settings
) -> Augment:
    channels, mix_until_step = settings.pop("channels", 3), settings.pop("mix_until_step", None)
    colors = IMAGENET if channels == 3 else {"mean": (0.5,) * channels, "std": (0.5,) * channels}
    return Augment(
        AugmentConfig(**settings),
        preprocess=PreprocessConfig(image_size=size, **colors),
        image_size=size,
        num_classes=7,
        batch_size=batch,
        seed=seed,
        mix_until_step=mix_until_step,
        compile=compile,
    )


def test_disabled_augmentation_equals_preprocessing_to_the_bit(photos: Tensor):
    images, targets = augmentation(crop="none", flip=0.0)(batch_of(photos))
    expected = Preprocess(PreprocessConfig(image_size=(40, 56), **IMAGENET)).normalize(photos)
    assert torch.equal(images, expected)
    assert targets.tolist() == [i % 7 for i in range(16)]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("channels", [1, 3])
def test_every_setting_gives_float32_of_the_models_size(photos: Tensor, name: str, channels: int):
    settings = SETTINGS[name]
    size = (40, 56) if settings.get("crop") == "pad" else (32, 24)
    images, targets = augmentation(size, channels=channels, **settings)(batch_of(photos[:, :channels]))
    assert images.shape == (16, channels, *size)
    assert images.dtype == torch.float32
    assert images.isfinite().all()
    assert images.is_contiguous()
    assert targets.dtype == (torch.float32 if name == "everything" else torch.int64)


def test_float_images_are_accepted(photos: Tensor):
    same, expected = (augmentation(**EVERYTHING)(batch_of(p)) for p in (photos.to(torch.float32), photos))
    torch.testing.assert_close(same, expected, rtol=0, atol=1e-5)


def test_channels_last_images_give_the_same_result(photos: Tensor):
    expected, _ = augmentation(**EVERYTHING)(batch_of(photos))
    images, _ = augmentation(**EVERYTHING)(batch_of(photos.contiguous(memory_format=torch.channels_last)))
    assert torch.equal(images, expected)
    plain, _ = augmentation(crop="none")(batch_of(photos.contiguous(memory_format=torch.channels_last)))
    assert plain.is_contiguous()


@pytest.mark.parametrize("name", SETTINGS)
def test_the_batch_is_unchanged(photos: Tensor, name: str):
    for pixels in (photos.clone(), photos.to(torch.float32)):
        original = pixels.clone()
        augmentation(**SETTINGS[name])(batch_of(pixels))
        assert torch.equal(pixels, original)


def test_result_is_a_function_of_step_and_seed(photos: Tensor):
    augment = augmentation(**EVERYTHING)
    images, targets = augment(batch_of(photos, step=3))
    again = augmentation(**EVERYTHING)(batch_of(photos, step=3))
    assert torch.equal(images, again[0])
    assert torch.equal(targets, again[1])
    for other in (augment(batch_of(photos, step=4)), augmentation(seed=2, **EVERYTHING)(batch_of(photos, step=3))):
        same = (images == other[0]).flatten(1).all(1)
        assert not same.any()


@pytest.mark.parametrize("name", SETTINGS)
def test_an_image_has_the_same_bits_in_any_batch(photos: Tensor, name: str):
    """Augmentation of an image, without mixing, depends on its slot and not on the other images."""
    settings = SETTINGS[name] | {"mixup": 0.0, "cutmix": 0.0}
    augment, batch = augmentation(**settings), batch_of(photos)
    together, _ = augment(batch)
    for which in (torch.tensor([5]), torch.tensor([3, 14, 0]), torch.arange(4, 12), torch.arange(15, -1, -1)):
        assert torch.equal(augment(rows(batch, which))[0], together[which])


def test_device_crops_the_same_box_as_a_worker(photos: Tensor):
    images, _ = augmentation((32, 32), flip=0.0)(batch_of(photos, step=5))
    config = AugmentConfig()
    boxes = crop_boxes(rng.sample_seeds(1, 5, np.arange(16)), np.tile((40, 56), (16, 1)), config.scale, config.ratio)
    for image, (top, left, height, width), got in zip(photos, boxes, images, strict=True):
        part = image[None, :, top : top + height, left : left + width] / 255
        expected = interpolate(part, (32, 32), mode="bilinear", antialias=True)[0]
        mean, std = (torch.tensor(IMAGENET[name])[:, None, None] for name in ("mean", "std"))
        torch.testing.assert_close(got, (expected - mean) / std, rtol=0, atol=5e-5)


def test_cropped_images_are_not_cropped_again(photos: Tensor):
    config, preprocess = AugmentConfig(flip=0.0), PreprocessConfig(image_size=(40, 56))
    augment = Augment(
        config, preprocess=preprocess, image_size=(40, 56), num_classes=7, batch_size=16, seed=1, cropped=True
    )
    assert torch.equal(augment(batch_of(photos))[0], Preprocess(preprocess).normalize(photos))


def test_mixing_does_not_depend_on_the_order_of_rows(photos: Tensor):
    augment, batch = augmentation(**EVERYTHING), batch_of(photos)
    images, targets = augment(batch)
    order = torch.randperm(16)
    shuffled = augment(rows(batch, order))
    assert torch.equal(shuffled[0], images[order])
    assert torch.equal(shuffled[1], targets[order])


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("multi_label", [False, True])
def test_result_does_not_depend_on_the_number_of_processes(photos: Tensor, world: int, multi_label: bool):
    """Each with its own part of the batch and nothing else."""
    batch = batch_of(photos, multi_label=multi_label)
    batch = replace(batch, weights=(torch.arange(16) % 5 != 0).float())
    augment = augmentation(**EVERYTHING, mix_group=4)
    images, targets = augment(batch)
    parts = [augment(rows(batch, part)) for part in torch.arange(16).chunk(world)]
    assert torch.equal(torch.cat([part[0] for part in parts]), images)
    assert torch.equal(torch.cat([part[1] for part in parts]), targets)


def test_mixed_labels_sum_to_one(photos: Tensor):
    _, targets = augmentation(**EVERYTHING)(batch_of(photos))
    assert targets.shape == (16, 7)
    torch.testing.assert_close(targets.sum(1), torch.ones(16), rtol=0, atol=1e-6)
    assert (targets.max(1).values < 1).any()


def test_multi_label_targets_are_mixed_too(photos: Tensor):
    batch = batch_of(photos, multi_label=True)
    images, targets = augmentation(crop="none", flip=0.0, mixup=1.0)(batch)
    plain, _ = augmentation(crop="none", flip=0.0)(batch)
    params = augmentation(crop="none", flip=0.0, mixup=1.0).draw(0, np.arange(16), (40, 56))
    partners, lam = params["mix"]["partners"], torch.from_numpy(params["mix"]["lam"])
    torch.testing.assert_close(targets, batch.targets * lam[:, None] + batch.targets[partners] * (1 - lam[:, None]))
    keep = lam[:, None, None, None]
    torch.testing.assert_close(images, plain * keep + plain[partners] * (1 - keep), rtol=0, atol=1e-5)


def test_unreadable_image_is_not_mixed_into_others(photos: Tensor):
    bad = torch.arange(16) % 3 == 0
    batch = replace(batch_of(photos), weights=(~bad).float())
    settings = {"crop": "none", "flip": 0.0, "mixup": 1.0, "cutmix": 1.0}
    noise = torch.where(bad[:, None, None, None], torch.randint_like(photos, 256), photos)
    images, targets = augmentation(**settings)(batch)
    others, _ = augmentation(**settings)(replace(batch, images=noise))
    assert torch.equal(images[~bad], others[~bad])
    partners = torch.from_numpy(augmentation(**settings).draw(0, np.arange(16), (40, 56))["mix"]["partners"])
    alone = ~bad & bad[partners]
    assert alone.any()
    assert torch.equal(targets[alone].argmax(1), batch.targets[alone])
    assert torch.all(targets[alone].max(1).values == 1)


@pytest.mark.parametrize("name", SETTINGS)
def test_augmentation_traces_without_graph_breaks(photos: Tensor, name: str):
    """fullgraph: no step depends on values, so a GPU is never waited for; the graph computes the same."""
    torch._dynamo.reset()
    settings = SETTINGS[name]
    plain = augmentation(**settings)
    traced = augmentation(**settings)
    traced.static_shapes = True
    traced._transform = torch.compile(traced.transform, fullgraph=True, dynamic=False, backend="eager")
    traced._mix = torch.compile(traced.mix, fullgraph=True, dynamic=False, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(3):
            torch.testing.assert_close(traced(batch_of(photos, step)), plain(batch_of(photos, step)), rtol=0, atol=0)


@pytest.mark.parametrize("name", SETTINGS)
def test_cache_size_does_not_change_the_bits(photos: Tensor, name: str, monkeypatch: pytest.MonkeyPatch):
    found = []
    for size in (1, 100_000, 1 << 30):
        monkeypatch.setattr(compose, "CACHE_BYTES", size)
        found.append(augmentation(**SETTINGS[name])(batch_of(photos)))
    for images, targets in found[1:]:
        assert torch.equal(images, found[0][0])
        assert torch.equal(targets, found[0][1])


def test_input_is_not_modified(photos: Tensor):
    for given in (photos, photos.to(torch.float32)):
        before = given.clone()
        augmentation(crop="none", flip=1.0)(batch_of(given))
        assert torch.equal(given, before)


def test_mix_off_disables_mixing_at_the_end_of_a_run(photos: Tensor):
    mixes = {"mixup": 0.8, "cutmix": 1.0}
    ends, whole = augmentation(mix_until_step=5, **mixes), augmentation()
    for step in (4, 5, 6):
        images, targets = ends(batch_of(photos, step))
        alone, labels = whole(batch_of(photos, step))
        assert torch.equal(images, alone) == (step >= 5)
        assert torch.equal(targets, one_hot(labels, 7).float()) == (step >= 5)
        assert targets.shape == (16, 7)  # compiled networks want one shape throughout


@pytest.mark.slow
def test_compiled_augmentation_is_equal_up_to_rounding(photos: Tensor):
    settings = EVERYTHING
    compiled, plain = augmentation(compile=True, **settings), augmentation(**settings)
    for step in range(2):
        ours, expected = compiled(batch_of(photos, step)), plain(batch_of(photos, step))
        far = (ours[0] - expected[0]).abs() > 1e-3  # a level that lies on a threshold may fall on its other side
        assert far.float().mean() < 1e-3
        torch.testing.assert_close(ours[1], expected[1])


def _sync_debug_mode(mode: str) -> None:
    with warnings.catch_warnings():  # it says, once, that it is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)


def _rounded_otherwise(
    augment: Augment,
    batch: Batch,
    monkeypatch: pytest.MonkeyPatch,
    noise: Callable[[Tensor], Tensor] = torch.randn_like,
) -> Tensor:
    """The same, had rounding been another when RandAugment got the images."""
    apply = RandAugment.apply
    with monkeypatch.context() as patched:
        patched.setattr(RandAugment, "apply", lambda self, x, params: apply(self, x + 5e-8 * noise(x), params))
        return augment(batch)[0]


def _differ(ours: Tensor, expected: Tensor) -> Tensor:
    """Which images do, visibly: b."""
    return (ours - expected).abs().amax(dim=(1, 2, 3)) > 1e-3


def test_rounding_is_visible_only_in_equalized_or_posterized_images(photos: Tensor, monkeypatch):
    plain, batch = augmentation(**EVERYTHING), batch_of(photos)
    same = _rounded_otherwise(plain, batch, monkeypatch, noise=torch.zeros_like)
    assert not _differ(same, plain(batch)[0]).any()
    for name in ("equalize", "posterize"):
        monkeypatch.setitem(COLOR_OPERATIONS, name, lambda images, _: images)
    assert not _differ(_rounded_otherwise(plain, batch, monkeypatch), plain(batch)[0]).any()


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_gpu_gives_the_same_result_without_synchronization(photos: Tensor, name: str, compile: bool, monkeypatch):
    augment, plain = augmentation(compile=compile, **SETTINGS[name]), augmentation(**SETTINGS[name])
    for step in range(3):
        batch = batch_of(photos, step)
        there = replace(batch, **{n: getattr(batch, n).cuda() for n in ("images", "targets", "weights")})
        _sync_debug_mode("error" if step else "default")  # tables are sent once, kernels built once
        try:
            images, targets = augment(there)
        finally:
            _sync_debug_mode("default")
        expected = plain(batch)
        # Equalize counts the pixels of each level, and one that lies between two levels can shift a whole
        # image, and then the one that it is mixed into. Only those may differ that rounding changes here too.
        others = [_rounded_otherwise(plain, batch, monkeypatch) for _ in range(4)]
        shaky = torch.stack([_differ(other, expected[0]) for other in others]).any(0)
        assert shaky.sum() <= (4 if name == "everything" else 0)
        assert not (_differ(images.cpu(), expected[0]) & ~shaky).any()
        torch.testing.assert_close(targets.cpu(), expected[1])


def test_images_of_the_wrong_size_are_refused(photos: Tensor):
    with pytest.raises(DataError, match="got images of 40 x 56, expected 32 x 32"):
        augmentation((32, 32), crop="none")(batch_of(photos))


@pytest.mark.parametrize("slots", [range(6), range(2, 10), [0, 1, 2, 3, 8, 9, 10, 11]])
def test_slots_that_are_not_complete_groups_are_refused(photos: Tensor, slots: range | list[int]):
    part = rows(batch_of(photos), torch.tensor(list(slots)))
    with pytest.raises(DataError, match=r"of 16 images of a batch, expected whole groups of 8 to mix; try .*="):
        augmentation(mixup=0.8)(part)


def test_shift_larger_than_the_image_is_refused():
    with pytest.raises(ConfigError, match="pad=8, expected less than the side of 8 x 8 images"):
        augmentation((8, 8), crop="pad", pad=8)


@pytest.mark.parametrize("settings", [{"color_jitter": (0.4, 0.4, 0.4, 0.1)}, {"policy": "three"}, {"policy": "rand"}])
def test_color_operations_need_three_channels(settings: dict):
    with pytest.raises(ConfigError, match="not 4 channels"):
        augmentation(channels=4, **settings)

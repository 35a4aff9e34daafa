"""Compares whole-batch augmentation with kornia's and torchvision's: speed and accuracy.

    python benchmarks/augment.py [--device cuda] [--rounds 9] [--sizes 1024x32,256x224] [--compile]

Every operation has its own parameter for each image. kornia supports this too; torchvision's functions take
one parameter and are called for each image. Times are medians in milliseconds over interleaved rounds. "Off by"
is the largest difference from the operation's definition, in levels of 255, on the first 16 images: torchvision's
float functions on one image, or Pillow's for operations that are defined on 256 levels. Packages that are not
installed are skipped.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable
from types import ModuleType

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from vitrail import rng
from vitrail.bench.libraries import declare_torchvision_operators
from vitrail.config import AugmentConfig, PreprocessConfig
from vitrail.data.augment import Augment, color
from vitrail.data.augment.affine import affine, rotation
from vitrail.data.augment.crop import crop_boxes, resized_crop
from vitrail.data.augment.three_augment import gaussian_weights
from vitrail.data.batch import Batch

Call = Callable[[], object]
Row = tuple[str, Call, Call | None, Call | None, Callable[[int], Tensor] | None]
"""Name; ours, kornia's, torchvision's on the whole batch; the definition for image i."""

CHECKED = 16

SETTINGS: dict[str, dict[str, object]] = {
    "crop, flip": {},
    "shift, flip": {"crop": "pad"},
    "+ jitter": {"color_jitter": (0.4, 0.4, 0.4, 0.1)},
    "+ 3-Augment": {"policy": "three", "color_jitter": (0.3, 0.3, 0.3, 0.0)},
    "+ RandAugment": {"policy": "rand", "magnitude_std": 0.5},
    "+ erase": {"policy": "rand", "magnitude_std": 0.5, "erase": 0.25},
    "+ mixup, CutMix": {"policy": "rand", "magnitude_std": 0.5, "erase": 0.25, "mixup": 0.8, "cutmix": 1.0},
}


def peer(name: str) -> ModuleType | None:
    """Another package's module, or None; torchvision's wheels need operators that a CPU-only torch lacks."""
    spec = importlib.util.find_spec(name.split(".")[0])
    if spec is None or spec.origin is None:
        return None
    if name.startswith("torchvision") and not hasattr(torch.ops.torchvision, "nms"):
        declare_torchvision_operators()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def milliseconds(calls: dict[str, Call], rounds: int, device: torch.device) -> dict[str, float]:
    """Medians over rounds; each round runs all calls, so that noise affects them equally."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 2):
        for name, call in calls.items():
            _wait(device)
            start = time.perf_counter()
            call()
            _wait(device)
            if number >= 2:
                times[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def operations(photos: Tensor, side: int) -> list[Row]:
    """Each operation by the three packages, with the same parameters, and its definition."""
    images, device, count = photos / 255, photos.device, len(photos)
    kornia, vision = peer("kornia"), peer("torchvision.transforms.v2.functional")
    seeds = rng.sample_seeds(0, 0, np.arange(count))
    draws = torch.from_numpy(rng.uniform_np(seeds, 1, 4)).to(device)
    factor, turn = 0.4 + 1.2 * draws[:, 0], draws[:, 1] - 0.5
    threshold, bits = (256 * draws[:, 2]).floor(), 1 + (7 * draws[:, 3]).floor()
    deviation = 0.1 + 1.9 * draws[:, 1]
    weights = torch.from_numpy(gaussian_weights(deviation.cpu().double().numpy(), 6)).to(device)
    boxes = torch.from_numpy(crop_boxes(seeds, np.tile((side, side), (count, 1)), (0.08, 1.0), (3 / 4, 4 / 3)))
    corners = _corners(boxes).to(device)
    degrees = 60 * draws[:, 0].cpu() - 30
    matrix = torch.from_numpy(rotation(degrees.numpy(), (side, side)).astype(np.float32)).to(device)
    black = torch.zeros(3, 1, 1, device=device)
    there = boxes.to(device)

    def each(function: Callable[..., Tensor], *numbers: Tensor) -> Call:
        lists = [n.tolist() for n in numbers]
        return lambda: torch.stack([function(image, *row) for image, *row in zip(images, *lists, strict=True)])

    def one(function: Callable[..., Tensor], *numbers: Tensor) -> Callable[[int], Tensor]:
        return lambda i: function(images[i].cpu(), *(n[i].item() for n in numbers))

    def pillow(function: Callable[..., Image.Image], *numbers: Tensor) -> Callable[[int], Tensor]:
        def at(i: int) -> Tensor:
            image = Image.fromarray(photos[i].permute(1, 2, 0).cpu().numpy())
            return torch.from_numpy(np.array(function(image, *(int(n[i]) for n in numbers)))).permute(2, 0, 1) / 255

        return at

    def cropped(i: int) -> Tensor:
        top, left, height, width = boxes[i].tolist()
        part = images[i : i + 1, :, top : top + height, left : left + width].cpu()
        return torch.nn.functional.interpolate(part, (side, side), mode="bilinear", antialias=True)[0]

    if vision is None:
        raise SystemExit("the definitions are torchvision's: pip install torchvision")
    v: ModuleType = vision
    k = kornia.enhance if kornia else None
    rows: list[Row] = [
        (
            "resized crop",
            lambda: resized_crop(images, there, (side, side), "bilinear"),
            kornia and (lambda: kornia.geometry.crop_and_resize(images, corners, (side, side), align_corners=False)),
            each(lambda i, t, x, h, w: v.resized_crop(i, t, x, h, w, [side, side], antialias=True), *there.T),
            cropped,
        )
    ]
    for name, ours, theirs, function in (
        ("brightness", color.brightness, "adjust_brightness_accumulative", v.adjust_brightness),
        ("contrast", color.contrast, "adjust_contrast_with_mean_subtraction", v.adjust_contrast),
        ("saturation", color.saturation, "adjust_saturation_with_gray_subtraction", v.adjust_saturation),
        ("sharpness", color.sharpness, "sharpness", v.adjust_sharpness),
    ):
        call = k and (lambda name=theirs: getattr(k, name)(images, factor))
        rows.append((name, lambda f=ours: f(images, factor), call, each(function, factor), one(function, factor)))
    level = (threshold - 0.5) / 255
    blurred = lambda i, d: v.gaussian_blur(i, [13, 13], [d, d])  # noqa: E731
    turned = lambda i, d: v.rotate(i, d, v.InterpolationMode.BILINEAR)  # noqa: E731
    rows += [
        (
            "hue",
            lambda: color.hue(images, turn),
            k and (lambda: k.adjust_hue(images, 2 * torch.pi * turn)),
            each(v.adjust_hue, turn),
            one(v.adjust_hue, turn),
        ),
        (
            "solarize",
            lambda: color.solarize(images, threshold),
            k and (lambda: k.solarize(images, level)),
            each(v.solarize, level),
            pillow(ImageOps.solarize, threshold),
        ),
        (
            "posterize",
            lambda: color.posterize(images, bits),
            k and (lambda: k.posterize(images, bits.int())),
            each(lambda i, b: v.posterize(i, int(b)), bits),
            pillow(ImageOps.posterize, bits),
        ),
        (
            "auto-contrast",
            lambda: color.auto_contrast(images),
            k and (lambda: k.normalize_min_max(images)),
            each(v.autocontrast),
            one(v.autocontrast),
        ),
        (
            "equalize",
            lambda: color.equalize(images),
            k and (lambda: k.equalize(images)),
            each(v.equalize),
            pillow(ImageOps.equalize),
        ),
        (
            "blur",
            lambda: color.blur(images, weights),
            kornia
            and (lambda: kornia.filters.gaussian_blur2d(images, 13, deviation[:, None].repeat(1, 2), "replicate")),
            each(blurred, deviation),
            one(blurred, deviation),  # mirrored at the edge: there it differs
        ),
        (
            "rotate",
            lambda: affine(images, matrix, black),
            kornia and (lambda: kornia.geometry.rotate(images, degrees.to(device), align_corners=False)),
            each(turned, degrees),
            one(turned, degrees),
        ),
    ]
    return rows


def _corners(boxes: Tensor) -> Tensor:
    """Boxes in kornia's format: the four corner pixels, x and y."""
    top, left, height, width = boxes.to(torch.float32).unbind(1)
    right, bottom = left + width - 1, top + height - 1
    return torch.stack([left, top, right, top, right, bottom, left, bottom], dim=1).view(-1, 4, 2)


def off_by(call: Call | None, definition: Callable[[int], Tensor] | None, inner: int) -> float | None:
    """Largest difference in levels of 255, without the outer `inner` pixels, where border handling differs."""
    if call is None or definition is None:
        return None
    got = call()
    assert isinstance(got, Tensor)
    part = np.s_[:, inner:-inner, inner:-inner] if inner else np.s_[:]
    gaps = [(got[i].cpu()[part] - definition(i)[part]).abs().max() for i in range(min(CHECKED, len(got)))]
    return 255 * float(torch.stack(gaps).max())


def show(*cells: str | float | None) -> None:
    texts = ["-" if c is None else c if isinstance(c, str) else f"{c:.3g}" if c < 100 else f"{c:.0f}" for c in cells]
    print(f"  {texts[0]:<18}" + "".join(f"{text:>14}" for text in texts[1:]), flush=True)


def compare(photos: Tensor, side: int, rounds: int) -> None:
    show("", "ours", "kornia", "torchvision", "ours off by", "kornia off by")
    for name, ours, kornia, vision, definition in operations(photos, side):
        calls = {"ours": ours} | ({"kornia": kornia} if kornia else {}) | ({"vision": vision} if vision else {})
        took = milliseconds(calls, rounds, photos.device)
        inner = {"blur": 6, "rotate": side // 3}.get(name, 0)
        gaps = [off_by(call, definition, inner) for call in (ours, kornia)]
        show(name, took["ours"], took.get("kornia"), took.get("vision"), *gaps)


def whole(photos: Tensor, side: int, rounds: int, compile: bool) -> None:
    """Time `Augment` from uint8 to the network's input, and kornia's pipeline of the same operations."""
    count, device = len(photos), photos.device
    targets = torch.arange(count, device=device) % 10
    places = torch.arange(count)
    batch = Batch(0, photos, targets, torch.ones(count, device=device), places, places)
    show("", "ours", "compiled", "draws alone", "kornia")
    for name, settings in SETTINGS.items():
        config = AugmentConfig(**settings)  # type: ignore[arg-type]
        make = lambda compile, config=config: Augment(  # noqa: E731
            config,
            preprocess=PreprocessConfig(image_size=side),
            image_size=(side, side),
            num_classes=10,
            batch_size=count,
            seed=0,
            compile=compile,
        )
        plain, compiled = make(False), make(True)
        calls: dict[str, Call] = {
            "ours": lambda a=plain: a(batch),
            "draws": lambda a=plain: a.draw(0, places.numpy(), (side, side)),
        }
        if compile:
            calls["compiled"] = lambda a=compiled: a(batch)
        if (theirs := kornia_pipeline(config, side)) is not None:
            calls["kornia"] = lambda p=theirs: p(photos / 255)
        took = milliseconds(calls, rounds, device)
        show(name, took["ours"], took.get("compiled"), took["draws"], took.get("kornia"))


def kornia_pipeline(config: AugmentConfig, side: int) -> Callable[[Tensor], object] | None:
    """The same operations from kornia.augmentation, if it has them."""
    kornia = peer("kornia")
    if kornia is None or config.crop == "pad" or config.policy == "three" or config.mixes:
        return None
    a = kornia.augmentation
    parts = [a.RandomResizedCrop((side, side), cropping_mode="resample"), a.RandomHorizontalFlip(p=0.5)]
    if config.policy == "rand":
        parts.append(a.auto.RandAugment(n=2, m=27))  # 9 of 10 is 27 of its 30; one operation for the whole batch
    if any(config.color_jitter):
        parts.append(a.ColorJitter(*config.color_jitter, p=1.0))
    parts.append(a.Normalize(mean=torch.full((3,), 0.5), std=torch.full((3,), 0.5)))
    if config.erase:
        parts.append(a.RandomErasing(p=config.erase))
    pipeline: Callable[[Tensor], object] = torch.nn.Sequential(*parts)
    return pipeline


def photographs(count: int, side: int, device: torch.device) -> Tensor:
    """Square crops of scikit-learn's two photographs, uint8."""
    from sklearn.datasets import load_sample_images

    images = [torch.from_numpy(p.copy()).permute(2, 0, 1) for p in load_sample_images().images]
    tops = np.linspace(0, 427 - side, 8).astype(int)
    lefts = np.linspace(0, 640 - side, 16).astype(int)
    squares = [p[:, t : t + side, x : x + side] for p in images for t in tops for x in lefts]
    return torch.stack([squares[i % len(squares)] for i in range(count)]).to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", help="comma-separated list of images x side, such as 256x32,16x224")
    parser.add_argument("--compile", action="store_true", help="time the compiled augmentation too")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    sizes = options.sizes or ("1024x32,256x224" if device.type == "cuda" else "256x32,16x224")
    for size in sizes.split(","):
        count, side = (int(n) for n in size.split("x"))
        photos = photographs(count, side, device)
        print(f"{count} x 3 x {side} x {side} on {device}, milliseconds")
        with torch.no_grad():
            compare(photos, side, options.rounds)
            whole(photos, side, options.rounds, options.compile)


if __name__ == "__main__":
    main()

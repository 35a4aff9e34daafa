"""Images per second from JPEG files to normalized 224 px training batches: vitrail, timm and torchvision.

All loaders have the same files, the same cores and the same augmentation: a random resized crop (0.08 to 1 of the
area, bilinear), a horizontal flip with probability 0.5, and normalization. Each epoch is timed in a process of its
own, from the request of the first batch to the last batch, including the start of the workers. Rounds are
interleaved.

Small images have a short side of 256: from tar shards (ImageNet's, say), else crops of the photographs in scikit-learn
and scikit-image. Large images have 12 megapixels: the same photographs, enlarged, with camera-like noise.
"""

from __future__ import annotations

import io
import json
import os
import resource
import statistics
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from vitrail.bench.libraries import declare_torchvision_operators
from vitrail.errors import ConfigError, DataError, did_you_mean

SIDE = 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DISTINCT = 12
"""Number of different large images; the rest are copies of them."""
SMALL_BATCH, LARGE_BATCH = 128, 8
PEERS = ("timm", "torchvision")
Epoch = Callable[[], Iterable[Any]]
Progress = Callable[[str], None]


def photographs() -> list[Image.Image]:
    from skimage import data
    from sklearn.datasets import load_sample_image

    arrays = [load_sample_image("china.jpg"), load_sample_image("flower.jpg")]
    arrays += [data.astronaut(), data.coffee(), data.chelsea(), data.rocket()]
    return [Image.fromarray(array) for array in arrays]


def small_images(count: int, shards: str | None) -> Iterable[bytes]:
    """JPEG files with a short side of about 256."""
    if shards is not None:
        files = []
        for path in sorted(Path(shards).glob("*.tar")):
            with tarfile.open(path) as tar:
                files += [tar.extractfile(m).read() for m in tar if m.name.endswith(".jpg")]  # type: ignore[union-attr]
        if not files:
            raise DataError(f"got {shards}, expected a folder of .tar files with .jpg images.")
        yield from (files[i % len(files)] for i in range(count))
        return
    random, images = np.random.default_rng(0), photographs()
    for i in range(count):
        image = images[i % len(images)]
        width, height = image.size
        w, h = int(width * random.uniform(0.5, 1)), int(height * random.uniform(0.5, 1))
        left, top = int(random.integers(0, width - w + 1)), int(random.integers(0, height - h + 1))
        scale = 256 / min(w, h)
        part = image.crop((left, top, left + w, top + h)).resize(
            (round(w * scale), round(h * scale)), Image.Resampling.BICUBIC
        )
        yield encoded(part, 90)


def large_images(count: int) -> Iterable[bytes]:
    """JPEG files of 4000 x 3000."""
    random, images, files = np.random.default_rng(0), photographs(), []
    for i in range(min(count, DISTINCT)):
        pixels = np.asarray(images[i % len(images)].resize((4000, 3000), Image.Resampling.BICUBIC)).astype(np.float32)
        pixels += random.standard_normal((3000, 4000, 1), np.float32) * 4
        files.append(encoded(Image.fromarray(pixels.clip(0, 255).astype(np.uint8)), 92))
    yield from (files[i % len(files)] for i in range(count))


def encoded(image: Image.Image, quality: int) -> bytes:
    out = io.BytesIO()
    image.convert("RGB").save(out, "JPEG", quality=quality)
    return out.getvalue()


def write(files: Iterable[bytes], folder: Path) -> Path:
    """Write the files as a folder with two classes."""
    for i, data in enumerate(files):
        path = folder / ("even" if i % 2 == 0 else "odd") / f"{i:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def ours(folder: Path, batch: int, workers: int) -> Epoch:
    from vitrail.config import AugmentConfig, DataConfig, PreprocessConfig
    from vitrail.data.augment import Augment
    from vitrail.data.batches import training_batches
    from vitrail.data.sources.folder import open_folder

    config = DataConfig(source=f"folder:{folder}", workers=workers)
    source, augment = open_folder(folder, config).train, AugmentConfig()
    preprocess = PreprocessConfig(image_size=SIDE, mean=MEAN, std=STD)
    change = Augment(
        augment, preprocess=preprocess, image_size=(SIDE, SIDE), num_classes=2, batch_size=batch, seed=0, cropped=True
    )

    def epoch() -> Iterable[Any]:
        with training_batches(
            source, config=config, augment=augment, preprocess=preprocess, batch_size=batch, seed=0, device="cpu",
            steps=len(source) // batch,
        ) as batches:  # fmt: skip
            for each in batches:
                yield change(each)

    return epoch


def timms(folder: Path, batch: int, workers: int) -> Epoch:
    from timm.data import ImageDataset, create_loader

    loader = create_loader(
        ImageDataset(str(folder)), SIDE, batch, is_training=True, color_jitter=0.0, interpolation="bilinear", mean=MEAN,
        std=STD, num_workers=workers, device=torch.device("cpu"), persistent_workers=False,
    )  # fmt: skip
    return lambda: loader


def torchvisions(folder: Path, batch: int, workers: int, *, tensors: bool) -> Epoch:
    """Crops of Pillow's images, or of tensors made from them."""
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    crop = [v2.RandomResizedCrop(SIDE, antialias=True), v2.RandomHorizontalFlip()]
    steps = [v2.ToImage(), *crop] if tensors else [*crop, v2.ToImage()]
    steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    data = ImageFolder(str(folder), v2.Compose(steps))
    loader = DataLoader(data, batch, shuffle=True, num_workers=workers, drop_last=True)
    return lambda: loader


def loaders(folder: Path, batch: int, cores: int, against: Sequence[str]) -> dict[str, Callable[[], Epoch]]:
    found: dict[str, Callable[[], Epoch]] = {f"vitrail, {cores} workers": partial(ours, folder, batch, cores)}
    if "timm" in against:
        found["timm, its default of 1 worker"] = partial(timms, folder, batch, 1)
        found[f"timm, {cores} workers"] = partial(timms, folder, batch, cores)
    if "torchvision" in against:
        for name, tensors in (("images", False), ("tensors", True)):
            make = partial(torchvisions, folder, batch, cores, tensors=tensors)
            found[f"torchvision v2 on {name}, {cores} workers"] = make
    return found


def processor_seconds() -> float:
    return sum(
        used.ru_utime + used.ru_stime
        for used in (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def timed(make: Callable[[], Epoch]) -> tuple[float, float]:
    """Images per second of wall time and of CPU time."""
    epoch = make()
    count, start, used = 0, time.perf_counter(), processor_seconds()
    for images, _ in epoch():
        assert images.shape[1:] == (3, SIDE, SIDE)
        assert images.dtype == torch.float32
        count += len(images)
    wall = time.perf_counter() - start
    return count / wall, count / (processor_seconds() - used)


def in_process(run: Callable[[], Any]) -> Any:
    """The result of `run`, as JSON, in a forked process, so that no candidate profits from another's setup."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(run()).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        result = pipe.read()
    os.waitpid(child, 0)
    if not result:
        raise DataError("the process of a loader failed; see its traceback above.")
    return json.loads(result)


@dataclass(frozen=True, kw_only=True)
class LoaderRow:
    """The speed of one loader; each rate also as a ratio to the best other library's."""

    images: str
    """small or large."""
    loader: str
    images_per_s: float | None = None
    """Median over rounds."""
    ratio: float | None = None
    """Median of the ratios within a round."""
    best_round: float | None = None
    """The most reliable figure on a shared machine."""
    best_ratio: float | None = None
    per_cpu_s: float | None = None
    """Images per second of CPU time of all processes, in the best round."""
    cpu_ratio: float | None = None
    status: str = "ok"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(kind: str, epochs: Mapping[str, Callable[[], Epoch]], rounds: int, progress: Progress) -> list[LoaderRow]:
    """Time the loaders in turns, the fastest first; a library that is not installed is a row that says so."""
    missing, usable = {}, {}
    for who, make in epochs.items():
        try:
            make()  # imports are not timed
            usable[who] = make
        except ImportError as error:
            missing[who] = f"not installed ({error.name} is missing): pip install 'vitrail[bench]'"
    found: list[dict[str, tuple[float, float]]] = []
    for number in range(rounds):
        progress(f"{kind} images: round {number + 1} of {rounds}")
        found.append({})
        for who, make in list(usable.items()):
            try:
                found[-1][who] = in_process(partial(timed, make))
            except DataError:
                missing[who] = "failed: see its traceback"
                del usable[who]
    rows = [LoaderRow(images=kind, loader=who, **_rates(who, found)) for who in usable]
    rows.sort(key=lambda row: -(row.images_per_s or 0))
    return rows + [LoaderRow(images=kind, loader=who, status=why) for who, why in missing.items()]


def _rates(who: str, found: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, Any]:
    """The columns of a loader, from images per second of wall and of CPU time in each round."""
    names = found[-1]  # those that failed in an earlier round are not in the last one
    peers = [name for name in names if not name.startswith("vitrail")]
    best = {name: [max(turn[name][i] for turn in found) for i in (0, 1)] for name in names}
    ratios: list[float | None] = [None, None, None]
    if peers:
        ratios = [
            statistics.median(turn[who][0] / max(turn[peer][0] for peer in peers) for turn in found),
            *(best[who][i] / max(best[peer][i] for peer in peers) for i in (0, 1)),
        ]
    return {
        "images_per_s": statistics.median(turn[who][0] for turn in found),
        "ratio": ratios[0],
        "best_round": best[who][0],
        "best_ratio": ratios[1],
        "per_cpu_s": best[who][1],
        "cpu_ratio": ratios[2],
    }


def measure_input(
    *,
    against: Sequence[str] = ("timm", "torchvision"),
    small: int = 4096,
    large: int = 48,
    shards: str | None = None,
    rounds: int = 5,
    cores: int | None = None,
    progress: Progress = lambda what: None,
) -> list[LoaderRow]:
    """Compare the loaders on `small` images of 256 px and `large` ones of 12 megapixels; 0: none of them.

    `shards`: a folder of tar shards with JPEGs to take as the small images. Limits this process to `cores`.
    """
    for name in against:
        if name not in PEERS:
            raise ConfigError(f"unknown library {name!r}{did_you_mean(name, PEERS)}")
    if min(small, large) < 0 or not (small or large):
        raise ConfigError(f"got {small} small and {large} large images; expected some of at least one kind.")
    available = sorted(os.sched_getaffinity(0))
    cores = min(cores or len(available), len(available))
    os.sched_setaffinity(0, available[:cores])
    torch.set_num_threads(1)  # the workers have the cores
    declare_torchvision_operators()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for kind, count, batch in (("small", small, SMALL_BATCH), ("large", large, LARGE_BATCH)):
            if not count:
                continue
            progress(f"writing {count} {kind} images")
            files = write(small_images(count, shards) if kind == "small" else large_images(count), Path(folder, kind))
            rows += compare(kind, loaders(files, min(batch, count // 2), cores, against), rounds, progress)
    return rows

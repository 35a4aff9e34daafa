"""Images per second from JPEG files to normalized 224 px training batches: vitrail, timm and torchvision.

    python benchmarks/input.py [--against timm,torchvision] [--small 4096] [--large 48] [--data SHARDS] [--cores 2]

All loaders have the same files, the same cores and the same augmentation: a random resized crop (0.08 to 1 of the
area, bilinear), a horizontal flip with probability 0.5, and normalization. Each epoch is timed in a process of its
own, from the request of the first batch to the last batch, including the start of the workers. Rounds are
interleaved. The columns are the median over rounds, with the median of the ratios within a round; the best
round, which is the most reliable figure on a shared machine; and the images per second of CPU time of all
processes, in the best round.

Small images have a short side of 256: from the tar shards of the folder given with --data (ImageNet's, say), else
crops of the photographs in scikit-learn and scikit-image. Large images have 12 megapixels: the same photographs,
enlarged, with camera-like noise.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import statistics
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

SIDE = 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DISTINCT = 12
"""Number of different large images; the rest are copies of them."""
Epoch = Callable[[], Iterable[Any]]


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
        yield from (files[i % len(files)] for i in range(count))
        return
    random, images = np.random.default_rng(0), photographs()
    for i in range(count):
        image = images[i % len(images)]
        width, height = image.size
        w, h = int(width * random.uniform(0.5, 1)), int(height * random.uniform(0.5, 1))
        left, top = random.integers(0, width - w + 1), random.integers(0, height - h + 1)
        scale = 256 / min(w, h)
        part = image.crop((left, top, left + w, top + h)).resize((round(w * scale), round(h * scale)), Image.BICUBIC)
        yield encoded(part, 90)


def large_images(count: int) -> Iterable[bytes]:
    """JPEG files of 4000 x 3000."""
    random, images, files = np.random.default_rng(0), photographs(), []
    for i in range(min(count, DISTINCT)):
        pixels = np.asarray(images[i % len(images)].resize((4000, 3000), Image.BICUBIC)).astype(np.float32)
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


def loaders(folder: Path, batch: int, cores: int, against: list[str]) -> dict[str, Callable[[], Epoch]]:
    found = {f"vitrail, {cores} workers": partial(ours, folder, batch, cores)}
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
    return json.loads(result)


def compare(title: str, epochs: dict[str, Callable[[], Epoch]], rounds: int, cores: int) -> None:
    for make in epochs.values():
        make()  # imports are no part of it
    found = [{who: in_process(partial(timed, make)) for who, make in epochs.items()} for _ in range(rounds)]
    peers = [who for who in epochs if not who.startswith("vitrail")] or list(epochs)
    print(f"{title}; {rounds} rounds; {cores} cores, torch {torch.__version__}; in brackets: times the best peer's")
    print(f"  {'':42s} {'img/s, median':>17s} {'best round':>17s} {'per core-second':>17s}")
    rows = []
    for who in epochs:
        ratio = statistics.median(turn[who][0] / max(turn[peer][0] for peer in peers) for turn in found)
        columns = [(statistics.median(turn[who][0] for turn in found), ratio)]
        for i in (0, 1):
            best = {w: max(turn[w][i] for turn in found) for w in epochs}
            columns.append((best[who], best[who] / max(best[peer] for peer in peers)))
        rows.append((columns[0][0], who, "".join(f" {rate:9.1f} [{times:5.2f}]" for rate, times in columns)))
    for _, who, row in sorted(rows, reverse=True):
        print(f"  {who:42s}{row}")


def declare() -> torch.library.Library | None:
    """Declare the operators that torchvision's import needs if its library does not load (a CPU-only torch)."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    except ImportError:
        pass
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", default="timm,torchvision")
    parser.add_argument("--small", type=int, default=4096, help="images of 256 px; 0 for none")
    parser.add_argument("--large", type=int, default=48, help="images of 12 megapixels; 0 for none")
    parser.add_argument("--data", help="a folder of tar shards with JPEGs to take as the small images")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=int, default=2)
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    torch.set_num_threads(1)  # the workers have the cores
    declared = declare() if options.against else None
    against = [name for name in options.against.split(",") if name]
    with tempfile.TemporaryDirectory() as folder:
        if options.small:
            files = write(small_images(options.small, options.data), Path(folder, "small"))
            title = f"{options.small} images with a short side of 256"
            compare(title, loaders(files, 128, options.cores, against), options.rounds, options.cores)
        if options.large:
            files = write(large_images(options.large), Path(folder, "large"))
            title = f"{options.large} images of 12 megapixels"
            compare(title, loaders(files, 8, options.cores, against), options.rounds, options.cores)
    del declared


if __name__ == "__main__":
    main()

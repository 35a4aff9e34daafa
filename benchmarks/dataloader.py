"""vitrail's worker pool against torch's DataLoader as the transport between the same workers' code and the same loop.

    python benchmarks/dataloader.py [--images 4096] [--batch-size 64] [--cores 2] [--device cpu] [--rounds 7]

Both transports run the same decoding and cropping (`SampleReader`) on the same JPEG files, give identical pixels
(checked first) and prefetch the same number of images. Each epoch is timed in a process of its own, from the request of
the first batch to the last batch on the device, including the start of the workers; the rounds are interleaved.
With `--step MS` the device is busy for about as long after each batch, as in training; `waited` is the time per batch
that the loop waited for data.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitrail.bench.input_speed import in_process, small_images, write
from vitrail.config import AugmentConfig, DataConfig, PreprocessConfig
from vitrail.data import loader as loader_module
from vitrail.data.batch import Batch
from vitrail.data.batches import training_batches
from vitrail.data.loader import Loader, WorkerLoader, prefetch_depth
from vitrail.data.sources.folder import open_folder
from vitrail.data.transfer import TargetTable
from vitrail.data.transforms import SampleReader
from vitrail.runtime.malloc import tune_malloc

SIDE = 224


class ReadBatches(Dataset[Any]):
    """(indices, seeds) -> the batch's pixels, decoded by the worker that gets the request."""

    def __init__(self, reader: SampleReader, shape: tuple[int, ...]) -> None:
        self.reader, self.shape = reader, shape

    def __getitem__(self, request: Any) -> tuple[Tensor, Any, Any]:
        indices, seeds = request
        out = torch.empty(len(indices), *self.shape, dtype=torch.uint8)
        errors = self.reader(indices, seeds, out.numpy())
        return out, indices, errors


class DataLoaderLoader(Loader):
    """`WorkerLoader` with torch's DataLoader instead of the worker pool."""

    def __init__(
        self,
        reader: SampleReader,
        shape: tuple[int, ...],
        workers: int,
        depth: int,
        rows_for: Callable[[int], Any],
        target_table: TargetTable,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.target_table = target_table
        cuda = self.device.type == "cuda"
        self.batches = iter(
            DataLoader(
                ReadBatches(reader, shape),
                batch_size=None,
                sampler=[rows_for(step) for step in range(self.step, self.stop_step)],
                num_workers=workers,
                prefetch_factor=max(-(-depth // workers), 1),
                pin_memory=cuda,
                multiprocessing_context="fork",
                worker_init_fn=_tune_worker,
            )
        )
        self.stream = torch.cuda.Stream(self.device) if cuda else None
        self.staged: deque[tuple[Tensor, Tensor, Tensor, Any, Any]] = deque()

    def _stage(self) -> None:
        images, indices, _ = next(self.batches, (None, None, None))
        if images is None:
            return
        indices = np.asarray(indices)
        targets = self.target_table.targets_for(indices)
        weights = torch.from_numpy(self.target_table.usable(indices).astype(np.float32))
        if self.stream is None:
            self.staged.append((images, targets, weights, indices, None))
            return
        with torch.cuda.stream(self.stream):
            moved = [t.to(self.device, non_blocking=True) for t in (images, targets, weights)]
            copied = torch.cuda.Event()
            copied.record(self.stream)
        self.staged.append((*moved, indices, copied))

    def _load_batch(self, step: int) -> Batch:
        if not self.staged:
            self._stage()
        images, targets, weights, indices, copied = self.staged.popleft()
        if copied is not None:
            current = torch.cuda.current_stream()
            current.wait_event(copied)
            for tensor in (images, targets, weights):
                tensor.record_stream(current)
            self._stage()  # the next batch is copied while this one is used
        return Batch(step, images.permute(0, 3, 1, 2), targets, weights, self.slots, torch.from_numpy(indices))


def _tune_worker(number: int) -> None:
    torch.set_num_threads(1)
    tune_malloc()


def dataloader_instead_of_pool(
    pool: Any, source: Any, rows_for: Any, target_table: Any, on_errors: Any, **options: Any
) -> Loader:
    """Takes the arguments of WorkerLoader; `pool` is the arguments of `pool_for_transform`."""
    reader, transform, rows, workers = pool
    depth = prefetch_depth(transform, rows)
    return DataLoaderLoader(reader, transform.shape, workers, depth, rows_for, target_table, **options)


def batches(folder: Path, batch_size: int, workers: int, device: str, transport: str) -> Loader:
    config = DataConfig(source=f"folder:{folder}", workers=workers, resident=False)
    source, augment = open_folder(folder, config).train, AugmentConfig()
    originals = loader_module.pool_for_transform, WorkerLoader
    if transport == "DataLoader":
        loader_module.pool_for_transform = lambda *args: args  # type: ignore[assignment]
        loader_module.WorkerLoader = dataloader_instead_of_pool  # type: ignore[assignment, misc]
    try:
        return training_batches(
            source,
            config=config,
            augment=augment,
            preprocess=PreprocessConfig(image_size=SIDE),
            batch_size=batch_size,
            seed=0,
            device=device,
            steps=len(source) // batch_size,
        )
    finally:
        loader_module.pool_for_transform, loader_module.WorkerLoader = originals  # type: ignore[misc]


def busy(device: str, step_ms: float, state: dict[str, Any]) -> None:
    """Keep the device busy for about `step_ms`."""
    if not step_ms:
        return
    if device == "cpu":
        time.sleep(step_ms / 1e3)
        return
    if not state:
        state["x"] = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
        state["x"] @ state["x"]
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            state["x"] @ state["x"]
        torch.cuda.synchronize()
        state["count"] = max(round(step_ms / 1e3 / ((time.perf_counter() - start) / 20)), 1)
    for _ in range(state["count"]):
        state["x"] @ state["x"]


def timed_epoch(
    folder: Path, batch_size: int, workers: int, device: str, step_ms: float, transport: str
) -> dict[str, float]:
    state: dict[str, Any] = {}
    busy(device, step_ms, state)
    waited, count, start = 0.0, 0, time.perf_counter()
    with batches(folder, batch_size, workers, device, transport) as loader:
        source = iter(loader)
        while True:
            asked = time.perf_counter()
            batch = next(source, None)
            if batch is None:
                break
            waited += time.perf_counter() - asked
            busy(device, step_ms, state)
            if device != "cpu":
                torch.cuda.synchronize()
            count += 1
        seconds = time.perf_counter() - start
    return {"rate": count * batch_size / seconds, "waited": 1e3 * waited / count}


def check_same_pixels(folder: Path, batch_size: int, workers: int) -> None:
    def images(transport: str) -> Iterator[Tensor]:
        with batches(folder, batch_size, workers, "cpu", transport) as loader:
            for step, batch in enumerate(loader):
                if step == 3:
                    return
                yield batch.images.clone()

    for pool, dataloader in zip(images("pool"), images("DataLoader"), strict=True):
        assert torch.equal(pool, dataloader), "the transports give different pixels"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=4096)
    parser.add_argument("--data", help="a folder of tar shards with JPEGs; default: crops of bundled photographs")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--step", type=float, default=0, metavar="MS")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    with tempfile.TemporaryDirectory() as name:
        folder = write(small_images(options.images, options.data), Path(name))
        check_same_pixels(folder, options.batch_size, options.cores)
        results: dict[str, list[dict[str, float]]] = {"pool": [], "DataLoader": []}
        for _ in range(options.rounds):
            for transport, found in results.items():
                run = partial(
                    timed_epoch, folder, options.batch_size, options.cores, options.device, options.step, transport
                )
                found.append(in_process(run))
    print(f"{options.images} images, batch size {options.batch_size}, {options.cores} workers, {options.device}, "
          f"step {options.step:g} ms, {options.rounds} rounds")  # fmt: skip
    for transport, found in results.items():
        rates = [each["rate"] for each in found]
        waits = statistics.median(each["waited"] for each in found)
        ratio = statistics.median(
            pool["rate"] / each["rate"] for pool, each in zip(results["pool"], found, strict=True)
        )
        print(f"{transport:10} {statistics.median(rates):7.0f} images/s  best {max(rates):7.0f}  "
              f"waited {waits:6.1f} ms per batch  pool is {ratio:.3f} x as fast")  # fmt: skip


if __name__ == "__main__":
    main()

"""Copies to the device: pinned, in parallel with the computation, and the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_source import Images
from images import encoded
from PIL import Image

from vitrail.config import AugmentConfig, DataConfig, PreprocessConfig
from vitrail.data.batches import training_batches
from vitrail.data.loader import Loader, WorkerLoader
from vitrail.data.transfer import BatchTransfer, CudaBatchTransfer, TargetTable, make_transfer
from vitrail.data.worker_pool import FinishedBatch, InlinePool


def test_targets_are_looked_up_and_missing_ones_are_not_usable() -> None:
    labels = TargetTable(np.array([2, -1, 0]), multi_label=False, required=True)
    indices = np.array([0, 1, 2, -1])
    assert labels.targets_for(indices).tolist() == [2, 0, 0, 2]
    assert labels.usable(indices).tolist() == [True, False, True, False]
    assert TargetTable(labels.targets, multi_label=False, required=False).usable(indices).tolist() == [
        True,
        True,
        True,
        False,
    ]
    multi_label = TargetTable(np.array([[True, False], [False, False]]), multi_label=True, required=True)
    assert multi_label.targets_for(np.array([1, 0])).tolist() == [[0, 0], [1, 0]]
    assert multi_label.usable(np.array([1, -1])).tolist() == [True, False]


def test_on_the_cpu_nothing_is_copied() -> None:
    images = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
    finished = FinishedBatch(images, np.array([7, 8]), [(1, "broken")])
    staged = BatchTransfer(torch.device("cpu")).send(finished, torch.tensor([1, 2]), np.array([True, True]))
    batch = staged.to_batch(5, torch.tensor([0, 1]))
    assert (batch.step, batch.weights.tolist(), batch.indices.tolist()) == (5, [1, 0], [7, 8])
    assert batch.images.shape == (2, 3, 4, 5)
    assert batch.images.data_ptr() == images.ctypes.data
    assert np.array_equal(batch.images.permute(0, 2, 3, 1), images)


def files(folder: Path, count: int = 40) -> Images:
    random, found = np.random.default_rng(0), []
    for i in range(count):
        found.append(folder / f"{i}.jpg")
        pixels = random.integers(0, 256, (40 + i, 60, 3), np.uint8)
        found[-1].write_bytes(encoded(Image.fromarray(pixels), "JPEG"))
    return Images(found)


def train(source: Any, device: str, workers: int, steps: int = 12) -> Loader:
    return training_batches(
        source, config=DataConfig(workers=workers, resident=False), augment=AugmentConfig(),
        preprocess=PreprocessConfig(image_size=32), batch_size=16, seed=0, device=device, steps=steps,
    )  # fmt: skip


@pytest.mark.gpu
def test_pixels_on_the_gpu_are_those_of_the_cpu(tmp_path: Path) -> None:
    source = files(tmp_path)
    for workers in (0, 2):
        with train(source, "cpu", 0) as here, train(source, "cuda", workers) as there:
            assert isinstance(there, WorkerLoader)
            assert isinstance(there.transfer, CudaBatchTransfer)
            assert there.transfer.pinned is not None
            pairs = []
            for a, b in zip(here, there, strict=True):
                assert b.images.is_cuda
                assert not b.slots.is_cuda
                pairs.append((a, b))
        for a, b in pairs:  # only now the host waits
            for name in ("images", "targets", "weights", "indices", "slots"):
                assert torch.equal(getattr(a, name), getattr(b, name).cpu())


@pytest.mark.gpu
def test_memory_is_not_reused_before_it_is_copied(tmp_path: Path) -> None:
    source = files(tmp_path)
    with train(source, "cpu", 0, steps=60) as loader:
        expected = [int(b.images.sum(dtype=torch.int64)) for b in loader]
    sums = []
    with train(source, "cuda", 2, steps=60) as loader:
        for batch in loader:
            torch.cuda._sleep(3_000_000)  # the device is behind, as in training
            sums.append(batch.images.sum(dtype=torch.int64))
    assert [int(s) for s in sums] == expected


@pytest.mark.gpu
def test_the_cuda_transfer_pins_and_unpins() -> None:
    pool = InlinePool(lambda *_: [], rows=4, shape=(2, 2, 3), dtype=np.uint8, depth=1, task_rows=4)
    transfer = make_transfer(torch.device("cuda"), pool)
    assert isinstance(transfer, CudaBatchTransfer)
    assert torch.from_numpy(pool.buffer.images(0)).is_pinned()
    transfer.close()
    assert not torch.from_numpy(pool.buffer.images(0)).is_pinned()
    transfer.close()

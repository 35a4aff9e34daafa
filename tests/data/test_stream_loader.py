"""Training on a stream: independent of the number of workers, and resumable."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from images import encoded
from PIL import Image

from vitrail.config import AugmentConfig, DataConfig, PreprocessConfig
from vitrail.data.batch import Batch
from vitrail.data.batches import training_batches
from vitrail.data.loader import Loader
from vitrail.data.sources.stream import ShardStream
from vitrail.errors import DataError, TrainError

LABELS = ("a", "b", "c")


def write(path: Path, samples: list[tuple[str, dict[str, bytes]]]) -> str:
    with tarfile.open(path, "w") as tar:
        for key, parts in samples:
            for kind, data in parts.items():
                member = tarfile.TarInfo(f"{key}.{kind}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return str(path)


def encoded_image(number: int) -> bytes:
    random = np.random.default_rng(number)
    return encoded(Image.fromarray(random.integers(0, 256, (20 + number % 9, 24, 3), np.uint8)), "JPEG")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Four shards of 15."""
    folder = tmp_path_factory.mktemp("shards")
    return [
        write(
            folder / f"{s}.tar",
            [(f"{i:03d}", {"jpg": encoded_image(i), "cls": str(i % 3).encode()}) for i in range(15 * s, 15 * s + 15)],
        )
        for s in range(4)
    ]


def stream(shards: list[str]) -> ShardStream:
    return ShardStream("shards", shards, LABELS, DataConfig(source="stream:x"))


def train(source: ShardStream, **changes: Any) -> Loader:
    config = DataConfig(**{"workers": 0, **changes.pop("data", {})})
    options: dict[str, Any] = {
        "augment": AugmentConfig(), "preprocess": PreprocessConfig(image_size=16), "batch_size": 8, "seed": 3,
        "device": "cpu",
        "steps": 10,
    }  # fmt: skip
    return training_batches(source, config=config, **{**options, **changes})


def same(a: Batch, b: Batch) -> bool:
    names = ("images", "targets", "weights", "slots")
    return a.step == b.step and all(torch.equal(getattr(a, n), getattr(b, n)) for n in names)


def test_the_number_of_workers_changes_nothing(shards: list[str]) -> None:
    runs = []
    for workers in (0, 1, 3):
        with train(stream(shards), data={"workers": workers}) as loader:
            runs.append(list(loader))
        assert loader.cropped
        assert len(runs[-1]) == 10
    for other in runs[1:]:
        assert all(same(a, b) for a, b in zip(runs[0], other, strict=True))


def test_an_epoch_has_every_image_once(shards: list[str]) -> None:
    with train(stream(shards), batch_size=60, steps=2, augment=AugmentConfig(crop="none")) as loader:
        first, second = list(loader)
    for batch in (first, second):
        assert np.bincount(batch.targets, minlength=3).tolist() == [20, 20, 20]
        assert len({image.numpy().tobytes() for image in batch.images}) == 60
    assert not torch.equal(first.images, second.images)


def test_two_ranks_share_the_images(shards: list[str]) -> None:
    seen: list[bytes] = []
    for rank in range(2):
        with train(
            stream(shards), batch_size=60, steps=1, augment=AugmentConfig(crop="none"), rank=rank, world_size=2
        ) as loader:
            batch = next(loader)
        assert batch.slots.tolist() == list(range(30 * rank, 30 * rank + 30))
        seen += [image.numpy().tobytes() for image in batch.images]
    assert len(set(seen)) == 60


@pytest.mark.parametrize("stop", [0, 1, 4, 9])
def test_it_resumes_from_its_state(shards: list[str], stop: int) -> None:
    with train(stream(shards)) as loader:
        whole = list(loader)
    with train(stream(shards), data={"workers": 2}) as loader:
        for _ in range(stop):
            next(loader)
        state = json.loads(json.dumps(loader.state()))
    with train(stream(shards), start_step=stop, state=state) as loader:
        rest = list(loader)
    assert len(rest) == 10 - stop
    assert all(same(a, b) for a, b in zip(whole[stop:], rest, strict=True))


def test_a_state_of_other_ranks_is_refused(shards: list[str]) -> None:
    with train(stream(shards)) as loader:
        state = loader.state()
    with pytest.raises(TrainError, match="another number of ranks"):
        train(stream(shards), state=state, world_size=2)


def test_bad_images_have_no_weight_and_too_many_end_it(shards: list[str], tmp_path: Path) -> None:
    samples = [
        (f"{i}", {"jpg": encoded_image(i)[:-200] if i % 4 == 1 else encoded_image(i), "cls": b"1"}) for i in range(16)
    ]
    damaged = write(tmp_path / "damaged.tar", samples)
    with train(stream([damaged]), batch_size=16, steps=2, data={"max_bad_fraction": 0.004}) as loader:
        batches = list(loader)
    assert [b.weights.sum().item() for b in batches] == [12, 12]
    assert set(loader.bad) == {"damaged/1", "damaged/5", "damaged/9", "damaged/13"}
    with (
        pytest.raises(DataError, match=r"4 of 1,000 images of shards cannot be read"),
        train(stream([damaged]), batch_size=16, steps=2, data={"max_bad_fraction": 0.003}) as loader,
    ):
        list(loader)


def test_images_without_a_label_have_no_weight_where_one_is_needed(tmp_path: Path) -> None:
    samples = [(f"{i}", {"jpg": encoded_image(i), **({"cls": b"2"} if i % 2 else {})}) for i in range(8)]
    shard = write(tmp_path / "half.tar", samples)
    for labeled, weight in ((True, 4), (False, 8)):
        with train(stream([shard]), steps=1, labeled=labeled) as loader:
            batch = next(loader)
        assert batch.weights.sum() == weight
        assert sorted(batch.targets.tolist()) == [0] * 4 + [2] * 4


def test_several_labels(tmp_path: Path) -> None:
    samples = [(f"{i}", {"jpg": encoded_image(i), "txt": b"a|c" if i % 2 else b"b"}) for i in range(8)]
    with train(stream([write(tmp_path / "several.tar", samples)]), steps=1) as loader:
        batch = next(loader)
    assert sorted(batch.targets.tolist()) == [[0, 1, 0]] * 4 + [[1, 0, 1]] * 4


def test_stream_errors_are_raised_by_the_loader(shards: list[str], tmp_path: Path) -> None:
    cut = tmp_path / "cut.tar"
    cut.write_bytes(Path(shards[0]).read_bytes()[:9000])
    with pytest.raises(DataError, match="is truncated"), train(stream([str(cut)]), steps=100) as loader:
        list(loader)


def test_closing_early_ends_the_thread_that_reads(shards: list[str]) -> None:
    loader = train(stream(shards), steps=10_000)
    next(loader)
    loader.close()
    assert not loader.reader_thread.thread.is_alive()  # type: ignore[attr-defined]

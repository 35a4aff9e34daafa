"""The flat copy of a Parquet file's images: made once by all processes, and not at all where it cannot be written."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pyarrow as pa
import pytest

from vitrail.data.sources.parquet_cache import ExtractedImages, extract_images

IMAGES = [b"first", b"", b"the third"]


def extract(tmp_path: Path, reads: list[int]) -> ExtractedImages | None:
    """Copy IMAGES; appends to `reads` whenever they are read."""
    table = tmp_path / "table.parquet"

    def groups():
        reads.append(1)
        time.sleep(0.2)
        yield pa.array(IMAGES)

    return extract_images([table], "image", groups(), sum(map(len, IMAGES)))


def test_threads_that_need_the_same_copy_wait_for_the_first(tmp_path, cache):
    (tmp_path / "table.parquet").touch()
    reads, found = [], []
    threads = [threading.Thread(target=lambda: found.append(extract(tmp_path, reads))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reads) == 1
    assert [[copy[i] for i in range(3)] for copy in found] == [IMAGES] * 4
    assert {path.suffix for path in (cache / "parquet").iterdir()} == {".bin", ".npy", ".lock"}


@pytest.mark.parametrize("fault", ["no lock file", "full disk"])
def test_without_a_writable_cache_there_is_no_copy(tmp_path, cache, monkeypatch, fault):
    (tmp_path / "table.parquet").touch()

    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    if fault == "full disk":
        monkeypatch.setattr("os.fsync", refuse)
    else:
        monkeypatch.setattr(Path, "open", refuse)
    assert extract(tmp_path, []) is None
    assert not [path for path in (cache / "parquet").iterdir() if path.suffix != ".lock"]


def test_an_interrupted_copy_leaves_nothing_and_is_made_again(tmp_path, cache):
    def interrupted():
        yield pa.array(IMAGES[:1])
        raise KeyboardInterrupt

    (tmp_path / "table.parquet").touch()
    with pytest.raises(KeyboardInterrupt):
        extract_images([tmp_path / "table.parquet"], "image", interrupted(), 100)
    assert [path.suffix for path in (cache / "parquet").iterdir()] == [".lock"]
    copy = extract(tmp_path, [])
    assert [copy[i] for i in range(3)] == IMAGES

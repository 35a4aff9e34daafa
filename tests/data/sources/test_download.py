"""Downloads: atomic, resumed after an interruption, verified, with clear errors."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import struct
import threading

import numpy as np
import pytest

from vitrail.config import DataConfig
from vitrail.data.sources import decoded_cache, download, open_source_splits
from vitrail.data.sources.catalog import CATALOG, PublishedFile
from vitrail.errors import DataError, NotFoundError

DATA = np.random.default_rng(0).bytes(900_000)
FILE = PublishedFile("data.bin", len(DATA), hashlib.md5(DATA).hexdigest())


def get(server, tmp_path, file=FILE, verify=True, base_urls=None):
    return download.download(file, base_urls or [f"{server.url}/"], tmp_path / "here", verify)


@pytest.fixture
def full(server):
    server.files["data.bin"] = DATA
    return server


def test_a_file_is_downloaded_once(full, tmp_path):
    path = get(full, tmp_path)
    assert path.read_bytes() == DATA
    get(full, tmp_path)
    assert len(full.requests) == 1
    assert {p.name for p in path.parent.iterdir()} <= {"data.bin", ".data.bin.lock"}


def test_an_interrupted_download_is_resumed(full, tmp_path):
    full.break_after = [300_000, 200_000]
    assert get(full, tmp_path).read_bytes() == DATA
    assert [expected for _, _, expected in full.requests] == [None, "bytes=300000-", "bytes=500000-"]


def test_a_server_without_ranges_starts_from_the_beginning(full, tmp_path):
    full.ranges = False
    full.break_after = [300_000]
    assert get(full, tmp_path).read_bytes() == DATA
    assert full.sent == 300_000 + len(DATA)


def test_the_download_of_an_interrupted_process_is_resumed(full, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "data.bin.part").write_bytes(DATA[:123_456])
    assert get(full, tmp_path).read_bytes() == DATA
    assert full.sent == len(DATA) - 123_456


def test_a_partial_download_does_not_have_the_final_name(full, tmp_path):
    full.break_after, full.failures = [300_000], [0, 404]
    with pytest.raises(download.DownloadError, match="Not Found"):
        get(full, tmp_path)
    assert not (tmp_path / "here" / "data.bin").exists()
    assert (tmp_path / "here" / "data.bin.part").stat().st_size == 300_000


def test_a_wrong_checksum_leaves_nothing_behind(full, tmp_path):
    full.files["data.bin"] = DATA[:-1] + b"?"
    with pytest.raises(download.DownloadError, match=rf"its MD5 is \w+, expected {FILE.md5}"):
        get(full, tmp_path)
    assert not [p for p in (tmp_path / "here").iterdir() if "lock" not in p.name]
    full.files["data.bin"] = DATA
    assert get(full, tmp_path).read_bytes() == DATA


def test_a_partial_download_that_is_too_long_starts_again(full, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "data.bin.part").write_bytes(DATA + b"more")
    with pytest.raises(download.DownloadError, match="the partial download of 900,004 bytes is longer"):
        get(full, tmp_path)
    assert get(full, tmp_path).read_bytes() == DATA


def test_the_next_url_is_tried(full, tmp_path):
    addresses = [f"{full.url}/moved/", "http://127.0.0.1:9/", f"{full.url}/"]
    assert get(full, tmp_path, base_urls=addresses).read_bytes() == DATA


def test_every_url_that_failed_is_named(full, tmp_path):
    with pytest.raises(
        download.DownloadError, match=r"127\.0\.0\.1:\d+/moved/: Not Found; http://127\.0\.0\.1:9/: .*refused"
    ):
        get(full, tmp_path, base_urls=[f"{full.url}/moved/", "http://127.0.0.1:9/"])


def test_processes_that_need_the_same_file_wait_for_the_first(full, tmp_path):
    threads = [threading.Thread(target=get, args=(full, tmp_path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(full.requests) == 1


def test_a_folder_that_cannot_be_written_is_named(full, tmp_path):
    (tmp_path / "here").write_text("a file is in the way")
    with pytest.raises(DataError, match=r"cannot write data\.bin to .*here"):
        get(full, tmp_path)


# A dataset as a whole


@pytest.fixture
def mnist(server, monkeypatch):
    """A small dataset in place of MNIST, on the server."""
    rng = np.random.default_rng(1)
    made, files = {}, []
    for part, word, count in (("train", "train", 20), ("test", "t10k", 10)):
        pixels = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        targets = np.arange(count, dtype=np.uint8) % 10
        made[part] = pixels[..., None], targets.astype(np.int64)
        for name, array in ((f"{word}-images-idx3", pixels), (f"{word}-labels-idx1", targets)):
            head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
            data = gzip.compress(head + array.tobytes(), mtime=0)
            server.files[f"{name}-ubyte.gz"] = data
            files.append(PublishedFile(f"{name}-ubyte.gz", len(data), hashlib.md5(data).hexdigest()))
    entry = dataclasses.replace(
        CATALOG["mnist"],
        split_sizes=(20, 10),
        digest=decoded_cache.content_digest(made),
        base_urls=(f"{server.url}/",),
        files=tuple(files),
    )
    monkeypatch.setitem(CATALOG, "mnist", entry)
    return server


def test_a_dataset_is_downloaded_once_and_verified(mnist, cache):
    parts = open_source_splits(DataConfig(source="mnist"))
    assert (len(parts.train), len(parts.test), parts.notes) == (20, 10, ())
    assert len(list((cache / "mnist").glob("*.gz"))) == 4
    mnist.requests.clear()
    assert len(open_source_splits(DataConfig(source="mnist")).train) == 20
    assert mnist.requests == []


def test_a_recompressed_archive_verifies_and_another_content_does_not(mnist, cache):
    name = "t10k-labels-idx1-ubyte.gz"
    plain = gzip.decompress(mnist.files[name])
    mnist.files[name] = gzip.compress(plain, 1, mtime=5)
    assert len(open_source_splits(DataConfig(source="mnist")).test) == 10
    for path in (cache / "mnist").glob("*.gz"):
        path.unlink()
    mnist.files[name] = gzip.compress(plain[:-1] + b"\0")
    with pytest.raises(DataError, match=r"does not contain mnist as published: .*it has been removed; try again"):
        open_source_splits(DataConfig(source="mnist"))
    assert not list((cache / "mnist").glob("*.gz"))
    mnist.files[name] = gzip.compress(plain)
    assert len(open_source_splits(DataConfig(source="mnist")).test) == 10


def test_without_a_digest_the_files_md5_decides(mnist, monkeypatch):
    monkeypatch.setitem(CATALOG, "mnist", dataclasses.replace(CATALOG["mnist"], digest=""))
    name = "t10k-labels-idx1-ubyte.gz"
    whole = mnist.files[name]
    mnist.files[name] = gzip.compress(gzip.decompress(whole), 1, mtime=5)
    with pytest.raises(NotFoundError, match="its MD5 is"):
        open_source_splits(DataConfig(source="mnist"))
    mnist.files[name] = whole
    assert open_source_splits(DataConfig(source="mnist")).notes == ()
    assert (
        open_source_splits(DataConfig(source="mnist")).notes == ()
    )  # found in the cache, whose files are the published ones


def test_no_network_says_where_to_put_the_files(mnist, cache, monkeypatch):
    monkeypatch.setitem(
        CATALOG, "mnist", dataclasses.replace(CATALOG["mnist"], base_urls=("http://127.0.0.1:9/mnist/",))
    )
    with pytest.raises(NotFoundError) as error:
        open_source_splits(DataConfig(source="mnist"))
    message = str(error.value)
    assert message.startswith("mnist is not on this machine and could not be downloaded (http://127.0.0.1:9/mnist/: ")
    assert "put train-images-idx3-ubyte.gz, " in message
    assert f"into {cache / 'mnist'}, or give the folder that has them with root=" in message

"""`vitrail datasets`: the list, details, JSON and downloads."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import struct
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from vitrail.cli.console import out
from vitrail.data.sources import decoded_cache
from vitrail.data.sources.catalog import CATALOG, PublishedFile


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache; the system-wide folder is disabled."""
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr("vitrail.data.sources.data_cache.SYSTEM_DIR", tmp_path / "none")
    return tmp_path / "cache"


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def server_url(tmp_path, monkeypatch):
    """URL of a local server of small files in MNIST's format."""
    folder = tmp_path / "served"
    folder.mkdir()
    splits, files = {}, []
    for split, prefix, count in (("train", "train", 20), ("test", "t10k", 10)):
        pixels = np.full((count, 28, 28), count, np.uint8)
        targets = np.arange(count, dtype=np.uint8) % 10
        splits[split] = pixels[..., None], targets.astype(np.int64)
        for name, array in ((f"{prefix}-images-idx3-ubyte.gz", pixels), (f"{prefix}-labels-idx1-ubyte.gz", targets)):
            header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
            data = gzip.compress(header + array.tobytes())
            (folder / name).write_bytes(data)
            files.append(PublishedFile(name, len(data), hashlib.md5(data).hexdigest()))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder))) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        entry = dataclasses.replace(
            CATALOG["mnist"],
            split_sizes=(20, 10),
            digest=decoded_cache.content_digest(splits),
            base_urls=(url,),
            files=tuple(files),
        )
        monkeypatch.setitem(CATALOG, "mnist", entry)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield url
        server.shutdown()
        thread.join()


def test_every_dataset_is_listed_with_its_location(vitrail):
    result = vitrail("datasets")
    assert (result.status, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0].split() == ["name", "images", "classes", "image", "size", "location"]
    assert [line.split()[0] for line in lines[1:]] == list(CATALOG)
    assert lines[1] == "digits          1,797       10       8 x 8  in scikit-learn"
    expected = (
        "cifar10        60,000       10     32 x 32  not downloaded (170 MB from https://www.cs.toronto.edu/~kriz/)"
    )
    assert expected in lines


@pytest.mark.parametrize("columns", [60, 80, 99, 140])
def test_no_line_is_wider_than_the_window(vitrail, monkeypatch, columns):
    monkeypatch.setattr(out, "width", columns)
    result = vitrail("datasets")
    lines = result.out.splitlines()
    assert max(map(len, lines)) <= columns
    if columns >= 80:  # no line is wrapped
        assert len(lines) == len(CATALOG) + (2 if columns < 100 else 1)
    assert not [line for line in lines if line != line.rstrip()]
    assert ("For the URLs, widen the window to 100 columns" in result.out) == (columns < 100)


def test_one_dataset_is_shown_in_detail(vitrail):
    result = vitrail("datasets", "CIFAR-100")
    assert "50,000 training, 10,000 test" in result.out
    assert "100: apple, aquarium_fish, baby" in result.out
    assert "no digest known; the published MD5 of its files is checked" in result.out


def test_json_is_complete_and_the_only_output(vitrail):
    result = vitrail("datasets", "--json")
    assert result.err == ""
    rows = {row["name"]: row for row in json.loads(result.out)["datasets"]}
    assert list(rows) == list(CATALOG)
    assert (rows["digits"]["available"], rows["digits"]["folder"]) == (True, None)
    assert (rows["mnist"]["available"], rows["mnist"]["download_bytes"]) == (False, 11_594_722)
    assert rows["cifar10"]["image_shape"] == [32, 32, 3]


def test_dataset_is_downloaded_to_the_cache(vitrail, server_url, cache):
    assert f"not downloaded (0 MB from {server_url})" in vitrail("datasets", "mnist").out
    result = vitrail("datasets", "mnist", "--download")
    assert (result.status, result.err) == (0, "")
    assert str(cache / "mnist") in result.out.replace("\n", "")
    assert "(verified)" in result.out
    [row] = json.loads(vitrail("datasets", "mnist", "--json").out)["datasets"]
    assert (row["folder"], row["layout"]) == (str(cache / "mnist"), "IDX")


def test_root_option_is_searched(vitrail, server_url, tmp_path):
    [row] = json.loads(vitrail("datasets", "mnist", "--root", tmp_path / "served", "--json").out)["datasets"]
    assert row["folder"] == str(tmp_path / "served")


def test_digits_are_always_available(vitrail):
    assert vitrail("datasets", "digits", "--download").status == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mnst"], "unknown built-in dataset 'mnst'; did you mean 'mnist'?"),
        (["--download"], "--download needs the name of a dataset, such as vitrail datasets cifar10 --download."),
        (
            ["mnist", "--root", "/no/such/folder"],
            "root=/no/such/folder is not a folder; expected one that contains mnist.",
        ),
    ],
)
def test_invalid_arguments_are_one_sentence_errors(vitrail, arguments, message):
    result = vitrail("datasets", *arguments)
    assert (result.status, result.out, result.errors) == (1, "", [message])

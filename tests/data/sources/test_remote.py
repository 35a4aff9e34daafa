"""Remote shards: a server with range requests, one without, one that fails, and S3."""

from __future__ import annotations

import builtins
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import need_extra

from vitrail.config import DataConfig
from vitrail.data.sources import open_source_splits, remote, shard_index
from vitrail.errors import ConfigError, DataError, NotFoundError

need_extra("cloud")


def opened(spec, **settings):
    return open_source_splits(DataConfig(source=spec, **settings))


@pytest.fixture
def web(server, make_tar, png_bytes):
    """Two shards of five large images each, with labels and class names."""
    for s in range(2):
        members = []
        for i in range(5 * s, 5 * s + 5):
            members += [(f"{i:03d}.cls", b"%d" % (i % 2)), (f"{i:03d}.png", png_bytes(i, 200))]
        server.files[f"set/train-{s}.tar"] = make_tar(members)
    server.files["set/classes.json"] = json.dumps(["cat", "dog"]).encode()
    return server


def test_samples_have_random_access_and_the_index_reads_only_headers(web, png_bytes):
    source = opened(f"{web.url}/set/train-{{0..1}}.tar").train
    whole = sum(len(data) for name, data in web.files.items() if name.endswith("tar"))
    assert web.sent < whole / 10
    assert (len(source), source.blocks, source.labels) == (10, (5, 5), ("cat", "dog"))
    assert source.targets.tolist() == [i % 2 for i in range(10)]
    before = web.sent
    assert source[7].image == png_bytes(7, 200)
    assert web.sent - before == len(png_bytes(7, 200))
    assert source.key(7) == "train-1/007"


def test_the_index_is_rebuilt_when_the_etag_changes(web, cache, make_tar, monkeypatch):
    spec = f"shards:{web.url}/set/train-0.tar"
    opened(spec)
    assert len(list((cache / "shards").glob("*train-0.tar.index"))) == 1
    made = []
    whole = shard_index.build_index
    monkeypatch.setattr(shard_index, "build_index", lambda shard: made.append(shard) or whole(shard))
    assert len(opened(spec).train) == 5
    assert made == []
    web.etag, web.files["set/train-0.tar"] = "two", make_tar([("a.png", b"x"), ("a.cls", b"0")])
    assert len(opened(spec).train) == 1
    assert made == [f"{web.url}/set/train-0.tar"]


def test_shards_on_a_server_without_ranges_are_downloaded_once(web, png_bytes, cache):
    web.ranges = False
    spec = f"{web.url}/set/train-{{0..1}}.tar"
    source = opened(spec).train
    assert [source[i].image for i in (9, 0, 4)] == [png_bytes(i, 200) for i in (9, 0, 4)]
    assert len(list((cache / "shards").glob("*.tar"))) == 2
    web.requests.clear()
    again = opened(spec).train
    assert again[9].image == png_bytes(9, 200)
    assert not [path for method, path, _ in web.requests if method == "GET" and path.endswith(".tar")]


def test_small_images_are_read_ahead_in_few_requests(server, make_tar, png_bytes):
    members = [m for i in range(300) for m in ((f"{i:03d}.png", png_bytes(i)), (f"{i:03d}.cls", b"0"))]
    server.files["train.tar"] = make_tar(members)
    assert len(opened(f"{server.url}/train.tar").train) == 300
    assert len([1 for method, path, _ in server.requests if (method, path) == ("GET", "train.tar")]) < 15


def test_temporary_errors_are_retried_and_permanent_ones_are_named(web):
    source = opened(f"{web.url}/set/train-0.tar").train
    web.failures = [503, 500]
    assert len(source[0].image) > 1000
    web.failures = [503] * 20
    with pytest.raises(DataError, match=rf"cannot read {web.url}/set/train-0\.tar after 4 attempts .*503"):
        source[1]


def test_missing_and_truncated_shards_are_named(web):
    with pytest.raises(NotFoundError, match=rf"{web.url}/set/train-7\.tar does not exist"):
        opened(f"{web.url}/set/train-7.tar")
    web.files["set/train-0.tar"] = web.files["set/train-0.tar"][:-90_000]
    with pytest.raises(DataError, match=r"set/train-0\.tar is truncated"):
        opened(f"{web.url}/set/train-0.tar")


def test_samples_are_read_from_threads_and_after_pickling(web, png_bytes):
    source = pickle.loads(pickle.dumps(opened(f"{web.url}/set/train-{{0..1}}.tar").train))
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda i: source[i % 10].image, range(40))) == [png_bytes(i % 10, 200) for i in range(40)]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_samples_are_read_in_a_forked_process(web, png_bytes):
    source = opened(f"{web.url}/set/train-0.tar").train
    assert source[0].image == png_bytes(0, 200)  # the connection of this process is open
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=lambda: queue.put(source[3].image))
    child.start()
    assert queue.get(timeout=20) == png_bytes(3, 200)
    child.join()


def test_samples_are_read_in_a_spawned_process(web, png_bytes):
    source = opened(f"{web.url}/set/train-0.tar").train
    code = "import pickle, sys; s = pickle.load(sys.stdin.buffer); sys.stdout.buffer.write(s[3].image)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(source), capture_output=True, check=True, env=environment
    )
    assert done.stdout == png_bytes(3, 200)


def test_without_fsspec_it_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def refuse(name, *arguments, **options):
        if name == "fsspec":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"reading s3://bucket/x\.tar needs fsspec: pip install 'vitrail\[cloud\]'"):
        remote.fetch("s3://bucket/x.tar")


def test_a_file_system_that_is_not_installed_is_named():
    with pytest.raises(ConfigError, match=r"reading gs://bucket/x\.tar needs gcsfs: pip install 'vitrail\[cloud\]'"):
        remote.fetch("gs://bucket/x.tar")
    with pytest.raises(DataError, match=r"cannot read odd://x"):
        remote.fetch("odd://x")


@pytest.fixture
def bucket(monkeypatch):
    """A local S3 server (moto)."""
    pytest.importorskip("s3fs")
    moto_server = pytest.importorskip("moto.server")
    botocore = pytest.importorskip("botocore.session")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    running = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    client = botocore.get_session().create_client("s3", endpoint_url=f"http://{host}:{port}")
    client.create_bucket(Bucket="images")
    yield client
    running.stop()


def test_s3_is_read_by_ranges(bucket, make_tar, png_bytes):
    members = [m for i in range(6) for m in ((f"{i}.png", png_bytes(i, 60)), (f"{i}.cls", b"%d" % (i % 2)))]
    bucket.put_object(Bucket="images", Key="set/train-0.tar", Body=make_tar(members))
    bucket.put_object(Bucket="images", Key="set/classes.json", Body=b'["cat", "dog"]')
    for spec in ("s3://images/set/train-{0..0}.tar", "shards:s3://images/set/*.tar"):
        source = opened(spec).train
        assert (len(source), source.labels) == (6, ("cat", "dog"))
        assert source[4].image == png_bytes(4, 60)
        assert source[4].target == 0
    with pytest.raises(NotFoundError, match=r"s3://images/set/train-9\.tar does not exist"):
        opened("s3://images/set/train-9.tar")

"""Shards on another machine: a server with ranges, one without, one that fails, and S3."""

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
from vitrail.errors import ConfigError, DataError, NotFound

need_extra("cloud")


def opened(spec, **settings):
    return open_source_splits(DataConfig(source=spec, **settings))


@pytest.fixture
def web(server, tar_of, draw):
    """Two shards of five large images each, with labels, and the names of the classes."""
    for s in range(2):
        members = []
        for i in range(5 * s, 5 * s + 5):
            members += [(f"{i:03d}.cls", b"%d" % (i % 2)), (f"{i:03d}.png", draw(i, 200))]
        server.files[f"set/train-{s}.tar"] = tar_of(members)
    server.files["set/classes.json"] = json.dumps(["cat", "dog"]).encode()
    return server


def test_any_sample_is_reached_and_the_index_reads_headers_alone(web, draw):
    source = opened(f"{web.url}/set/train-{{0..1}}.tar").train
    whole = sum(len(data) for name, data in web.files.items() if name.endswith("tar"))
    assert web.sent < whole / 10
    assert (len(source), source.blocks, source.labels) == (10, (5, 5), ("cat", "dog"))
    assert source.targets.tolist() == [i % 2 for i in range(10)]
    before = web.sent
    assert source[7].image == draw(7, 200)
    assert web.sent - before == len(draw(7, 200))
    assert source.key(7) == "train-1/007"


def test_the_index_is_made_once_and_again_when_the_etag_changes(web, cache, tar_of, monkeypatch):
    spec = f"shards:{web.url}/set/train-0.tar"
    opened(spec)
    assert len(list((cache / "shards").glob("*train-0.tar.index"))) == 1
    made = []
    whole = shard_index.build_index
    monkeypatch.setattr(shard_index, "build_index", lambda shard: made.append(shard) or whole(shard))
    assert len(opened(spec).train) == 5
    assert made == []
    web.etag, web.files["set/train-0.tar"] = "two", tar_of([("a.png", b"x"), ("a.cls", b"0")])
    assert len(opened(spec).train) == 1
    assert made == [f"{web.url}/set/train-0.tar"]


def test_a_server_without_ranges_is_copied_from_once(web, draw, cache):
    web.ranges = False
    spec = f"{web.url}/set/train-{{0..1}}.tar"
    source = opened(spec).train
    assert [source[i].image for i in (9, 0, 4)] == [draw(i, 200) for i in (9, 0, 4)]
    assert len(list((cache / "shards").glob("*.tar"))) == 2
    web.asked.clear()
    again = opened(spec).train
    assert again[9].image == draw(9, 200)
    assert not [path for method, path, _ in web.asked if method == "GET" and path.endswith(".tar")]


def test_small_images_are_read_ahead_in_few_requests(server, tar_of, draw):
    members = [m for i in range(300) for m in ((f"{i:03d}.png", draw(i)), (f"{i:03d}.cls", b"0"))]
    server.files["train.tar"] = tar_of(members)
    assert len(opened(f"{server.url}/train.tar").train) == 300
    assert len([1 for method, path, _ in server.asked if (method, path) == ("GET", "train.tar")]) < 15


def test_a_failure_that_passes_is_tried_again_and_one_that_stays_is_named(web):
    source = opened(f"{web.url}/set/train-0.tar").train
    web.failures = [503, 500]
    assert len(source[0].image) > 1000
    web.failures = [503] * 20
    with pytest.raises(DataError, match=rf"cannot read {web.url}/set/train-0\.tar after 4 attempts .*503"):
        source[1]


def test_a_shard_that_is_not_there_and_one_that_is_cut(web):
    with pytest.raises(NotFound, match=rf"{web.url}/set/train-7\.tar does not exist"):
        opened(f"{web.url}/set/train-7.tar")
    web.files["set/train-0.tar"] = web.files["set/train-0.tar"][:-90_000]
    with pytest.raises(DataError, match=r"set/train-0\.tar is truncated"):
        opened(f"{web.url}/set/train-0.tar")


def test_samples_are_read_from_threads_and_after_pickling(web, draw):
    source = pickle.loads(pickle.dumps(opened(f"{web.url}/set/train-{{0..1}}.tar").train))
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda i: source[i % 10].image, range(40))) == [draw(i % 10, 200) for i in range(40)]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_samples_are_read_in_a_forked_process(web, draw):
    source = opened(f"{web.url}/set/train-0.tar").train
    assert source[0].image == draw(0, 200)  # the connection of this process is open
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=lambda: queue.put(source[3].image))
    child.start()
    assert queue.get(timeout=20) == draw(3, 200)
    child.join()


def test_samples_are_read_in_a_process_of_its_own(web, draw):
    source = opened(f"{web.url}/set/train-0.tar").train
    code = "import pickle, sys; s = pickle.load(sys.stdin.buffer); sys.stdout.buffer.write(s[3].image)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(source), capture_output=True, check=True, env=environment
    )
    assert done.stdout == draw(3, 200)


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
    """S3, imitated by moto on this machine."""
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


def test_s3_is_read_by_ranges(bucket, tar_of, draw):
    members = [m for i in range(6) for m in ((f"{i}.png", draw(i, 60)), (f"{i}.cls", b"%d" % (i % 2)))]
    bucket.put_object(Bucket="images", Key="set/train-0.tar", Body=tar_of(members))
    bucket.put_object(Bucket="images", Key="set/classes.json", Body=b'["cat", "dog"]')
    for spec in ("s3://images/set/train-{0..0}.tar", "shards:s3://images/set/*.tar"):
        source = opened(spec).train
        assert (len(source), source.labels) == (6, ("cat", "dog"))
        assert source[4].image == draw(4, 60)
        assert source[4].target == 0
    with pytest.raises(NotFound, match=r"s3://images/set/train-9\.tar does not exist"):
        opened("s3://images/set/train-9.tar")

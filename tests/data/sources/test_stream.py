"""Streams: workers without overlap, shuffling, and exact resumption from a state."""

from __future__ import annotations

import gzip
import itertools
import json
import pickle

import pytest
from conftest import need_extra
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.config import DataConfig
from vitrail.data.sources import ShardStream, open_data, open_source_splits
from vitrail.data.sources import stream as module
from vitrail.errors import DataError, TrainError


@pytest.fixture
def web(shards):
    """Five shards of six samples, with class names."""
    folder = shards("web", 5, 6)
    (folder / "classes.json").write_text('["cat", "dog", "emu"]')
    return folder


@pytest.fixture
def stream(web) -> ShardStream:
    return open_source_splits(DataConfig(source=f"stream:{web}")).train


def keys(reader, count):
    return [sample.key for sample in itertools.islice(reader, count)]


def test_an_epoch_holds_every_sample_once_with_its_label(stream, png_bytes):
    found = list(itertools.islice(stream.samples(buffer=7), 30))
    assert len({s.key for s in found}) == 30
    for sample in found:
        number = int(sample.key.split("/")[1])
        assert sample.key == f"train-{number // 6:03d}/{number:06d}"
        assert (sample.image, sample.target) == (png_bytes(number), number % 3)


def test_the_order_is_shuffled_and_another_each_epoch_and_seed(stream):
    reader = stream.samples(buffer=7, seed=1)
    first, second = keys(reader, 30), keys(reader, 30)
    assert set(first) == set(second)
    assert first != second
    assert first != sorted(first)
    assert keys(stream.samples(buffer=7, seed=1), 30) == first
    assert keys(stream.samples(buffer=7, seed=2), 30) != first


@pytest.mark.parametrize(("world", "workers"), [(1, 2), (5, 1), (2, 2), (4, 2), (7, 1)])
def test_ranks_and_workers_share_an_epoch_without_overlap(stream, world, workers):
    parts = []
    for rank, worker in itertools.product(range(world), range(workers)):
        reader = stream.samples(None, rank, world, worker=worker, num_workers=workers, buffer=4)
        mine = []
        while True:
            sample = next(reader)
            if reader.start.epoch > 0:
                break
            mine.append(sample.key)
        parts.append(mine)
    together = [key for part in parts for key in part]
    assert len(together) == len(set(together)) == 30
    assert all(parts)


@settings(max_examples=25)
@given(cut=st.integers(0, 75), more=st.integers(1, 40), buffer=st.integers(1, 40), world=st.sampled_from([1, 2, 7]))
def test_a_saved_state_resumes_exactly(stream_of_five, cut, more, buffer, world):
    def fresh(state=None):
        return stream_of_five.samples(state, 0, world, seed=3, buffer=buffer)

    whole = keys(fresh(), cut + more)
    reader = fresh()
    keys(reader, cut)
    state = json.loads(json.dumps(reader.state))
    assert keys(fresh(state), more) == whole[cut:]
    assert keys(reader, more) == whole[cut:]  # reading the state does not change it


@pytest.fixture(scope="module")
def stream_of_five(tmp_path_factory, make_tar, png_bytes):
    folder = tmp_path_factory.mktemp("five")
    for s in range(5):
        members = [m for i in range(s, 30, 5) for m in ((f"{i}.png", png_bytes(i)), (f"{i}.cls", b"0"))]
        (folder / f"{s}.tar").write_bytes(make_tar(members))
    return open_source_splits(DataConfig(source=f"stream:{folder}", class_names=["all"])).train


def test_the_random_stream_has_its_fixed_number():
    assert module.SHUFFLE == 0x8B672A17  # another number would change the order of every run


def test_a_state_is_a_position_and_a_count(stream):
    reader = stream.samples(buffer=4)
    keys(reader, 9)  # two buffers of four, and one of the third
    state = reader.state
    assert {k: state[k] for k in ("epoch", "shard", "member", "drawn")} == {
        "epoch": 0,
        "shard": 1,
        "member": 2,
        "drawn": 1,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world_size": 2}, "another number of ranks and workers"),
        ({"seed": 1}, "another seed"),
        ({"buffer": 5}, "another buffer"),
    ],
)
def test_a_state_of_another_run_is_refused(stream, change, message):
    state = stream.samples(buffer=4).state
    with pytest.raises(
        TrainError, match=rf"the saved state of the stream is for {message}.* resumes only with the same settings"
    ):
        stream.samples(state, **{"buffer": 4, **change})


def test_a_state_of_other_shards_is_refused(stream, shards):
    state = stream.samples().state
    folder = shards("other", 5, 6)
    other = open_source_splits(DataConfig(source=f"stream:{folder}", class_names=["a", "b", "c"])).train
    with pytest.raises(TrainError, match="is for other shards"):
        other.samples(state)


def test_a_stream_is_picklable(stream):
    copy = pickle.loads(pickle.dumps(stream))
    assert keys(copy.samples(), 30) == keys(stream.samples(), 30)


def test_a_stream_states_its_limitations_and_needs_a_validation_source(web, shards, logged_notes):
    with pytest.raises(DataError, match=r"no images of .* can be held out.*give a validation source with validation="):
        open_data(DataConfig(source=f"stream:{web}"))
    shards("web", 1, 3, prefix="val")
    splits = open_data(DataConfig(source=f"stream:{web}"))
    assert (len(splits.validation), splits.eval_split) == (3, "validation")
    assert len(splits.train.shards) == 5
    assert logged_notes == [module.LIMITATIONS]
    other = open_data(DataConfig(source=f"stream:{web}/train-{{000..004}}.tar", validation=f"{web}/val-000.tar"))
    assert other.validation.labels == other.train.labels == ("cat", "dog", "emu")
    with pytest.raises(DataError, match="is a stream, which cannot be used for validation"):
        open_data(DataConfig(source=f"{web}/train-000.tar", validation=f"stream:{web}/val-000.tar"))


def test_class_names_come_from_the_validation_source_or_must_be_given(shards):
    folder = shards("bare", 2, 6)
    with pytest.raises(DataError, match=r"are unknown.* put classes\.json next to the shards, or give them"):
        open_source_splits(DataConfig(source=f"stream:{folder}"))
    shards("bare", 1, 6, prefix="val")
    assert open_source_splits(DataConfig(source=f"stream:{folder}")).train.labels == ("0", "1", "2")


def test_invalid_labels_are_named(shards):
    folder = shards("bare", 1, 6)
    reader = open_source_splits(DataConfig(source=f"stream:{folder}", class_names=["cat", "dog"])).train.samples()
    with pytest.raises(DataError, match="train-000/000002 has the label 2, but there are 2 classes"):
        next(reader)


def test_multi_label_data_is_detected_from_the_first_samples(tmp_path, make_tar, png_bytes):
    members = [
        ("a.png", png_bytes(0)),
        ("a.json", b'{"tags": ["x", "y"]}'),
        ("b.png", png_bytes(1)),
        ("b.json", b'{"tags": "y"}'),
    ]
    (tmp_path / "s.tar").write_bytes(make_tar(members))
    stream = open_source_splits(DataConfig(source=f"stream:{tmp_path / 's.tar'}", class_names=["x", "y"])).train
    assert stream.multi_label
    assert {s.key: s.target for s in itertools.islice(stream.samples(), 2)} == {"s/a": (0, 1), "s/b": (1,)}


def test_a_compressed_shard_is_read(tmp_path, make_tar, png_bytes):
    (tmp_path / "s.tar.gz").write_bytes(gzip.compress(make_tar([("a.png", png_bytes(0)), ("a.cls", b"1")])))
    stream = open_source_splits(DataConfig(source=f"stream:{tmp_path / 's.tar.gz'}", class_names=["x", "y"])).train
    sample = next(stream.samples())
    assert (sample.key, sample.image, sample.target) == ("s/a", png_bytes(0), 1)


@pytest.mark.parametrize("cut", [700, 1300, 2100])
def test_a_truncated_shard_is_named(tmp_path, make_tar, cut):
    whole = make_tar([("a.png", bytes(600)), ("a.cls", b"0"), ("b.png", bytes(600)), ("b.cls", b"0")])
    (tmp_path / "s.tar").write_bytes(whole[:cut])
    config = DataConfig(source=f"stream:{tmp_path / 's.tar'}", class_names=["x"])
    with pytest.raises(DataError, match=r"s\.tar is truncated"):
        next(open_source_splits(config).train.samples())


def test_shards_without_images_do_not_loop_forever(tmp_path, make_tar):
    (tmp_path / "s.tar").write_bytes(make_tar([("a.cls", b"0")]))
    stream = open_source_splits(DataConfig(source=f"stream:{tmp_path / 's.tar'}", class_names=["x"])).train
    with pytest.raises(DataError, match="s has no images for worker 0 of 1"):
        next(stream.samples())


def test_a_stream_over_http_survives_a_connection_that_breaks(server, make_tar, png_bytes):
    need_extra("cloud")
    members = [m for i in range(8) for m in ((f"{i}.png", png_bytes(i, 60)), (f"{i}.cls", b"0"))]
    server.files["s.tar"] = make_tar(members)
    stream = open_source_splits(DataConfig(source=f"stream:{server.url}/s.tar", class_names=["x"])).train
    server.break_after = [20_000, 40_000]
    found = {s.key: s.image for s in itertools.islice(stream.samples(), 8)}
    assert found == {f"s/{i}": png_bytes(i, 60) for i in range(8)}
    assert server.break_after == []

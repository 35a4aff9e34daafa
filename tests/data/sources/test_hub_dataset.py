"""Datasets on the hub, with a local HTTP server in its place."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import FakeHub, fill_cache, serve, use_hub
from huggingface_hub import constants

from vitrail.config import DataConfig
from vitrail.data.sources import open_data, open_source_splits
from vitrail.data.sources.hub_dataset import PARQUET_BRANCH, parse_repository, select_files
from vitrail.errors import DataError, NotFoundError
from vitrail.storage.hub_client import HubRepository

REPO = "someone/animals"
MAIN, CONVERSION = "a" * 40, "c" * 40


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[FakeHub]:
    with serve(FakeHub("dataset", REPO, {}, {"main": MAIN})) as state:
        use_hub(state.url, tmp_path, monkeypatch)
        yield state


@pytest.fixture
def parquet(png_bytes):
    """The bytes of a Parquet file with images first..last, in the hub's layout."""

    def make(first: int, last: int, column: str = "image") -> bytes:
        images = [{"bytes": png_bytes(i), "path": None} for i in range(first, last)]
        table = pa.table({column: images, "label": [i % 2 for i in range(first, last)]})
        told = {"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}
        out = io.BytesIO()
        pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(told)}), out)
        return out.getvalue()

    return make


@pytest.fixture
def animals(hub, parquet):
    hub.files[MAIN] = {
        "README.md": b"# Animals",
        "data/train-00000-of-00002.parquet": parquet(0, 4),
        "data/train-00001-of-00002.parquet": parquet(4, 7),
        "data/test-00000-of-00001.parquet": parquet(10, 12),
        "notes.zip": b"must not be fetched",
    }
    return hub


def opened(spec, **settings):
    return open_source_splits(DataConfig(source=spec, **settings))


@pytest.mark.parametrize(
    "spec", [f"hf:{REPO}", f"hf:{REPO}@main", f"https://huggingface.co/datasets/{REPO}", f"hf:hf://datasets/{REPO}"]
)
def test_a_dataset_is_downloaded_and_opened(animals, png_bytes, spec):
    parts = opened(spec)
    assert animals.downloaded() == {n for n in animals.files[MAIN] if n != "notes.zip"}
    assert (len(parts.train), parts.validation, len(parts.test)) == (7, None, 2)
    assert parts.train.labels == ("cat", "dog")
    assert [parts.train[i].image for i in range(7)] == [png_bytes(i) for i in range(7)]
    assert parts.train.name == "animals/train"
    assert open_data(DataConfig(source=spec)).eval_split == "test"


def test_the_second_time_nothing_is_fetched_and_offline_it_still_opens(animals, monkeypatch):
    opened(f"hf:{REPO}")
    animals.requests.clear()
    assert len(opened(f"hf:{REPO}").train) == 7
    assert animals.requests == []
    animals.error_status = 503
    assert len(opened(f"hf:{REPO}").train) == 7
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert len(opened(f"hf:{REPO}").test) == 2


def test_a_cache_filled_by_another_program_is_used_if_complete(animals, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    fill_cache(
        tmp_path / "hub",
        animals,
        ("data/train-00000-of-00002.parquet", "data/test-00000-of-00001.parquet"),
        MAIN,
    )
    with pytest.raises(
        NotFoundError, match=r"has 1 of 2 files of someone/animals like data/train-00000-of-00002\.parquet"
    ):
        opened(f"hf:{REPO}")
    fill_cache(tmp_path / "hub", animals, ("data/train-00001-of-00002.parquet",), MAIN)
    assert len(opened(f"hf:{REPO}").train) == 7


def test_other_files_are_read_from_the_hubs_conversion_to_parquet(hub, parquet):
    hub.files[MAIN] = {"images.zip": b"must not be fetched"}
    with pytest.raises(NotFoundError, match=r"someone/animals has no Parquet files on the hub, and no conversion"):
        opened(f"hf:{REPO}")
    hub.commits[PARQUET_BRANCH] = CONVERSION
    hub.files[CONVERSION] = {
        "default/train/0000.parquet": parquet(0, 3),
        "default/train/0001.parquet": parquet(3, 4),
        "default/validation/0000.parquet": parquet(4, 6),
    }
    parts = opened(f"hf:{REPO}")
    assert (len(parts.train), len(parts.validation), parts.test) == (4, 2, None)


def test_a_configuration_is_selected_by_name(hub, parquet):
    hub.files[MAIN] = {"big/train-0.parquet": parquet(0, 5), "small/train-0.parquet": parquet(0, 2)}
    assert len(opened(f"hf:{REPO}:small").train) == 2
    assert hub.downloaded() == {"small/train-0.parquet"}
    with pytest.raises(
        DataError, match=r"has several configurations \(big, small\); choose one: hf:someone/animals:big"
    ):
        opened(f"hf:{REPO}")
    with pytest.raises(NotFoundError, match=r"has no configuration 'smal'; did you mean 'small'\?"):
        opened(f"hf:{REPO}:smal")


def test_the_card_assigns_files_to_configurations(hub, parquet):
    hub.files[MAIN] = {
        "README.md": b"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: a/*\n"
        b"  - split: validation\n    path: [b.parquet]\n---\n# Animals\n",
        "a/x.parquet": parquet(0, 3),
        "a/y.parquet": parquet(3, 5),
        "b.parquet": parquet(5, 6),
        "c.parquet": parquet(6, 9),
    }
    parts = opened(f"hf:{REPO}")
    assert (len(parts.train), len(parts.validation)) == (5, 1)
    assert "c.parquet" not in hub.downloaded()


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["train.parquet", "test.parquet"], {"train": ["train.parquet"], "test": ["test.parquet"]}),
        (["data/train-0.parquet", "val.parquet"], {"train": ["data/train-0.parquet"], "validation": ["val.parquet"]}),
        (["plain_text/train-0.parquet"], {"train": ["plain_text/train-0.parquet"]}),
        (["0000.parquet", "0001.parquet"], {"train": ["0000.parquet", "0001.parquet"]}),
        (["test-0.parquet"], {"train": ["test-0.parquet"]}),
        (["README.md"], {}),
    ],
)  # fmt: skip
def test_files_are_assigned_to_splits_by_their_names(names, expected):
    assert select_files(names, {}, HubRepository("dataset", "a/b")) == expected


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("a/b", ("a/b", None, None)),
        ("a/b@v1", ("a/b", "v1", None)),
        ("a/b:c", ("a/b", None, "c")),
        ("a/b@refs/pr/1:c", ("a/b", "refs/pr/1", "c")),
    ],
)
def test_repository_names_are_parsed(spec, expected):
    name, revision, config = expected
    assert parse_repository(spec) == (HubRepository("dataset", name, revision), config)


def test_invalid_repository_names_are_refused():
    with pytest.raises(NotFoundError, match="hf:mnist is not a dataset name; expected hf:user/name"):
        parse_repository("mnist")


def test_errors_of_the_hub_are_one_sentence(animals, monkeypatch):
    with pytest.raises(NotFoundError, match=r"no revision 'v9'; .*/datasets/someone/animals/tree/main"):
        opened(f"hf:{REPO}@v9")
    with pytest.raises(NotFoundError, match="no public dataset someone/cars at http"):
        opened("hf:someone/cars")
    animals.error_status = 503
    with pytest.raises(DataError, match="returned status 503 for someone/animals; try again later"):
        opened(f"hf:{REPO}")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"could not download someone/animals from http://127\.0\.0\.1:9 .*check the"):
        opened(f"hf:{REPO}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(NotFoundError, match="someone/animals is missing or incomplete in the cache"):
        opened(f"hf:{REPO}")


def test_a_damaged_download_is_removed_and_downloaded_again(animals):
    animals.corrupt = True
    with pytest.raises(DataError, match=r"train-00000-of-00002\.parquet of someone/animals was damaged"):
        opened(f"hf:{REPO}")
    animals.corrupt = False
    assert len(opened(f"hf:{REPO}").train) == 7

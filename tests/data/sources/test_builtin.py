"""Built-in datasets: every layout and location, verified by content."""

from __future__ import annotations

import dataclasses
import gzip
import io
import os
import pickle
import struct
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from images import encoded
from PIL import Image
from scipy.io import savemat
from sklearn.datasets import load_digits

from vitrail.config import DataConfig
from vitrail.data.sources import builtin, data_cache, decoded_cache, layouts, open_data, open_source_splits
from vitrail.data.sources.catalog import CATALOG
from vitrail.errors import DataError, NotFoundError

COUNTS = (30, 10)


def raw(entry, seed=0):
    """A small dataset of the same shape."""
    rng = np.random.default_rng(seed)
    made = {}
    for part, count in zip(("train", "test"), COUNTS, strict=True):
        targets = np.arange(count) % len(entry.labels)
        made[part] = rng.integers(0, 256, (count, *entry.shape), dtype=np.uint8), targets.astype(np.int64)
    return made


@pytest.fixture
def small(monkeypatch):
    """`small("cifar10")`: the catalog's entry made small, and its content."""

    def make(name):
        entry = CATALOG[name]
        made = raw(entry)
        entry = dataclasses.replace(entry, split_sizes=COUNTS, digest=decoded_cache.content_digest(made), base_urls=())
        monkeypatch.setitem(CATALOG, name, entry)
        return entry, made

    return make


# Layouts


def write_idx(folder, made, compressed=True, dot=False):
    folder.mkdir(parents=True, exist_ok=True)
    for part, word in (("train", "train"), ("test", "t10k")):
        pixels, targets = made[part]
        for kind, array in (("images-idx3", pixels[..., 0]), ("labels-idx1", targets.astype(np.uint8))):
            data = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
            name = f"{word}-{kind.replace('-idx', '.idx') if dot else kind}-ubyte"
            path = folder / (f"{name}.gz" if compressed else name)
            path.write_bytes(gzip.compress(data, 1) if compressed else data)


def old_pickle(pixels, targets, key):
    """A batch as Python 2's cPickle wrote it, opcode by opcode: strings of bytes, NumPy's old names."""

    def text(value):
        return b"U" + bytes([len(value)]) + value

    rows = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)).reshape(len(pixels), -1)
    dtype = (
        b"cnumpy\ndtype\n"
        + text(b"u1")
        + b"K\0K\1\x87R(K\3"
        + text(b"|")
        + b"NNN"
        + 2 * b"J\xff\xff\xff\xff"
        + b"K\0tb"
    )
    data = rows.tobytes()
    shape = b"".join(b"J" + struct.pack("<i", n) for n in rows.shape) + b"\x86"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85" + text(b"b") + b"\x87R(K\1" + shape
    array += dtype + b"\x89T" + struct.pack("<i", len(data)) + data + b"tb"
    labels = b"](" + b"".join(b"K" + bytes([t]) for t in targets.tolist()) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(key) + labels + text(b"batch_label") + text(b"one") + b"u."


def batches(entry, made, key):
    """File name -> its bytes, as in CIFAR's archives."""
    if entry.name == "cifar100":
        return {part: old_pickle(*made[part], key) for part in made}
    pixels, targets = made["train"]
    pieces = zip(np.split(pixels, 5), np.split(targets, 5), strict=True)
    files = {f"data_batch_{i}": old_pickle(*piece, key) for i, piece in enumerate(pieces, start=1)}
    return {**files, "test_batch": old_pickle(*made["test"], key)}


def write_pickles(folder, entry, made):
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in batches(entry, made, b"fine_labels" if entry.name == "cifar100" else b"labels").items():
        (folder / name).write_bytes(data)


def write_archive(folder, entry, made):
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / f"{entry.name.replace('cifar', 'cifar-')}-python.tar.gz", "w:gz") as archive:
        for name, data in batches(entry, made, b"fine_labels" if entry.name == "cifar100" else b"labels").items():
            info = tarfile.TarInfo(f"any-folder/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def write_binary(folder, entry, made):
    folder.mkdir(parents=True, exist_ok=True)
    for part, (pixels, targets) in made.items():
        rows = pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1)
        before = [np.full_like(targets, 7), targets] if entry.name == "cifar100" else [targets]
        records = np.concatenate([np.stack(before, 1).astype(np.uint8), rows], 1)
        names = layouts._cifar_names(entry, part)
        for name, piece in zip(names, np.split(records, len(names)), strict=True):
            (folder / f"{name}.bin").write_bytes(piece.tobytes())


def write_parquet(folder, entry, made):
    folder.mkdir(parents=True, exist_ok=True)
    for part, (pixels, targets) in made.items():
        images = [{"bytes": encoded(Image.fromarray(p.squeeze()), "PNG"), "path": None} for p in pixels]
        columns = {"img": images, "fine_label" if entry.name == "cifar100" else "label": targets}
        pq.write_table(pa.table(columns), folder / f"{part}-00000-of-00001.parquet")


WAYS = {
    "IDX": ("mnist", "mnist", lambda f, e, m: write_idx(f, m)),
    "IDX, unpacked": ("fashion-mnist", "FashionMNIST/raw", lambda f, e, m: write_idx(f, m, compressed=False)),
    "IDX, with points": ("kmnist", "kmnist", lambda f, e, m: write_idx(f, m, compressed=False, dot=True)),
    "pickles": ("cifar10", "cifar-10-batches-py", write_pickles),
    "pickles of 100": ("cifar100", "cifar100/cifar-100-python", write_pickles),
    "archive": ("cifar10", "cifar10", write_archive),
    "archive of 100": ("cifar100", ".", write_archive),
    "binary": ("cifar10", "cifar10/cifar-10-batches-bin", write_binary),
    "binary of 100": ("cifar100", "cifar-100-binary", write_binary),
    "Parquet": ("cifar10", "cifar10/plain_text", write_parquet),
    "Parquet of 100": ("cifar100", "cifar100", write_parquet),
    "Parquet, gray": ("mnist", "mnist/data", write_parquet),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_layout_has_the_same_content(small, tmp_path, way):
    name, folder, write = WAYS[way]
    entry, made = small(name)
    write(tmp_path / "data" / folder, entry, made)
    splits = open_data(DataConfig(source=name, root=str(tmp_path / "data")))
    assert (splits.eval_split, splits.test) == ("test", splits.validation)
    for part, source in (("train", splits.train), ("test", splits.test)):
        assert np.array_equal(source.pixels, made[part][0])
        assert source.targets.tolist() == made[part][1].tolist()
        assert source.labels == entry.labels
        sample = source[3]
        assert (sample.key, sample.target) == (f"{part}/00003", int(made[part][1][3]))
        assert np.array_equal(sample.image, made[part][0][3])
        assert np.array_equal(pickle.loads(pickle.dumps(source))[3].image, sample.image)


def test_label_ten_of_svhn_is_zero(small, tmp_path):
    _, made = small("svhn")
    for part, (pixels, targets) in made.items():
        labels = np.where(targets == 0, 10, targets)[:, None].astype(np.uint8)
        savemat(tmp_path / f"{part}_32x32.mat", {"X": np.moveaxis(pixels, 0, -1), "y": labels})
    source = open_source_splits(DataConfig(source="svhn", root=str(tmp_path))).train
    assert np.array_equal(source.pixels, made["train"][0])
    assert source.targets.tolist() == made["train"][1].tolist()


class Evil:
    def __reduce__(self):
        return os.system, ("echo this must not run",)


def test_a_pickle_with_code_in_it_is_refused(small, tmp_path, capfd):
    entry, made = small("cifar10")
    write_pickles(tmp_path / "cifar10", entry, made)
    (tmp_path / "cifar10" / "data_batch_3").write_bytes(pickle.dumps({b"data": Evil()}, protocol=2))
    with pytest.raises(DataError, match=r"data_batch_3 is not a CIFAR pickle: it refers to (posix|nt)\.system"):
        open_source_splits(DataConfig(source="cifar10", root=str(tmp_path)))
    assert "must not run" not in capfd.readouterr().out


def test_a_pickle_that_python_3_wrote_is_read(small, tmp_path):
    _, made = small("cifar100")
    for part, (pixels, targets) in made.items():
        rows = pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1)
        saved = {b"data": rows, b"fine_labels": targets.tolist()}
        (tmp_path / part).write_bytes(pickle.dumps(saved, protocol=2))
    source = open_source_splits(DataConfig(source="cifar100", root=str(tmp_path))).test
    assert np.array_equal(source.pixels, made["test"][0])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda data: gzip.compress(gzip.decompress(data)[:-5]),
            r"train-images.* is truncated: it has 23,515 of 23,520 bytes",
        ),
        (lambda data: data[:200], r"cannot read .*train-images.*: .*copy or download it again"),
        (lambda data: gzip.compress(b"no idx"), r"train-images.* is not an IDX file of bytes"),
        (lambda data: gzip.compress(gzip.decompress(data)[:-1] + b"?"), r"does not contain mnist as published"),
    ],
)
def test_a_damaged_file_is_named(small, tmp_path, spoil, message):
    _, made = small("mnist")
    made["train"][0].flat[-1] = 0
    write_idx(tmp_path / "mnist", made)
    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(DataError, match=message):
        open_source_splits(DataConfig(source="mnist", root=str(tmp_path)))


def test_recompressed_and_reordered_files_verify(small, tmp_path):
    entry, made = small("mnist")
    order = np.random.default_rng(1).permutation(COUNTS[0])
    made["train"] = made["train"][0][order], made["train"][1][order]
    write_idx(tmp_path / "mnist", made)
    assert decoded_cache.content_digest(made) == entry.digest
    assert len(open_source_splits(DataConfig(source="mnist", root=str(tmp_path))).train) == COUNTS[0]


def test_a_label_or_a_pixel_changes_the_digest():
    made = raw(CATALOG["mnist"])
    before = decoded_cache.content_digest(made)
    made["train"][1][3] += 1
    after = decoded_cache.content_digest(made)
    made["test"][0][0, 0, 0, 0] ^= 1
    assert len({before, after, decoded_cache.content_digest(made)}) == 3


# Places


def test_the_given_root_precedes_the_cache_which_precedes_the_system_folder(small, tmp_path, cache):
    entry, made = small("mnist")
    for folder in (tmp_path / "mine" / "MNIST" / "raw", cache / "mnist", data_cache.SYSTEM_DIR / "mnist"):
        write_idx(folder, made)
    assert builtin.find_dataset(entry, str(tmp_path / "mine")).folder == tmp_path / "mine" / "MNIST" / "raw"
    assert builtin.find_dataset(entry).folder == cache / "mnist"
    for path in (cache / "mnist").iterdir():
        path.unlink()
    assert builtin.find_dataset(entry).folder == data_cache.SYSTEM_DIR / "mnist"
    assert builtin.find_dataset(entry, str(tmp_path)).folder == data_cache.SYSTEM_DIR / "mnist"
    with pytest.raises(NotFoundError, match=r"root=.*nowhere is not a folder; expected one that contains mnist"):
        builtin.find_dataset(entry, str(tmp_path / "nowhere"))


def test_another_dataset_with_the_same_layout_is_skipped(small, tmp_path, monkeypatch):
    _, digits = small("mnist")
    clothes = dataclasses.replace(CATALOG["fashion-mnist"], split_sizes=COUNTS, digest="0" * 64, base_urls=())
    monkeypatch.setitem(CATALOG, "fashion-mnist", clothes)
    write_idx(tmp_path, digits)
    with pytest.raises(NotFoundError, match=r"fashion-mnist is not on this machine.*apt install dataset-fashion-mnist"):
        open_source_splits(DataConfig(source="fashion-mnist", root=str(tmp_path)))


def test_an_unnamed_folder_is_identified_by_its_content(small, tmp_path, monkeypatch):
    entry, made = small("mnist")
    monkeypatch.setitem(CATALOG, "kmnist", dataclasses.replace(CATALOG["kmnist"], split_sizes=COUNTS))
    write_idx(tmp_path / "files", made)
    assert builtin.find_dataset(entry, str(tmp_path / "files")).folder == tmp_path / "files"
    assert builtin.find_dataset(CATALOG["kmnist"], str(tmp_path / "files")) is None
    assert builtin.find_dataset(CATALOG["fashion-mnist"], str(tmp_path / "files")) is None


def test_slow_layouts_are_decoded_once(small, tmp_path, cache, monkeypatch):
    entry, made = small("cifar10")
    write_parquet(tmp_path / "cifar10", entry, made)
    config = DataConfig(source="cifar10", root=str(tmp_path))
    open_source_splits(config)
    monkeypatch.setattr(layouts, "decode", lambda *_: pytest.fail("decoded again"))
    assert np.array_equal(open_source_splits(config).train.pixels, made["train"][0])
    assert builtin.find_dataset(entry).layout == "decoded"
    assert np.array_equal(open_source_splits(DataConfig(source="cifar10")).test.pixels, made["test"][0])
    (cache / "cifar10" / "decoded" / "test-pixels.npy").unlink()  # an incomplete copy is not used
    assert builtin.find_dataset(entry) is None


def test_a_cache_that_is_not_writable_is_not_used(small, tmp_path, monkeypatch):
    entry, made = small("cifar10")
    write_parquet(tmp_path / "cifar10", entry, made)
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "file"))
    assert len(open_source_splits(DataConfig(source="cifar10", root=str(tmp_path))).train) == COUNTS[0]


def test_without_a_digest_a_note_says_so(small, tmp_path, logged_notes, monkeypatch):
    entry, made = small("kmnist")
    monkeypatch.setitem(CATALOG, "kmnist", dataclasses.replace(entry, digest=""))
    write_idx(tmp_path / "kmnist", made)
    open_data(DataConfig(source="kmnist", root=str(tmp_path)))
    assert logged_notes == [f"the content of {tmp_path / 'kmnist'} could not be verified: no digest of kmnist is known"]


# What is in them


def test_digits_are_scikit_learns_in_a_fixed_split():
    parts = open_source_splits(DataConfig(source="digits"))
    found = load_digits()
    assert {"train": parts.train.pixels.shape, "test": parts.test.pixels.shape} == {
        "train": (1438, 8, 8, 1),
        "test": (359, 8, 8, 1),
    }
    assert (parts.train.pixels.dtype, parts.train.pixels.max()) == (np.uint8, 255)
    sources = (parts.train, parts.test)
    ours = {(p.tobytes(), int(t)) for s in sources for p, t in zip(s.pixels, s.targets, strict=True)}
    scaled = np.rint(found.images * 255 / 16).astype(np.uint8)
    assert ours == {(p.tobytes(), int(t)) for p, t in zip(scaled, found.target, strict=True)}
    share = np.bincount(parts.test.targets) / np.bincount(found.target)
    assert np.abs(share - 0.2).max() < 0.004
    made = {"train": (parts.train.pixels, parts.train.targets), "test": (parts.test.pixels, parts.test.targets)}
    assert decoded_cache.content_digest(made) == CATALOG["digits"].digest


def test_an_exact_fraction_of_each_class_is_held_out():
    splits = open_data(DataConfig(source="digits", held_out=0.1))
    whole = np.bincount(open_source_splits(DataConfig(source="digits")).train.targets)
    held = np.bincount(splits.validation.targets)
    assert held.tolist() == [round(0.1 * n) for n in whole]
    assert (len(splits.train) + len(splits.validation), len(splits.test)) == (1438, 359)
    assert len(splits.train.pixels) == len(splits.train)
    assert np.array_equal(splits.validation.pixels[5], splits.validation[5].image)


def test_class_names_may_be_given_in_another_order():
    plain = open_source_splits(DataConfig(source="digits")).train
    turned = open_source_splits(DataConfig(source="digits", class_names=[str(9 - i) for i in range(10)])).train
    assert turned.targets.tolist() == [9 - t for t in plain.targets]
    with pytest.raises(DataError, match=r"data\.class_names= gives 2 names, but digits has 10 classes"):
        open_source_splits(DataConfig(source="digits", class_names=["0", "1"]))


def test_the_catalog_is_complete():
    for name, entry in CATALOG.items():
        assert entry.name == name
        assert len(set(entry.labels)) == len(entry.labels) == (100 if name == "cifar100" else 10)
        assert bool(entry.files) == bool(entry.base_urls) == (name != "digits")
        assert all(address.endswith("/") for address in entry.base_urls)
        assert not entry.digest or len(entry.digest) == 64


@pytest.mark.slow
def test_the_real_cifar10_is_the_published_one(shared):
    folder = shared / "data"
    if not (folder / "cifar10").exists():
        pytest.skip("no cifar10 beside the checkout")
    splits = open_data(DataConfig(source="cifar10", root=str(folder), held_out=0.1))
    assert [len(p) for p in (splits.train, splits.validation, splits.test)] == [45_000, 5_000, 10_000]
    whole = open_source_splits(DataConfig(source="cifar10", root=str(folder))).train.pixels
    mean = whole.mean((0, 1, 2)) / 255
    assert np.abs(mean - [0.4914, 0.4822, 0.4465]).max() < 1e-4

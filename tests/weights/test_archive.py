"""Archives: every file type gives the same tensors, read lazily; broken files raise one-sentence errors."""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from vitrail.errors import CheckpointError, NotFoundError
from vitrail.weights.archive import Archive, LazyTensors, choose_weights_file, open_archive
from vitrail.weights.pickles import SECTIONS

TENSORS = {
    "cls": torch.arange(3.0),
    "blocks.0.w": torch.arange(6, dtype=torch.float64).view(2, 3),
    "half": torch.tensor([0.5, -2.0], dtype=torch.float16),
    "steps": torch.tensor(7),
}
BRAIN = {"brain": torch.tensor([[1.0, -3.140625]], dtype=torch.bfloat16)}


def save_legacy(tensors: dict[str, Tensor], path: Path) -> None:
    torch.save(tensors, path, _use_new_zipfile_serialization=False)


def save_npz(tensors: dict[str, Tensor], path: Path) -> None:
    with path.open("wb") as file:  # given a name, np.savez would append .npz
        np.savez(file, **{n: t.numpy() for n, t in tensors.items()})


SAVERS: dict[str, Callable[[dict[str, Tensor], Path], None]] = {
    "safetensors": save_file,
    "torch": torch.save,
    "legacy": save_legacy,
    "npz": save_npz,
}
every_kind = pytest.mark.parametrize("kind", SAVERS)


def assert_tensors(archive: Archive, expected: dict[str, Tensor]) -> None:
    assert set(archive.tensors) == set(expected)
    assert len(archive.tensors) == len(expected)
    for name, tensor in expected.items():
        assert archive.shape(name) == tuple(tensor.shape)
        assert archive.tensors[name].dtype == tensor.dtype
        assert torch.equal(archive.tensors[name], tensor)


@every_kind
@pytest.mark.parametrize("name", ["x.safetensors", "x.pth", "x.npz", "no suffix"])
def test_every_file_type_is_read_under_any_file_name(tmp_path: Path, kind: str, name: str):
    tensors = TENSORS if kind == "npz" else TENSORS | BRAIN
    SAVERS[kind](tensors, tmp_path / name)
    assert_tensors(open_archive(tmp_path / name), tensors)


@given(
    st.dictionaries(
        st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1, max_size=12).map("t/{}".format),
        st.lists(st.integers(0, 4), max_size=4),
        min_size=1,
        max_size=5,
    )
)
def test_any_names_and_shapes_round_trip_through_every_file_type(
    tmp_path_factory: pytest.TempPathFactory, shapes: dict
):
    folder = tmp_path_factory.mktemp("any")
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    for kind, write in SAVERS.items():
        write(tensors, folder / kind)
        assert_tensors(open_archive(folder / kind), tensors)


def test_published_checkpoint_opens(real_checkpoint: Path):
    archive = open_archive(real_checkpoint)
    assert sum(np.prod(archive.shape(n)) for n in archive.tensors) == 5_717_416
    assert archive.shape("pos_embed") == (1, 197, 192)


def test_golden_npz_files_match_numpy():
    for path in (ROOT / "tests" / "golden").glob("*.npz"):
        archive = open_archive(path)
        with np.load(path) as expected:
            numbers = {n for n in expected.files if expected[n].dtype.kind in "biufc"}
            assert set(archive.tensors) == numbers
            name = sorted(numbers)[0]
            assert np.array_equal(archive.tensors[name].numpy(), expected[name])


def test_bfloat16_stored_by_jax_as_void_is_restored(tmp_path: Path):
    raw = BRAIN["brain"].view(torch.int16).numpy().view("V2")
    np.savez(tmp_path / "x.npz", brain=raw)
    assert_tensors(open_archive(tmp_path / "x.npz"), BRAIN)


def test_big_endian_and_fortran_arrays_are_read(tmp_path: Path):
    values = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    np.savez(tmp_path / "x.npz", big=values.astype(">f4"), columns=np.asfortranarray(values), name=np.array("ViT"))
    archive = open_archive(tmp_path / "x.npz")
    assert_tensors(archive, {"big": torch.from_numpy(values), "columns": torch.from_numpy(values)})
    assert archive.notes == ["ignored name: not tensors"]


def test_shapes_and_membership_read_no_data(tmp_path: Path):
    np.savez(tmp_path / "x.npz", a=np.zeros((300, 400)), b=np.zeros(2))
    archive = open_archive(tmp_path / "x.npz")
    (tmp_path / "x.npz").write_bytes(b"")  # names and shapes have been read; the data is gone
    assert archive.shape("a") == (300, 400)
    assert "a" in archive.tensors
    assert "c" not in archive.tensors
    with pytest.raises(CheckpointError, match="cannot read 'a'"):
        archive.tensors["a"]
    with pytest.raises(KeyError):
        archive.tensors["c"]


MEASURE = """
import sys, torch
from vitrail.weights.archive import open_archive
def private():  # private memory in bytes: pages of a mapped file are not counted
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))
for path in sys.argv[1:]:
    before = private()
    archive = open_archive(path)
    held = [archive.tensors[name] for name in archive.tensors]
    total = sum(float(t.sum()) for t in held)
    print(private() - before, sum(t.nbytes for t in held))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_mapped_files_allocate_no_private_memory(tmp_path: Path):
    paths = [tmp_path / "safetensors", tmp_path / "torch"]
    for path in paths:
        SAVERS[path.name]({f"t{i}": torch.ones(1024, 1024) for i in range(24)}, path)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURE, *map(str, paths)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    for line in process.stdout.splitlines():
        private, total = map(int, line.split())
        assert total == 24 * 4 * 1024**2
        assert private < total / 10


def test_writing_to_a_tensor_does_not_change_the_file(tmp_path: Path):
    for kind, write in SAVERS.items():
        write(TENSORS, tmp_path / kind)
        before = (tmp_path / kind).read_bytes()
        open_archive(tmp_path / kind).tensors["cls"].fill_(9)
        assert (tmp_path / kind).read_bytes() == before


def test_safetensors_metadata_is_read(tmp_path: Path):
    save_file(TENSORS, tmp_path / "x", metadata={"format": "pt"})
    assert open_archive(tmp_path / "x").metadata == {"format": "pt"}


def test_strip_prefix_selects_and_shortens_names():
    archive = Archive("x", LazyTensors.from_tensors({"visual.a": torch.ones(2), "text.a": torch.zeros(1)}))
    assert_tensors(archive.strip_prefix("visual."), {"a": torch.ones(2)})
    assert archive.strip_prefix("") is archive


TRAINING_CHECKPOINTS = {
    "mae": ({"model": TENSORS, "optimizer": {"state": {0: {"avg": torch.ones(1)}}}, "epoch": 3}, "model"),
    "deit": ({"model": OrderedDict(TENSORS), "args": argparse.Namespace(model="deit_tiny")}, "model"),
    "timm": ({"state_dict": {"x": torch.ones(1)}, "state_dict_ema": TENSORS, "arch": "vit"}, "state_dict_ema"),
    "dino": ({"student": {"x": torch.ones(1)}, "teacher": TENSORS, "dino_loss": {"center": torch.ones(1)}}, "teacher"),
    "nested": ({"model": {"state_dict": TENSORS}, "loss": torch.tensor(0.1)}, "model"),
    "unknown": ({"my_network": TENSORS, "my_optimizer": {"a": torch.ones(1)}, "note": None}, "my_network"),
    "parameters": ({"model": {n: torch.nn.Parameter(t, t.is_floating_point()) for n, t in TENSORS.items()}}, "model"),
}


@pytest.mark.parametrize("source", TRAINING_CHECKPOINTS)
@pytest.mark.parametrize("save", [torch.save, save_legacy])
def test_weights_in_a_training_checkpoint_are_found(tmp_path: Path, source: str, save: Callable[..., None]):
    saved, name = TRAINING_CHECKPOINTS[source]
    save(saved, tmp_path / "x.pth")
    archive = open_archive(tmp_path / "x.pth")
    assert_tensors(archive, TENSORS)
    assert not any(archive.tensors[n].requires_grad for n in archive.tensors)
    sections = [k for k, v in saved.items() if isinstance(v, dict)]
    assert archive.notes == ([f"read {name!r} of {', '.join(sections)}"] if len(sections) > 1 else [])


def test_section_can_be_chosen(tmp_path: Path):
    torch.save({"student": TENSORS, "teacher": {"x": torch.ones(1)}}, tmp_path / "x.pth")
    assert_tensors(open_archive(tmp_path / "x.pth", section="student"), TENSORS)
    with pytest.raises(CheckpointError, match="no section 'studnt'; did you mean 'student'"):
        open_archive(tmp_path / "x.pth", section="studnt")
    save_file(TENSORS, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="has no section 'student'"):
        open_archive(tmp_path / "x.safetensors", section="student")


def test_known_sections_are_preferred_in_order(tmp_path: Path):
    for better, worse in pairwise(SECTIONS):
        torch.save({worse: {"w": torch.ones(1)}, better: {"b": torch.ones(1)}}, tmp_path / "x.pth")
        assert list(open_archive(tmp_path / "x.pth").tensors) == ["b"]


def test_self_referencing_dictionary_is_read(tmp_path: Path):
    recursive: dict[str, object] = dict(TENSORS)
    recursive["model"] = recursive
    torch.save(recursive, tmp_path / "x.pth")
    assert_tensors(open_archive(tmp_path / "x.pth"), TENSORS)


def test_non_tensor_entries_are_kept_as_metadata(tmp_path: Path):
    args = argparse.Namespace(model="vit_tiny", lr=0.1)
    torch.save({"model": TENSORS | {"version": "1.0", "none": None}, "epoch": 3, "args": args}, tmp_path / "x.pth")
    archive = open_archive(tmp_path / "x.pth")
    assert_tensors(archive, TENSORS)
    metadata = {"epoch": 3, "args": {"model": "vit_tiny", "lr": 0.1}, "sections": ["model", "epoch", "args"]}
    assert archive.extras == metadata | {"version": "1.0", "none": None}
    assert archive.notes == ["ignored version, none: not tensors"]


def test_wrapper_prefixes_are_removed_only_if_every_name_has_them(tmp_path: Path):
    save_file({f"_orig_mod.module.{n}": t for n, t in TENSORS.items()}, tmp_path / "x")
    archive = open_archive(tmp_path / "x")
    assert_tensors(archive, TENSORS)
    assert archive.notes == ["removed '_orig_mod.' from every name", "removed 'module.' from every name"]
    save_file({"module.a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "y")
    assert set(open_archive(tmp_path / "y").tensors) == {"module.a", "b"}


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (
            {"first": TENSORS, "second": TENSORS},
            "first, second, none of which has a known name; choose one with section=",
        ),
        ([torch.ones(1)], "contains a list, expected a dictionary of tensors"),
        ({"epoch": 3}, "contains no tensors"),
        ({0: {"average": torch.ones(1)}}, "contains no tensors"),
        ({}, "contains no tensors"),
    ],
)
def test_pickle_without_clear_weights_is_refused(tmp_path: Path, saved: object, message: str):
    torch.save(saved, tmp_path / "x.pth")
    with pytest.raises(CheckpointError, match=message):
        open_archive(tmp_path / "x.pth")


def test_files_without_tensors_are_refused(tmp_path: Path):
    save_file({}, tmp_path / "empty.safetensors")
    np.savez(tmp_path / "empty.npz")
    for name in ("empty.safetensors", "empty.npz"):
        with pytest.raises(CheckpointError, match="contains no tensors"):
            open_archive(tmp_path / name)


class Trap:
    """An object that creates a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def save_trap(kind: str, path: Path, trap: Trap) -> None:
    if kind == "npz":
        with path.open("wb") as file:
            np.savez(file, a=np.ones(1), b=np.array([trap], dtype=object))
    elif kind.startswith("pickle"):
        path.write_bytes(pickle.dumps({"model": TENSORS, "x": trap}, protocol=int(kind[-1])))
    else:
        torch.save({"model": TENSORS, "x": trap}, path, _use_new_zipfile_serialization=kind == "torch")


@pytest.mark.parametrize("kind", ["torch", "legacy", "pickle2", "pickle4", "pickle5", "npz"])
@pytest.mark.parametrize("name", ["x.pth", "x.safetensors"])
def test_code_in_a_file_is_refused_and_not_executed(tmp_path: Path, kind: str, name: str):
    created = tmp_path / "it ran"
    save_trap(kind, tmp_path / name, Trap(created))
    with pytest.raises(CheckpointError, match=r"was refused: .* nothing in it was executed"):
        open_archive(tmp_path / name)
    assert not created.exists()
    if kind == "torch":  # without weights_only the trap does run
        with (tmp_path / name).open("rb") as file:
            torch.load(file, weights_only=False)
        assert created.exists()


def test_pickled_module_is_refused_with_its_class_name(tmp_path: Path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "x.pth")
    with pytest.raises(CheckpointError, match=r"refused: it requires torch\.nn\.modules\.linear\.Linear"):
        open_archive(tmp_path / "x.pth")


@every_kind
def test_file_truncated_at_any_length_raises_checkpoint_error(tmp_path: Path, kind: str):
    SAVERS[kind](TENSORS, tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    for length in [*range(0, len(data), max(len(data) // 60, 1)), len(data) - 1]:
        (tmp_path / "cut").write_bytes(data[:length])
        with pytest.raises(CheckpointError) as caught:
            open_archive(tmp_path / "cut")
        assert "\n" not in str(caught.value)
        assert length < 40 or "truncated" in str(caught.value)
        assert "refused" not in str(caught.value) or length < 40


def test_corrupted_npz_array_raises_when_it_is_read(tmp_path: Path):
    np.savez(tmp_path / "x.npz", a=np.zeros(1000))
    data = bytearray((tmp_path / "x.npz").read_bytes())
    data[3000] ^= 1
    (tmp_path / "x.npz").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"cannot read 'a'.*CRC"):
        open_archive(tmp_path / "x.npz").tensors["a"]


def test_corrupted_pickle_raises_checkpoint_error(tmp_path: Path):
    torch.save(TENSORS, tmp_path / "x.pth")
    with zipfile.ZipFile(tmp_path / "x.pth") as source, zipfile.ZipFile(tmp_path / "y.pth", "w") as target:
        for name in source.namelist():
            data = source.read(name)
            target.writestr(name, data[: len(data) // 2] if name.endswith("data.pkl") else data)
    with pytest.raises(CheckpointError):
        open_archive(tmp_path / "y.pth")


def test_missing_file_error_suggests_a_similar_name(tmp_path: Path):
    with pytest.raises(NotFoundError, match="is empty"):
        open_archive(tmp_path / "model.safetensors")
    save_file(TENSORS, tmp_path / "model.safetensors")
    with pytest.raises(NotFoundError, match=r"no such file: .*did you mean 'model\.safetensors'"):
        open_archive(tmp_path / "model.safetensor")
    with pytest.raises(NotFoundError, match="there is no folder"):
        open_archive(tmp_path / "gone" / "model.safetensors")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(NotFoundError, match="a link to nowhere, which does not exist"):
        open_archive(tmp_path / "link")


def test_named_pipe_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="neither a file nor a folder"):
        open_archive(tmp_path / "pipe")


def test_home_directory_in_a_path_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save_file(TENSORS, tmp_path / "x")
    assert_tensors(open_archive("~/x"), TENSORS)


def test_choose_weights_file_prefers_standard_names():
    assert (
        choose_weights_file(["pytorch_model.bin", "model.safetensors", "model.safetensors.index.json"])
        == "model.safetensors"
    )
    assert choose_weights_file(["pytorch_model.bin", "open_clip_pytorch_model.bin", "x.npz"]) == "pytorch_model.bin"
    assert choose_weights_file(["x.npz", "x.safetensors", "README.md"]) == "x.safetensors"
    assert (
        choose_weights_file(["vit.pth", "optimizer.pt", "scheduler.pt", "training_args.bin", "rng_state.pth"])
        == "vit.pth"
    )
    assert choose_weights_file(["config.json", "sub/model.safetensors", ".x.safetensors"]) is None
    with pytest.raises(CheckpointError, match=r"several .*\(a\.pth, b\.pt\)"):
        choose_weights_file(["b.pt", "a.pth"])

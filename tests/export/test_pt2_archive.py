"""A stranger's .pt2: read where it can only compute, refused where torch would run what it holds."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vitrail.errors import CheckpointError, FormatError
from vitrail.export import formats
from vitrail.export.engines import open_file
from vitrail.export.export_metadata import ExportMetadata
from vitrail.export.tracing import trace

Change = Callable[[bytes], bytes]


class Touches:
    """What a pickle can do to somebody who opens it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.fixture(scope="module")
def program(tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "tiny.pt2"
    metadata = ExportMetadata(info=tiny.info, to="pt2")
    formats.write(trace(tiny.net, metadata), metadata, path)
    return path


def changed(path: Path, to: Path, changes: dict[str, Change], added: dict[str, bytes] | None = None) -> Path:
    """A copy of an archive with other members."""
    to = to / path.name
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(to, "w", zipfile.ZIP_STORED) as new:
        left = set(changes)
        for name in old.namelist():
            data, short = old.read(name), name.partition("/")[2]
            if short in changes:
                left.remove(short)
                data = changes[short](data)
            new.writestr(name, data)
        assert not left
        for short, data in (added or {}).items():
            new.writestr(f"{path.stem}/{short}", data)
    return to


def pickled(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def in_json(change: Callable[[Any], None]) -> Change:
    def changes(data: bytes) -> bytes:
        values = json.loads(data)
        change(values)
        return json.dumps(values).encode()

    return changes


GRAPH, EXAMPLE = "models/model.json", "data/sample_inputs/model.pt"
WEIGHTS, CONSTANTS = "data/weights/model_weights_config.json", "data/constants/model_constants_config.json"


def test_a_copy_with_nothing_changed_is_read(program, tmp_path):
    assert open_file(changed(program, tmp_path, {})).name == "torch"


def test_a_pickle_for_an_example_is_not_run(program, tmp_path):
    mark = tmp_path / "mark"
    path = changed(program, tmp_path, {EXAMPLE: lambda old: pickled(Touches(mark))})
    with pytest.raises(FormatError, match=r"tiny\.pt2 is not read: its example is a pickle of more than tensors"):
        open_file(path)
    assert not mark.exists()


def test_pickled_weights_are_not_run(program, tmp_path):
    mark = tmp_path / "mark"

    def pickle_first(config: Any) -> None:
        next(iter(config["config"].values())).update(use_pickle=True, path_name="weight_0")

    changes = {WEIGHTS: in_json(pickle_first), "data/weights/weight_0": lambda old: pickled(Touches(mark))}
    with pytest.raises(FormatError, match="its tensors are pickled"):
        open_file(changed(program, tmp_path, changes))
    assert not mark.exists()


@pytest.mark.parametrize(
    "name",
    [
        "data/weights/model.pt",  # how older versions of torch kept weights
        "data/constants/model.pt",
        "data/constants/opaque_obj_0",
        "data/constants/custom_obj_0",
        "data/aotinductor/model/model.so",
        "models/other.json",
    ],
)
def test_what_an_export_never_has_is_refused_by_its_name(program, tmp_path, name):
    mark = tmp_path / "mark"
    data = pickle.dumps(Touches(mark)) if name.endswith("_0") else pickled(Touches(mark))
    with pytest.raises(FormatError, match=f"it holds {name}"):
        open_file(changed(program, tmp_path, {}, {name: data}))
    assert not mark.exists()


def test_constants_that_are_objects_are_not_unpickled(program, tmp_path):
    mark = tmp_path / "mark"

    def add(config: Any) -> None:
        meta = {"path_name": "../constants/opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
        config["config"]["thing"] = meta

    path = changed(program, tmp_path, {CONSTANTS: in_json(add)}, {"data/constants/tensor_0": pickled(Touches(mark))})
    with pytest.raises(FormatError):
        open_file(path)
    assert not mark.exists()


def test_the_archives_of_older_versions_are_not_tried(program, tmp_path):
    """torch would fall back to them, and to their pickles, where the newer format fails."""
    mark = tmp_path / "mark"
    parts = {"serialized_state_dict.pt", "serialized_constants.pt", "serialized_example_inputs.pt"}
    with zipfile.ZipFile(tmp_path / "old.pt2", "w") as file:
        file.writestr("version", "8.20")
        with zipfile.ZipFile(program) as now:
            file.writestr("serialized_exported_program.json", now.read(f"{program.stem}/{GRAPH}"))
        for name in parts:
            file.writestr(name, pickled(Touches(mark)))
    with pytest.raises(CheckpointError, match=r"old\.pt2 cannot be read as a torch\.export program"):
        open_file(tmp_path / "old.pt2")
    assert not mark.exists()


def expression(values: Any, text: str) -> None:
    """Put a text where the batch's size stands."""
    found = []

    def walk(value: Any) -> None:
        for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            if isinstance(one, dict) and "expr_str" in one:
                one["expr_str"] = text
                found.append(one)
            walk(one)

    walk(values)
    assert found


def operator(values: Any, name: str) -> None:
    values["graph_module"]["graph"]["nodes"][0]["target"] = name


@pytest.mark.parametrize(
    "change",
    [
        lambda values: expression(values, "__import__('pathlib').Path('mark').touch()"),
        lambda values: expression(values, "Symbol('s0', integer=True).__class__"),
        lambda values: expression(values, "9**9**9**9"),
        lambda values: operator(values, "torch.os.system"),
        lambda values: operator(values, "torch.ops.aten.from_file.default"),
        lambda values: operator(values, "torch.ops.aten.save.default"),
        lambda values: operator(values, "torch.ops.aten.segment_reduce.default"),
        lambda values: operator(values, "_operator.methodcaller"),
        lambda values: values["guards_code"].append("__import__('pathlib').Path('mark').touch()"),
        lambda values: values["graph_module"]["module_call_graph"][0]["signature"].update(
            forward_arg_names=["pixels=__import__('pathlib').Path('mark').touch()"]
        ),
        lambda values: values["graph_module"]["module_call_graph"][0]["signature"].update(
            in_spec='[1, {"type": "collections.defaultdict", "context": "{}", "children_spec": []}]'
        ),
    ],
)
def test_a_graph_that_says_more_than_names_is_refused(program, tmp_path, monkeypatch, change):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FormatError, match="could run code"):
        open_file(changed(program, tmp_path, {GRAPH: in_json(change)}))
    assert not Path("mark").exists()


def test_a_program_tells_nothing_of_the_machine_it_was_written_on(program):
    with zipfile.ZipFile(program) as file:
        everything = b"".join(file.read(name) for name in file.namelist())
    assert b"tracing.py" not in everything
    assert str(Path(formats.__file__).parent).encode() not in everything

"""Untrusted .pt2 files: plain ones are read; those from which torch would execute code are refused."""

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

from vitrail.engines.engine import open_file
from vitrail.engines.export_metadata import ExportMetadata
from vitrail.errors import CheckpointError, FormatError
from vitrail.exporting import formats
from vitrail.exporting.tracing import trace

Change = Callable[[bytes], bytes]


class TouchOnUnpickle:
    """An object whose pickle creates a file when it is loaded."""

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


def modified_copy(path: Path, target: Path, changes: dict[str, Change], added: dict[str, bytes] | None = None) -> Path:
    """Copy an archive with changed and added members; names are without the top folder."""
    target = target / path.name
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as new:
        missing = set(changes)
        for name in old.namelist():
            data, member = old.read(name), name.partition("/")[2]
            if member in changes:
                missing.remove(member)
                data = changes[member](data)
            new.writestr(name, data)
        assert not missing
        for member, data in (added or {}).items():
            new.writestr(f"{path.stem}/{member}", data)
    return target


def torch_pickle(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def json_change(change: Callable[[Any], None]) -> Change:
    def changes(data: bytes) -> bytes:
        values = json.loads(data)
        change(values)
        return json.dumps(values).encode()

    return changes


GRAPH, EXAMPLE_INPUT = "models/model.json", "data/sample_inputs/model.pt"
WEIGHTS, CONSTANTS = "data/weights/model_weights_config.json", "data/constants/model_constants_config.json"


def test_an_unmodified_copy_is_read(program, tmp_path):
    assert open_file(modified_copy(program, tmp_path, {})).name == "torch"


def test_a_pickled_example_input_is_not_executed(program, tmp_path):
    marker = tmp_path / "marker"
    path = modified_copy(program, tmp_path, {EXAMPLE_INPUT: lambda old: torch_pickle(TouchOnUnpickle(marker))})
    with pytest.raises(
        FormatError, match=r"tiny\.pt2 was not loaded: its example input contains pickled objects other than tensors"
    ):
        open_file(path)
    assert not marker.exists()


def test_pickled_weights_are_not_executed(program, tmp_path):
    marker = tmp_path / "marker"

    def pickle_first(config: Any) -> None:
        next(iter(config["config"].values())).update(use_pickle=True, path_name="weight_0")

    changes = {
        WEIGHTS: json_change(pickle_first),
        "data/weights/weight_0": lambda old: torch_pickle(TouchOnUnpickle(marker)),
    }
    with pytest.raises(FormatError, match="its tensors are pickled"):
        open_file(modified_copy(program, tmp_path, changes))
    assert not marker.exists()


@pytest.mark.parametrize(
    "name",
    [
        "data/weights/model.pt",  # how older versions of torch stored weights
        "data/constants/model.pt",
        "data/constants/opaque_obj_0",
        "data/constants/custom_obj_0",
        "data/aotinductor/model/model.so",
        "models/other.json",
    ],
)
def test_unexpected_members_are_refused_by_name(program, tmp_path, name):
    marker = tmp_path / "marker"
    data = pickle.dumps(TouchOnUnpickle(marker)) if name.endswith("_0") else torch_pickle(TouchOnUnpickle(marker))
    with pytest.raises(FormatError, match=f"it contains {name}"):
        open_file(modified_copy(program, tmp_path, {}, {name: data}))
    assert not marker.exists()


def test_pickled_constants_are_not_executed(program, tmp_path):
    marker = tmp_path / "marker"

    def add_opaque_object(config: Any) -> None:
        meta = {"path_name": "../constants/opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
        config["config"]["thing"] = meta

    path = modified_copy(
        program,
        tmp_path,
        {CONSTANTS: json_change(add_opaque_object)},
        {"data/constants/tensor_0": torch_pickle(TouchOnUnpickle(marker))},
    )
    with pytest.raises(FormatError):
        open_file(path)
    assert not marker.exists()


def test_archives_of_older_torch_versions_are_not_read(program, tmp_path):
    """torch would fall back to reading them, and their pickles, after the newer format has failed."""
    marker = tmp_path / "marker"
    names = {"serialized_state_dict.pt", "serialized_constants.pt", "serialized_example_inputs.pt"}
    with zipfile.ZipFile(tmp_path / "old.pt2", "w") as file:
        file.writestr("version", "8.20")
        with zipfile.ZipFile(program) as new:
            file.writestr("serialized_exported_program.json", new.read(f"{program.stem}/{GRAPH}"))
        for name in names:
            file.writestr(name, torch_pickle(TouchOnUnpickle(marker)))
    with pytest.raises(CheckpointError, match=r"old\.pt2 cannot be read as a torch\.export program"):
        open_file(tmp_path / "old.pt2")
    assert not marker.exists()


def set_batch_expression(values: Any, text: str) -> None:
    """Replace the symbolic expressions of the batch size."""
    changed_nodes = []

    def walk(value: Any) -> None:
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            if isinstance(item, dict) and "expr_str" in item:
                item["expr_str"] = text
                changed_nodes.append(item)
            walk(item)

    walk(values)
    assert changed_nodes


def set_operator(values: Any, name: str) -> None:
    values["graph_module"]["graph"]["nodes"][0]["target"] = name


@pytest.mark.parametrize(
    "change",
    [
        lambda values: set_batch_expression(values, "__import__('pathlib').Path('marker').touch()"),
        lambda values: set_batch_expression(values, "Symbol('s0', integer=True).__class__"),
        lambda values: set_batch_expression(values, "9**9**9**9"),
        lambda values: set_operator(values, "torch.os.system"),
        lambda values: set_operator(values, "torch.ops.aten.from_file.default"),
        lambda values: set_operator(values, "torch.ops.aten.save.default"),
        lambda values: set_operator(values, "torch.ops.aten.segment_reduce.default"),
        lambda values: set_operator(values, "_operator.methodcaller"),
        lambda values: values["guards_code"].append("__import__('pathlib').Path('marker').touch()"),
        lambda values: values["graph_module"]["module_call_graph"][0]["signature"].update(
            forward_arg_names=["pixels=__import__('pathlib').Path('marker').touch()"]
        ),
        lambda values: values["graph_module"]["module_call_graph"][0]["signature"].update(
            in_spec='[1, {"type": "collections.defaultdict", "context": "{}", "children_spec": []}]'
        ),
    ],
)
def test_a_graph_with_strings_other_than_plain_names_is_refused(program, tmp_path, monkeypatch, change):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FormatError, match="could run code"):
        open_file(modified_copy(program, tmp_path, {GRAPH: json_change(change)}))
    assert not Path("marker").exists()


def test_a_program_contains_no_paths_of_the_machine_that_wrote_it(program):
    with zipfile.ZipFile(program) as file:
        content = b"".join(file.read(name) for name in file.namelist())
    assert b"tracing.py" not in content
    assert str(Path(formats.__file__).parent).encode() not in content

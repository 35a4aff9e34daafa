"""A torch.export program as a file, and back again without running anything that a stranger put there.

torch's own loader unpickles what it finds, and takes expressions, names and operators of the graph as
Python. So an archive is read only where it holds what is written here: tensors as plain bytes, and a
graph of ATen operators whose every string is a name.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch.export.pt2_archive import PT2ArchiveReader
from torch.export.pt2_archive._package import load_pt2

from vitrail.errors import CheckpointError, FormatError
from vitrail.export.optional_packages import silence_exporters

MODEL = "model"
"""torch's name for a program that is alone in its archive."""
METADATA_FILE = "vitrail.json"
CONFIGS = (f"data/weights/{MODEL}_weights_config.json", f"data/constants/{MODEL}_constants_config.json")
GRAPH = f"models/{MODEL}.json"
EXAMPLE = f"data/sample_inputs/{MODEL}.pt"
ALLOWED_MEMBERS = re.compile(
    r"data/(weights/weight_\d+|constants/tensor_\d+)|archive_format|archive_version|byteorder|(\.data/)?version"
    r"|\.data/serialization_id|extra/" + "|".join(map(re.escape, (METADATA_FILE, *CONFIGS, GRAPH, EXAMPLE)))
)
"""What an archive may consist of."""

WORD = re.compile(r"[\w.]*", re.ASCII)
OPERATOR = re.compile(r"torch\.ops\.aten\.(\w+)\.\w+|_operator\.(getitem|add|sub|mul|floordiv|mod)", re.ASCII)
# fmt: off
ALLOWED_OPERATORS = frozenset((
    "__or__", "_assert_tensor_metadata", "_to_copy", "_unsafe_view", "add", "addmm", "alias", "arange", "bmm", "cat",
    "chunk", "clone", "contiguous", "conv2d", "convolution", "cos", "div", "erf", "exp", "expand", "flatten",
    "gather", "ge", "gelu", "group_norm", "layer_norm", "linear", "lt", "matmul", "max_pool2d", "mean", "meshgrid",
    "mm", "mul", "native_group_norm", "native_layer_norm", "neg", "pad", "permute", "pow", "relu", "relu_", "reshape",
    "rms_norm", "scaled_dot_product_attention", "select", "sigmoid", "silu", "sin", "slice", "softmax", "split",
    "split_with_sizes", "squeeze", "stack", "sub", "sym_size", "tanh", "tile", "to", "transpose", "unbind",
    "unflatten", "unsqueeze", "view", "where",
))
# fmt: on
"""Operators that networks here are made of. Others read files, print, or trust the numbers they are given."""
SYMBOL = re.compile(r"Symbol\('[a-z]\w*'(, (positive|integer)=True)*\)", re.ASCII)
SUM = re.compile(r"([\d\s+()-]|\*(?!\*))*", re.ASCII)
CONTAINERS = (None, "builtins.tuple", "builtins.list", "builtins.dict")


def write_program(program: torch.export.ExportedProgram, path: Path, metadata: str) -> None:
    """Without the places in the source that its operators came from, which are those of this machine."""
    for node in program.graph.nodes:
        for name in ("stack_trace", "nn_module_stack", "torch_fn", "from_node", "source_fn_stack"):
            node.meta.pop(name, None)
    with silence_exporters():
        torch.export.save(program, path, extra_files={METADATA_FILE: metadata})


def read_archive(path: Path) -> tuple[Any, str]:
    """A module to call, and the text of its metadata; FormatError where the archive could do more than compute."""
    try:
        with path.open("rb") as file, silence_exporters():
            _check(PT2ArchiveReader(file), path)
            file.seek(0)
            found = load_pt2(file)
            return found.exported_programs[MODEL].module(), found.extra_files.get(METADATA_FILE, "")
    except FormatError:
        raise
    except Exception as error:  # torch's own, of many kinds
        raise CheckpointError(f"{path} cannot be read as a torch.export program: {error_summary(error)}.") from error


def _check(archive: PT2ArchiveReader, path: Path) -> None:
    """Raise FormatError for anything but tensors and a plain graph; read as torch itself will read it."""
    names = archive.get_file_names()
    strange = next((name for name in names if not ALLOWED_MEMBERS.fullmatch(name)), None)
    if strange is not None:
        raise _refusal(path, f"it holds {strange}")
    for name in CONFIGS:
        config = json.loads(archive.read_bytes(name))
        if any(entry["use_pickle"] for entry in config["config"].values()):
            raise _refusal(path, "its tensors are pickled")
        _check_strings(config, path)
    graph = json.loads(archive.read_bytes(GRAPH))
    if graph.get("guards_code") or graph["graph_module"].get("treespec_namedtuple_fields"):
        raise _refusal(path, "its graph comes with code")
    _check_strings(graph, path)
    try:
        torch.load(io.BytesIO(archive.read_bytes(EXAMPLE)), weights_only=True)
    except Exception as error:
        raise _refusal(path, "its example is a pickle of more than tensors") from error


def _check_strings(value: Any, path: Path, key: str = "") -> None:
    """Names and nothing else, at any depth: torch makes Python code of them."""
    if isinstance(value, dict):
        for name, one in value.items():
            _check_strings(name, path)
            _check_strings(one, path, name)
    elif isinstance(value, list):
        for one in value:
            _check_strings(one, path, key)
    elif isinstance(value, str) and not _is_plain(value, key):
        shown = value if len(value) <= 60 else f"{value[:60]}..."
        raise _refusal(path, f"its graph says {shown!r}")


def _is_plain(text: str, key: str) -> bool:
    if key == "target":
        found = OPERATOR.fullmatch(text)
        return found is not None and (found[1] is None or found[1] in ALLOWED_OPERATORS)
    if key == "expr_str":
        return SUM.fullmatch(SYMBOL.sub("", text)) is not None
    if key in ("in_spec", "out_spec"):
        return _is_plain_tree(json.loads(text))
    if key == "torch_version":
        return re.fullmatch(r"[\w.+]*", text, re.ASCII) is not None
    return WORD.fullmatch(text) is not None


def _is_plain_tree(tree: Any) -> bool:
    """How arguments are nested: version, and types in types."""
    if isinstance(tree, list):
        return all(_is_plain_tree(one) for one in tree)
    if not isinstance(tree, dict):
        return isinstance(tree, int)
    plain = tree.keys() <= {"type", "context", "children_spec"} and tree.get("type") in CONTAINERS
    return plain and tree.get("context") in (None, "null", "[]") and _is_plain_tree(tree.get("children_spec", []))


def _refusal(path: Path, why: str) -> FormatError:
    return FormatError(
        f"{path} is not read: {why}, which vitrail export never writes and which could run code; "
        "export the model anew from its checkpoint."
    )


def error_summary(error: BaseException) -> str:
    """Of an engine's error; OpenVINO begins with where in its source it came to pass."""
    lines = [line for line in str(error).strip().splitlines() if not line.startswith(("Exception from ", "Check '"))]
    return (lines or [type(error).__name__])[0].rstrip(".")

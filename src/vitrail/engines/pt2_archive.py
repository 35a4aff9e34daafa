"""Write torch.export programs, and read untrusted ones without executing code from them.

torch's loader unpickles objects, and evaluates expressions, names and operators of the graph as Python. An archive is
therefore read only if it contains what is written here: tensors as plain bytes, and a graph of ATen operators whose
strings are all plain names.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch.export.pt2_archive import PT2ArchiveReader

from vitrail.engines.optional_packages import error_summary, silence_exporters
from vitrail.errors import CheckpointError, FormatError

MODEL_NAME = "model"
"""Name that torch gives to the only program of an archive."""
METADATA_FILE = "vitrail.json"
CONFIGS = (f"data/weights/{MODEL_NAME}_weights_config.json", f"data/constants/{MODEL_NAME}_constants_config.json")
GRAPH = f"models/{MODEL_NAME}.json"
EXAMPLE_INPUT = f"data/sample_inputs/{MODEL_NAME}.pt"
ALLOWED_MEMBERS = re.compile(
    r"data/(weights/weight_\d+|constants/tensor_\d+)|archive_format|archive_version|byteorder|(\.data/)?version"
    r"|\.data/serialization_id|extra/" + "|".join(map(re.escape, (METADATA_FILE, *CONFIGS, GRAPH, EXAMPLE_INPUT)))
)
"""Names of the members that an archive may have."""

NAME = re.compile(r"[\w.]*", re.ASCII)
OPERATOR = re.compile(r"torch\.ops\.aten\.(\w+)\.\w+|_operator\.(getitem|add|sub|mul|floordiv|mod)", re.ASCII)
# fmt: off
ALLOWED_OPERATORS = frozenset((
    "__or__", "_assert_tensor_metadata", "_to_copy", "_unsafe_view", "add", "addmm", "alias", "arange", "bmm", "cat",
    "chunk", "clamp", "clamp_min", "clone", "contiguous", "conv2d", "convolution", "cos", "div", "erf", "exp",
    "expand", "expand_as", "flatten", "gather", "ge", "gelu", "group_norm", "layer_norm", "linalg_vector_norm",
    "linear", "lt", "matmul", "max_pool2d", "mean", "meshgrid", "mm", "mul", "native_group_norm", "native_layer_norm",
    "neg", "pad", "permute", "pow", "relu", "relu_", "reshape", "rms_norm", "roll", "scaled_dot_product_attention",
    "select", "sigmoid", "silu", "sin", "slice", "softmax", "split", "split_with_sizes", "squeeze", "stack", "sub",
    "sym_size", "tanh", "tile", "to", "transpose", "unbind", "unflatten", "unsqueeze", "view", "where",
))
# fmt: on
"""Operators of vitrail's networks. Others may read files, print, or not validate their arguments."""
SYMBOL = re.compile(r"Symbol\('[a-z]\w*'(, (positive|integer)=True)*\)", re.ASCII)
CONSTRUCTOR = re.compile(r"\b(Add|Integer|Mul)(?=\()", re.ASCII)
ARITHMETIC = re.compile(r"([\d\s+(),-]|\*(?!\*))*", re.ASCII)
CONTAINERS = (None, "builtins.tuple", "builtins.list", "builtins.dict")


def write_program(program: torch.export.ExportedProgram, path: Path, metadata: str) -> None:
    """Write a program without the source locations of its operators, which contain paths of this machine."""
    for node in program.graph.nodes:
        for name in ("stack_trace", "nn_module_stack", "torch_fn", "from_node", "source_fn_stack"):
            node.meta.pop(name, None)
    with silence_exporters():
        torch.export.save(program, path, extra_files={METADATA_FILE: metadata})


def read_archive(path: Path) -> tuple[Any, str]:
    """Read a callable module and the text of its metadata; FormatError if the archive could execute code."""
    try:
        with path.open("rb") as file, silence_exporters():
            _check_archive(PT2ArchiveReader(file), path)
            file.seek(0)
            extra_files = {METADATA_FILE: ""}
            program = torch.export.load(file, extra_files=extra_files)
            return program.module(), extra_files[METADATA_FILE]
    except FormatError:
        raise
    except Exception as error:  # torch raises many types
        raise CheckpointError(f"{path} cannot be read as a torch.export program: {error_summary(error)}.") from error


def _check_archive(archive: PT2ArchiveReader, path: Path) -> None:
    """Raise FormatError for anything but tensors and a plain graph; uses torch's reader, as loading does."""
    names = archive.get_file_names()
    unexpected = next((name for name in names if not ALLOWED_MEMBERS.fullmatch(name)), None)
    if unexpected is not None:
        raise _format_error(path, f"it contains {unexpected}")
    for name in CONFIGS:
        config = json.loads(archive.read_bytes(name))
        if any(entry["use_pickle"] for entry in config["config"].values()):
            raise _format_error(path, "its tensors are pickled")
        _check_strings(config, path)
    graph = json.loads(archive.read_bytes(GRAPH))
    if graph.get("guards_code") or graph["graph_module"].get("treespec_namedtuple_fields"):
        raise _format_error(path, "its graph contains code")
    _check_strings(graph, path)
    try:
        torch.load(io.BytesIO(archive.read_bytes(EXAMPLE_INPUT)), weights_only=True)
    except Exception as error:
        raise _format_error(path, "its example input contains pickled objects other than tensors") from error


def _check_strings(value: Any, path: Path, key: str = "") -> None:
    """Raise FormatError unless all strings, at any depth, are plain: torch evaluates them as Python."""
    if isinstance(value, dict):
        for name, item in value.items():
            _check_strings(name, path)
            _check_strings(item, path, name)
    elif isinstance(value, list):
        for item in value:
            _check_strings(item, path, key)
    elif isinstance(value, str) and not _is_plain(value, key):
        shown = value if len(value) <= 60 else f"{value[:60]}..."
        raise _format_error(path, f"its graph contains {shown!r}")


def _is_plain(text: str, key: str) -> bool:
    """Whether a string is safe to evaluate; `key` is the JSON key under which it is stored."""
    if key == "target":
        match = OPERATOR.fullmatch(text)
        return match is not None and (match[1] is None or match[1] in ALLOWED_OPERATORS)
    if key == "expr_str":
        return ARITHMETIC.fullmatch(CONSTRUCTOR.sub("", SYMBOL.sub("", text))) is not None
    if key in ("in_spec", "out_spec"):
        return _is_plain_tree(json.loads(text))
    if key == "torch_version":
        return re.fullmatch(r"[\w.+]*", text, re.ASCII) is not None
    return NAME.fullmatch(text) is not None


def _is_plain_tree(tree: Any) -> bool:
    """Whether a serialized pytree spec contains only its version and nested tuples, lists and dicts."""
    if isinstance(tree, list):
        return all(_is_plain_tree(item) for item in tree)
    if not isinstance(tree, dict):
        return isinstance(tree, int)
    plain = tree.keys() <= {"type", "context", "children_spec"} and tree.get("type") in CONTAINERS
    return plain and tree.get("context") in (None, "null", "[]") and _is_plain_tree(tree.get("children_spec", []))


def _format_error(path: Path, reason: str) -> FormatError:
    return FormatError(
        f"{path} was not loaded: {reason}, which vitrail export never writes and which could run code; "
        "export the model again from its checkpoint."
    )

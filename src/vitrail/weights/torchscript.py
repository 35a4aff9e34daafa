"""The tensors of a TorchScript archive, read as data: neither its code nor Python's pickle machine is run.

torch.jit.save writes a zip file: `data.pkl`, the tree of modules as a pickle; `data/N`, the bytes of
each storage; `code/`, the program. The first two are read. The pickle is interpreted here, with the
few instructions that torch's C++ writer uses: a name in it (`__torch__.clip.model.CLIP`) becomes a
label and never a Python object, so nothing in the file can call anything.
"""

from __future__ import annotations

import math
import pickletools
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import CheckpointError
from vitrail.weights.file_type import DOWNLOAD_AGAIN, first_line, refuse_code

TENSOR = "torch._utils._rebuild_tensor_v2"
SAME = frozenset(
    f"torch.jit._pickle.{name}"
    for name in ("restore_type_tag", "build_intlist", "build_doublelist", "build_boollist", "build_tensorlist")
)
"""Functions that return their first argument."""
EMPTY = "collections.OrderedDict"
"""The backward hooks of a tensor: always empty."""
STORAGES = {
    f"torch.{name}Storage": dtype
    for name, dtype in {
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Double": torch.float64,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
    }.items()
}
KNOWN = frozenset({TENSOR, EMPTY, *SAME, *STORAGES})
MODULE = "__torch__."
"""Where the names of a program's own classes begin."""

# A tree of modules may share its branches, and so be much larger than its file.
MAX_ATTRIBUTES, MAX_DEPTH, MAX_NAME_LENGTH = 100_000, 64, 200
"""Attributes in the tree, modules within modules, characters in a name."""


@dataclass(frozen=True)
class Name:
    """A global of the pickle, which stays a name."""

    text: str


@dataclass(frozen=True)
class Storage:
    """Where the numbers of a tensor are: `data/KEY` of the archive."""

    key: str
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True)
class Strided:
    """A tensor that has not been read."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(eq=False)
class Module:
    """A module (or any other object) of the program: its class by name, its attributes as data."""

    kind: str
    attributes: dict[Any, Any] = field(default_factory=dict)


@dataclass
class Script:
    """An open archive: `close` it when everything wanted has been read."""

    archive: zipfile.ZipFile
    root: str
    tensors: dict[str, Strided]
    modules: dict[str, str]
    """Dotted name -> the name of its class, for each module."""

    def read(self, name: str) -> Tensor:
        strided = self.tensors[name]
        data = bytearray(self.archive.read(f"{self.root}data/{strided.storage.key}"))
        dtype = strided.storage.dtype
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.as_strided(strided.shape, strided.stride, strided.offset)

    def close(self) -> None:
        self.archive.close()


def open_torchscript(path: Path) -> Script:
    """Names, shapes and classes; the tensors are read when they are asked for."""
    try:
        archive = zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise _damaged(path, first_line(error)) from error
    try:
        root = next(n for n in archive.namelist() if n.rsplit("/", 1)[-1] == "data.pkl").removesuffix("data.pkl")
        tree = Pickle(path).load(_stored(archive, f"{root}data.pkl"))
        if not isinstance(tree, Module):
            raise ValueError("data.pkl holds no module")
        if f"{root}byteorder" in archive.NameToInfo and archive.read(f"{root}byteorder").decode() != sys.byteorder:
            raise CheckpointError(f"{path} was written on a machine of another byte order, and is not read.")
        tensors, modules = flattened(tree)
        for strided in tensors.values():
            _check_storage(archive, root, strided)
        return Script(archive, root, tensors, modules)
    except CheckpointError:
        archive.close()
        raise
    except Exception as error:  # damaged bytes fail in as many ways as there are instructions
        archive.close()
        raise _damaged(path, first_line(error)) from error


def flattened(tree: Module) -> tuple[dict[str, Strided], dict[str, str]]:
    """Tensors and classes of modules by dotted name, as `state_dict` spells them."""
    tensors: dict[str, Strided] = {}
    modules: dict[str, str] = {}
    todo, visited = [("", tree, 0)], 0
    while todo:
        prefix, module, depth = todo.pop()
        visited += 1 + len(module.attributes)
        if visited > MAX_ATTRIBUTES or depth > MAX_DEPTH:
            raise ValueError("its modules are nested without end")
        modules[prefix.removesuffix(".")] = module.kind
        inner = []
        for name, value in module.attributes.items():
            if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH:
                raise ValueError("an attribute of a module has no proper name")
            if isinstance(value, Strided):
                tensors[f"{prefix}{name}"] = value
            elif isinstance(value, Module):
                inner.append((f"{prefix}{name}.", value, depth + 1))
        todo += reversed(inner)
    return tensors, modules


class Pickle:
    """An interpreter of the instructions that torch's C++ pickler writes, for data alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def load(self, data: bytes) -> Any:
        for instruction, argument, _ in pickletools.genops(data):
            if instruction.name == "STOP":
                return self.stack.pop()
            self.step(instruction.name, argument)
        raise ValueError("it has no end")

    def step(self, instruction: str, argument: Any) -> None:
        stack = self.stack
        match instruction:
            case "PROTO":
                pass
            case "MARK":
                self.marks.append(len(stack))
            case "BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT":
                stack.append(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[instruction])
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE":
                stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}[instruction]())
            case "TUPLE":
                stack.append(tuple(self.marked()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(self.taken(int(instruction[-1]))))
            case "APPEND" | "APPENDS":
                values = self.marked() if instruction == "APPENDS" else self.taken(1)
                _as(list, stack[-1]).extend(values)
            case "SETITEM" | "SETITEMS":
                values = self.marked() if instruction == "SETITEMS" else self.taken(2)
                keys = [_as((str, int, float), key) for key in values[::2]]  # whose hash is no work
                _as(dict, stack[-1]).update(zip(keys, values[1::2], strict=True))
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "GLOBAL":
                stack.append(self.named(argument.replace(" ", ".")))
            case "BINPERSID":
                stack.append(_storage(stack.pop()))
            case "NEWOBJ":
                made, _ = self.taken(2)
                stack.append(_made(_as(Name, made).text))
            case "BUILD":
                state = stack.pop()
                _as(Module, stack[-1]).attributes = state if isinstance(state, dict) else {}
            case "REDUCE":
                called, arguments = self.taken(2)
                stack.append(_call(_as(Name, called).text, arguments))
            case _:
                refuse_code(self.path, f"its pickle has the instruction {instruction}")

    def named(self, name: str) -> Name:
        if not name.startswith(MODULE) and name not in KNOWN:
            refuse_code(self.path, f"it asks for {name}")
        return Name(name)

    def marked(self) -> list[Any]:
        """What was pushed since the last mark."""
        return self.taken(len(self.stack) - self.marks.pop())

    def taken(self, count: int) -> list[Any]:
        if not 0 <= count <= len(self.stack):
            raise ValueError("its stack is empty")
        first = len(self.stack) - count
        values = self.stack[first:]
        del self.stack[first:]
        return values


def _made(name: str) -> Module:
    if not name.startswith(MODULE):
        raise ValueError(f"an object is made of {name}")
    return Module(name.rsplit(".", 1)[-1])


def _call(name: str, arguments: Any) -> Any:
    if name == TENSOR:
        storage, offset, shape, stride = arguments[:4]
        numbers = [offset, *shape, *stride]
        if any(_as(int, n) < 0 for n in numbers) or len(shape) != len(stride):
            raise ValueError("a tensor of negative size")
        return Strided(_as(Storage, storage), offset, tuple(shape), tuple(stride))
    if name in SAME:
        return arguments[0]
    if name == EMPTY and arguments == ():
        return {}
    raise ValueError(f"{name} is called as a function")


def _storage(saved: Any) -> Storage:
    kind, name, key, _, numel = saved
    if kind != "storage":
        raise ValueError(f"a reference to {kind!r}")
    return Storage(_as(str, key), STORAGES[_as(Name, name).text], _as(int, numel))


def _as(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{type(value).__name__} where another type belongs")
    return value


def _check_storage(archive: zipfile.ZipFile, root: str, strided: Strided) -> None:
    storage = strided.storage
    info = archive.NameToInfo.get(f"{root}data/{storage.key}")
    wanted = storage.numel * storage.dtype.itemsize
    if info is None or info.file_size != wanted or info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"data/{storage.key} does not hold the {wanted} bytes of its tensor")
    last = strided.offset + sum((n - 1) * s for n, s in zip(strided.shape, strided.stride, strict=True))
    if math.prod(strided.shape) and last >= storage.numel:
        raise ValueError(f"a tensor reaches beyond data/{storage.key}")


def _stored(archive: zipfile.ZipFile, name: str) -> bytes:
    """A member that is kept as it is, so that its size in memory is its size in the file."""
    if archive.NameToInfo[name].compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{name} is compressed")
    return archive.read(name)


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is a TorchScript archive, truncated or damaged ({why}); {DOWNLOAD_AGAIN}.")

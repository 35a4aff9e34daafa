"""Read the tensors of a TorchScript archive without running its code or Python's unpickler.

torch.jit.save writes a zip file: `data.pkl`, the tree of modules as a pickle; `data/N`, the bytes of each storage;
`code/`, the program. The first two are read. The pickle is interpreted here, with the few opcodes that torch's C++
pickler uses. A global in it (`__torch__.clip.model.CLIP`) stays a string and never becomes a Python object, so nothing
in the file can be called.
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

from vitrail.errors import CheckpointError, first_line
from vitrail.weights.file_type import DOWNLOAD_AGAIN, refuse_code

REBUILD_TENSOR = "torch._utils._rebuild_tensor_v2"
IDENTITY_FUNCTIONS = frozenset(
    f"torch.jit._pickle.{name}"
    for name in ("restore_type_tag", "build_intlist", "build_doublelist", "build_boollist", "build_tensorlist")
)
"""Functions that return their first argument."""
ORDERED_DICT = "collections.OrderedDict"
"""The type of a tensor's backward hooks, which are always empty."""
STORAGE_DTYPES = {
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
ALLOWED_GLOBALS = frozenset({REBUILD_TENSOR, ORDERED_DICT, *IDENTITY_FUNCTIONS, *STORAGE_DTYPES})
CLASS_PREFIX = "__torch__."
"""Prefix of the names of the program's own classes."""

# Modules may be shared, so the expanded tree can be much larger than the file.
MAX_ATTRIBUTES, MAX_DEPTH, MAX_NAME_LENGTH = 100_000, 64, 200
"""Limits: attributes in the tree, nesting of modules, characters in a name."""


@dataclass(frozen=True)
class GlobalName:
    """The name of a global in the pickle."""

    text: str


@dataclass(frozen=True)
class Storage:
    """The storage of a tensor: `data/KEY` in the archive."""

    key: str
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True)
class TensorRef:
    """The metadata of a tensor that has not been read."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(eq=False)
class ScriptObject:
    """A module or other object of the program: the name of its class and its attributes."""

    class_name: str
    attributes: dict[Any, Any] = field(default_factory=dict)


@dataclass
class TorchScriptArchive:
    """An open archive. Call `close` once the tensors have been read."""

    archive: zipfile.ZipFile
    root: str
    tensors: dict[str, TensorRef]
    modules: dict[str, str]
    """Dotted module name -> class name."""

    def read(self, name: str) -> Tensor:
        strided = self.tensors[name]
        data = bytearray(self.archive.read(f"{self.root}data/{strided.storage.key}"))
        dtype = strided.storage.dtype
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.as_strided(strided.shape, strided.stride, strided.offset)

    def close(self) -> None:
        self.archive.close()


def open_torchscript(path: Path) -> TorchScriptArchive:
    """Open an archive and read names, shapes and classes; tensors are read on access."""
    try:
        archive = zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise _damaged_error(path, first_line(error)) from error
    try:
        root = next(n for n in archive.namelist() if n.rsplit("/", 1)[-1] == "data.pkl").removesuffix("data.pkl")
        tree = PickleInterpreter(path).load(_read_uncompressed(archive, f"{root}data.pkl"))
        if not isinstance(tree, ScriptObject):
            raise ValueError("data.pkl holds no module")
        if f"{root}byteorder" in archive.NameToInfo and archive.read(f"{root}byteorder").decode() != sys.byteorder:
            raise CheckpointError(f"{path} was written on a machine with another byte order, which is not supported.")
        tensors, modules = flatten_modules(tree)
        for strided in tensors.values():
            _check_storage(archive, root, strided)
        return TorchScriptArchive(archive, root, tensors, modules)
    except CheckpointError:
        archive.close()
        raise
    except Exception as error:  # damaged bytes can raise almost anything
        archive.close()
        raise _damaged_error(path, first_line(error)) from error


def flatten_modules(tree: ScriptObject) -> tuple[dict[str, TensorRef], dict[str, str]]:
    """Tensors and module classes by dotted name, as in `state_dict`."""
    tensors: dict[str, TensorRef] = {}
    modules: dict[str, str] = {}
    todo, visited = [("", tree, 0)], 0
    while todo:
        prefix, module, depth = todo.pop()
        visited += 1 + len(module.attributes)
        if visited > MAX_ATTRIBUTES or depth > MAX_DEPTH:
            raise ValueError("its modules are nested too deeply")
        modules[prefix.removesuffix(".")] = module.class_name
        inner = []
        for name, value in module.attributes.items():
            if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH:
                raise ValueError("an attribute of a module has an invalid name")
            if isinstance(value, TensorRef):
                tensors[f"{prefix}{name}"] = value
            elif isinstance(value, ScriptObject):
                inner.append((f"{prefix}{name}.", value, depth + 1))
        todo += reversed(inner)
    return tensors, modules


class PickleInterpreter:
    """Interpreter for the opcodes that torch's C++ pickler writes; data only."""

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
        raise ValueError("it has no STOP opcode")

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
                stack.append(tuple(self.pop_to_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(self.pop(int(instruction[-1]))))
            case "APPEND" | "APPENDS":
                values = self.pop_to_mark() if instruction == "APPENDS" else self.pop(1)
                _expect(list, stack[-1]).extend(values)
            case "SETITEM" | "SETITEMS":
                values = self.pop_to_mark() if instruction == "SETITEMS" else self.pop(2)
                keys = [_expect((str, int, float), key) for key in values[::2]]  # types that are cheap to hash
                _expect(dict, stack[-1]).update(zip(keys, values[1::2], strict=True))
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "GLOBAL":
                stack.append(self.check_global(argument.replace(" ", ".")))
            case "BINPERSID":
                stack.append(_storage(stack.pop()))
            case "NEWOBJ":
                made, _ = self.pop(2)
                stack.append(_new_object(_expect(GlobalName, made).text))
            case "BUILD":
                state = stack.pop()
                _expect(ScriptObject, stack[-1]).attributes = state if isinstance(state, dict) else {}
            case "REDUCE":
                called, arguments = self.pop(2)
                stack.append(_call(_expect(GlobalName, called).text, arguments))
            case _:
                refuse_code(self.path, f"its pickle has the opcode {instruction}")

    def check_global(self, name: str) -> GlobalName:
        if not name.startswith(CLASS_PREFIX) and name not in ALLOWED_GLOBALS:
            refuse_code(self.path, f"it requires {name}")
        return GlobalName(name)

    def pop_to_mark(self) -> list[Any]:
        """Pop what was pushed since the last mark."""
        return self.pop(len(self.stack) - self.marks.pop())

    def pop(self, count: int) -> list[Any]:
        if not 0 <= count <= len(self.stack):
            raise ValueError("its stack is empty")
        first = len(self.stack) - count
        values = self.stack[first:]
        del self.stack[first:]
        return values


def _new_object(name: str) -> ScriptObject:
    if not name.startswith(CLASS_PREFIX):
        raise ValueError(f"an object of type {name}")
    return ScriptObject(name.rsplit(".", 1)[-1])


def _call(name: str, arguments: Any) -> Any:
    if name == REBUILD_TENSOR:
        storage, offset, shape, stride = arguments[:4]
        numbers = [offset, *shape, *stride]
        if any(_expect(int, n) < 0 for n in numbers) or len(shape) != len(stride):
            raise ValueError("a tensor of negative size")
        return TensorRef(_expect(Storage, storage), offset, tuple(shape), tuple(stride))
    if name in IDENTITY_FUNCTIONS:
        return arguments[0]
    if name == ORDERED_DICT and arguments == ():
        return {}
    raise ValueError(f"{name} is called as a function")


def _storage(saved: Any) -> Storage:
    kind, name, key, _, numel = saved
    if kind != "storage":
        raise ValueError(f"a reference to {kind!r}")
    return Storage(_expect(str, key), STORAGE_DTYPES[_expect(GlobalName, name).text], _expect(int, numel))


def _expect(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{type(value).__name__} where another type is required")
    return value


def _check_storage(archive: zipfile.ZipFile, root: str, strided: TensorRef) -> None:
    storage = strided.storage
    info = archive.NameToInfo.get(f"{root}data/{storage.key}")
    expected = storage.numel * storage.dtype.itemsize
    if info is None or info.file_size != expected or info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"data/{storage.key} does not hold the {expected} bytes of its tensor")
    last = strided.offset + sum((n - 1) * s for n, s in zip(strided.shape, strided.stride, strict=True))
    if math.prod(strided.shape) and last >= storage.numel:
        raise ValueError(f"a tensor reaches beyond data/{storage.key}")


def _read_uncompressed(archive: zipfile.ZipFile, name: str) -> bytes:
    """Read a member that is stored uncompressed, so that its size in memory is its size in the file."""
    if archive.NameToInfo[name].compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{name} is compressed")
    return archive.read(name)


def _damaged_error(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is a TorchScript archive, truncated or damaged ({why}); {DOWNLOAD_AGAIN}.")

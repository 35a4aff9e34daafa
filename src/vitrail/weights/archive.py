"""Open files of tensors of any supported type. Names and shapes are read at once, the data on access.

The type is detected from the first bytes, not from the file name: safetensors (whole or in shards), NumPy npz,
PyTorch zip and legacy pickle files, TorchScript. This module does not depend on the models. Tensors of safetensors and
PyTorch zip files are views of the memory-mapped file: they use memory once accessed, and writing to them changes a
private copy, not the file.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vitrail.errors import CheckpointError, NotFoundError, did_you_mean, first_line
from vitrail.weights.file_type import (
    DOWNLOAD_AGAIN,
    detect_file_type,
    read_json,
    refuse_code,
    summarize_names,
)
from vitrail.weights.pickles import load_pickle, unwrap
from vitrail.weights.torchscript import open_torchscript

# Names of weights files in repositories of Hugging Face, timm and open_clip, in order of preference.
STANDARD_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "open_clip_pytorch_model.bin",
)
# A folder without any of these names must hold one file with one of these suffixes, in order of preference.
WEIGHTS_SUFFIXES = ((".safetensors",), (".npz",), (".pth", ".pt", ".bin"))
SIDECARS = ("config.json", "preprocessor_config.json", "processor_config.json", "open_clip_config.json")

NOT_WEIGHTS = re.compile(r"optimizer|scheduler|scaler|training_args|rng_state")  # files that hold no weights
WRAPPER_PREFIXES = ("module.", "_orig_mod.")  # left by DistributedDataParallel and torch.compile

ALIGNMENT = 64
"""In bytes, as in torch's CPU allocator."""

READ_ERRORS = (OSError, EOFError, TypeError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error, SafetensorError)
SHARD_NAME = re.compile(r"-\d+-of-(\d+)\.\w+$")


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: its shape and a function that reads it."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


class LazyTensors(Mapping[str, Tensor]):
    """Mapping from names to tensors. Names and shapes are known; each lookup reads the tensor, without caching it."""

    def __init__(self, entries: Mapping[str, TensorEntry], source: str) -> None:
        self.entries = dict(entries)
        self._source = source

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], source: str = "memory") -> LazyTensors:
        """Wrap tensors that are already in memory."""
        return cls(
            {n: TensorEntry(tuple(t.shape), _bind_name(tensors.__getitem__, n)) for n, t in tensors.items()}, source
        )

    def __getitem__(self, name: str) -> Tensor:
        entry = self.entries[name]
        try:
            return entry.read()
        except READ_ERRORS as error:
            raise CheckpointError(
                f"{self._source}: cannot read {name!r} ({first_line(error)}); {DOWNLOAD_AGAIN}."
            ) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name: object) -> bool:  # Mapping's default would read the tensor
        return name in self.entries

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading its data."""
        return self.entries[name].shape

    def strip_prefix(self, prefix: str) -> LazyTensors:
        """The tensors whose names begin with `prefix`, with the prefix removed."""
        entries = {n.removeprefix(prefix): e for n, e in self.entries.items() if n.startswith(prefix)}
        return LazyTensors(entries, self._source)

    def rename(self, spelling: Callable[[str], str]) -> LazyTensors:
        """Rename the tensors; CheckpointError if two get the same name."""
        renamed = {spelling(name): entry for name, entry in self.entries.items()}
        if len(renamed) < len(self.entries):
            raise CheckpointError(f"{self._source}: two tensors have the same name after renaming.")
        return LazyTensors(renamed, self._source)


@dataclass
class Archive:
    """An open checkpoint: its tensors by name, and the metadata in and beside the file."""

    source: str
    """The path as given, for messages."""
    tensors: LazyTensors
    """Read on access."""
    metadata: dict[str, str] = field(default_factory=dict)
    """From a safetensors header or an index file."""
    sidecars: dict[str, Any] = field(default_factory=dict)
    """Parsed JSON files beside the weights, by file name."""
    extras: dict[str, Any] = field(default_factory=dict)
    """Other contents of a pickle: epoch, arch, args."""
    notes: list[str] = field(default_factory=list)
    """Choices made while opening, for the user."""
    hints: dict[str, Any] = field(default_factory=dict)
    """Config fields given by the caller, used where the file does not state them."""
    handles: list[Any] = field(default_factory=list)
    """Open npz and TorchScript files, closed once the tensors have been read."""

    def close(self) -> None:
        """Close npz and TorchScript files. Tensors already read and memory-mapped tensors stay valid."""
        for handle in self.handles:
            handle.close()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading its data."""
        return self.tensors.shape(name)

    def strip_prefix(self, prefix: str) -> Archive:
        """This archive with only the tensors whose names begin with `prefix`, with the prefix removed."""
        return replace(self, tensors=self.tensors.strip_prefix(prefix)) if prefix else self


@dataclass
class _Contents:
    """The contents of one file."""

    entries: dict[str, TensorEntry]
    metadata: dict[str, str] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)


def open_archive(path: str | Path, *, section: str | None = None) -> Archive:
    """Open a weights file, an index of shards, or a folder that holds one of these.

    `section` names the part of a pickle to read, such as 'student'; the default is the first of `pickles.SECTIONS` that
    the pickle has.
    """
    path = Path(path).expanduser()
    with _explain_read_errors(path):
        file, notes = _find_weights_file(path)
        contents = _read_contents(file, section)
        sidecars, sidecar_notes = _read_sidecars(file, whole_folder=path.is_dir())
    entries, prefix_notes = _strip_wrapper_prefixes(contents.entries)
    if not entries:
        raise CheckpointError(f"{file} contains no tensors.")
    return Archive(
        source=str(path),
        tensors=LazyTensors(entries, str(file)),
        metadata=contents.metadata,
        sidecars=sidecars,
        extras=contents.extras,
        notes=[*notes, *contents.notes, *prefix_notes, *sidecar_notes],
        handles=contents.handles,
    )


def align_tensor(tensor: Tensor) -> Tensor:
    """Make a tensor contiguous, at an address that is a multiple of ALIGNMENT; copies only if it is not.

    Matrix products may sum in another order for unaligned operands, and a memory-mapped tensor starts at any offset of
    the file. With aligned tensors, a model's outputs are bit-identical wherever its tensors lie in a file.
    """
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def unmap_weights(net: nn.Module) -> None:
    """Replace the memory-mapped tensors of a network on the CPU by copies, one at a time.

    For long-running processes: mapped tensors change with the file, and if the file is truncated, reading them kills
    the process.
    """
    if next(net.parameters()).device.type == "cpu":
        net._apply(torch.clone)  # like `to`, this also clears what modules have cached


def choose_weights_file(names: Iterable[str]) -> str | None:
    """The weights file among the files of a folder or repository; None if there is none.

    CheckpointError if several files are equally likely.
    """
    names = sorted(n for n in names if "/" not in n and not n.startswith("."))
    for standard in STANDARD_NAMES:
        if standard in names:
            return standard
    for suffixes in WEIGHTS_SUFFIXES:
        candidates = [n for n in names if n.endswith(suffixes) and not NOT_WEIGHTS.search(n)]
        if len(candidates) == 1:
            return candidates[0]
        if candidates:
            raise CheckpointError(
                f"several files could be the weights ({summarize_names(candidates)}); pass the path of one of them."
            )
    return None


def _read_contents(path: Path, section: str | None) -> _Contents:
    kind = detect_file_type(path)
    if section is not None and not kind.endswith("torch"):
        raise CheckpointError(f"{path} is not a pickle: it has no section {section!r}.")
    if kind == "safetensors":
        _refuse_shard(path)
        return _read_safetensors(path)
    if kind == "npz":
        return _read_npz(path)
    if kind == "index":
        return _read_index(path)
    if kind == "torchscript":
        return _read_torchscript(path)
    _refuse_shard(path)
    return _read_torch(path, section, mapped=kind == "torch")


def _read_safetensors(path: Path) -> _Contents:
    try:
        handle = safe_open(path, framework="pt")
        shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
        metadata = dict(handle.metadata() or {})
    except SafetensorError as error:
        raise CheckpointError(f"{path} is truncated or damaged ({first_line(error)}); {DOWNLOAD_AGAIN}.") from error
    entries = {name: TensorEntry(shape, _bind_name(handle.get_tensor, name)) for name, shape in shapes.items()}
    return _Contents(entries, metadata)


def _read_torch(path: Path, section: str | None, mapped: bool) -> _Contents:
    saved = unwrap(load_pickle(path, mapped), section, path)
    return _Contents(LazyTensors.from_tensors(saved.tensors).entries, extras=saved.extras, notes=saved.notes)


def _read_torchscript(path: Path) -> _Contents:
    script = open_torchscript(path)
    entries = {name: TensorEntry(t.shape, _bind_name(script.read, name)) for name, t in script.tensors.items()}
    notes = ["read the tensors of a TorchScript program; none of its code was executed"]
    return _Contents(entries, extras={"modules": script.modules}, notes=notes, handles=[script])


def _read_npz(path: Path) -> _Contents:
    archive = np.load(path, allow_pickle=False)
    try:
        entries, aside = _npz_entries(archive, path)
    except BaseException:
        archive.close()
        raise
    notes = [f"ignored {summarize_names(aside)}: not tensors"] if aside else []
    return _Contents(entries, notes=notes, handles=[archive])


def _npz_entries(archive: Any, path: Path) -> tuple[dict[str, TensorEntry], list[str]]:
    """The tensors, and the names of arrays that are not numeric."""
    entries, aside = {}, []
    for name in archive.files:
        try:
            shape, dtype = _npy_header(archive, name)
        except READ_ERRORS as error:
            raise CheckpointError(f"{path} is damaged at {name!r} ({first_line(error)}); {DOWNLOAD_AGAIN}.") from error
        if dtype.hasobject:
            refuse_code(path, f"its array {name!r} is a pickle of Python objects")
        if dtype.kind in "biufc" or dtype == np.dtype("V2"):
            entries[name] = TensorEntry(shape, _bind_name(lambda name: _from_numpy(archive[name]), name))
        else:
            aside.append(name)
    return entries, aside


def _npy_header(archive: Any, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    with archive.zip.open(name if name in archive.zip.namelist() else f"{name}.npy") as stream:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
    return shape, dtype


def _from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    if array.dtype == np.dtype("V2"):  # JAX's bfloat16 as stored by NumPy
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))


def _read_index(path: Path) -> _Contents:
    index = read_json(path)
    weight_map = index["weight_map"]
    plain = isinstance(weight_map, dict) and all(isinstance(f, str) and Path(f).name == f for f in weight_map.values())
    if not plain:
        raise CheckpointError(f"{path}: weight_map must map each tensor to a file name in the same folder.")
    files = sorted(set(weight_map.values()))
    if missing := [f for f in files if not (path.parent / f).exists()]:
        raise CheckpointError(
            f"{path} lists shards that are not in its folder: {summarize_names(missing)}; {DOWNLOAD_AGAIN}."
        )
    shards = {f: _read_shard(path.parent / f) for f in files}
    if absent := [n for n, f in weight_map.items() if n not in shards[f].entries]:
        where = weight_map[absent[0]]
        raise CheckpointError(
            f"{path} lists {summarize_names(absent)} in {where}, which does not contain them; {DOWNLOAD_AGAIN}."
        )
    entries = {name: shards[file].entries[name] for name, file in weight_map.items()}
    notes = [f"read {len(files)} shards"]
    if unnamed := [n for f in files for n in shards[f].entries if n not in weight_map]:
        notes.append(f"ignored {summarize_names(unnamed)}, which {path.name} does not list")
    metadata = index.get("metadata")
    return _Contents(entries, {str(k): str(v) for k, v in (metadata or {}).items()}, notes=notes)


def _read_shard(path: Path) -> _Contents:
    kind = detect_file_type(path)
    if kind == "safetensors":
        return _read_safetensors(path)
    if kind.endswith("torch"):
        return _read_torch(path, None, mapped=kind == "torch")
    raise CheckpointError(f"{path} is not a shard but a {kind} file; expected safetensors or a torch.save file.")


def _strip_wrapper_prefixes(entries: dict[str, TensorEntry]) -> tuple[dict[str, TensorEntry], list[str]]:
    """Remove prefixes that wrappers such as DistributedDataParallel add to every name."""
    notes = []
    while entries and (prefix := next((w for w in WRAPPER_PREFIXES if all(n.startswith(w) for n in entries)), None)):
        entries = {name.removeprefix(prefix): entry for name, entry in entries.items()}
        notes.append(f"removed {prefix!r} from every name")
    return entries, notes


def _find_weights_file(path: Path) -> tuple[Path, list[str]]:
    """The file to open, and notes about the choice."""
    if path.is_file():
        return path, []
    if not path.exists():
        raise NotFoundError(_not_found_message(path))
    if not path.is_dir():
        raise CheckpointError(f"{path} is neither a file nor a folder.")
    names = [f.name for f in path.iterdir()]
    try:
        name = choose_weights_file(names)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    if name is not None:
        return path / name, []
    if (path / "model").is_dir() and choose_weights_file(f.name for f in (path / "model").iterdir()):
        return _find_weights_file(path / "model")[0], [f"read the model of the training run in {path}"]
    looked = ", ".join((*STANDARD_NAMES, "one .safetensors, .npz, .pth, .pt or .bin file"))
    raise NotFoundError(
        f"no weights in the folder {path}, which contains {summarize_names(names) or 'nothing'}; expected {looked}."
    )


def _not_found_message(path: Path) -> str:
    if path.is_symlink():
        return f"{path} is a link to {path.readlink()}, which does not exist."
    parent = path.parent
    if not parent.is_dir():
        return f"no such file: {path} (there is no folder {parent} either)."
    names = [f.name for f in parent.iterdir()]
    return f"no such file: {path}{did_you_mean(path.name, names) if names else f'; {parent} is empty.'}"


def _read_sidecars(file: Path, whole_folder: bool) -> tuple[dict[str, Any], list[str]]:
    """The parsed JSON files that describe `file`, and a note if they are ignored.

    They are read if the whole folder was given, if the file has a standard name, or if the folder holds no other
    weights.
    """
    there = [name for name in SIDECARS if (file.parent / name).is_file()]
    if there and not whole_folder and file.name not in STANDARD_NAMES:
        suffixes = tuple(s for kind in WEIGHTS_SUFFIXES for s in kind)
        names = [f.name for f in file.parent.iterdir() if f.name != file.name]
        others = [n for n in names if n.endswith(suffixes) and not NOT_WEIGHTS.search(n)]
        if others:
            return {}, [
                f"{summarize_names(there)} not read: "
                f"the folder holds other weights besides {file.name} ({summarize_names(others)})"
            ]
    return {name: read_json(file.parent / name) for name in there}, []


def _refuse_shard(path: Path) -> None:
    match = SHARD_NAME.search(path.name)
    if match and int(match[1]) > 1:
        raise CheckpointError(f"{path} is one shard of {int(match[1])}; pass the folder or its .index.json file.")


def _bind_name(read: Callable[[str], Tensor], name: str) -> Callable[[], Tensor]:
    return lambda: read(name)


@contextmanager
def _explain_read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise NotFoundError(f"no such file: {error.filename or path}.") from error
    except PermissionError as error:
        raise CheckpointError(f"no permission to read {error.filename or path}; try `ls -l` on it.") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}.") from error

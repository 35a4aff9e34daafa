"""The folder of `vitrail serve --models`: which models and versions are in it, and which of their files are complete.

DIR/NAME/VERSION is one version: a run folder, a model folder, a checkpoint or an exported file. DIR/NAME, if it is
itself a model, is its version 1. Hidden names are ignored, so `mv` to a hidden name removes a version, and files copied
under a hidden name are invisible until they are renamed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from vitrail.engines.exported_files import SUFFIXES, existing_files
from vitrail.errors import ConfigError, did_you_mean
from vitrail.weights.locate import WEIGHTS_SUFFIXES

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,99}")
"""Names of models and versions: they are part of URLs and of metric labels."""
CANARY, SETTINGS = "canary", "serving.json"
"""Names beside the versions of a model: the images that a new version is tried on, and settings."""
MODEL_STEMS = ("model", "pytorch_model")
MAX_FILES = 5000
"""Files in one version; more are not those of a model."""
ClassRule = Literal["append", "any"]


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Contents of serving.json."""

    classes: ClassRule = "append"
    """append: a new version has the classes of the one in use, in the same order, and may have more; any: no rule."""
    canary_drop: float | None = None
    """Allowed loss of top-1 accuracy on the canary images, in percentage points; None: that of --canary-drop."""


@dataclass(frozen=True)
class FoundVersion:
    """A version in the folder."""

    name: str
    version: str
    path: Path
    signature: str
    """Hash of the names, sizes and times of its files; changes when a file does."""
    size: int
    """Bytes of its files."""
    newest: float
    """When one of its files last changed."""


@dataclass(frozen=True)
class FoundModel:
    """A model in the folder."""

    name: str
    versions: dict[str, FoundVersion]
    canary: Path | None = None
    """Folder with images to try new versions on."""
    settings: ModelSettings = field(default_factory=ModelSettings)
    problem: str = ""
    """Why the files or the settings cannot be read; no new version is loaded meanwhile."""


def find_models(folder: Path, before: Mapping[str, FoundModel] | None = None) -> dict[str, FoundModel]:
    """The models in the folder, by name. Raises OSError if it cannot be read.

    before: the models found last. What cannot be read now, as on a network disk that is away, stays as it was: only
    what does not exist has been removed.
    """
    models: dict[str, FoundModel] = {}
    for path in _visible(folder):
        last = None if before is None else before.get(path.name) or before.get(path.stem)
        try:
            model = _find_model(path, last)
        except OSError as error:
            if last is None or _is_missing(error):  # never readable, as lost+found, or just removed
                continue
            reason = (error.strerror or type(error).__name__).lower()
            model = replace(last, problem=f"its files cannot be read: {reason}.")
        if model is not None and model.versions:
            models.setdefault(model.name, model)
    return models


def _find_model(path: Path, last: FoundModel | None) -> FoundModel | None:
    """The versions of the model at this path: one, if it is itself a model. None if its name is not one of a model."""
    name, versions = _name_of(path), []
    if not NAME.fullmatch(name):
        return None
    if (model_path := model_in(path, any_name=False)) is not None:
        versions.append(_find_version(name, "1", model_path))
    elif _is_folder(path):
        known = {} if last is None else last.versions
        versions += [_find_entry(name, entry, known) for entry in _visible(path)]
    canary = path / CANARY
    settings, problem = _read_settings(path / SETTINGS)
    found_versions = {one.version: one for one in versions if one is not None}
    return FoundModel(name, found_versions, canary if _is_folder(canary) else None, settings, problem)


def _find_entry(name: str, entry: Path, known: Mapping[str, FoundVersion]) -> FoundVersion | None:
    """The version at an entry of a model's folder; None if there is none.

    One that cannot be read is as it was found last. If it was never readable, loading it fails and says why.
    """
    if entry.name in (CANARY, SETTINGS):
        return None
    try:
        version, path = _name_of(entry), model_in(entry)
        return _find_version(name, version, path) if path is not None and NAME.fullmatch(version) else None
    except OSError as error:
        if _is_missing(error) or not NAME.fullmatch(entry.name):
            return None
        unreadable = FoundVersion(name, entry.name, entry, f"unreadable: error {error.errno}", 0, 0.0)
        return known.get(entry.name) or known.get(entry.stem) or unreadable


def model_in(path: Path, any_name: bool = True) -> Path | None:
    """The path to load if this is a model, else None.

    A model is a model or run folder, a weights file, an exported file, or a folder with one of these files, named
    model.* unless `any_name` is true.
    """
    if path.name in (CANARY, SETTINGS):
        return None
    if _is_file(path):
        suffix = path.suffix.lower()
        if suffix == ".bin" and _is_file(path.with_suffix(".xml")):  # the weights of an OpenVINO file
            return None
        return path if suffix in WEIGHTS_SUFFIXES or suffix in SUFFIXES.values() else None
    if _is_file(path / "config.json"):
        return path
    if not _is_folder(path):
        return None
    files = [found for one in _visible(path) if _is_file(one) and (found := model_in(one)) is not None]
    return files[0] if len(files) == 1 and (any_name or files[0].stem in MODEL_STEMS) else None


def _find_version(name: str, version: str, path: Path) -> FoundVersion | None:
    """The version at this path; None if it has no files yet, or they disappear while they are listed."""
    digest, size, newest, count = hashlib.sha256(), 0, 0.0, 0
    try:
        for file in _files(path):
            status = file.stat()
            inside = file.relative_to(path.parent)  # servers may see the folder under different paths
            digest.update(f"{inside}\0{status.st_size}\0{status.st_mtime_ns}\0".encode(errors="surrogateescape"))
            size, newest, count = size + status.st_size, max(newest, status.st_mtime, status.st_ctime), count + 1
            if count > MAX_FILES:
                return None
    except OSError as error:
        if not _is_missing(error):
            raise
        return None
    return FoundVersion(name, version, path, digest.hexdigest()[:32], size, newest) if size else None


def _files(path: Path) -> Iterator[Path]:
    """All files of a version, including hidden ones that are still being copied; of a run, those of its model."""
    if _is_file(path):
        yield from existing_files(path) if path.suffix.lower() in SUFFIXES.values() else [path]
        return
    is_run = _is_folder(path / "checkpoint") or _is_file(path / "metrics.jsonl")
    for folder, _, names in os.walk(path / "model" if is_run else path, onerror=_raise):
        yield from (Path(folder, name) for name in sorted(names))


def _raise(error: OSError) -> NoReturn:
    raise error


def _is_file(path: Path) -> bool:
    """Whether this is an existing file. Raises OSError if the disk cannot tell, unlike `Path.is_file`."""
    return stat.S_ISREG(_mode(path))


def _is_folder(path: Path) -> bool:
    return stat.S_ISDIR(_mode(path))


def _mode(path: Path) -> int:
    """Type of a file; 0 if there is none."""
    try:
        return path.stat().st_mode
    except OSError as error:
        if not _is_missing(error):
            raise
        return 0


def _is_missing(error: OSError) -> bool:
    """Whether the error means that there is no such file; other errors do not say whether there is one."""
    return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _name_of(path: Path) -> str:
    """A file's name without its suffix, a folder's name."""
    return path.stem if _is_file(path) else path.name


def _read_settings(path: Path) -> tuple[ModelSettings, str]:
    """The settings of a model, and why they cannot be read."""
    if not _is_file(path):
        return ModelSettings(), ""
    try:
        return parse_settings(json.loads(path.read_text(encoding="utf-8"))), ""
    except ConfigError as error:
        return ModelSettings(), f"{path.name}: {error}"
    except (OSError, ValueError):
        return ModelSettings(), f"{path.name} is not readable as JSON."


def parse_settings(values: Any) -> ModelSettings:
    """Validate the contents of serving.json."""
    if not isinstance(values, dict):
        raise ConfigError('expected an object such as {"classes": "any"}.')
    known = [one.name for one in fields(ModelSettings)]
    for name in values:
        if name not in known:
            raise ConfigError(f"unknown setting {name!r}{did_you_mean(name, known)}")
    settings = ModelSettings(**values)
    if settings.classes not in ("append", "any"):
        raise ConfigError(f"classes={settings.classes!r}: expected append or any.")
    drop = settings.canary_drop
    if drop is not None and (isinstance(drop, bool) or not isinstance(drop, int | float) or not 0 <= drop <= 100):
        raise ConfigError(f"canary_drop={drop!r}: expected percentage points, 0 to 100.")
    return settings

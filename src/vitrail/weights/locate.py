"""Find a model's files by path, name of a shipped or published model, or hub id."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vitrail.errors import NotFoundError, VitrailError
from vitrail.models.model_names import find_published, parse_name
from vitrail.models.published_models import PUBLISHED_MODELS, PublishedModel
from vitrail.weights.file_type import summarize_names
from vitrail.weights.shipped import SHIPPED

WEIGHTS_SUFFIXES = frozenset({".safetensors", ".npz", ".pth", ".pt", ".bin", ".ckpt"})


@dataclass(frozen=True)
class ModelLocation:
    """The path of a model's files."""

    path: Path
    origin: str = ""
    """The hub id or the shipped model's name; empty for a local path."""
    notes: tuple[str, ...] = ()
    """Notes for the user about the choice."""


def locate(source: str | Path | ModelLocation) -> ModelLocation:
    """Find the files of a path, model name or hub id; downloads them if needed."""
    if isinstance(source, ModelLocation):
        return source
    text, path = str(source), Path(source).expanduser()
    if not text.strip():
        raise NotFoundError("got an empty name, expected a file, a folder, a model name or a hub id.")
    if _exists(path):
        return ModelLocation(_model_folder(path))
    if isinstance(source, Path):
        return _raise_not_found(path)
    if text in SHIPPED:
        return ModelLocation(SHIPPED[text].path, text)
    variant = find_published(text)
    if variant is not None and _is_variant_name(text, variant):
        return _download_variant(text, variant)
    if re.fullmatch(r"[^/]+/\d+(-\w+)?(@\w+)?", text):  # ViT-B/16: no hub id ends in a bare number
        raise NotFoundError(_unpublished_message(text))
    from vitrail.weights import hub  # huggingface_hub takes a while to import

    if hub.HUB_PREFIX.match(text):
        return ModelLocation(hub.fetch(text), hub.HUB_PREFIX.sub("", text, count=1))
    if re.fullmatch(r"(vit|deit|resnetv2|flexivit|eva)\w*\.[a-z]\w+", text):  # a timm name with its tag
        return ModelLocation(hub.fetch(f"timm/{text}"), f"timm/{text}", (f"{text} is read as timm/{text}",))
    if _looks_like_path(text, path):
        return _raise_not_found(path)
    if hub.parse_hub_id(text) is None:
        raise NotFoundError(f"no file, folder or model is called {text!r}{_suggestion(text)}")
    try:
        return ModelLocation(hub.fetch(text), text)
    except VitrailError as error:
        near = difflib.get_close_matches(text, [*SHIPPED, *(v.hub_id for v in PUBLISHED_MODELS)], n=1, cutoff=0.85)
        hint = f" Did you mean {near[0]}?" if near and near[0] != text and find_published(text) is None else ""
        raise type(error)(f"there is no file or folder {text}; as a hub id: {error}{hint}") from error


def _model_folder(path: Path) -> Path:
    """The path of the model; for a training run's folder, the model in it."""
    if not (path / "checkpoint").is_dir() or not (path / "metrics.jsonl").exists():
        return path
    if not (path / "model").is_dir():
        resume = f"vitrail train --resume --out {shlex.quote(str(path))}"
        raise NotFoundError(f"the run in {path} is not finished and has no model yet; continue it with {resume}.")
    return path / "model"


def _raise_not_found(path: Path) -> ModelLocation:
    """Raise NotFoundError and list the models in the folder; if it cannot be listed, opening the path fails later."""
    folder = path.parent
    if os.path.islink(path) or not os.access(folder, os.R_OK | os.X_OK) or not folder.is_dir():
        return ModelLocation(path)
    names = _models_in(folder)
    near = difflib.get_close_matches(path.name, names, n=1)
    if near:
        raise NotFoundError(f"no such file: {path}; did you mean {str(folder / near[0])!r}?")
    if not names:
        where = f"the folder {folder}" if folder != Path() else "the current folder"
        raise NotFoundError(f"no such file: {path}; {where} contains no models.")
    raise NotFoundError(f"no such file: {path}; found {summarize_names(str(folder / name) for name in names)}.")


def _models_in(folder: Path) -> list[str]:
    """Names of possible models in a folder: weights files, folders with weights, run folders."""
    with suppress(OSError):
        return sorted(f.name for f in folder.iterdir() if not f.name.startswith(".") and _may_be_model(f))
    return []


def _may_be_model(path: Path) -> bool:
    try:
        if not path.is_dir():
            return path.suffix.lower() in WEIGHTS_SUFFIXES
        return any(f.name == "config.json" or f.suffix.lower() in WEIGHTS_SUFFIXES for f in path.iterdir())
    except OSError:  # no permission to read the folder
        return False


def _is_variant_name(text: str, variant: PublishedModel) -> bool:
    """Whether the text is the variant's name, not the hub id of another copy of the same model."""
    return text.lower() == variant.name.lower() or "/" not in text.removeprefix("timm/")


def _download_variant(text: str, variant: PublishedModel) -> ModelLocation:
    from vitrail.weights import hub  # huggingface_hub takes a while to import

    if not variant.hub_id:
        where = (
            f"are at {variant.weights_url}: download that file and load it" if variant.weights_url else "are not public"
        )
        raise NotFoundError(
            f"the weights of {variant.name} {where}; vitrail.create({variant.name!r}) builds it without weights."
        )
    alias_note = "" if text == variant.hub_id else f"{text} stands for {variant.hub_id}"
    try:
        return ModelLocation(hub.fetch(variant.hub_id), variant.hub_id, (alias_note,) if alias_note else ())
    except VitrailError as error:
        raise type(error)(f"{alias_note}: {error}" if alias_note else str(error)) from error


def _unpublished_message(text: str) -> str:
    """Why a valid model name cannot be loaded."""
    try:
        parse_name(text)
    except NotFoundError as error:
        return str(error)
    base, _, image = text.partition("@")
    published = find_published(base)
    if image and published is not None and published.hub_id:
        return (
            f"{text} has no public weights; load {base} with image_size={image}, "
            "which resamples its position embeddings."
        )
    return f"{text} has no public weights; vitrail.create({text!r}) builds it without weights."


def _looks_like_path(text: str, path: Path) -> bool:
    return (
        text.startswith((".", "/", "~"))
        or text.endswith("/")
        or "\\" in text
        or text.count("/") > 1
        or path.suffix.lower() in WEIGHTS_SUFFIXES | {".json"}
        or (len(path.parts) > 1 and _exists(Path(path.parts[0])))
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, or a null character
        return False


def _suggestion(text: str) -> str:
    model_names = {name for v in PUBLISHED_MODELS for name in (v.name, *v.aliases)} | set(SHIPPED)
    near = difflib.get_close_matches(text, sorted(model_names | set(_models_in(Path()))), n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return "; `vitrail models` lists the names; a hub id has the form user/model."

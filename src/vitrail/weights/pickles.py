"""Read torch.save files without executing code, and find the weights in what a training script saved."""

from __future__ import annotations

import argparse
import pickle
import pickletools
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import CheckpointError, did_you_mean, first_line
from vitrail.weights.file_type import DOWNLOAD_AGAIN, refuse_code, summarize_names

# Keys under which a pickle may hold the weights, in order of preference. Averaged weights come before raw ones, as in
# timm; DINO's teacher before its student, as in its own evaluation.
SECTIONS = (
    "state_dict_ema",  # timm
    "model_ema",  # DeiT
    "state_dict",  # timm, Lightning
    "model",  # DeiT, MAE, DINOv2
    "teacher",  # DINO, DINOv2
    "target_encoder",  # I-JEPA
    "student",
    "model_state_dict",
    "model_state",
    "module",
    "net",
    "weights",
    "params",
)
NOT_WEIGHTS = re.compile(r"optim|sched|scaler|loss|^amp$")  # sections with tensors that are not weights

MAX_NESTING = 4  # of sections; a dictionary can contain itself


@dataclass
class PickleContents:
    """The tensors of a pickle, its plain values, and notes about the choice of section.

    `extras["sections"]` lists the keys of the dictionaries around the tensors; they show which script wrote the file.
    """

    tensors: dict[str, Tensor]
    extras: dict[str, Any]
    notes: list[str]


def load_pickle(path: Path, mmap: bool) -> Any:
    """Load a torch.save file that contains only tensors, plain values and argparse.Namespace."""
    # torch.load reads any path that ends in .safetensors as safetensors, and memory-maps only paths.
    odd_name = path.suffix == ".safetensors"
    try:
        with (
            torch.serialization.safe_globals([argparse.Namespace]),
            warnings.catch_warnings(),
            path.open("rb") as file,
        ):
            warnings.simplefilter("ignore")  # about pickle versions; real problems raise errors
            what = file if odd_name else path
            return torch.load(what, map_location="cpu", weights_only=True, mmap=mmap and not odd_name)
    except (OSError, MemoryError):
        raise
    except pickle.UnpicklingError as error:
        if not mmap and _is_truncated(path):
            raise CheckpointError(f"{path} is truncated; {DOWNLOAD_AGAIN}.") from error
        required = re.search(r"GLOBAL (\S+)", str(error))
        refuse_code(
            path, f"it requires {required[1]}" if required else "it contains more than a dictionary of tensors", error
        )
    except Exception as error:  # damaged bytes can raise almost anything
        raise CheckpointError(f"{path} is truncated or damaged ({first_line(error)}); {DOWNLOAD_AGAIN}.") from error


def _is_truncated(path: Path) -> bool:
    """Whether one of the five pickles at the start of a legacy PyTorch file is incomplete. Executes nothing."""
    with path.open("rb") as file:
        try:
            for _ in range(5):
                for _ in pickletools.genops(file):
                    pass
        except ValueError:
            return True
    return False


def unwrap(loaded: Any, section: str | None, path: Path) -> PickleContents:
    """Find the dictionary of tensors in what a training script saved."""
    extras: dict[str, Any] = {}
    notes: list[str] = []
    sections: list[str] = []
    node = loaded
    requested = section
    for _ in range(MAX_NESTING):
        if not isinstance(node, Mapping):
            break
        inner = [k for k, v in node.items() if isinstance(k, str) and _holds_tensors(v)]
        choice = _choose_section(node, inner, requested, path)
        requested = None
        if choice is None:
            break
        if len(inner) > 1:
            notes.append(f"read {choice!r} of {', '.join(inner)}")
        extras.update({str(k): _to_plain(v) for k, v in node.items() if _is_plain(v)})
        sections += map(str, node)
        node = node[choice]
    if not isinstance(node, Mapping):
        raise CheckpointError(f"{path} contains a {type(node).__name__}, expected a dictionary of tensors.")
    tensors = {k: v.detach() for k, v in node.items() if isinstance(k, str) and isinstance(v, Tensor)}
    aside = [str(k) for k in node if k not in tensors]
    extras.update({str(k): _to_plain(v) for k, v in node.items() if k not in tensors and _is_plain(v)})
    if aside:
        notes.append(f"ignored {summarize_names(aside)}: not tensors")
    return PickleContents(tensors, extras | {"sections": sections}, notes)


def _choose_section(node: Mapping[Any, Any], inner: list[str], requested: str | None, path: Path) -> str | None:
    """The key of the section with the weights, or None if the tensors are in `node` itself."""
    if requested is not None:
        if requested not in inner:
            raise CheckpointError(
                f"{path} has no section {requested!r}{did_you_mean(requested, inner) if inner else '.'}"
            )
        return requested
    for name in SECTIONS:
        if name in inner:
            return name
    if any(isinstance(v, Tensor) for v in node.values()):
        return None
    likely = [name for name in inner if not NOT_WEIGHTS.search(name)]
    if len(likely) > 1:
        raise CheckpointError(
            f"{path} contains {', '.join(likely)}, none of which has a known name; choose one with section=."
        )
    return likely[0] if likely else None


def _holds_tensors(value: Any, depth: int = MAX_NESTING) -> bool:
    if not isinstance(value, Mapping) or not depth:
        return False
    return any(isinstance(v, Tensor) or _holds_tensors(v, depth - 1) for v in value.values())


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):  # such as arguments, unless it contains weights
        return not _holds_tensors(value)
    return isinstance(value, str | int | float | bool | None | argparse.Namespace)


def _to_plain(value: Any) -> Any:
    return vars(value) if isinstance(value, argparse.Namespace) else value

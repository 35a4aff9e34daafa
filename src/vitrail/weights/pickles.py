"""Files of torch.save, read without running anything, and the weights found in what a training script saved."""

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

from vitrail.errors import CheckpointError, did_you_mean
from vitrail.weights.file_type import DOWNLOAD_AGAIN, first_line, refuse_code, summarize_names

# Where a pickle keeps the weights, best first. Averaged weights go before raw ones, as in timm;
# DINO's teacher before its student, as in its own evaluation.
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
BOOKKEEPING = re.compile(r"optim|sched|scaler|loss|^amp$")  # sections that hold tensors and are no weights

DEEPEST = 4  # sections within sections; a dictionary can hold itself


@dataclass
class Saved:
    """The tensors of a pickle, the plain values among and around them, and what was chosen.

    `extras["sections"]` lists the keys of the dictionaries around the tensors: which script wrote them shows there.
    """

    tensors: dict[str, Tensor]
    extras: dict[str, Any]
    notes: list[str]


def load_pickle(path: Path, mapped: bool) -> Any:
    """What torch.save saved, with nothing but tensors, plain values and argparse's Namespace let through."""
    # torch.load takes a path that ends in .safetensors for one, whatever is in it; it maps only paths.
    odd_name = path.suffix == ".safetensors"
    try:
        with (
            torch.serialization.safe_globals([argparse.Namespace]),
            warnings.catch_warnings(),
            path.open("rb") as file,
        ):
            warnings.simplefilter("ignore")  # about pickle versions; what matters becomes an error
            what = file if odd_name else path
            return torch.load(what, map_location="cpu", weights_only=True, mmap=mapped and not odd_name)
    except (OSError, MemoryError):
        raise
    except pickle.UnpicklingError as error:
        if not mapped and _is_cut(path):
            raise CheckpointError(f"{path} is truncated; {DOWNLOAD_AGAIN}.") from error
        asked = re.search(r"GLOBAL (\S+)", str(error))
        refuse_code(path, f"it asks for {asked[1]}" if asked else "it is more than a dictionary of tensors", error)
    except Exception as error:  # damaged bytes fail in as many ways as there are instructions
        raise CheckpointError(f"{path} is truncated or damaged ({first_line(error)}); {DOWNLOAD_AGAIN}.") from error


def _is_cut(path: Path) -> bool:
    """Whether one of the five pickles at the start of an old PyTorch file has no end. Executes nothing."""
    with path.open("rb") as file:
        try:
            for _ in range(5):
                for _ in pickletools.genops(file):
                    pass
        except ValueError:
            return True
    return False


def unwrap(loaded: Any, section: str | None, path: Path) -> Saved:
    """The dictionary of tensors inside what a training script saved."""
    extras: dict[str, Any] = {}
    notes: list[str] = []
    sections: list[str] = []
    node = loaded
    asked = section
    for _ in range(DEEPEST):
        if not isinstance(node, Mapping):
            break
        inner = [k for k, v in node.items() if isinstance(k, str) and _holds_tensors(v)]
        choice = _choose_section(node, inner, asked, path)
        asked = None
        if choice is None:
            break
        if len(inner) > 1:
            notes.append(f"read {choice!r} of {', '.join(inner)}")
        extras.update({str(k): _plain(v) for k, v in node.items() if _is_plain(v)})
        sections += map(str, node)
        node = node[choice]
    if not isinstance(node, Mapping):
        raise CheckpointError(f"{path} holds a {type(node).__name__}, wanted a dictionary of tensors.")
    tensors = {k: v.detach() for k, v in node.items() if isinstance(k, str) and isinstance(v, Tensor)}
    aside = [str(k) for k in node if k not in tensors]
    extras.update({str(k): _plain(v) for k, v in node.items() if k not in tensors and _is_plain(v)})
    if aside:
        notes.append(f"put aside {summarize_names(aside)}: not tensors")
    return Saved(tensors, extras | {"sections": sections}, notes)


def _choose_section(node: Mapping[Any, Any], inner: list[str], asked: str | None, path: Path) -> str | None:
    """The key to go into, or None where the tensors are in `node` itself."""
    if asked is not None:
        if asked not in inner:
            raise CheckpointError(f"{path} has no section {asked!r}{did_you_mean(asked, inner) if inner else '.'}")
        return asked
    for name in SECTIONS:
        if name in inner:
            return name
    if any(isinstance(v, Tensor) for v in node.values()):
        return None
    likely = [name for name in inner if not BOOKKEEPING.search(name)]
    if len(likely) > 1:
        raise CheckpointError(f"{path} holds {', '.join(likely)}, and none has a known name; say which with section=.")
    return likely[0] if likely else None


def _holds_tensors(value: Any, depth: int = DEEPEST) -> bool:
    if not isinstance(value, Mapping) or not depth:
        return False
    return any(isinstance(v, Tensor) or _holds_tensors(v, depth - 1) for v in value.values())


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):  # arguments, unless it holds weights
        return not _holds_tensors(value)
    return isinstance(value, str | int | float | bool | None | argparse.Namespace)


def _plain(value: Any) -> Any:
    return vars(value) if isinstance(value, argparse.Namespace) else value

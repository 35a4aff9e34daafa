"""Class names: from a list, a file, a checkpoint's id2label, or ImageNet's from an installed package.

A checkpoint that names no classes and has exactly 1,000 outputs is taken for an ImageNet-1k classifier, by every
command alike, and a note says so: `named` holds the rule.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.errors import ConfigError, NotFoundError, did_you_mean

if TYPE_CHECKING:
    from vitrail.models import Net
    from vitrail.weights.model_info import ModelInfo

IMAGENET_1K = "imagenet-1k"
ASSUMED_IMAGENET = (
    "the checkpoint does not name its 1,000 classes: they are taken for ImageNet-1k's, in the usual order; "
    "--labels FILE (labels=... in Python) names others"
)
PLACEHOLDER = re.compile(r"LABEL_\d+")  # what transformers writes where nobody gave names


def read_labels(spec: str | Path | Sequence[str] | Mapping[Any, Any], count: int | None = None) -> tuple[str, ...]:
    """Class names in the order of the head's outputs; `count` is how many there must be.

    `spec` is the names themselves, an id2label dictionary, the word 'imagenet-1k', or a file: one
    name on each line, a JSON list, a JSON dictionary from index to name, or a config.json with an
    `id2label`, `label_names` or `labels` in it.
    """
    if isinstance(spec, str | Path):
        said = str(spec)
        labels = _imagenet_or_complain() if said == IMAGENET_1K else _from_file(Path(spec).expanduser())
    else:
        said = "the given class names"
        labels = _from_value(spec, said)
    if count is not None and len(labels) != count:
        raise ConfigError(f"{said}: got {len(labels)} names, wanted {count}, one for each output of the head.")
    return labels


def from_id2label(id2label: Mapping[Any, Any]) -> tuple[str, ...] | None:
    """The names of a Hugging Face config; None where they are only LABEL_0, LABEL_1, ..."""
    labels = _from_value(id2label, "id2label")
    return None if all(PLACEHOLDER.fullmatch(name) for name in labels) else labels


def imagenet_1k() -> tuple[str, ...] | None:
    """ImageNet-1k's names from timm's or torchvision's files, which are read and not imported; None without them."""
    for package, read in (("timm", _from_timm), ("torchvision", _from_torchvision)):
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        try:
            labels = read(Path(spec.origin).parent)
        except (OSError, KeyError, ValueError, SyntaxError):
            continue  # a version that keeps them elsewhere
        if len(labels) == 1000:
            return labels
    return None


def assume_imagenet_labels(net: Net, info: ModelInfo) -> ModelInfo:
    """The info with ImageNet-1k's names, and a note, where a checkpoint names no classes and they can only be those.

    The evidence: 1,000 outputs, one class for each image, a head that is not zero, and nothing stated about classes
    in the file or beside it. A model that vitrail trained has the names of its own data, or none. Without a package
    that has ImageNet's names, classes stay numbers.
    """
    bare = info.labels is None and info.task == "classify" and not info.multi_label and info.config.num_classes == 1000
    if not bare or info.trained_by_vitrail or not any(tensor.any() for tensor in net.head.parameters()):
        return info
    labels = imagenet_1k()
    return info if labels is None else info.replace(labels=labels).with_notes(ASSUMED_IMAGENET)


def stated_labels(info: ModelInfo) -> tuple[str, ...] | None:
    """The class names that the checkpoint or the user has stated; None for those that `named` assumed."""
    return None if ASSUMED_IMAGENET in info.notes and info.labels == imagenet_1k() else info.labels


def _imagenet_or_complain() -> tuple[str, ...]:
    labels = imagenet_1k()
    if labels is None:
        raise NotFoundError(
            "no installed package has ImageNet's class names; try `pip install timm`, or give a file with one name "
            "on each line."
        )
    return labels


@cache
def _from_timm(folder: Path) -> tuple[str, ...]:
    """The first of each class's names; where two classes share it, as much more as tells them apart."""
    info = folder / "data" / "_info"
    synsets = (info / "imagenet_synsets.txt").read_text(encoding="utf-8").split()
    lemmas = _table(info / "imagenet_synset_to_lemma.txt", set(synsets))
    whole = [lemmas[s] for s in synsets]
    first = [names.split(",")[0] for names in whole]
    named = [long if n > 1 else short for short, long, n in zip(first, whole, _repeats(first), strict=True)]
    if len(set(named)) < len(named):  # 'crane' is a bird and a machine
        meanings = _table(info / "imagenet_synset_to_definition.txt", set(synsets))
        told = [f"{n} ({meanings[s].split(';')[0]})" for n, s in zip(named, synsets, strict=True)]
        named = [long if n > 1 else short for short, long, n in zip(named, told, _repeats(named), strict=True)]
    return tuple(named)


def _table(path: Path, wanted: set[str]) -> dict[str, str]:
    pairs = (line.partition("\t") for line in path.read_text(encoding="utf-8").splitlines())
    return {key: value.strip() for key, _, value in pairs if key in wanted}


def _repeats(names: list[str]) -> list[int]:
    counts = Counter(names)
    return [counts[n] for n in names]


def _from_torchvision(folder: Path) -> tuple[str, ...]:
    tree = ast.parse((folder / "models" / "_meta.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "_IMAGENET_CATEGORIES" for target in node.targets
        ):
            return tuple(ast.literal_eval(node.value))
    raise KeyError("_IMAGENET_CATEGORIES")


def _from_file(path: Path) -> tuple[str, ...]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        folder = path.parent
        names = [f.name for f in folder.iterdir()] if folder.is_dir() else []
        hint = did_you_mean(path.name, [*names, IMAGENET_1K])
        raise NotFoundError(f"no such file of class names: {path}{hint}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text; wanted one class name on each line, or JSON.") from None
    except OSError as error:
        raise ConfigError(f"cannot read the class names in {path}: {error.strerror or error}.") from error
    if path.suffix == ".json" or text.lstrip()[:1] in ("[", "{"):
        try:
            value = json.loads(text)
        except ValueError as error:
            if path.suffix == ".json":
                raise ConfigError(f"{path} is not valid JSON ({error}).") from None
        else:
            return _from_value(value, str(path))
    return _checked([line.strip() for line in text.rstrip().splitlines()], str(path))


def _from_value(value: Any, said: str) -> tuple[str, ...]:
    """A list of names, a dictionary from index to name, or a config that holds one of these."""
    if isinstance(value, Mapping):
        for key in ("id2label", "label_names", "labels"):
            if value.get(key):
                return _from_value(value[key], said)
        return _checked(_in_order(value, said), said)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return _checked(list(value), said)
    raise ConfigError(f"{said}: wanted a list of names or a dictionary from index to name, got {value!r:.60}.")


def _in_order(names: Mapping[Any, Any], said: str) -> list[Any]:
    if names and all(isinstance(v, int) for v in names.values()):
        names = {index: name for name, index in names.items()}  # label2id, the other way round
    try:
        by_index = {int(key): name for key, name in names.items()}
    except (TypeError, ValueError):
        raise ConfigError(f"{said}: wanted indices 0, 1, ... as keys, got {next(iter(names))!r}.") from None
    missing = [i for i in range(len(names)) if i not in by_index]
    if missing:
        raise ConfigError(f"{said}: index {missing[0]} of 0 ... {len(names) - 1} has no name.")
    return [by_index[i] for i in range(len(by_index))]


def _checked(names: list[Any], said: str) -> tuple[str, ...]:
    if not names:
        raise ConfigError(f"{said}: no class names in it.")
    for index, name in enumerate(names):
        if not isinstance(name, str) or not name.strip():
            raise ConfigError(f"{said}: class {index} has no name (got {name!r}); every class needs one.")
    return tuple(names)

"""Class names: from a list, a file, a checkpoint's id2label, or ImageNet's from an installed package.

Every command treats a checkpoint without class names and with exactly 1,000 outputs as an ImageNet-1k classifier and
logs a note; `assume_imagenet_labels` implements the rule.
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
    "the checkpoint has no class names; its 1,000 classes are assumed to be ImageNet-1k's, in the usual order; "
    "pass --labels FILE (labels=... in Python) for other names"
)
PLACEHOLDER = re.compile(r"LABEL_\d+")  # transformers' default names


def read_labels(spec: str | Path | Sequence[str] | Mapping[Any, Any], count: int | None = None) -> tuple[str, ...]:
    """Class names in the order of the head's outputs; `count` is the required number.

    `spec` is the names themselves, an id2label dictionary, the string 'imagenet-1k', or a file: one name per line, a
    JSON list, a JSON dictionary from index to name, or a config.json with `id2label`, `label_names` or `labels`.
    """
    if isinstance(spec, str | Path):
        source = str(spec)
        labels = _require_imagenet_1k() if source == IMAGENET_1K else _from_file(Path(spec).expanduser())
    else:
        source = "the given class names"
        labels = _from_value(spec, source)
    if count is not None and len(labels) != count:
        raise ConfigError(f"{source}: got {len(labels)} names, expected {count}, one for each output of the head.")
    return labels


def from_id2label(id2label: Mapping[Any, Any]) -> tuple[str, ...] | None:
    """The class names of a Hugging Face config; None if they are the defaults LABEL_0, LABEL_1, ..."""
    labels = _from_value(id2label, "id2label")
    return None if all(PLACEHOLDER.fullmatch(name) for name in labels) else labels


def imagenet_1k() -> tuple[str, ...] | None:
    """ImageNet-1k's class names from the files of timm or torchvision, which are not imported; None without them."""
    for package, read in (("timm", _from_timm), ("torchvision", _from_torchvision)):
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        try:
            labels = read(Path(spec.origin).parent)
        except (OSError, KeyError, ValueError, SyntaxError):
            continue  # this version has them elsewhere
        if len(labels) == 1000:
            return labels
    return None


def assume_imagenet_labels(net: Net, info: ModelInfo) -> ModelInfo:
    """Add ImageNet-1k's class names and a note to the model info if the checkpoint seems to be an ImageNet classifier.

    The conditions: 1,000 outputs, single-label, a head that is not all zeros, no class names in the file or beside it,
    and not trained by vitrail. If no installed package has ImageNet's names, the model info is returned unchanged.
    """
    bare = info.labels is None and info.task == "classify" and not info.multi_label and info.config.num_classes == 1000
    if not bare or info.trained_by_vitrail or not any(tensor.any() for tensor in net.head.parameters()):
        return info
    labels = imagenet_1k()
    return info if labels is None else info.replace(labels=labels).with_notes(ASSUMED_IMAGENET)


def stated_labels(info: ModelInfo) -> tuple[str, ...] | None:
    """The class names from the checkpoint or the user; None for names that `assume_imagenet_labels` assumed."""
    return None if ASSUMED_IMAGENET in info.notes and info.labels == imagenet_1k() else info.labels


def _require_imagenet_1k() -> tuple[str, ...]:
    labels = imagenet_1k()
    if labels is None:
        raise NotFoundError(
            "no installed package has ImageNet's class names; try `pip install timm`, or pass a file with one name "
            "per line."
        )
    return labels


@cache
def _from_timm(folder: Path) -> tuple[str, ...]:
    """The first synonym of each class; if two classes share it, all synonyms, and the definition if needed."""
    info = folder / "data" / "_info"
    synsets = (info / "imagenet_synsets.txt").read_text(encoding="utf-8").split()
    lemmas = _read_table(info / "imagenet_synset_to_lemma.txt", set(synsets))
    all_synonyms = [lemmas[s] for s in synsets]
    first_synonyms = [names.split(",")[0] for names in all_synonyms]
    labels = [
        long if n > 1 else short
        for short, long, n in zip(first_synonyms, all_synonyms, _occurrences(first_synonyms), strict=True)
    ]
    if len(set(labels)) < len(labels):  # 'crane' is a bird and a machine
        meanings = _read_table(info / "imagenet_synset_to_definition.txt", set(synsets))
        defined = [f"{n} ({meanings[s].split(';')[0]})" for n, s in zip(labels, synsets, strict=True)]
        labels = [
            long if n > 1 else short for short, long, n in zip(labels, defined, _occurrences(labels), strict=True)
        ]
    return tuple(labels)


def _read_table(path: Path, expected: set[str]) -> dict[str, str]:
    pairs = (line.partition("\t") for line in path.read_text(encoding="utf-8").splitlines())
    return {key: value.strip() for key, _, value in pairs if key in expected}


def _occurrences(names: list[str]) -> list[int]:
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
        names = [f.name for f in folder.iterdir() if f.suffix in (".txt", ".json")] if folder.is_dir() else []
        hint = did_you_mean(path.name, [*names, IMAGENET_1K])
        raise NotFoundError(f"no such class names file: {path}{hint}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text; expected one class name per line, or JSON.") from None
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
    return _validated([line.strip() for line in text.rstrip().splitlines()], str(path))


def _from_value(value: Any, source: str) -> tuple[str, ...]:
    """A list of names, a dictionary from index to name, or a config that holds one of these."""
    if isinstance(value, Mapping):
        for key in ("id2label", "label_names", "labels"):
            if value.get(key):
                return _from_value(value[key], source)
        return _validated(_sort_by_index(value, source), source)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return _validated(list(value), source)
    raise ConfigError(f"{source}: expected a list of names or a dictionary from index to name, got {value!r:.60}.")


def _sort_by_index(names: Mapping[Any, Any], source: str) -> list[Any]:
    if names and all(isinstance(v, int) for v in names.values()):
        names = {index: name for name, index in names.items()}  # label2id: invert it
    try:
        by_index = {int(key): name for key, name in names.items()}
    except (TypeError, ValueError):
        raise ConfigError(f"{source}: expected indices 0, 1, ... as keys, got {next(iter(names))!r}.") from None
    missing = [i for i in range(len(names)) if i not in by_index]
    if missing:
        raise ConfigError(f"{source}: index {missing[0]} of 0 to {len(names) - 1} has no name.")
    return [by_index[i] for i in range(len(by_index))]


def _validated(names: list[Any], source: str) -> tuple[str, ...]:
    if not names:
        raise ConfigError(f"{source}: it contains no class names.")
    for index, name in enumerate(names):
        if not isinstance(name, str) or not name.strip():
            raise ConfigError(f"{source}: class {index} has no name (got {name!r}); every class needs one.")
    return tuple(names)

"""Map-style datasets in memory, of torch, torchvision or Hugging Face, as sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset
from torch.utils.data import Subset as TorchSubset

from vitrail.data.decode import ImageLike
from vitrail.data.sources.base import Sample, Source, SourceSplits, Targets
from vitrail.data.sources.progress import progress_bar
from vitrail.errors import DataError

IMAGE_KEYS, LABEL_KEYS = ("image", "img", "pixel_values", "pixels"), ("label", "labels", "target", "fine_label")
SPLIT_NAMES = {"train": "train", "training": "train", "validation": "validation", "valid": "validation",
               "val": "validation", "test": "test"}  # fmt: skip
"""Keys of a dict of datasets -> split."""
EXPECTED = "expected a map-style torch Dataset, a vitrail Source, or a tuple or dict of them: train, validation, test"


class DatasetSource:
    """A map-style dataset whose items are (image, label) or a mapping with `image` and `label`, as a source.

    Labels come from the dataset's `.targets` and class names from its `.classes`; without them every item is read once.
    Its transforms are applied; random ones are not reproducible, so leave augmentation to vitrail.
    """

    blocks = None
    pixels = None

    def __init__(self, dataset: Any, name: str, labels: Sequence[str] | None = None) -> None:
        self.dataset, self.name = dataset, name
        raw = _stored_targets(dataset)
        if raw is None:
            raw = self._read_targets()
        self.targets, names = _encode(raw, labels or _class_names(dataset), name)
        self.labels = tuple(names)
        self.multi_label = self.targets.ndim == 2

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Sample:
        try:
            item = self.dataset[index]
        except Exception as error:  # counts as an unreadable image
            raise DataError(f"{self.key(index)}: {type(error).__name__}: {error}") from error
        image, _ = _split_item(item, self.name)
        target = self.targets[index]
        return Sample(
            self.key(index), _as_image(image, self.key(index)), tuple(np.flatnonzero(target).tolist())
            if self.multi_label else int(target)
        )  # fmt: skip

    def key(self, index: int) -> str:
        return f"{self.name}/{index:06d}"

    def _read_targets(self) -> list[Any]:
        with progress_bar(f"reading the labels of {self.name}", len(self.dataset)) as advance:
            found = []
            for index in range(len(self.dataset)):
                found.append(_split_item(self.dataset[index], self.name)[1])
                advance(1)
        return found


def splits_from(value: Any, name: str) -> SourceSplits:
    """The splits of a dataset, a source, SourceSplits, or a tuple or dict (train, validation, test) of them."""
    if isinstance(value, SourceSplits):
        return value
    if isinstance(value, tuple):
        if not 1 <= len(value) <= 3:
            raise DataError(f"got a tuple of {len(value)} datasets; {EXPECTED}.")
        parts = dict(zip(("train", "validation", "test"), value, strict=False))
    elif isinstance(value, Mapping):
        unknown = [key for key in value if key not in SPLIT_NAMES]
        if unknown or not any(SPLIT_NAMES[key] == "train" for key in value):
            raise DataError(f"got datasets called {', '.join(map(repr, value))}; {EXPECTED}.")
        parts = {SPLIT_NAMES[key]: part for key, part in value.items()}
    else:
        parts = {"train": value}
    train = source_from(parts["train"], f"{name}/train" if len(parts) > 1 else name)
    others = {
        split: source_from(part, f"{name}/{split}", train.labels)
        for split, part in parts.items()
        if split != "train" and part is not None
    }
    return SourceSplits(train, others.get("validation"), others.get("test"))


def source_from(value: Any, name: str, labels: Sequence[str] | None = None) -> Source:
    """A source, or a dataset as one. `labels`: class names for a dataset that does not state any."""
    if all(hasattr(value, part) for part in ("key", "labels", "multi_label", "targets")):
        return value
    if isinstance(value, IterableDataset) or not (hasattr(value, "__getitem__") and hasattr(value, "__len__")):
        raise DataError(f"got {type(value).__name__}, which has no length or no random access; {EXPECTED}.")
    if isinstance(value, str | bytes | np.ndarray | Tensor) or len(value) == 0:
        raise DataError(f"got {'an empty ' * (len(value) == 0)}{type(value).__name__}; {EXPECTED}.")
    own = _class_names(value)
    return DatasetSource(value, name, labels if own is None else own)


def _stored_targets(dataset: Any) -> Any:
    """Labels that a dataset states without reading its items; None if it does not."""
    if isinstance(dataset, TorchSubset):
        inner = _stored_targets(dataset.dataset)
        return None if inner is None else [inner[int(i)] for i in dataset.indices]
    if (targets := getattr(dataset, "targets", None)) is not None and len(targets) == len(dataset):
        return targets
    column = next((key for key in LABEL_KEYS if key in (getattr(dataset, "column_names", None) or ())), None)
    return list(dataset[column]) if column is not None else None


def _class_names(dataset: Any) -> list[str] | None:
    while isinstance(dataset, TorchSubset):
        dataset = dataset.dataset
    if (names := getattr(dataset, "classes", None)) is not None:
        return [str(name) for name in names]
    features: Any = getattr(dataset, "features", None) or {}
    found = (getattr(features.get(key), "names", None) for key in LABEL_KEYS) if isinstance(features, Mapping) else ()
    return next((list(names) for names in found if names), None)


def _encode(raw: Any, names: Sequence[str] | None, about: str) -> tuple[Targets, Sequence[str]]:
    """Class indices N, or N K booleans, and the class names: those given, the words in order, or "0", "1", ..."""
    values: list[Any] = [v.tolist() if isinstance(v, Tensor | np.ndarray | np.generic) else v for v in raw]
    kinds = {type(v) for v in values}
    if kinds <= {list, tuple}:
        table = np.asarray(values)
        if table.ndim != 2 or not np.isin(table, (0, 1)).all():
            raise DataError(f"{about}: expected a class index, a word or zeros and ones per class as each label.")
        names = names or [str(i) for i in range(table.shape[1])]
        if len(names) != table.shape[1]:
            raise DataError(f"{about} has {len(names)} class names and {table.shape[1]} numbers per label.")
        return table.astype(bool), names
    if kinds == {str}:
        names = names or sorted(set(values))
        index = {name: i for i, name in enumerate(names)}
        if missing := set(values) - set(index):
            raise DataError(f"{about} has the label {min(missing)!r}, which is not among its classes.")
        return np.array([index[v] for v in values], np.int64), names
    if not kinds <= {int, bool}:
        other = next(v for v in values if not isinstance(v, int))
        raise DataError(f"{about}: got a label {other!r}, expected a class index, a word or zeros and ones per class.")
    indices: npt.NDArray[np.int64] = np.array(values, np.int64)
    names = names or [str(i) for i in range(int(indices.max()) + 1)]
    if indices.max() >= len(names) or indices.min() < -1:
        raise DataError(f"{about} has labels from {indices.min()} to {indices.max()} and {len(names)} classes.")
    return indices, names


def _split_item(item: Any, about: str) -> tuple[Any, Any]:
    """Image and label of an item."""
    if isinstance(item, Mapping):
        keys = [next((k for k in some if k in item), None) for some in (IMAGE_KEYS, LABEL_KEYS)]
        if None not in keys:
            return item[keys[0]], item[keys[1]]
    elif isinstance(item, tuple | list) and len(item) >= 2:
        return item[0], item[1]
    found = f"a mapping with {', '.join(map(str, item))}" if isinstance(item, Mapping) else f"a {type(item).__name__}"
    raise DataError(f"the items of {about} are {found}; expected (image, label), or a mapping with image and label.")


def _as_image(image: Any, key: str) -> ImageLike:
    """The image as the decoder takes it; floats from 0 to 1 become uint8."""
    if isinstance(image, Tensor | np.ndarray) and not str(image.dtype).endswith("uint8"):
        values: Any = image
        if not str(values.dtype).removeprefix("torch.").startswith(("float", "bfloat")):
            raise DataError(f"{key} is of {values.dtype}, expected uint8, or floats from 0 to 1.")
        low, high = float(values.min()), float(values.max())
        if low < 0 or high > 1:
            raise DataError(
                f"{key} has values from {low:.3g} to {high:.3g}, expected uint8, or floats from 0 to 1; remove the "
                "normalization from the dataset's transforms: vitrail normalizes."
            )
        scaled = values * 255
        return scaled.round().byte() if isinstance(scaled, Tensor) else np.round(scaled).astype(np.uint8)
    if isinstance(image, str | Path | bytes | Image.Image | np.ndarray | Tensor):
        return image
    raise DataError(f"{key} is a {type(image).__name__}; expected a Pillow image, an array, a tensor, bytes or a path.")

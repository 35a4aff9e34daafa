"""What is stored of each image: its features, or its best classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.sources.base import Source
from vitrail.engine_model import EngineModel
from vitrail.errors import ConfigError, did_you_mean
from vitrail.evaluation.features import FeatureSpec, extract, resolve_features
from vitrail.model import Model
from vitrail.models.base import eval_mode
from vitrail.predictions import check_top, class_label, top_scores

# B images in a batch, N readable images of a part, D features, k classes

Columns = dict[str, Tensor]
"""Name -> one row per image."""
DTYPES = ("float32", "float16")


class Output(Protocol):
    """What is stored of each image."""

    @property
    def task(self) -> str:
        """The command: embed or predict."""

    def resolve(self, model: Model) -> Self:
        """Check the options against a model, and complete them."""

    def settings(self) -> dict[str, Any]:
        """Options that determine the rows, as JSON values."""

    def run(self, model: Model, images: Tensor) -> Columns:
        """B C H W, 0 to 255 -> columns, on the CPU."""

    def table(
        self, model: Model, source: Source, split: str, part: range, found: Tensor, columns: Columns,
        unreadable: Mapping[int, str],
    ) -> pa.Table:  # fmt: skip
        """The rows of a part.

        `found` are the indices of the rows of `columns`; `unreadable` says why the others could not be read.
        """


@dataclass(frozen=True, kw_only=True)
class FeatureOutput:
    """Features: one vector per readable image."""

    spec: FeatureSpec = FeatureSpec()
    dtype: str = "float32"
    """float32 or float16."""
    normalize: bool = False
    """Whether to scale each vector to length 1."""

    task = "embed"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"features cannot be stored as {self.dtype!r}{did_you_mean(self.dtype, DTYPES)}")

    def resolve(self, model: Model) -> FeatureOutput:
        """An exported model only provides the features it was exported with."""
        if not isinstance(model, EngineModel):
            return replace(self, spec=resolve_features(self.spec, model.net))
        model.check_features()
        if self.spec != FeatureSpec():
            model.check_has_network()
        return self

    def settings(self) -> dict[str, Any]:
        return {"features": str(self.spec), "dtype": self.dtype, "normalize": self.normalize}

    def run(self, model: Model, images: Tensor) -> Columns:
        if isinstance(model, EngineModel):
            values = model.outputs(images)
        else:
            with eval_mode(model.net), torch.no_grad():
                normalized = model.preprocess.normalize(images).to(model.dtype)
                values = extract(model.net, normalized, self.spec).float().cpu()
        return {"embedding": F.normalize(values, dim=1) if self.normalize else values}

    def table(
        self, model: Model, source: Source, split: str, part: range, found: Tensor, columns: Columns,
        unreadable: Mapping[int, str],
    ) -> pa.Table:  # fmt: skip
        """One row per readable image: key, split, label, target, embedding."""
        return pa.table(
            sample_columns(source, split, found.tolist())
            | {"embedding": vectors(columns["embedding"], self.dtype)}
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PredictionOutput:
    """The best classes of each image, or why it cannot be read."""

    top: int = 5

    task = "predict"

    def __post_init__(self) -> None:
        check_top(self.top)

    def resolve(self, model: Model) -> PredictionOutput:
        model.check_classes()
        return PredictionOutput(top=min(self.top, model.config.num_classes))

    def settings(self) -> dict[str, Any]:
        return {"top": self.top}

    def run(self, model: Model, images: Tensor) -> Columns:
        if isinstance(model, EngineModel):
            logits = model.outputs(images)
        else:
            with eval_mode(model.net), torch.no_grad():
                logits = model.net(model.preprocess.normalize(images).to(model.dtype)).float().cpu()
        scores, indices = top_scores(logits, model.info, self.top)
        return {"top_scores": scores.float(), "top_indices": indices.int()}

    def table(
        self, model: Model, source: Source, split: str, part: range, found: Tensor, columns: Columns,
        unreadable: Mapping[int, str],
    ) -> pa.Table:  # fmt: skip
        """One row per image: key, split, label, target, top_labels, top_scores, top_indices, error."""
        samples = sample_columns(source, split, list(part))
        row_of = {index: row for row, index in enumerate(found.tolist())}
        rows = pa.array([row_of.get(index) for index in part], pa.int64())  # null: not readable
        errors = pa.array([unreadable.get(index) for index in part], pa.string())
        return pa.table(
            samples | {name: c.take(rows) for name, c in class_columns(model, columns).items()} | {"error": errors}
        )


def sample_columns(source: Source, split: str, numbers: Sequence[int]) -> dict[str, pa.Array]:
    """key, split, label and target: null for an unlabeled image, lists for multi-label data."""
    label, target = _label_columns(source, numbers)
    key = pa.array([_utf8(source.key(i)) for i in numbers], pa.string())
    return {"key": key, "split": pa.array([split] * len(numbers), pa.string()), "label": label, "target": target}


def vectors(values: Tensor, dtype: str = "float32") -> pa.FixedSizeListArray:
    """N D -> N lists."""
    flat = values.numpy().astype(np.float16 if dtype == "float16" else np.float32).reshape(-1)
    return pa.FixedSizeListArray.from_arrays(
        pa.array(flat, pa.float16() if dtype == "float16" else pa.float32()), values.shape[1]
    )


def class_columns(model: Model, columns: Columns) -> dict[str, pa.Array]:
    """Names, scores and indices of the best classes: N lists each."""
    scores, indices = columns["top_scores"], columns["top_indices"]
    names = pa.array([class_label(model.info, i) for i in indices.flatten().tolist()], pa.string())
    lists = {"top_labels": names, "top_scores": pa.array(scores.flatten().numpy())}
    lists["top_indices"] = pa.array(indices.flatten().numpy())
    return {name: pa.FixedSizeListArray.from_arrays(flat, scores.shape[1]) for name, flat in lists.items()}


def _utf8(name: str) -> str:
    """A name that is not UTF-8, from a file system, with escapes."""
    return name.encode("utf-8", "backslashreplace").decode()


def _label_columns(source: Source, numbers: Sequence[int]) -> tuple[pa.Array, pa.Array]:
    chosen = source.targets[list(numbers)]
    if source.multi_label:
        lists = [np.flatnonzero(row).tolist() for row in chosen]
        names = [[_utf8(source.labels[i]) for i in row] for row in lists]
        return pa.array(names, pa.list_(pa.string())), pa.array(lists, pa.list_(pa.int32()))
    known = [int(t) if t >= 0 and source.labels else None for t in chosen]
    return pa.array([None if t is None else _utf8(source.labels[t]) for t in known], pa.string()), pa.array(
        known, pa.int32()
    )

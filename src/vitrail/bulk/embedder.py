"""`Embedder`: features or predictions of batches of images, in any engine that runs Python functions on batches."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from vitrail.bulk.outputs import Columns, FeatureOutput, Output, PredictionOutput, class_columns, vectors
from vitrail.config import pair
from vitrail.data.transforms import EvalTransform, RowErrors
from vitrail.engine_model import EngineModel
from vitrail.errors import ConfigError, did_you_mean
from vitrail.evaluation.features import FeatureSpec
from vitrail.model import Model
from vitrail.open_model import load
from vitrail.weights.shipped import DEFAULT_MODEL

# N images in a batch, D features, k classes

OUTPUTS = ("features", "predictions")
IMAGE_COLUMNS = ("bytes", "image", "img", "path", "content")
"""Names of the column with the images, in the order in which they are tried."""
MAX_CACHED = 2
"""Models kept in a process."""

_LOCK = threading.Lock()
_MODELS: dict[str, Model] = {}
"""Engines unpickle the object for every batch; the models that it has loaded in a process stay."""


class Embedder:
    """Computes features or predictions of batches of images: `Embedder("ViT-B/16")(batch)`.

    A batch is one of

        bytes, paths or arrays     a list of encoded images, of paths, of uint8 arrays H W C, or of Hugging Face's rows
                                   {"bytes": ..., "path": ...}
        an array                   uint8, N H W C
        a mapping of columns       Ray Data's and NumPy's batches
        an Arrow table or batch    Ray Data with batch_format="pyarrow", Spark's mapInArrow
        a pandas DataFrame         Dask's map_partitions, Spark's mapInPandas

    and the result has the same type (a mapping for a list or an array), with the columns of the batch except the
    images, `embedding` (N D float32; or `top_labels`, `top_scores` and `top_indices`) and `error`: None, or why the
    image cannot be read. The row of an unreadable image has zeros, or null in Arrow.

    The object is small and can be pickled. The model is loaded on the first call in each process.
    """

    def __init__(
        self,
        model: str | Path | Model | None = None,
        *,
        output: Literal["features", "predictions"] = "features",
        spec: FeatureSpec | None = None,
        normalize: bool = False,
        top: int = 5,
        batch_size: int = 64,
        column: str | None = None,
        device: str = "cpu",
        threads: int | None = None,
        **options: Any,
    ) -> None:
        """
        model       a file, folder, name or hub id, or a loaded Model, which is pickled with the object; None: the model
                    that ships with vitrail
        output      "features", of the layers and pooling in `spec`, or "predictions", the `top` best classes
        batch_size  images computed at once; the last ones are padded to as many
        column      name of the column with the images; None: bytes, image, img, path or content
        threads     torch's threads, for the whole process; None: unchanged
        options     of `vitrail.load`: image_size, dtype, ...
        """
        if output not in OUTPUTS:
            raise ConfigError(f"unknown output {output!r}{did_you_mean(output, OUTPUTS)}")
        for name, value in (("batch_size", batch_size), ("threads", threads)):
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: expected at least 1.")
        self.model: str | Path | Model = DEFAULT_MODEL.name if model is None else model
        features = FeatureOutput(spec=spec or FeatureSpec(), normalize=normalize)
        self.output: Output = features if output == "features" else PredictionOutput(top=top)
        self.batch_size, self.column, self.device, self.threads, self.options = (
            batch_size, column, device, threads, options,
        )  # fmt: skip

    def __call__(self, batch: Any) -> Any:
        """Compute one batch; see the class."""
        if isinstance(batch, pa.RecordBatch):
            table = self(pa.Table.from_batches([batch]))
            return pa.record_batch([column.combine_chunks() for column in table.columns], schema=table.schema)
        if isinstance(batch, pa.Table):
            name = self._image_column(batch.column_names)
            computed, errors = self.compute(batch[name].to_pylist())
            columns = self._arrow_columns(computed, errors)
            table = batch.drop_columns([n for n in batch.column_names if n == name or n in columns])
            for other, values in columns.items():
                table = table.append_column(other, values)
            return table
        if isinstance(batch, Mapping):
            name = self._image_column(batch)
            return {n: values for n, values in batch.items() if n != name} | self._arrays(list(batch[name]))
        if hasattr(batch, "assign") and hasattr(batch, "columns"):  # pandas, without importing it
            name = self._image_column(batch.columns)
            series, found = type(batch[name]), self._arrays(list(batch[name]))
            columns = {n: series(list(values), index=batch.index, dtype=object) for n, values in found.items()}
            return batch.drop(columns=[name]).assign(**columns)
        if isinstance(batch, str | bytes | Path):
            raise ConfigError(f"got one image ({type(batch).__name__}), expected a batch, such as a list of them.")
        if not isinstance(batch, Iterable):
            raise ConfigError(f"got {type(batch).__name__}, expected a list of images, an array, columns or a table.")
        if isinstance(batch, np.ndarray) and batch.dtype != object and batch.ndim not in (1, 4):
            raise ConfigError(f"got an array of shape {batch.shape}, expected N H W C; try [image] for one image.")
        return self._arrays(list(batch))

    def map(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Compute batch after batch: the function of Spark's mapInPandas and mapInArrow."""
        yield from (self(batch) for batch in batches)

    def compute(self, images: Sequence[Any]) -> tuple[Columns, list[str | None]]:
        """Columns with a row for each image, and why an image could not be read."""
        model = self._model()
        output = self.output.resolve(model)
        transform = EvalTransform(model.preprocess.config)
        size, channels = pair(model.preprocess.config.image_size), model.preprocess.config.channels
        errors: list[str | None] = [None] * len(images)
        computed: list[Columns] = []
        for first in range(0, max(len(images), 1), self.batch_size):
            chunk, unreadable = images[first : first + self.batch_size], RowErrors()
            pixels = np.zeros((self.batch_size, *size, channels), transform.dtype)
            transform(dict(enumerate(map(_content, chunk))), np.zeros(self.batch_size, np.uint64), pixels, unreadable)
            for row, reason in unreadable.items():
                errors[first + row] = reason
            columns = output.run(model, torch.from_numpy(pixels).to(model.device).permute(0, 3, 1, 2))
            readable = torch.tensor([row not in unreadable for row in range(len(chunk))], dtype=torch.bool)
            computed.append({name: _blank(values[: len(chunk)], readable) for name, values in columns.items()})
        return {name: torch.cat([each[name] for each in computed]) for name in computed[0]}, errors

    def _arrays(self, images: Sequence[Any]) -> dict[str, npt.NDArray[Any]]:
        columns, errors = self.compute(images)
        found: dict[str, npt.NDArray[Any]] = {name: values.numpy() for name, values in columns.items()}
        if "top_indices" in columns:
            names = class_columns(self._model(), columns)["top_labels"].to_pylist()
            found = {"top_labels": np.array(names, object).reshape(columns["top_indices"].shape)} | found
        return found | {"error": np.array(errors, object)}

    def _arrow_columns(self, columns: Columns, errors: Sequence[str | None]) -> dict[str, Any]:
        rows = pa.array([None if error else row for row, error in enumerate(errors)], pa.int64())
        if "embedding" in columns:
            arrays: Mapping[str, Any] = {"embedding": vectors(columns["embedding"])}
        else:
            arrays = class_columns(self._model(), columns)
        return {name: array.take(rows) for name, array in arrays.items()} | {"error": pa.array(errors, pa.string())}

    def _image_column(self, names: Iterable[Any]) -> str:
        present = [str(name) for name in names]
        if self.column is not None and self.column not in present:
            raise ConfigError(f"the batch has no column {self.column!r}; it has {', '.join(present) or 'none'}.")
        name = self.column or next((name for name in IMAGE_COLUMNS if name in present), None)
        if name is None:
            raise ConfigError(
                f"the batch has the columns {', '.join(present) or '(none)'}, and none of {', '.join(IMAGE_COLUMNS)}; "
                "name the one with the images with column=."
            )
        return name

    def _model(self) -> Model:
        """The model, loaded once in each process."""
        if self.threads is not None and torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        if isinstance(self.model, Model):
            return self.model
        key = repr((str(self.model), self.device, sorted(self.options.items())))
        with _LOCK:
            if key not in _MODELS:
                loaded = load(self.model, device=self.device, **self.options)
                while len(_MODELS) >= MAX_CACHED:
                    del _MODELS[next(iter(_MODELS))]
                _MODELS[key] = loaded
            return _MODELS[key]

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self.model, EngineModel):
            raise ConfigError(f"{self.model} cannot be sent to other processes; pass the exported file to Embedder.")
        return vars(self)

    def __repr__(self) -> str:
        return f"<vitrail.Embedder {self.model}, {'features' if self.output.task == 'embed' else 'predictions'}>"


def _content(image: Any) -> Any:
    """An image as `decode` takes it: of Hugging Face's {"bytes": ..., "path": ...}, the bytes or the path."""
    if isinstance(image, Mapping) and image.keys() <= {"bytes", "path"}:
        return image.get("bytes") or image.get("path")
    return image


def _blank(values: torch.Tensor, readable: torch.Tensor) -> torch.Tensor:
    """The rows with zeros for unreadable images."""
    return torch.where(readable[:, None], values, torch.zeros_like(values))

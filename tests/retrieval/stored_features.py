"""Feature files of any vectors, as `vitrail embed` writes them: one file, or a folder of parts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SETTINGS: dict[str, Any] = {
    "task": "embed", "model": "small", "weights": "00000000", "features": "head input", "preprocess": {}
}  # fmt: skip


def clustered(rows: int, width: int = 16, centers: int = 20, seed: int = 0) -> np.ndarray:
    """Vectors around random centers, which are always the same, float32."""
    middles, rng = np.random.default_rng(0).normal(size=(centers, width)), np.random.default_rng([seed, rows])
    values = middles[rng.integers(0, centers, rows)] + 0.5 * rng.normal(size=(rows, width))
    return values.astype(np.float32)


def table(values: np.ndarray, start: int = 0) -> pa.Table:
    names = [f"{start + i}.png" for i in range(len(values))]
    return pa.table(
        {
            "key": names,
            "split": ["train"] * len(values),
            "label": pa.array([f"class {(start + i) % 3}" for i in range(len(values))], pa.string()),
            "target": pa.array([(start + i) % 3 for i in range(len(values))], pa.int32()),
            "embedding": pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1]),
        }
    )


def write_file(
    path: Path, values: np.ndarray, settings: Mapping[str, Any] = SETTINGS, rows_per_group: int = 100
) -> Path:
    metadata = {"vitrail": json.dumps({"format_version": 2, **settings})}
    pq.write_table(table(values).replace_schema_metadata(metadata), path, row_group_size=rows_per_group)
    return path


def write_parts(folder: Path, values: np.ndarray, parts: int, settings: Mapping[str, Any] = SETTINGS) -> Path:
    folder.mkdir()
    start = 0
    for number, some in enumerate(np.array_split(values, parts)):
        pq.write_table(table(some, start), folder / f"part-{number:05d}.parquet")
        start += len(some)
    return write_manifest(folder, "embed", parts, settings)


def write_manifest(folder: Path, task: str, parts: int, settings: Mapping[str, Any] = SETTINGS) -> Path:
    counts = {"num_images": 10, "images_per_part": 5, "num_parts": parts}
    manifest = {"format_version": 2, "task": task, **counts, "settings": dict(settings)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder

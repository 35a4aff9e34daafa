"""Recall, speed and memory of searching stored features: the index, the exact search, and optionally USearch's HNSW.

    python benchmarks/search.py --features features.parquet [--rows 200000] [--queries 500] [--threads 1] [--usearch]

Every 20th row of the file is a query; the others are the collection, repeated up to `--rows` with differences of random
pairs of the same class added (0.3 times), which keeps the features' covariance. Without `--features`, vectors are drawn
around random centers; their recall says little about real features.

Each search runs in its own process. Times are CPU seconds. Memory is the growth of the process's peak over its size
before, with the libraries loaded; mapped files count as far as they were read.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from vitrail.retrieval.exact_search import exact_search
from vitrail.retrieval.feature_index import FeatureIndex
from vitrail.retrieval.feature_store import FeatureStore

Floats = npt.NDArray[np.float32]
K = 10
ROWS_PER_GROUP = 1024
NO_METADATA = {"format_version": 2, "features": "head input"}


def real_vectors(file: Path) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Vectors of length 1 and the classes of a feature file."""
    table = pq.read_table(file, columns=["target", "embedding"])
    column = table["embedding"].combine_chunks()
    values = column.flatten().to_numpy(zero_copy_only=False).astype(np.float32).reshape(len(column), -1)
    targets = table["target"].fill_null(0).to_numpy().astype(np.int64)
    return values / np.linalg.norm(values, axis=1, keepdims=True), targets


def drawn_vectors(width: int, rng: np.random.Generator) -> tuple[Floats, npt.NDArray[np.int64]]:
    targets = rng.integers(0, 100, 20_000)
    values = rng.normal(size=(100, width))[targets] + rng.normal(size=(20_000, width))
    return values.astype(np.float32), targets


def repeated(base: Floats, targets: npt.NDArray[np.int64], rows: int, rng: np.random.Generator) -> Floats:
    """The vectors, and shifted copies of them, `rows` in all, in random order."""
    order = np.argsort(targets, kind="stable")
    first = np.searchsorted(targets[order], targets)
    count = np.bincount(targets)[targets]
    found = [base]
    while sum(map(len, found)) < rows:
        one, other = (order[first + (rng.random(len(base)) * count).astype(np.int64)] for _ in range(2))
        found.append(base + np.float32(0.3) * (base[one] - base[other]))
    values = np.concatenate(found)[:rows]
    return values[rng.permutation(len(values))]


def write_features(values: Floats, path: Path) -> None:
    writer = None
    for start in range(0, len(values), ROWS_PER_GROUP):
        some = values[start : start + ROWS_PER_GROUP]
        embedding = pa.FixedSizeListArray.from_arrays(pa.array(some.reshape(-1)), some.shape[1])
        keys = pa.array([str(start + i) for i in range(len(some))])
        table = pa.table({"key": keys, "split": keys, "label": keys, "embedding": embedding})
        if writer is None:
            writer = pq.ParquetWriter(path, table.schema.with_metadata({"vitrail": json.dumps(NO_METADATA)}))
        writer.write_table(table.replace_schema_metadata(writer.schema.metadata))
    assert writer is not None
    writer.close()


def status_mib(field: str) -> float:
    """VmRSS or VmHWM of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    return run(), time.process_time() - start


def exact(path: Path, queries: Floats, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    store = FeatureStore.open(path)
    before = status_mib("VmRSS")
    hits, seconds = timed(lambda: exact_search(store.blocks(), torch.from_numpy(queries), K))
    return {"row": hits.row.numpy(), "seconds": seconds, "memory": status_mib("VmHWM") - before}


def build(path: Path, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    FeatureIndex.open(path, exact=True)
    before = status_mib("VmRSS")
    _, seconds = timed(lambda: FeatureIndex.build(path))
    size = sum(file.stat().st_size for file in path.with_name(f"{path.name}.index").iterdir())
    return {"seconds": seconds, "memory": status_mib("VmHWM") - before, "size": size / 2**20}


def index(path: Path, queries: Floats, threads: int, recall: float) -> dict[str, Any]:
    torch.set_num_threads(threads)
    opened = FeatureIndex.open(path, recall=recall)
    before = status_mib("VmRSS")
    hits, seconds = timed(lambda: opened.nearest(torch.from_numpy(queries), K))
    row = {"row": hits.row.numpy(), "seconds": seconds, "memory": status_mib("VmHWM") - before}
    return row | {"measured": opened.recall, "text": str(opened)}


def usearch(values: Floats, queries: Floats, threads: int, folder: Path) -> list[dict[str, Any]]:
    """HNSW in float16 with 16 neighbors a node: (built, then searched with growing effort)."""
    from usearch.index import Index

    before = status_mib("VmRSS")
    graph = Index(ndim=values.shape[1], metric="cos", dtype="f16", connectivity=16, expansion_add=64)
    _, seconds = timed(lambda: graph.add(np.arange(len(values)), values, threads=threads))
    graph.save(str(folder / "usearch"))
    size = (folder / "usearch").stat().st_size / 2**20
    rows = [{"name": "build", "seconds": seconds, "memory": status_mib("VmHWM") - before, "size": size}]
    graph = Index.restore(str(folder / "usearch"), view=True)
    for effort in (16, 32, 64, 128, 256):
        graph.expansion_search = effort
        found, seconds = timed(lambda: graph.search(queries, K, threads=threads))
        rows.append({"name": f"effort {effort}", "row": found.keys.astype(np.int64), "seconds": seconds})
    return rows


def in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def report(name: str, found: dict[str, Any], truth: npt.NDArray[np.int64], text: str = "") -> None:
    kept = np.mean([len({*a} & {*b}) / K for a, b in zip(found["row"].tolist(), truth.tolist(), strict=True)])
    memory = f", {found['memory']:.0f} MiB" if "memory" in found else ""
    speed = len(truth) / max(found["seconds"], 1e-9)
    print(f"{name:26} recall@10 {kept:.3f}, {speed:,.0f} queries per CPU second{memory}{text}")


def report_build(name: str, found: dict[str, Any]) -> None:
    print(f"{name:26} {found['seconds']:.0f} CPU seconds, {found['memory']:.0f} MiB, file {found['size']:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=Path, help="a file of vitrail embed")
    for name, usual in (("rows", 200_000), ("queries", 500), ("threads", 1), ("width", 192)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--usearch", action="store_true", help="measure USearch, too, if it is installed")
    chosen = parser.parse_args()
    rng = np.random.default_rng(0)
    values, targets = real_vectors(chosen.features) if chosen.features else drawn_vectors(chosen.width, rng)
    held_out = np.arange(len(values)) % 20 == 0
    queries = values[held_out][: chosen.queries]
    collection = repeated(values[~held_out], targets[~held_out], chosen.rows, rng)
    print(f"{len(collection):,} vectors of width {values.shape[1]}, {len(queries)} queries, {chosen.threads} threads")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "features.parquet"
        write_features(collection, path)
        found = in_process(exact, path, queries, chosen.threads)
        truth = found["row"]
        report("exact, from Parquet", found, truth)
        report_build("index: build", in_process(build, path, chosen.threads))
        for target in (0.9, 0.95, 0.99):
            row = in_process(index, path, queries, chosen.threads, target)
            report(f"index, --recall {target}", row, truth, f"; {row['text']}")
        if chosen.usearch:
            built, *rows = in_process(usearch, collection, queries, chosen.threads, Path(folder))
            report_build("USearch: build", built)
            for row in rows:
                report(f"USearch, {row['name']}", row, truth)


if __name__ == "__main__":
    main()

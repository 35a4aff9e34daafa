"""Features of a folder of images with Dask: paths -> features -> Parquet.

    python examples/embed_with_dask.py photos/ features/ [--model MODEL] [--workers 2]

The same lines run on a cluster with `dask.distributed.Client(...)` in place of the scheduler of processes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import dask
import pyarrow as pa
import pyarrow.parquet as pq
from dask.bag import from_sequence

import vitrail


def write(paths: list[str], embedder: vitrail.Embedder, out: str, number: int) -> str:
    """Embed the images of a partition, and write them to a file."""
    table = embedder(pa.table({"path": paths, "image": paths}))  # the column with the images is replaced
    file = f"{out}/part-{number:05d}.parquet"
    pq.write_table(table, file)
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    options.out.mkdir(parents=True)
    embedder = vitrail.Embedder(options.model, column="image", threads=1)
    paths = sorted(str(path) for path in options.images.rglob("*") if path.is_file())
    partitions = from_sequence(paths, partition_size=256).to_delayed()
    tasks = [
        dask.delayed(write)(partition, embedder, str(options.out), n) for n, partition in enumerate(partitions)
    ]  # fmt: skip
    files = dask.compute(*tasks, scheduler="processes", num_workers=options.workers)
    print(f"wrote {len(files)} files with the features of {len(paths)} images")


if __name__ == "__main__":
    main()

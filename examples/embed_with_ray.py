"""Features of a folder of images with Ray Data: files -> bytes -> features -> Parquet.

    python examples/embed_with_ray.py photos/ features/ [--model MODEL] [--actors 2]

`vitrail embed --data photos/ --out features/ --on ray` does this with restarts and checks. Use `vitrail.Embedder` as
here if the images come from a pipeline of your own.
"""

from __future__ import annotations

import argparse

import ray

import vitrail


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images")
    parser.add_argument("out")
    parser.add_argument("--model")
    parser.add_argument("--actors", type=int, default=2)
    options = parser.parse_args()
    images = ray.data.read_binary_files(options.images, include_paths=True)  # columns bytes and path
    features = images.map_batches(
        vitrail.Embedder,
        fn_constructor_kwargs={"model": options.model, "column": "bytes", "batch_size": 64, "threads": 1},
        batch_size=64,
        compute=ray.data.ActorPoolStrategy(size=options.actors),
        num_cpus=1,
    )
    features.write_parquet(options.out)


if __name__ == "__main__":
    main()

"""Data loading: image files -> uint8 pixels -> augmented, normalized float batches.

Three layers; the first two do not know each other, and the loader joins them:

    Source    What the images are. A map-style dataset: `source[i]` is a `Sample` (key, undecoded image, target).
              sources/: folders, tables, tar shards, the Hugging Face hub, built-in datasets.
    Sampler   Which image comes when. `sampler.indices(first, count)` are indices into the source, a pure function
              of the seed and the position. It never touches an image, and it has no state to save.
              sampler.py: `Sampler`; loader.py: `BatchSampler`, the part of each step that one process loads.
    Loader    How images become batches. An iterator of `Batch`: uint8 images, targets and weights on the device.
              batches.py: `training_batches` and `evaluation_batches` choose one of
                  ResidentLoader   the dataset is decoded once and stays on the device (resident.py)
                  WorkerLoader     workers decode and prefetch (worker_pool.py, transforms.py, transfer.py)
                  StreamLoader     a `stream:` source, which has no indices and so no sampler (stream_loader.py)

Around them: decode.py and jpeg.py turn bytes into pixels; preprocess.py resizes, crops and normalizes as a model
expects; augment/ augments whole batches on the device; bad_images.py records unreadable images.

    splits = open_data(DataConfig(source="cifar10"))                  # sources
    with training_batches(splits.train, ...) as batches:              # loader; it creates the sampler
        for batch in batches: ...
"""

from vitrail.data.decode import ImageLike, decode
from vitrail.data.preprocess import Preprocess

__all__ = ["ImageLike", "Preprocess", "decode"]

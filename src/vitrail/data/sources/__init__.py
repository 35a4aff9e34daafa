"""Data sources: datasets of labeled images behind one protocol, `Source`. `open_data(config)` opens any of them.

A source is a map-style dataset, as in PyTorch: `len(source)`, and `source[i]`, a `Sample` whose image is not decoded
yet. It also gives all labels (`targets`) and the name of any image (`key(i)`) without reading images. A source knows
neither order nor batches: the sampler (vitrail/data/sampler.py) chooses the indices, and the loader
(vitrail/data/loader.py) reads them, decodes the images and makes batches. `ShardStream` is the exception: it is
iterable-style, without indices, and has a loader of its own (vitrail/data/stream_loader.py).

base.py             Source, Sample, and the splits of a source and of a run
source_spec.py      parses `--data`: folder:, table:, shards:, stream:, hf:, a built-in name or a path
source_factory.py   opens the source and chooses its training, validation and test splits
holdout.py          holds out a fraction of the training images where a source has no validation split

folder.py           one folder per class
table.py            CSV, TSV or Parquet (parquet.py: images stored inside Parquet files)
shards.py           tar files in the WebDataset layout, with an index (shard_index.py, tar.py, remote.py)
stream.py           the same tar files read sequentially, without an index
hub_dataset.py      datasets on the Hugging Face hub
dataset.py          map-style datasets in memory, of torch, torchvision or Hugging Face
builtin.py          datasets by name (catalog.py, layouts.py, decoded_cache.py, download.py)
"""

from vitrail.data.sources.base import Sample, Source, SourceSplits, Splits, Targets
from vitrail.data.sources.source_factory import open_data, open_source_splits
from vitrail.data.sources.stream import ShardStream

__all__ = ["Sample", "ShardStream", "Source", "SourceSplits", "Splits", "Targets", "open_data", "open_source_splits"]

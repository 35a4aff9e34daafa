"""Data sources: labeled images behind one protocol, `Source`. `open_data(config)` opens any of them.

source_spec.py      parses `--data`: folder:, table:, shards:, stream:, hf:, a built-in name or a path
source_factory.py   opens the source and chooses its training, validation and test splits
holdout.py          holds out a fraction of the training images where a source has no validation split

folder.py           one folder per class
table.py            CSV, TSV or Parquet (parquet.py: images stored inside Parquet files)
shards.py           tar files in the WebDataset layout, with an index (shard_index.py, tar.py, remote.py)
stream.py           the same tar files read sequentially, without an index
hub.py              datasets on the Hugging Face hub
builtin.py          datasets by name (catalog.py, layouts.py, decoded_cache.py, download.py)
"""

from vitrail.data.sources.base import Sample, Source, SourceSplits, Splits, Targets
from vitrail.data.sources.source_factory import open_data, open_source_splits
from vitrail.data.sources.stream import ShardStream

__all__ = ["Sample", "ShardStream", "Source", "SourceSplits", "Splits", "Targets", "open_data", "open_source_splits"]

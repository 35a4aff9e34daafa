"""Sources of labeled images, all behind one protocol: `open_data(config)`.

folder.py      one folder for each class
table.py       CSV, TSV, Parquet (parquet.py: images inside it)
shards.py      tar files in WebDataset's layout, through an index (tar.py, index.py, remote.py)
stream.py      the same without an index; promises less
hub.py         data sets on the Hugging Face hub
builtin.py     data sets by name (catalog.py, layouts.py, content.py, download.py)

spec.py        which of them a name means
split.py       what is held out of them, where they have nothing of their own to measure on
"""

from vitrail.data.sources.base import Sample, Source, SourceSplits, Splits, Targets
from vitrail.data.sources.source_factory import open_data, open_source_splits
from vitrail.data.sources.stream import ShardStream

__all__ = ["Sample", "ShardStream", "Source", "SourceSplits", "Splits", "Targets", "open_data", "open_source_splits"]

"""Similar images: the nearest neighbors of an image among the features that `vitrail embed` wrote.

feature_store    the features as rows: a Parquet file, or a folder of parts
exact_search     the exact nearest neighbors, block by block
inverted_lists   an approximate search with FAISS that reads a fraction of the vectors from a memory-mapped file
recall           how many of the exact neighbors the approximate search finds, and how much it has to read for that
index_file       the index's folder: what it was made from, whether it still fits
feature_index    `FeatureIndex`: opens, builds and searches
query_features   images -> features, with the model and preprocessing that made the index's features
search           `vitrail.search`
neighbor_figure  the figure of queries and their neighbors
"""

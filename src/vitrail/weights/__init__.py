"""Read and write checkpoints: vitrail's own format and those of other libraries."""

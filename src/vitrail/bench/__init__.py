"""Benchmarks: this package and its peers, each measured in the same run."""

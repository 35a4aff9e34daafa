"""Fused operations, each beside its PyTorch reference implementation."""

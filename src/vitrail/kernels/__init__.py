"""Fused operations; each stands beside its plain PyTorch twin."""

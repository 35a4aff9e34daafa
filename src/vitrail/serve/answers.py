"""Outputs -> what is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail import __version__
from vitrail.models import ViT
from vitrail.serve.limits import Limits
from vitrail.serve.served import Served
from vitrail.weights.model_info import ModelInfo

Row = npt.NDArray[np.floating[Any]]


def ranked(info: ModelInfo, logits: Row, top: int) -> list[dict[str, Any]]:
    """One image's outputs -> its best classes; scores sum to 1 unless it may have several of them."""
    scores = _chances(logits.astype(np.float64), info.multi_label)
    top = min(top, len(scores))
    best = np.argpartition(-scores, top - 1)[:top]
    best = best[np.argsort(-scores[best], kind="stable")]
    labels = info.labels
    return [
        {"label": labels[i] if labels is not None else f"class {i}", "index": int(i), "score": float(scores[i])}
        for i in best
    ]


def _chances(logits: Row, multi_label: bool) -> Row:
    if multi_label:
        return np.asarray(0.5 * (1 + np.tanh(logits / 2)))
    raised = np.exp(logits - logits.max())
    return np.asarray(raised / raised.sum())


def description(served: Served, limits: Limits) -> dict[str, Any]:
    """What /v1/model says."""
    info, model = served.info, served.model
    config = info.config
    height, width, channels = served.shape
    rows, columns = served.grid
    net = model.net if model is not None else None
    attentive = isinstance(net, ViT)
    return {
        "name": served.name,
        "family": info.family,
        "task": info.task if served.classifies else "embed",
        "multi_label": info.multi_label,
        "classes": config.num_classes if served.classifies else 0,
        "labels": None if info.labels is None else list(info.labels),
        "parameters": served.parameters,
        "image": {"height": height, "width": width, "channels": channels},
        "grid": {"rows": rows, "columns": columns},
        "depth": getattr(config, "depth", None),
        "heads": getattr(config, "num_heads", None),
        "special": list(served.special),
        "pool": getattr(config, "pool", None),
        "position": getattr(config, "position", None),
        "attention": attentive,
        "methods": list(served.methods),
        "engine": served.engine.name,
        "precision": served.engine.precision,
        "version": __version__,
        "limits": {
            "bytes": limits.bytes,
            "pixels": limits.pixels,
            "total_pixels": limits.total_pixels,
            "images": limits.images,
        },
    }

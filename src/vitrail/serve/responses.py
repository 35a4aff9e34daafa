"""Model outputs and model description as JSON objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vitrail import __version__
from vitrail.models import ViT
from vitrail.predictions import Prediction, top_predictions
from vitrail.serve.limits import Limits
from vitrail.serve.served_model import ServedModel
from vitrail.weights.model_info import ModelInfo

Row = npt.NDArray[np.floating[Any]]


def top_classes(info: ModelInfo, logits: Row, top: int) -> list[dict[str, Any]]:
    """Logits of one image -> its `top` classes, best first. Scores sum to 1 unless the model is multi-label."""
    return [prediction_json(p) for p in top_predictions(torch.from_numpy(logits)[None], info, top)[0]]


def prediction_json(prediction: Prediction) -> dict[str, Any]:
    return {"label": prediction.label, "index": prediction.index, "score": prediction.score}


def list_models(models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Response of /v1/models, in the shape of OpenAI's API, for `ModelRegistry.describe()`."""
    data = [{"id": model["name"], "object": "model", "created": 0, "owned_by": "vitrail", **model} for model in models]
    return {"object": "list", "data": data}


def describe_model(served: ServedModel, limits: Limits, name: str, version: str) -> dict[str, Any]:
    """Response of /v1/model."""
    info, model = served.info, served.model
    config = info.config
    height, width, channels = served.input_shape
    rows, columns = served.grid
    net = model.net if model is not None else None
    return {
        "name": name,
        "version": version,
        "family": info.family,
        "task": info.task if served.classifies else "embed",
        "multi_label": info.multi_label,
        "num_classes": config.num_classes if served.classifies else 0,
        "labels": None if info.labels is None else list(info.labels),
        "num_parameters": served.num_parameters,
        "image_size": {"height": height, "width": width},
        "channels": channels,
        "grid": {"rows": rows, "columns": columns},
        "depth": getattr(config, "depth", None),
        "num_heads": heads if isinstance(heads := getattr(config, "num_heads", None), int) else None,
        "prefix_tokens": list(served.prefix_tokens),
        "pool": getattr(config, "pool", None),
        "position": getattr(config, "position", None),
        "has_attention": isinstance(net, ViT),
        "methods": list(served.explain_methods),
        "engine": served.engine.name,
        "precision": served.engine.precision,
        "vitrail_version": __version__,
        "limits": {
            "max_bytes": limits.max_bytes,
            "max_pixels": limits.max_pixels,
            "max_total_pixels": limits.max_total_pixels,
            "max_images": limits.max_images,
        },
    }

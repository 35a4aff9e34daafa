"""Explanations of one image as JSON: maps, attention weights, mean attention distances.

They are computed in steps (generators), so that the engine thread can run predictions in between.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from vitrail.explain.distance import mean_distances, patch_distances, uniform_distance
from vitrail.explain.masking import Fill
from vitrail.explain.overlays import as_rgb, upscale
from vitrail.explain.positions import SIMILARITY_MEANING, position_similarity
from vitrail.explain.steps import ForwardResult, LayerAttention, explain_steps
from vitrail.inference import network_input
from vitrail.model import Model
from vitrail.models import ViT
from vitrail.predictions import class_index, top_predictions
from vitrail.serve.http_errors import RequestError
from vitrail.serve.image_decoder import ImageDecoder
from vitrail.serve.responses import prediction_json
from vitrail.serve.served_model import ServedModel

# L layers, H heads, T tokens (prefix tokens first), h rows and w columns of patches, N = h w

Floats = npt.NDArray[np.floating[Any]]
MAX_DEFAULT_ATTENTION = 4_000_000
"""Maximum number of attention weights, over all layers, for which all layers are sent by default."""
MAX_ATTENTION = 32_000_000
"""Maximum number of attention weights in a response."""
MAX_OCCLUSION_BATCH = 32
"""Maximum number of masked images per step of occlusion."""
STEP_S = 0.15
"""Target duration of one step of occlusion."""
MIN_IMAGE_SIDE = 256
"""Minimum of the shorter side of the returned image, in pixels."""
EXPORTED = "an exported file has no explanations; serve the checkpoint it was made from."


@dataclass(frozen=True, kw_only=True)
class ExplainRequest:
    """Parameters of /v1/explain."""

    layers: tuple[int, ...] | None = None
    methods: tuple[str, ...] | None = None
    target: str | int | None = None
    hide: tuple[int, ...] = ()
    fill: Fill = "mean"


class Explainer:
    """Computes explanations for one model: call `check`, then `steps`."""

    def __init__(self, served: ServedModel, decoder: ImageDecoder) -> None:
        self.served, self.decoder = served, decoder

    @property
    def model(self) -> Model:
        if self.served.model is None:
            raise RequestError(501, "exported_model", EXPORTED)
        return self.served.model

    def check(self, request: ExplainRequest) -> None:
        """Raise RequestError if the model cannot compute this; called before the image is decoded."""
        model, supported = self.model, self.served.explain_methods
        if not supported:
            raise RequestError(
                501, "not_explainable", "this model cannot be explained: it has neither attention layers nor classes."
            )
        for method in request.methods or ():
            if method not in supported:
                raise RequestError(
                    400, "invalid_parameter", f"got method {method[:40]!r}, expected one of {', '.join(supported)}."
                )
        self.decoder.check_patches(request.hide)
        if request.layers is not None:
            self._check_layers(request.layers)
        if request.target is not None:
            if not self.served.classifies:
                raise RequestError(400, "invalid_parameter", "this model has no classes, so target cannot be set.")
            class_index(model.info, request.target)

    def steps(self, pixels: npt.NDArray[Any], request: ExplainRequest) -> Generator[Any, None, dict[str, Any]]:
        """H W C -> the response; yields None, or {method: a partial map}."""
        model, info = self.model, self.model.info
        visible = self.decoder.hide_patches(pixels, request.hide, request.fill) if request.hide else pixels
        images = network_input(model.net, model.preprocess, visible[None])
        methods = self.served.explain_methods[:1] if request.methods is None else request.methods
        targets = None if request.target is None else torch.tensor([class_index(info, request.target)])
        layers = self._selected_layers(request)
        attention: dict[str, Any] = {"attention": [], "attention_distance": [], "uniform_attention_distance": None}
        distances = None
        if isinstance(model.net, ViT):
            size = (images.shape[2], images.shape[3])
            grid = model.net.config.grid_of(size)
            distances = patch_distances(grid, size).to(images.device, torch.float32)
            attention["uniform_attention_distance"] = uniform_distance(grid, size)
        predictions, target, maps = [], None, {}
        for step in explain_steps(
            model.net,
            images,
            methods,
            targets=None if targets is None else targets.to(images.device),
            layers=None if isinstance(model.net, ViT) else (),
            multi_label=info.multi_label,
            max_batch_size=MAX_OCCLUSION_BATCH,
            step_s=STEP_S,
        ):
            progress = None
            if isinstance(step, LayerAttention):
                assert distances is not None
                assert isinstance(step.weights, torch.Tensor)
                by_head = mean_distances(step.weights, distances, model.info.config.num_prefix_tokens)[0]  # type: ignore[union-attr]
                attention["attention_distance"].append([round(px, 3) for px in by_head.tolist()])
                if step.layer in layers:
                    weights = step.weights[0].float().cpu().numpy()
                    attention["attention"].append(encode_attention(step.layer + 1, weights))
            elif isinstance(step, ForwardResult):
                if self.served.classifies:
                    ranked = top_predictions(step.logits, info, info.config.num_classes)[0]
                    predictions = [prediction_json(p) for p in ranked[:5]]
                    target = next(prediction_json(p) for p in ranked if p.index == int(step.targets[0]))
            elif step.known is None:
                maps[step.method] = encode_map(step.values[0].float().cpu().numpy())
            else:
                partial = encode_partial_map(step.values[0].numpy(), step.known.numpy())
                progress = {step.method: {**partial, "done": step.done, "total": step.total}}
            del step
            yield progress
        rows, columns = self.served.grid
        return {
            "grid": {"rows": rows, "columns": columns},
            "prefix_tokens": list(self.served.prefix_tokens),
            "predictions": predictions,
            "target": target,
            "image": encode_image(pixels),
            "maps": maps,
            "layers": [layer + 1 for layer in layers],
            **attention,
        }

    def preprocess_steps(self, pixels: npt.NDArray[Any]) -> Generator[None, None, dict[str, Any]]:
        """H W C -> response of /v1/preprocess; needs no network."""
        yield
        rows, columns = self.served.grid
        return {"grid": {"rows": rows, "columns": columns}, "image": encode_image(pixels)}

    def _selected_layers(self, request: ExplainRequest) -> tuple[int, ...]:
        """Layers whose attention is sent, from 0."""
        net = self.model.net
        if not isinstance(net, ViT):
            return ()
        if request.layers is not None:
            return tuple(sorted({layer - 1 for layer in request.layers}))
        depth = len(net.blocks)
        return tuple(range(depth)) if depth * self._attention_size() <= MAX_DEFAULT_ATTENTION else (depth - 1,)

    def _attention_size(self) -> int:
        """Number of attention weights in one layer."""
        net = self.model.net
        assert isinstance(net, ViT)
        rows, columns = self.served.grid
        return int(net.config.num_heads * (net.config.num_prefix_tokens + rows * columns) ** 2)

    def _check_layers(self, layers: Sequence[int]) -> None:
        depth = len(self.model.net.blocks) if isinstance(self.model.net, ViT) else 0
        for layer in layers:
            if not 1 <= layer <= depth:
                expected = f"expected 1 to {depth}" if depth else "this network has no attention"
                raise RequestError(400, "invalid_parameter", f"got layer {layer}; {expected}.")
        if layers and len(set(layers)) * self._attention_size() > MAX_ATTENTION:
            raise RequestError(
                400, "too_many_layers", "the attention of these layers is too large; request fewer layers."
            )


def encode_attention(layer: int, attention: Floats) -> dict[str, Any]:
    """H T T -> one byte per weight, scaled so that 255 is the maximum of the row, and these maxima."""
    row_max = attention.max(-1)  # H T
    steps = np.rint(255 * attention / np.maximum(row_max, np.finfo(np.float32).tiny)[..., None])
    return {
        "layer": layer,
        "num_heads": attention.shape[0],
        "num_tokens": attention.shape[1],
        "values": _to_base64(steps.astype(np.uint8)),
        "row_max": _to_base64(row_max.astype("<f4")),
    }


def encode_map(values: Floats) -> dict[str, Any]:
    """h w -> one byte per value, scaled between minimum and maximum."""
    low, high = float(values.min()), float(values.max())
    steps = np.rint(255 * (values - low) / (high - low)) if high > low else np.zeros_like(values)
    return {"values": _to_base64(steps.astype(np.uint8)), "min": low, "max": high}


def encode_partial_map(values: Floats, known: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """h w values, final where `known` -> a map, and one byte per patch: 1 if its value is final."""
    return {**encode_map(np.where(known, values, values[known].min())), "final": _to_base64(known.astype(np.uint8))}


def encode_image(pixels: npt.NDArray[Any]) -> str:
    """H W C -> data URL of a JPEG, enlarged if the image is small."""
    out = io.BytesIO()
    Image.fromarray(upscale(as_rgb(pixels), MIN_IMAGE_SIDE)).save(out, "JPEG", quality=90, subsampling=0)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()


def encode_positions(served: ServedModel) -> dict[str, Any]:
    """Response of /v1/positions: similarity of position embeddings. Raises ModelError if the model has none."""
    if served.model is None:
        raise RequestError(404, "no_positions", EXPORTED)
    height, width, _ = served.input_shape
    similarity = position_similarity(served.model.net, image_size=(height, width))  # h w h w
    rows, columns = similarity.shape[:2]
    flat = np.rint(127 * np.clip(similarity, -1, 1)).astype(np.int8)
    return {
        "grid": {"rows": rows, "columns": columns},
        "values": _to_base64(flat),
        "description": SIMILARITY_MEANING[served.model.net.config.position],  # type: ignore[union-attr]
    }


def _to_base64(values: npt.NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()

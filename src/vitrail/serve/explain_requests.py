"""Explanations of one image as JSON: maps, attention weights, mean attention distances.

They are computed in steps (generators), so that the engine thread can run predictions in between.
"""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from vitrail.api import Model
from vitrail.api.explanation import METHODS, class_index
from vitrail.explain.attention import AttentionIterator
from vitrail.explain.distance import mean_distances, patch_distances, uniform_distance
from vitrail.explain.gradient import check_targets
from vitrail.explain.masking import Fill, class_probabilities, covered_pixels, mask_patches, replacement_pixels
from vitrail.explain.occlusion import grid_of, windows
from vitrail.explain.overlays import as_rgb, upscale
from vitrail.explain.positions import SIMILARITY_MEANING, position_similarity
from vitrail.models import Net, ViT
from vitrail.models.base import eval_mode
from vitrail.serve.http_errors import RequestError
from vitrail.serve.image_decoder import ImageDecoder
from vitrail.serve.responses import top_predictions
from vitrail.serve.served_model import ServedModel, model_input

# L layers, H heads, T tokens (prefix tokens first), h rows and w columns of patches, N = h w

Floats = npt.NDArray[np.floating[Any]]
MAX_DEFAULT_ATTENTION = 4_000_000
"""Maximum number of attention weights, over all layers, for which all layers are sent by default."""
MAX_ATTENTION = 32_000_000
"""Maximum number of attention weights in a response."""
OCCLUSION_WINDOW, MAX_OCCLUSION_BATCH = 2, 32
"""Occlusion: side of the hidden square in patches, and maximum number of squares per batch."""
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

    def __init__(self, served: ServedModel, images: ImageDecoder) -> None:
        self.served, self.decoder = served, images

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
                501, "not_explainable", "this model has no explanations: it has no attention and no classes."
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
            class_index(model, request.target)

    def steps(self, pixels: npt.NDArray[Any], request: ExplainRequest) -> Generator[Any, None, dict[str, Any]]:
        """H W C -> the response; yields None, or {method: a partial map}."""
        model = self.model
        visible = self.decoder.hide_patches(pixels, request.hide, request.fill) if request.hide else pixels
        images = model_input(model, visible[None])
        layers = self._selected_layers(request)
        attention: dict[str, Any] = {"attention": [], "attention_distance": [], "uniform_attention_distance": None}
        if isinstance(model.net, ViT):
            logits = yield from _collect_attention(model.net, images, layers, attention)
        else:
            with torch.no_grad(), eval_mode(model.net):
                logits = model.net(images)
        yield
        row = logits[0].float().cpu().numpy()
        predictions = top_predictions(self.served.info, row, 5) if self.served.classifies else []
        target = predictions[0] if predictions else None
        if request.target is not None:
            number = class_index(model, request.target)
            target = next(p for p in top_predictions(self.served.info, row, len(row)) if p["index"] == number)
        maps = {}
        for method in self.served.explain_methods[:1] if request.methods is None else request.methods:
            target_index = torch.tensor([target["index"] if target else 0], device=model.device)
            if method == "occlusion":
                relevance = yield from occlusion_steps(model.net, images, target_index, model.info.multi_label)
            else:
                relevance = METHODS[method](model.net, images, target_index, model.info.multi_label)[0]
            maps[method] = encode_map(relevance.float().cpu().numpy())
            yield
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


def _collect_attention(
    net: ViT, images: Tensor, layers: Sequence[int], answer: dict[str, Any]
) -> Generator[None, None, Tensor]:
    """Run the network layer by layer, add attention and distances to `answer`, return the logits."""
    walk = AttentionIterator(net, images)
    size = (images.shape[2], images.shape[3])
    distances = patch_distances(walk.grid, size).to(images.device, torch.float32)
    for number, attention in enumerate(walk):
        mean_distance = mean_distances(attention, distances, net.config.num_prefix_tokens)[0]
        answer["attention_distance"].append([round(px, 3) for px in mean_distance.tolist()])
        if number in layers:
            answer["attention"].append(encode_attention(number + 1, attention[0].float().cpu().numpy()))
        yield
    answer["uniform_attention_distance"] = uniform_distance(walk.grid, size)
    return walk.logits


def occlusion_steps(
    net: Net, images: Tensor, targets: Tensor, multi_label: bool
) -> Generator[dict[str, Any], None, Tensor]:
    """Occlusion map of one image, computed in steps: 1 C H W -> h w. Same result as the method in METHODS.

    Yields the partial map after each step.
    """
    check_targets(net, targets, len(images))
    grid, target = grid_of(net, images), int(targets[0])
    images = covered_pixels(net, images)
    size = min(OCCLUSION_WINDOW, *grid)
    masks = windows(grid, size, size)
    replacement = replacement_pixels(images, "mean")[0]
    whole = class_probabilities(net, images, target, multi_label=multi_label).double()
    drops: list[Tensor] = []
    at, count = 0, 1
    while at < len(masks):
        start = time.perf_counter()
        occluded = mask_patches(images[0], replacement, masks[at : at + count].to(images.device))
        drops.append(whole - class_probabilities(net, occluded, target, multi_label=multi_label).double())
        at += len(drops[-1])
        count = min(max(int(count * STEP_S / (time.perf_counter() - start)), 1), 2 * count, MAX_OCCLUSION_BATCH)
        known = ~masks[at:].any(0)  # all squares that cover the patch are done
        values = _mean_over_windows(masks[:at], torch.cat(drops))
        yield {"occlusion": {**encode_partial_map(values.numpy(), known.numpy()), "done": at, "total": len(masks)}}
    return _mean_over_windows(masks, torch.cat(drops))


def _mean_over_windows(masks: Tensor, drops: Tensor) -> Tensor:
    """Masks M h w and values M -> h w: mean over the squares that cover a patch; NaN if none does."""
    cover = masks.double()
    return (drops[:, None, None] * cover).sum(0) / cover.sum(0)


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

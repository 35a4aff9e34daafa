"""What happens inside for one image, as the explorer draws it: maps, attention, distances.

Written as steps, so that the engine's thread can answer predictions in between.
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
from vitrail.api.looking import METHODS, class_number
from vitrail.explain.attention import Walk
from vitrail.explain.distance import mean_distances, patch_distances, uniform_distance
from vitrail.explain.gradient import check_targets
from vitrail.explain.hiding import Fill, filling, hidden, scores, seen
from vitrail.explain.occlusion import grid_of, windows
from vitrail.explain.panes import enlarged, shown
from vitrail.explain.positions import MEANING, position_similarity
from vitrail.models import Net, ViT
from vitrail.models.base import evaluating
from vitrail.serve.answers import ranked
from vitrail.serve.images import Images
from vitrail.serve.problems import Problem
from vitrail.serve.served import Served, images_of

# L layers, H heads, T tokens (special ones first), h rows and w columns of patches, N = h w

Floats = npt.NDArray[np.floating[Any]]
SMALL = 4_000_000
"""Values of attention in all layers that are sent unasked."""
LARGEST = 32_000_000
"""Values of attention that are sent at all."""
WINDOW, AT_A_TIME = 2, 32
"""Occlusion: patches along a side of the square that is hidden, and at how many places at a time, at most."""
TURN = 0.15
"""Seconds of occlusion after which others have their turn."""
SHORT = 256
"""Pixels of the image's short side, at least."""
CLOSED = "an exported file cannot be looked into; serve the checkpoint it was made from."


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a client wants to see."""

    layers: tuple[int, ...] | None = None
    methods: tuple[str, ...] | None = None
    target: str | int | None = None
    hide: tuple[int, ...] = ()
    fill: Fill = "mean"


class Looker:
    """Explanations of one model's images; `check` first, then `steps`."""

    def __init__(self, served: Served, images: Images) -> None:
        self.served, self.images = served, images

    @property
    def model(self) -> Model:
        if self.served.model is None:
            raise Problem(501, "no_network", CLOSED)
        return self.served.model

    def check(self, asked: Asked) -> None:
        """Raise Problem where there is no such thing to see, before the image is decoded."""
        model, able = self.model, self.served.methods
        if not able:
            raise Problem(501, "nothing_to_explain", "this model has neither attention nor classes to explain it by.")
        for method in asked.methods or ():
            if method not in able:
                raise Problem(400, "bad_value", f"no explanation {method[:40]!r} here; there is {', '.join(able)}.")
        self.images.check_hidden(asked.hide)
        if asked.layers is not None:
            self._check_layers(asked.layers)
        if asked.target is not None:
            if not self.served.classifies:
                raise Problem(400, "bad_value", "this model has no classes, so there is no target.")
            class_number(model, asked.target)

    def steps(self, whole: npt.NDArray[Any], asked: Asked) -> Generator[Any, None, dict[str, Any]]:
        """H W C -> the answer; yields None, or {method: a partial map}."""
        model = self.model
        seen = self.images.without(whole, asked.hide, asked.fill) if asked.hide else whole
        images = images_of(model, seen[None])
        layers = self._layers(asked)
        answer: dict[str, Any] = {"attention": [], "distance": [], "uniform_distance": None}
        if isinstance(model.net, ViT):
            logits = yield from _walked(model.net, images, layers, answer)
        else:
            with torch.no_grad(), evaluating(model.net):
                logits = model.net(images)
        yield
        row = logits[0].float().cpu().numpy()
        predictions = ranked(self.served.info, row, 5) if self.served.classifies else []
        target = predictions[0] if predictions else None
        if asked.target is not None:
            number = class_number(model, asked.target)
            target = next(p for p in ranked(self.served.info, row, len(row)) if p["index"] == number)
        maps = {}
        for method in self.served.methods[:1] if asked.methods is None else asked.methods:
            meant = torch.tensor([target["index"] if target else 0], device=model.device)
            if method == "occlusion":
                found = yield from occluded(model.net, images, meant, model.info.multi_label)
            else:
                found = METHODS[method](model.net, images, meant, model.info.multi_label)[0]
            maps[method] = packed_map(found.float().cpu().numpy())
            yield
        rows, columns = self.served.grid
        return {
            "grid": {"rows": rows, "columns": columns},
            "special": list(self.served.special),
            "predictions": predictions,
            "target": target,
            "image": image(whole),
            "maps": maps,
            "layers": [layer + 1 for layer in layers],
            **answer,
        }

    def only_seen(self, pixels: npt.NDArray[Any]) -> Generator[None, None, dict[str, Any]]:
        """H W C -> the image and its grid, for which no network is needed."""
        yield
        rows, columns = self.served.grid
        return {"grid": {"rows": rows, "columns": columns}, "image": image(pixels)}

    def _layers(self, asked: Asked) -> tuple[int, ...]:
        """Those whose attention is sent, from 0."""
        net = self.model.net
        if not isinstance(net, ViT):
            return ()
        if asked.layers is not None:
            return tuple(sorted({layer - 1 for layer in asked.layers}))
        depth = len(net.blocks)
        return tuple(range(depth)) if depth * self._values() <= SMALL else (depth - 1,)

    def _values(self) -> int:
        """Of one layer's attention."""
        net = self.model.net
        assert isinstance(net, ViT)
        rows, columns = self.served.grid
        return int(net.config.num_heads * (net.config.num_prefix_tokens + rows * columns) ** 2)

    def _check_layers(self, layers: Sequence[int]) -> None:
        depth = len(self.model.net.blocks) if isinstance(self.model.net, ViT) else 0
        for layer in layers:
            if not 1 <= layer <= depth:
                there = f"this network has layers 1 to {depth}" if depth else "this network has no attention"
                raise Problem(400, "bad_value", f"there is no layer {layer}: {there}.")
        if layers and len(set(layers)) * self._values() > LARGEST:
            raise Problem(400, "too_many_layers", "the attention of so many layers is too large; ask for fewer.")


def _walked(net: ViT, images: Tensor, layers: Sequence[int], answer: dict[str, Any]) -> Generator[None, None, Tensor]:
    """Through the network a layer at a time, writing down what is seen; gives the logits."""
    walk = Walk(net, images)
    size = (images.shape[2], images.shape[3])
    distances = patch_distances(walk.grid, size).to(images.device, torch.float32)
    for number, attention in enumerate(walk):
        far = mean_distances(attention, distances, net.config.num_prefix_tokens)[0]
        answer["distance"].append([round(px, 3) for px in far.tolist()])
        if number in layers:
            answer["attention"].append(packed_attention(number + 1, attention[0].float().cpu().numpy()))
        yield
    answer["uniform_distance"] = uniform_distance(walk.grid, size)
    return walk.logits


def occluded(net: Net, images: Tensor, targets: Tensor, multi_label: bool) -> Generator[dict[str, Any], None, Tensor]:
    """What METHODS has as occlusion, for one image, a few squares at a time: 1 C H W -> h w.

    Yields the map so far after each step.
    """
    check_targets(net, targets, len(images))
    grid, target = grid_of(net, images), int(targets[0])
    images = seen(net, images)
    size = min(WINDOW, *grid)
    masks = windows(grid, size, size)
    instead = filling(images, "mean")[0]
    whole = scores(net, images, target, multi_label=multi_label).double()
    lost: list[Tensor] = []
    at, count = 0, 1
    while at < len(masks):
        start = time.perf_counter()
        places = hidden(images[0], instead, masks[at : at + count].to(images.device))
        lost.append(whole - scores(net, places, target, multi_label=multi_label).double())
        at += len(lost[-1])
        count = min(max(int(count * TURN / (time.perf_counter() - start)), 1), 2 * count, AT_A_TIME)
        known = ~masks[at:].any(0)  # every square that covers the patch is done
        values = _mean_over(masks[:at], torch.cat(lost))
        yield {"occlusion": {**packed_partial(values.numpy(), known.numpy()), "done": at, "total": len(masks)}}
    return _mean_over(masks, torch.cat(lost))


def _mean_over(masks: Tensor, lost: Tensor) -> Tensor:
    """M h w and M -> h w: the mean of the squares that cover a patch; NaN where none does."""
    cover = masks.double()
    return (lost[:, None, None] * cover).sum(0) / cover.sum(0)


def packed_attention(layer: int, attention: Floats) -> dict[str, Any]:
    """H T T -> one byte for each value, and the peak of each row that 255 stands for."""
    peaks = attention.max(-1)  # H T
    steps = np.rint(255 * attention / np.maximum(peaks, np.finfo(np.float32).tiny)[..., None])
    return {
        "layer": layer,
        "heads": attention.shape[0],
        "tokens": attention.shape[1],
        "values": _text(steps.astype(np.uint8)),
        "peaks": _text(peaks.astype("<f4")),
    }


def packed_map(values: Floats) -> dict[str, Any]:
    """h w -> one byte for each value, between the lowest and the highest."""
    low, high = float(values.min()), float(values.max())
    steps = np.rint(255 * (values - low) / (high - low)) if high > low else np.zeros_like(values)
    return {"values": _text(steps.astype(np.uint8)), "low": low, "high": high}


def packed_partial(values: Floats, known: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """h w values, of which only some are known -> a map, and one byte for each patch: 1 where it is known."""
    return {**packed_map(np.where(known, values, values[known].min())), "known": _text(known.astype(np.uint8))}


def image(pixels: npt.NDArray[Any]) -> str:
    """H W C -> a data address of a JPEG that is large enough to be looked at."""
    out = io.BytesIO()
    Image.fromarray(enlarged(shown(pixels), SHORT)).save(out, "JPEG", quality=90, subsampling=0)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()


def positions(served: Served) -> dict[str, Any]:
    """How alike the places of any two patches are; ModelError where there are none."""
    if served.model is None:
        raise Problem(404, "no_positions", CLOSED)
    height, width, _ = served.shape
    alike = position_similarity(served.model.net, image_size=(height, width))  # h w h w
    rows, columns = alike.shape[:2]
    flat = np.rint(127 * np.clip(alike, -1, 1)).astype(np.int8)
    return {
        "grid": {"rows": rows, "columns": columns},
        "values": _text(flat),
        "meaning": MEANING[served.model.net.config.position],  # type: ignore[union-attr]
    }


def _text(values: npt.NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()

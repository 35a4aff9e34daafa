"""`vit.explain(image)`: predictions, attention and attribution maps of one image."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitrail.data.decode import ImageLike
from vitrail.errors import ConfigError, ModelError, did_you_mean
from vitrail.explain import attention_maps, gradient_rollout, occlusion, rollout_map
from vitrail.explain import faithfulness as measure_faithfulness
from vitrail.explain.attention import AttentionIterator, Query, require_attention, special_token_names
from vitrail.explain.faithfulness import Faithfulness
from vitrail.explain.masking import covered_pixels
from vitrail.models import BiT, Net

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitrail.api.model import Model, Prediction

# h rows and w columns of patches, L layers, H heads, P special tokens

Floats = npt.NDArray[np.floating[Any]]


@torch.no_grad()
def last_attention_map(net: Net, images: Tensor) -> Tensor:
    """B h w: attention of the attention pool, or else of the pooled tokens in the last layer."""
    net = require_attention(net)
    if net.pool is not None:
        walk = AttentionIterator(net, images, layers=()).run()
        assert walk.pool_attention is not None
        return walk.pool_attention.mean(1)[:, -math.prod(walk.grid) :].unflatten(1, walk.grid)
    return attention_maps(net, images, layers=(len(net.blocks) - 1,))[0][0].mean(1)


METHODS: dict[str, Callable[[Net, Tensor, Tensor, bool], Tensor]] = {
    "rollout": lambda net, images, targets, multi_label: rollout_map(net, images),
    "gradient": lambda net, images, targets, multi_label: gradient_rollout(net, images, targets),
    "attention": lambda net, images, targets, multi_label: last_attention_map(net, images),
    "occlusion": lambda net, images, targets, multi_label: occlusion(
        net, images, targets, stride=2, multi_label=multi_label
    ),
}
"""Methods by name: (network, images, class indices, multi_label) -> B h w; larger is more important."""
NEEDS_CLASSES = ("gradient", "occlusion")


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The explanation of one image. `figure` draws it; `save` writes all figures and arrays."""

    image: str
    """Name of the image."""
    model: str
    """Name of the model."""
    pixels: npt.NDArray[np.uint8]
    """H W 3: the image after resizing and cropping."""
    predictions: list[Prediction]
    """The top predictions; empty for a model without classes."""
    target: Prediction | None
    """The class that is explained."""
    maps: dict[str, Floats]
    """Method -> h w; larger is more important."""
    attention: Floats | None = None
    """L H h w: attention of the query in each layer and head; None for a network without attention."""
    special_attention: Floats | None = None
    """L H P: attention of the query to the special tokens; with `attention` it sums to 1."""
    special_names: tuple[str, ...] = ()
    query: Query = "read"
    """The query token: "read" (the pooled tokens), a token's name, or a patch as (row, column)."""
    faithfulness: dict[str, Faithfulness] = field(default_factory=dict)
    """Method, and "random" -> deletion and insertion curves; empty unless requested."""

    @property
    def rollout(self) -> Floats:
        """h w: attention rollout to the pooled tokens."""
        if "rollout" not in self.maps:
            raise ModelError(f"rollout was not requested; this explanation has {', '.join(self.maps) or 'no maps'}.")
        return self.maps["rollout"]

    def figure(self, kind: str = "overview", layer: int = -1) -> Figure:
        """One of `figures()`: "overview", "heads" (of one layer, from 1), "layers" or "faithfulness"."""
        from vitrail.explain import figures

        if kind not in (known := self.figures()):
            raise ConfigError(f"there is no figure {kind!r}{did_you_mean(kind, known)}")
        if kind == "overview":
            scores = [(p.label, p.score) for p in self.predictions]
            what = f"{self.image}: {self.target.label}" if self.target else self.image
            return figures.overview(self.pixels, self.maps, scores, what, self._subtitle())
        if kind == "faithfulness":
            assert self.target is not None
            what = f"Faithfulness of the explanations of “{self.target.label}”: {self.image}"
            return figures.faithfulness_curves(self.faithfulness, what, f"{self.model}; the baseline is a random order")
        assert self.attention is not None
        if kind == "layers":
            what = f"Attention by layer and head: {self.image}"
            return figures.layers(
                self.attention, what, f"{self.model}; {self._query_text()}; each map has its own scale"
            )
        number = _layer_index(layer, len(self.attention))
        what = f"Layer {number + 1} of {len(self.attention)}: {self.image}"
        under = f"{self.model}; {self._query_text()}{self._special_attention_text(number)}"
        mark = self.query if isinstance(self.query, tuple) else None
        return figures.heads(self.pixels, self.attention[number], what, under, mark)

    def figures(self) -> tuple[str, ...]:
        """Names of the available figures."""
        inside = ("heads", "layers") if self.attention is not None else ()
        return ("overview", *inside, *(("faithfulness",) if self.faithfulness else ()))

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The data of all figures, by name."""
        found: dict[str, npt.NDArray[Any]] = {"pixels": self.pixels, **self.maps}
        if self.attention is not None and self.special_attention is not None:
            found |= {"attention_by_head": self.attention, "attention_to_special": self.special_attention}
        for kind, both in self.faithfulness.items():
            found |= {f"deletion_{kind}": both.deletion.values, f"insertion_{kind}": both.insertion.values}
            found["shares"] = both.deletion.fractions
        return found

    def save(
        self,
        folder: str | Path,
        formats: Sequence[str] = ("png",),
        layers: Sequence[int] = (-1,),
        stem: str | None = None,
    ) -> list[Path]:
        """Write all figures (and the arrays, as "npz"). File names start with `stem`, by default the image's name."""
        from vitrail.explain.canvas import check_formats, save, save_arrays

        check_formats(formats)
        depth = len(self.attention) if self.attention is not None else 0
        names = {kind: -1 for kind in self.figures() if kind != "heads"}
        if depth:
            names |= {f"heads-{_layer_index(layer, depth) + 1}": layer for layer in layers}
        start = stem or Path(self.image).stem
        written = []
        for ending in formats:
            if ending == "npz":
                written.append(save_arrays(self.arrays(), Path(folder) / f"{start}.npz"))
                continue
            for name, layer in names.items():
                figure = self.figure(name.partition("-")[0], layer)
                written.append(save(figure, Path(folder) / f"{start}-{name}.{ending}"))
        return written

    def _subtitle(self) -> str:
        height, width = next(iter(self.maps.values())).shape
        return f"{self.model}; {height} × {width} patches; brighter = more important, each map has its own scale"

    def _query_text(self) -> str:
        if isinstance(self.query, tuple):
            return f"query: patch in row {self.query[0]}, column {self.query[1]}"
        return "query: the pooled tokens" if self.query == "read" else f"query: {self.query} token"

    def _special_attention_text(self, layer: int) -> str:
        """Mean attention to the special tokens, as text."""
        assert self.special_attention is not None
        shares = self.special_attention[layer].mean(0)
        parts = [f"{100 * share:.0f} % to {name}" for name, share in zip(self.special_names, shares, strict=True)]
        return f"; on average {', '.join(parts)}" if parts else ""


def explain(
    model: Model,
    image: ImageLike,
    *,
    name: str | None = None,
    target: str | int | None = None,
    methods: Sequence[str] | None = None,
    query: Query = "read",
    faithfulness: bool = False,
    top: int = 5,
) -> Explanation:
    """Explain the prediction of a model for one image.

    `target` is the class to explain, by name or index; None: the top prediction. `methods` are keys of METHODS;
    None: all that the model supports. `query` is the token whose attention is shown. `faithfulness` adds deletion and
    insertion curves, which take some hundred forward passes.
    """
    chosen = _resolve_methods(model, methods)
    pixels = model.preprocess.pixels(image)
    batch = torch.from_numpy(np.ascontiguousarray(pixels)).to(model.device).permute(2, 0, 1)[None]
    images = model.preprocess.normalize(batch).to(model.dtype)
    if query != "read":
        require_attention(model.net)
    attention_net = None if isinstance(model.net, BiT) else model.net
    views = special = None
    if attention_net is not None:
        found, beside = attention_maps(attention_net, images, query)
        views, special = _array(found[:, 0]), _array(beside[:, 0])
    predictions, chosen_class = _predictions(model, images, target, top)
    targets = torch.tensor([chosen_class.index if chosen_class else 0], device=model.device)
    multi_label = model.info.multi_label
    maps = {method: METHODS[method](model.net, images, targets, multi_label)[0] for method in chosen}
    curves: dict[str, Faithfulness] = {}
    if faithfulness:
        if chosen_class is None:
            raise ModelError("faithfulness needs a class probability, and this model has no classes.")
        curves = measure_faithfulness(model.net, images[0], maps, chosen_class.index, multi_label=multi_label)
    from vitrail.explain.overlays import as_rgb

    covered_size = covered_pixels(model.net, images).shape[2:]
    return Explanation(
        image=name or _name(image),
        model=model.info.title,
        pixels=as_rgb(pixels[: covered_size[0], : covered_size[1]]),
        predictions=predictions,
        target=chosen_class,
        maps={method: _array(found) for method, found in maps.items()},
        attention=views,
        special_attention=special,
        special_names=special_token_names(attention_net.config) if attention_net is not None else (),
        query=query,
        faithfulness=curves,
    )


def class_index(model: Model, target: str | int) -> int:
    """Index of a class given by index or name, ignoring case."""
    if isinstance(target, int) or target.isdecimal():
        model.label(int(target))  # raises where there is none
        return int(target)
    if model.labels is None:
        raise ModelError(
            f"the checkpoint has no class names, so {target!r} cannot be found: pass its index, or names with "
            "--labels FILE (labels=... in Python)."
        )
    labels = model.labels
    plain = [label.lower().replace("_", " ") for label in labels]
    asked = target.lower().replace("_", " ")
    if asked in plain:
        return plain.index(asked)
    starts = [i for i, label in enumerate(plain) if label.split(",")[0] == asked]
    if len(starts) == 1:
        return starts[0]
    raise ModelError(f"there is no class {target!r}{did_you_mean(target, labels)}")


def _resolve_methods(model: Model, methods: Sequence[str] | None) -> tuple[str, ...]:
    """The requested methods, or all that the model supports."""
    if methods is not None and not methods:
        raise ConfigError(f"no method was given; expected some of {', '.join(METHODS)}.")
    for method in methods or ():
        if method not in METHODS:
            raise ConfigError(f"there is no method {method!r}{did_you_mean(method, METHODS)}")
    classes = bool(model.config.num_classes) and model.info.task == "classify"
    if methods is None:
        able = [m for m in METHODS if m == "occlusion" or not isinstance(model.net, BiT)]
        methods = [m for m in able if classes or m not in NEEDS_CLASSES]
        if not methods:
            raise ModelError("this model has neither attention nor classes, so no method applies.")
    if isinstance(model.net, BiT) and any(m != "occlusion" for m in methods):
        require_attention(model.net)
    if not classes and (wanting := [m for m in methods if m in NEEDS_CLASSES]):
        raise ModelError(f"{wanting[0]} explains a class score, and this model has no classes; try rollout.")
    return tuple(dict.fromkeys(methods))


def _predictions(
    model: Model, images: Tensor, target: str | int | None, top: int
) -> tuple[list[Prediction], Prediction | None]:
    """The top predictions, and the one to explain."""
    if model.info.task != "classify" or not model.config.num_classes:
        if target is not None:
            raise ModelError(f"there is no class {target!r} to explain: this model has no classes.")
        return [], None
    from vitrail.models.base import eval_mode

    with torch.no_grad(), eval_mode(model.net):
        logits = model.net(images).float().cpu()
    ranked = model.top_predictions(logits, model.config.num_classes)[0]
    number = ranked[0].index if target is None else class_index(model, target)
    return ranked[:top], next(p for p in ranked if p.index == number)


def _array(found: Tensor) -> Floats:
    return found.float().cpu().numpy()


def _name(image: ImageLike) -> str:
    return Path(image).name if isinstance(image, str | Path) else "an image"


def _layer_index(layer: int, depth: int) -> int:
    """1-based layer number, or negative from the end -> 0-based index."""
    if not 1 <= abs(layer) <= depth:
        raise ModelError(f"there is no layer {layer}: this network has layers 1 to {depth} (or -1, the last).")
    return layer - 1 if layer > 0 else depth + layer

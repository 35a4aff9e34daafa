"""`Model.explain`: predictions, attention and attribution maps of one image, from one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitrail.data.decode import ImageLike
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError, ModelError, did_you_mean
from vitrail.explain.attention import Query, QueryAttention, require_attention
from vitrail.explain.faithfulness import Faithfulness
from vitrail.explain.faithfulness import faithfulness as measure_faithfulness
from vitrail.explain.masking import covered_pixels
from vitrail.explain.steps import (
    METHODS,
    NEEDS_ATTENTION,
    NEEDS_CLASSES,
    ForwardResult,
    LayerAttention,
    explain_steps,
    supported_methods,
)
from vitrail.explain.swin_attention import SwinQueryAttention
from vitrail.inference import network_input
from vitrail.models import BiT, Net, Swin, ViT
from vitrail.predictions import Prediction, class_index, top_predictions
from vitrail.weights.model_info import ModelInfo

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# h rows and w columns of patches, L layers, H heads, P prefix tokens

Floats = npt.NDArray[np.floating[Any]]


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
    """L H h w: attention of the query in each layer and head; None for a network without attention. NaN for heads
    that a layer of a Swin Transformer does not have."""
    prefix_attention: Floats | None = None
    """L H P: attention of the query to the prefix tokens; with `attention` it sums to 1."""
    prefix_names: tuple[str, ...] = ()
    query: Query = "pooled"
    """The query token: "pooled" (the tokens that the head receives), a token's name, or a patch as (row, column)."""
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
            raise ConfigError(f"unknown figure {kind!r}{did_you_mean(kind, known)}")
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
        under = f"{self.model}; {self._query_text()}{self._prefix_attention_text(number)}"
        mark = self.query if isinstance(self.query, tuple) else None
        views = self.attention[number]
        return figures.heads(self.pixels, views[~np.isnan(views).any((1, 2))], what, under, mark)

    def figures(self) -> tuple[str, ...]:
        """Names of the available figures."""
        inside = ("heads", "layers") if self.attention is not None else ()
        return ("overview", *inside, *(("faithfulness",) if self.faithfulness else ()))

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The data of all figures, by name."""
        found: dict[str, npt.NDArray[Any]] = {"pixels": self.pixels, **self.maps}
        if self.attention is not None and self.prefix_attention is not None:
            found |= {"attention_by_head": self.attention, "attention_to_prefix": self.prefix_attention}
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
        return "query: the pooled tokens" if self.query == "pooled" else f"query: {self.query} token"

    def _prefix_attention_text(self, layer: int) -> str:
        """Mean attention to the prefix tokens, as text."""
        assert self.prefix_attention is not None
        shares = self.prefix_attention[layer].mean(0)
        parts = [f"{100 * share:.0f} % to {name}" for name, share in zip(self.prefix_names, shares, strict=True)]
        return f"; on average {', '.join(parts)}" if parts else ""


def explain(
    net: Net,
    info: ModelInfo,
    image: ImageLike,
    *,
    name: str | None = None,
    target: str | int | None = None,
    methods: Sequence[str] | None = None,
    query: Query = "pooled",
    faithfulness: bool = False,
    top: int = 5,
) -> Explanation:
    """Explain the prediction of a network for one image; `Model.explain` calls this.

    `target` is the class to explain, by name or index; None: the top prediction. `methods` are some of METHODS;
    None: all that the model supports. `query` is the token whose attention is shown. `faithfulness` adds deletion and
    insertion curves, which take some hundred forward passes; all else comes from one forward pass, except that
    "gradient" adds a backward pass and "occlusion" a forward pass for each masked image.
    """
    has_classes = bool(info.config.num_classes) and info.task == "classify"
    methods = _resolve_methods(net, has_classes, methods)
    if target is not None and not has_classes:
        raise ModelError(f"got target={target!r}, but this model has no classes.")
    index = None if target is None else class_index(info, target)
    if faithfulness and not has_classes:
        raise ModelError("faithfulness needs a class probability, and this model has no classes.")
    preprocess = Preprocess(info.preprocess)
    pixels = preprocess.pixels(image)
    images = network_input(net, preprocess, pixels[None])
    attention: QueryAttention | SwinQueryAttention | None = None
    if isinstance(net, Swin):
        attention = SwinQueryAttention(net, images, query)
    elif query != "pooled" or not isinstance(net, BiT):
        attention = QueryAttention(net, images, query)
    targets = None if index is None else torch.tensor([index], device=images.device)
    maps: dict[str, Tensor] = {}
    result: ForwardResult | None = None
    layers = None if attention is not None else ()
    for step in explain_steps(net, images, methods, targets=targets, layers=layers, multi_label=info.multi_label):
        if isinstance(step, LayerAttention):
            assert attention is not None
            attention.add(step.weights)  # type: ignore[arg-type]
        elif isinstance(step, ForwardResult):
            result = step
        else:
            maps[step.method] = step.values[0]
        del step
    assert result is not None
    ranked = top_predictions(result.logits, info, info.config.num_classes)[0] if has_classes else []
    chosen = next((p for p in ranked if p.index == int(result.targets[0])), None)
    curves: dict[str, Faithfulness] = {}
    if faithfulness:
        assert chosen is not None
        curves = measure_faithfulness(net, images[0], maps, chosen.index, multi_label=info.multi_label)
    views, prefix = (None, None) if attention is None else attention.maps(result.pool_attention)
    from vitrail.explain.overlays import as_rgb

    height, width = covered_pixels(net, images).shape[2:]
    return Explanation(
        image=name or (Path(image).name if isinstance(image, str | Path) else "an image"),
        model=info.title,
        pixels=as_rgb(pixels[:height, :width]),
        predictions=ranked[:top],
        target=chosen,
        maps={method: _to_numpy(values) for method, values in maps.items()},
        attention=None if views is None else _to_numpy(views[:, 0]),
        prefix_attention=None if prefix is None else _to_numpy(prefix[:, 0]),
        prefix_names=net.config.prefix_token_names if isinstance(net, ViT) else (),
        query=query,
        faithfulness=curves,
    )


def _resolve_methods(net: Net, has_classes: bool, methods: Sequence[str] | None) -> tuple[str, ...]:
    """The requested methods, or all that the model supports."""
    supported = supported_methods(net, has_classes)
    if methods is None:
        if not supported:
            raise ModelError("this model has neither attention nor classes, so no method applies.")
        return supported
    if not methods:
        raise ConfigError(f"no method was given; expected one or more of {', '.join(METHODS)}.")
    for method in methods:
        if method not in METHODS:
            raise ConfigError(f"unknown method {method!r}{did_you_mean(method, METHODS)}")
    if isinstance(net, BiT) and any(method in NEEDS_ATTENTION for method in methods):
        require_attention(net)
    if not has_classes and (unsupported := [m for m in methods if m in NEEDS_CLASSES]):
        raise ModelError(f"{unsupported[0]} explains a class score, and this model has no classes; try rollout.")
    return tuple(dict.fromkeys(methods))


def _to_numpy(values: Tensor) -> Floats:
    return values.float().cpu().numpy()


def _layer_index(layer: int, depth: int) -> int:
    """1-based layer number, or negative from the end -> 0-based index."""
    if not 1 <= abs(layer) <= depth:
        raise ModelError(f"there is no layer {layer}: this network has layers 1 to {depth} (or -1, the last).")
    return layer - 1 if layer > 0 else depth + layer

"""`vit.explain(image)`: what a model makes of one image, seen from inside."""

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
from vitrail.explain import attention_views, class_view, faithfulness, gradient_view, occlusion
from vitrail.explain.attention import Query, Walk, attentive, special_names
from vitrail.explain.faithfulness import Faithfulness
from vitrail.explain.hiding import seen
from vitrail.models import BiT, Net

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitrail.api.model import Model, Prediction

# h rows and w columns of patches, L layers, H heads, P special tokens

Floats = npt.NDArray[np.floating[Any]]


@torch.no_grad()
def last_view(net: Net, images: Tensor) -> Tensor:
    """B h w: what is attended to at the end: by the attention pool, else by what the head reads in the last layer."""
    net = attentive(net)
    if net.pool is not None:
        walk = Walk(net, images, layers=()).run()
        assert walk.pool_attention is not None
        return walk.pool_attention.mean(1)[:, -math.prod(walk.grid) :].unflatten(1, walk.grid)
    return attention_views(net, images, layers=(len(net.blocks) - 1,))[0][0].mean(1)


METHODS: dict[str, Callable[[Net, Tensor, Tensor, bool], Tensor]] = {
    "rollout": lambda net, images, targets, several: class_view(net, images),
    "gradient": lambda net, images, targets, several: gradient_view(net, images, targets),
    "attention": lambda net, images, targets, several: last_view(net, images),
    "occlusion": lambda net, images, targets, several: occlusion(net, images, targets, stride=2, multi_label=several),
}
"""Kinds of explanation: a network, images, class numbers, and whether an image may have several of
them -> B h w, large where it matters."""
NEEDS_CLASSES = ("gradient", "occlusion")


@dataclass(frozen=True, kw_only=True)
class Look:
    """One image and what happens to it; `figure` draws it, `save` writes all of it."""

    image: str
    """Its name."""
    model: str
    """The model's name."""
    pixels: npt.NDArray[np.uint8]
    """H W 3, as the network sees it."""
    predictions: list[Prediction]
    """The likeliest classes; empty for a model without any."""
    target: Prediction | None
    """The class that is explained."""
    maps: dict[str, Floats]
    """Kind of explanation -> h w, large where it matters."""
    attention: Floats | None = None
    """L H h w: what the query attends to in each layer and head; None without attention."""
    special: Floats | None = None
    """L H P: what of it goes to tokens that are no patches; both together sum to 1."""
    special_names: tuple[str, ...] = ()
    query: Query = "read"
    """Who asks: what the head reads, a token, or a patch's row and column."""
    faithful: dict[str, Faithfulness] = field(default_factory=dict)
    """Kind of explanation, and "random" -> how the class's probability follows it."""

    @property
    def rollout(self) -> Floats:
        """h w: how much of each patch is in what the head reads."""
        if "rollout" not in self.maps:
            raise ModelError(f"rollout was not asked for; this look has {', '.join(self.maps) or 'no maps'}.")
        return self.maps["rollout"]

    def figure(self, kind: str = "overview", layer: int = -1) -> Figure:
        """One of `figures()`: "overview", "heads" (of one layer, from 1), "layers" or "faithfulness"."""
        from vitrail.explain import figures

        if kind not in (known := self.figures()):
            raise ConfigError(f"no figure of this look is called {kind!r}{did_you_mean(kind, known)}")
        if kind == "overview":
            scores = [(p.label, p.score) for p in self.predictions]
            what = f"What {self.model} sees in {self.image}" + (f": {self.target.label}" if self.target else "")
            return figures.overview(self.pixels, self.maps, scores, what, self._under())
        if kind == "faithfulness":
            assert self.target is not None
            what = f"Which explanation of “{self.target.label}” to trust: {self.image}"
            return figures.faithfulness_curves(self.faithful, what, f"{self.model}; a random order is what to beat")
        assert self.attention is not None
        if kind == "layers":
            what = f"Attention of every layer and head: {self.image}"
            return figures.layers(self.attention, what, f"{self.model}; {self._asked()}; each map has its own scale")
        number = _number(layer, len(self.attention))
        what = f"Layer {number + 1} of {len(self.attention)}: {self.image}"
        under = f"{self.model}; {self._asked()}{self._elsewhere(number)}"
        mark = self.query if isinstance(self.query, tuple) else None
        return figures.heads(self.pixels, self.attention[number], what, under, mark)

    def figures(self) -> tuple[str, ...]:
        """Names of the figures there are."""
        inside = ("heads", "layers") if self.attention is not None else ()
        return ("overview", *inside, *(("faithfulness",) if self.faithful else ()))

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Every number behind the figures, by name."""
        found: dict[str, npt.NDArray[Any]] = {"pixels": self.pixels, **self.maps}
        if self.attention is not None and self.special is not None:
            found |= {"attention_by_head": self.attention, "attention_to_special": self.special}
        for kind, both in self.faithful.items():
            found |= {f"deletion_{kind}": both.deletion.values, f"insertion_{kind}": both.insertion.values}
            found["shares"] = both.deletion.shares
        return found

    def save(
        self,
        folder: str | Path,
        formats: Sequence[str] = ("png",),
        layers: Sequence[int] = (-1,),
        stem: str | None = None,
    ) -> list[Path]:
        """All figures (and "npz", the arrays) into a folder; files' names begin with `stem`, else the image's."""
        from vitrail.explain.canvas import check_formats, save, save_arrays

        check_formats(formats)
        depth = len(self.attention) if self.attention is not None else 0
        names = {kind: -1 for kind in self.figures() if kind != "heads"}
        if depth:
            names |= {f"heads-{_number(layer, depth) + 1}": layer for layer in layers}
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

    def _under(self) -> str:
        height, width = next(iter(self.maps.values())).shape
        return f"{height} × {width} patches; bright is much, each image on its own scale"

    def _asked(self) -> str:
        if isinstance(self.query, tuple):
            return f"asked by the patch in row {self.query[0]}, column {self.query[1]}"
        return "asked by what the head reads" if self.query == "read" else f"asked by the {self.query} token"

    def _elsewhere(self, layer: int) -> str:
        """What the special tokens get, in words."""
        assert self.special is not None
        shares = self.special[layer].mean(0)
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
    trust: bool = False,
    top: int = 5,
) -> Look:
    """Look at one image through a model.

    `target` is the class to explain, by name or number; None: the likeliest one. `methods` are keys
    of METHODS; None: all that this model can have. `query` is whose attention is shown. `trust`
    adds deletion and insertion curves, which take some hundred forward passes.
    """
    chosen = _chosen(model, methods)
    pixels = model.preprocess.pixels(image)
    batch = torch.from_numpy(np.ascontiguousarray(pixels)).to(model.device).permute(2, 0, 1)[None]
    images = model.preprocess.normalize(batch).to(model.dtype)
    if query != "read":
        attentive(model.net)
    attentive_net = None if isinstance(model.net, BiT) else model.net
    views = special = None
    if attentive_net is not None:
        found, beside = attention_views(attentive_net, images, query)
        views, special = _array(found[:, 0]), _array(beside[:, 0])
    predictions, meant = _classes(model, images, target, top)
    targets = torch.tensor([meant.index if meant else 0], device=model.device)
    several = model.info.multi_label
    maps = {method: METHODS[method](model.net, images, targets, several)[0] for method in chosen}
    trusted: dict[str, Faithfulness] = {}
    if trust:
        if meant is None:
            raise ModelError("deletion and insertion follow a class's probability, and this model has no classes.")
        trusted = faithfulness(model.net, images[0], maps, meant.index, multi_label=several)
    from vitrail.explain.panes import shown

    seen_size = seen(model.net, images).shape[2:]
    return Look(
        image=name or _name(image),
        model=model.info.title,
        pixels=shown(pixels[: seen_size[0], : seen_size[1]]),
        predictions=predictions,
        target=meant,
        maps={method: _array(found) for method, found in maps.items()},
        attention=views,
        special=special,
        special_names=special_names(attentive_net.config) if attentive_net is not None else (),
        query=query,
        faithful=trusted,
    )


def class_number(model: Model, target: str | int) -> int:
    """A class by its number or its name, whatever its capitals."""
    if isinstance(target, int) or target.isdecimal():
        model.label(int(target))  # raises where there is none
        return int(target)
    if model.labels is None:
        raise ModelError(
            f"the checkpoint does not name its classes, so {target!r} cannot be found: give its number, or names with "
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
    raise ModelError(f"no class is called {target!r}{did_you_mean(target, labels)}")


def _chosen(model: Model, methods: Sequence[str] | None) -> tuple[str, ...]:
    """The kinds of explanation: those asked for, else all that the model can have."""
    if methods is not None and not methods:
        raise ConfigError(f"no kind of explanation was given; wanted some of {', '.join(METHODS)}.")
    for method in methods or ():
        if method not in METHODS:
            raise ConfigError(f"no explanation is called {method!r}{did_you_mean(method, METHODS)}")
    classes = bool(model.config.num_classes) and model.info.task == "classify"
    if methods is None:
        able = [m for m in METHODS if m == "occlusion" or not isinstance(model.net, BiT)]
        methods = [m for m in able if classes or m not in NEEDS_CLASSES]
        if not methods:
            raise ModelError("this model has neither attention nor classes: there is nothing to explain it by.")
    if isinstance(model.net, BiT) and any(m != "occlusion" for m in methods):
        attentive(model.net)
    if not classes and (wanting := [m for m in methods if m in NEEDS_CLASSES]):
        raise ModelError(f"{wanting[0]} explains a class's score, and this model has no classes; try rollout.")
    return tuple(dict.fromkeys(methods))


def _classes(
    model: Model, images: Tensor, target: str | int | None, top: int
) -> tuple[list[Prediction], Prediction | None]:
    """The likeliest classes, and the one that is meant."""
    if model.info.task != "classify" or not model.config.num_classes:
        if target is not None:
            raise ModelError(f"there is no class {target!r} to explain: this model has no classes.")
        return [], None
    from vitrail.models.base import eval_mode

    with torch.no_grad(), eval_mode(model.net):
        logits = model.net(images).float().cpu()
    ranked = model.top_predictions(logits, model.config.num_classes)[0]
    number = ranked[0].index if target is None else class_number(model, target)
    return ranked[:top], next(p for p in ranked if p.index == number)


def _array(found: Tensor) -> Floats:
    return found.float().cpu().numpy()


def _name(image: ImageLike) -> str:
    return Path(image).name if isinstance(image, str | Path) else "an image"


def _number(layer: int, depth: int) -> int:
    """From 1, or from -1 backwards -> from 0."""
    if not 1 <= abs(layer) <= depth:
        raise ModelError(f"there is no layer {layer}: this network has layers 1 to {depth} (or -1, the last).")
    return layer - 1 if layer > 0 else depth + layer

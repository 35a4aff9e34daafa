"""The paper's figures of any model: filters, positions, attention distances, rollout, features in color."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitrail.config import DataConfig, Pair, ViTConfig, pair
from vitrail.data.decode import ImageLike
from vitrail.errors import ConfigError, DataError, ImageError, ModelError, VitrailError, did_you_mean
from vitrail.explain import (
    attention_distance,
    class_view,
    feature_colors,
    filters,
    patch_features,
    position_similarity,
    uniform_distance,
)
from vitrail.explain.attention import attentive, layer_number
from vitrail.explain.hiding import seen
from vitrail.explain.positions import MEANING
from vitrail.runtime import log_on_main_process, warn_once
from vitrail.train.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitrail.api.model import Model

# B images at a time, L layers, H heads, h rows and w columns of patches

COUNT = 128
"""Images that the paper's figures are made from."""
COLORED = 12
"""Images that are drawn in the colors of their features."""
BATCH = 8


@dataclass(frozen=True)
class Drawn:
    """A figure and the numbers behind it."""

    figure: Figure
    arrays: dict[str, npt.NDArray[Any]]


class Portrait:
    """A model and the images it is looked at with; each figure is made when it is asked for."""

    def __init__(
        self,
        model: Model,
        images: Sequence[ImageLike] | None = None,
        *,
        layer: int | None = None,
        foreground: bool = False,
        named: str = "",
        advance: Callable[[int], None] = lambda n: None,
    ) -> None:
        """`layer`, from 1 or from -1, is whose positions and features are drawn; `advance` hears of images done."""
        self.model, self.layer, self.foreground = model, layer, foreground
        self.images = list(bundled() if images is None else images)
        self.named = named or ("two photographs of scikit-learn's" if images is None else "the images given")
        self.advance = advance
        self.name = model.info.title
        if not self.images:
            raise DataError("there is no image to look at; wanted one or more.")

    @cached_property
    def pixels(self) -> list[npt.NDArray[Any]]:
        """H W C each, as the network sees them; those that cannot be read are left out, aloud."""
        found, bad = [], []
        for image in self.images:
            try:
                found.append(self.model.preprocess.pixels(image))
            except ImageError as error:
                bad.append(str(error))
        if bad:
            warn_once([f"{len(bad)} of {len(self.images)} images cannot be read and are left out: {bad[0]}"])
        if not found:
            raise DataError(f"none of the {len(self.images)} images can be read: {bad[0]}")
        return found

    def batches(self, size: int = BATCH) -> Iterator[Tensor]:
        """B C H W, ready for the network."""
        for start in range(0, len(self.pixels), size):
            group = np.stack(self.pixels[start : start + size])
            batch = torch.from_numpy(group).to(self.model.device).permute(0, 3, 1, 2)
            yield self.model.preprocess.normalize(batch).to(self.model.dtype)
            self.advance(len(group))

    @property
    def shown(self) -> list[npt.NDArray[np.uint8]]:
        from vitrail.explain.panes import shown

        height, width = _covered(self.model)
        return [shown(p[:height, :width]) for p in self.pixels]

    def draw(self, what: str) -> Drawn:
        """One of FIGURES; ModelError, with the reason, where this model has nothing of the kind."""
        if what not in FIGURES:
            raise ConfigError(f"no figure is called {what!r}{did_you_mean(what, FIGURES)}")
        return FIGURES[what](self)

    def save(
        self, folder: str | Path, what: Sequence[str] | None = None, formats: Sequence[str] = ("png",)
    ) -> list[Path]:
        """Figures as files; where none is named, those that this model cannot have are left out, aloud."""
        from vitrail.explain.canvas import check_formats, save, save_arrays

        check_formats(formats)
        for name in what or ():
            if name not in FIGURES:
                raise ConfigError(f"no figure is called {name!r}{did_you_mean(name, FIGURES)}")
        written, reasons = [], []
        for name in what or FIGURES:
            try:
                drawn = self.draw(name)
            except ModelError as error:
                if what is not None:
                    raise ModelError(f"{name}: {error}") from None
                reasons.append(f"no figure of its {name}: {error}")
                continue
            for ending in formats:
                path = Path(folder) / f"{name}.{ending}"
                written.append(save_arrays(drawn.arrays, path) if ending == "npz" else save(drawn.figure, path))
        warn_once(reasons)
        if not written:
            raise ModelError("none of the figures can be drawn of this model.")
        return written


def bundled() -> list[ImageLike]:
    """Two photographs that come with scikit-learn, openly licensed."""
    from sklearn.datasets import load_sample_images  # takes a second to import

    return [*load_sample_images().images]


def images_of(data: str, count: int = COUNT, root: str | None = None) -> list[ImageLike]:
    """So many images from all over a data set's measured part, in its order."""
    from vitrail.data.sources import open_source_splits

    return _spread(
        open_source_splits(DataConfig(source=data, root=root), require_labels=False).evaluation_source, data, count
    )


def images_of_run(model: str | None, count: int = COUNT) -> list[ImageLike] | None:
    """The same of what a run was measured on; None where the model is no run, or its data cannot be found any more."""
    from vitrail.data.sources import open_data

    folder = RunFolder(Path(model or "").expanduser())
    if model is None or not folder.metrics.exists():
        return None
    try:
        config = folder.read_config()
        with log_on_main_process():
            return _spread(open_data(config.data, require_labels=False).validation, config.data.source, count)
    except VitrailError as error:
        warn_once([f"the images of the run cannot be had ({error})"])
        return None


def _spread(source: Any, name: str, count: int) -> list[ImageLike]:
    if not hasattr(source, "__len__") or not len(source):
        raise DataError(f"{name} has no images to look at." if hasattr(source, "__len__") else f"{name} is a stream.")
    places = np.unique(np.linspace(0, len(source) - 1, min(count, len(source))).astype(int))
    return [source[int(i)].image for i in places]


def _filters(portrait: Portrait) -> Drawn:
    from vitrail.explain import figures

    patterns, shares = filters(portrait.model.net)
    under = f"{portrait.name}; share of all that the filters do; together {100 * shares.sum():.0f} %"
    what = f"The {len(patterns)} main patterns of the patch projection"
    return Drawn(figures.filters(patterns, shares, what, under), {"patterns": patterns, "shares": shares})


def _positions(portrait: Portrait) -> Drawn:
    from vitrail.explain import figures

    net, layer = portrait.model.net, 0
    own = getattr(net, "positions", ())
    if portrait.layer is not None:
        number = layer_number(attentive(net), portrait.layer)
        layer = number if len(own) > 1 else 0  # else all layers have the same
    alike = position_similarity(net, layer)
    assert isinstance(net.config, ViTConfig)
    where = f", layer {layer + 1} of {len(own)}" if len(own) > 1 else ""
    under = f"{portrait.name}{where}; {MEANING[net.config.position]}"
    return Drawn(figures.positions(alike, "How alike the positions of patches are", under), {"similarity": alike})


def _distances(portrait: Portrait) -> Drawn:
    from vitrail.explain import figures

    model = portrait.model
    found = attention_distance(model.net, portrait.batches()).numpy()
    size = pair(model.config.image_size)
    uniform = uniform_distance(attentive(model.net).config.grid_of(size), _covered(model))
    under = f"{portrait.name}, {_px(size)}; mean over {portrait.named} ({len(portrait.pixels)})"
    figure = figures.distances(found, uniform, "How far each head looks", under)
    return Drawn(figure, {"distances": found, "uniform": np.asarray(uniform)})


def _rollout(portrait: Portrait) -> Drawn:
    from vitrail.explain import figures

    maps = np.concatenate([class_view(portrait.model.net, b).float().cpu().numpy() for b in portrait.batches()])
    columns = 8 if len(maps) > 15 else min(5, len(maps))
    what = "What reaches the answer: attention rollout, all layers"
    under = f"{portrait.name}; {portrait.named}, each beside itself"
    return Drawn(figures.sheet(portrait.shown, [*maps], what, under, columns), {"rollout": maps})


def _colors(portrait: Portrait) -> Drawn:
    from vitrail.explain import figures

    model, parts = portrait.model, []
    for batch in portrait.batches():
        parts.append(patch_features(model.net, batch, portrait.layer).float().cpu())
        if sum(map(len, parts)) >= COLORED:
            break
    features = torch.cat(parts)[:COLORED]
    found = feature_colors(features, portrait.foreground).numpy()
    layer = "last layer, normalized" if portrait.layer is None else f"layer {portrait.layer}"
    what = "Patches in the colors of their features"
    under = f"{portrait.name}, {layer}; three principal components of {portrait.named} as red, green and blue"
    return Drawn(figures.colors(portrait.shown[: len(found)], found, what, under), {"colors": found})


FIGURES: dict[str, Callable[[Portrait], Drawn]] = {
    "filters": _filters,
    "positions": _positions,
    "distances": _distances,
    "rollout": _rollout,
    "colors": _colors,
}
"""Name -> how it is drawn."""
NEED_IMAGES = ("distances", "rollout", "colors")


def _covered(model: Model) -> tuple[int, int]:
    """Height and width of what patches lie on: the last rows and columns may be left out."""
    size = pair(model.config.image_size)
    rows, columns = seen(model.net, torch.empty(1, 1, *size)).shape[2:]
    return rows, columns


def _px(size: Pair) -> str:
    height, width = pair(size)
    return f"{height} px" if height == width else f"{height} × {width} px"

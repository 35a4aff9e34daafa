"""The paper's figures of a model: filters, position similarities, attention distances, rollouts, feature colors."""

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
    feature_colors,
    filter_components,
    patch_features,
    position_similarity,
    rollout_map,
    uniform_distance,
)
from vitrail.explain.attention import layer_index, require_attention
from vitrail.explain.masking import covered_pixels
from vitrail.explain.positions import SIMILARITY_MEANING
from vitrail.runs.run_folder import RunFolder
from vitrail.runtime import log_on_main_process, warn_once

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitrail.model import Model

# B images at a time, L layers, H heads, h rows and w columns of patches

NUM_IMAGES = 128
"""Default number of images, as in the paper."""
NUM_COLORED = 12
"""Number of images with feature colors."""
BATCH_SIZE = 8


@dataclass(frozen=True)
class DrawnFigure:
    """A figure and its data."""

    figure: Figure
    arrays: dict[str, npt.NDArray[Any]]


class ModelFigures:
    """Draws figures of a model, computed on some images."""

    def __init__(
        self,
        model: Model,
        images: Sequence[ImageLike] | None = None,
        *,
        layer: int | None = None,
        foreground: bool = False,
        images_description: str = "",
        advance: Callable[[int], None] = lambda n: None,
    ) -> None:
        """`layer` (1-based, or negative from the end): the layer whose positions and features are drawn.

        `images_description` is text for subtitles. `advance(n)` is called after each n images.
        """
        self.model, self.layer, self.foreground = model, layer, foreground
        self.images = list(sample_images() if images is None else images)
        default = "two sample photographs of scikit-learn" if images is None else "the given images"
        self.images_description = images_description or default
        self.advance = advance
        self.name = model.info.title
        if not self.images:
            raise DataError("got no images; expected one or more.")

    @cached_property
    def pixels(self) -> list[npt.NDArray[Any]]:
        """H W C each, after resizing and cropping. Unreadable images are skipped with a warning."""
        found, bad = [], []
        for image in self.images:
            try:
                found.append(self.model.preprocess.pixels(image))
            except ImageError as error:
                bad.append(str(error))
        if bad:
            warn_once([f"{len(bad)} of {len(self.images)} images cannot be read and are skipped: {bad[0]}"])
        if not found:
            raise DataError(f"none of the {len(self.images)} images can be read: {bad[0]}")
        return found

    def batches(self, size: int = BATCH_SIZE) -> Iterator[Tensor]:
        """B C H W, normalized."""
        for start in range(0, len(self.pixels), size):
            group = np.stack(self.pixels[start : start + size])
            batch = torch.from_numpy(group).to(self.model.device).permute(0, 3, 1, 2)
            yield self.model.preprocess.normalize(batch).to(self.model.dtype)
            self.advance(len(group))

    @property
    def shown(self) -> list[npt.NDArray[np.uint8]]:
        from vitrail.explain.overlays import as_rgb

        height, width = _covered_size(self.model)
        return [as_rgb(p[:height, :width]) for p in self.pixels]

    def draw(self, what: str) -> DrawnFigure:
        """Draw one of FIGURES; ModelError with the reason if it does not apply to this model."""
        if what not in FIGURES:
            raise ConfigError(f"unknown figure {what!r}{did_you_mean(what, FIGURES)}")
        return FIGURES[what](self)

    def save(
        self, folder: str | Path, what: Sequence[str] | None = None, formats: Sequence[str] = ("png",)
    ) -> list[Path]:
        """Write figures. Without `what`, all that apply to this model; a note lists the others."""
        from vitrail.explain.canvas import check_formats, save, save_arrays

        check_formats(formats)
        for name in what or ():
            if name not in FIGURES:
                raise ConfigError(f"unknown figure {name!r}{did_you_mean(name, FIGURES)}")
        written, reasons = [], []
        for name in what or FIGURES:
            try:
                drawn = self.draw(name)
            except ModelError as error:
                if what is not None:
                    raise ModelError(f"{name}: {error}") from None
                reasons.append(f"skipped the figure {name}: {error}")
                continue
            for ending in formats:
                path = Path(folder) / f"{name}.{ending}"
                written.append(save_arrays(drawn.arrays, path) if ending == "npz" else save(drawn.figure, path))
        warn_once(reasons)
        if not written:
            raise ModelError("none of the figures applies to this model.")
        return written


def sample_images() -> list[ImageLike]:
    """The two openly licensed photographs that come with scikit-learn."""
    from sklearn.datasets import load_sample_images  # takes a second to import

    return [*load_sample_images().images]


def dataset_images(data: str, count: int = NUM_IMAGES, root: str | None = None) -> list[ImageLike]:
    """`count` evenly spaced images of the evaluation split of a data set, in order."""
    from vitrail.data.sources import open_source_splits

    return _evenly_spaced(
        open_source_splits(DataConfig(source=data, root=root), require_labels=False).evaluation_source, data, count
    )


def run_images(model: str | None, count: int = NUM_IMAGES) -> list[ImageLike] | None:
    """The same for the data a run was evaluated on; None if the model is not a run or its data is gone."""
    from vitrail.data.sources import open_data

    folder = RunFolder(Path(model or "").expanduser())
    if model is None or not folder.metrics.exists():
        return None
    try:
        config = folder.read_config()
        with log_on_main_process():
            return _evenly_spaced(open_data(config.data, require_labels=False).validation, config.data.source, count)
    except VitrailError as error:
        warn_once([f"the run's images cannot be read ({error})"])
        return None


def _evenly_spaced(source: Any, name: str, count: int) -> list[ImageLike]:
    if not hasattr(source, "__len__") or not len(source):
        raise DataError(f"{name} has no images." if hasattr(source, "__len__") else f"{name} is a stream.")
    indices = np.unique(np.linspace(0, len(source) - 1, min(count, len(source))).astype(int))
    return [source[int(i)].image for i in indices]


def _filters(inputs: ModelFigures) -> DrawnFigure:
    from vitrail.explain import figures

    patterns, shares = filter_components(inputs.model.net)
    subtitle = f"{inputs.name}; fraction of the variance; {100 * shares.sum():.0f} % in total"
    title = f"The first {len(patterns)} principal components of the patch embedding filters"
    return DrawnFigure(figures.filters(patterns, shares, title, subtitle), {"patterns": patterns, "shares": shares})


def _positions(inputs: ModelFigures) -> DrawnFigure:
    from vitrail.explain import figures

    net, layer = inputs.model.net, 0
    positions = getattr(net, "positions", ())
    if inputs.layer is not None:
        number = layer_index(require_attention(net), inputs.layer)
        layer = number if len(positions) > 1 else 0  # else all layers have the same
    similarity = position_similarity(net, layer)
    assert isinstance(net.config, ViTConfig)
    where = f", layer {layer + 1} of {len(positions)}" if len(positions) > 1 else ""
    subtitle = f"{inputs.name}{where}; {SIMILARITY_MEANING[net.config.position]}"
    figure = figures.positions(similarity, "Similarity of position embeddings", subtitle)
    return DrawnFigure(figure, {"similarity": similarity})


def _distances(inputs: ModelFigures) -> DrawnFigure:
    from vitrail.explain import figures

    model = inputs.model
    found = attention_distance(model.net, inputs.batches()).numpy()
    size = pair(model.config.image_size)
    uniform = uniform_distance(require_attention(model.net).config.grid_of(size), _covered_size(model))
    subtitle = f"{inputs.name}, {_format_size(size)}; mean over {inputs.images_description} ({len(inputs.pixels)})"
    figure = figures.distances(found, uniform, "Attention distance by layer and head", subtitle)
    return DrawnFigure(figure, {"distances": found, "uniform": np.asarray(uniform)})


def _rollout(inputs: ModelFigures) -> DrawnFigure:
    from vitrail.explain import figures

    maps = np.concatenate([rollout_map(inputs.model.net, b).float().cpu().numpy() for b in inputs.batches()])
    columns = 8 if len(maps) > 15 else min(5, len(maps))
    title = "Attention rollout"
    subtitle = f"{inputs.name}; {inputs.images_description}, each beside its masked version"
    return DrawnFigure(figures.rollout_grid(inputs.shown, [*maps], title, subtitle, columns), {"rollout": maps})


def _colors(inputs: ModelFigures) -> DrawnFigure:
    from vitrail.explain import figures

    model, parts = inputs.model, []
    for batch in inputs.batches():
        parts.append(patch_features(model.net, batch, inputs.layer).float().cpu())
        if sum(map(len, parts)) >= NUM_COLORED:
            break
    features = torch.cat(parts)[:NUM_COLORED]
    found = feature_colors(features, inputs.foreground).numpy()
    layer = "last layer, normalized" if inputs.layer is None else f"layer {inputs.layer}"
    title = "Patch features as colors"
    subtitle = (
        f"{inputs.name}, {layer}; "
        f"first three principal components over {inputs.images_description} as red, green and blue"
    )
    return DrawnFigure(figures.colors(inputs.shown[: len(found)], found, title, subtitle), {"colors": found})


FIGURES: dict[str, Callable[[ModelFigures], DrawnFigure]] = {
    "filters": _filters,
    "positions": _positions,
    "distances": _distances,
    "rollout": _rollout,
    "colors": _colors,
}
"""Figure name -> function that draws it."""
NEED_IMAGES = ("distances", "rollout", "colors")


def _covered_size(model: Model) -> tuple[int, int]:
    """Height and width of the area covered by patches."""
    size = pair(model.config.image_size)
    rows, columns = covered_pixels(model.net, torch.empty(1, 1, *size)).shape[2:]
    return rows, columns


def _format_size(size: Pair) -> str:
    height, width = pair(size)
    return f"{height} px" if height == width else f"{height} × {width} px"

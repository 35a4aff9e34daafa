"""Arrays of a model at each snapshot of a run, with a consistent order and sign of the filters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vitrail.errors import ConfigError, ModelError, did_you_mean
from vitrail.explain.distance import attention_distance, uniform_distance
from vitrail.explain.filters import filter_components
from vitrail.explain.positions import position_similarity
from vitrail.explain.rollout import rollout_map
from vitrail.models import Net, Swin, ViT

# T snapshots; h rows and w columns of patches; n patterns of p x q pixels and C channels; L layers of H heads

Floats = npt.NDArray[np.floating[Any]]

NO_IMAGE = "no image was given."


@dataclass(frozen=True)
class Snapshot:
    """A snapshot of a run."""

    step: int
    epoch: float | None = None
    score: float | None = None
    """Accuracy, if it was evaluated at this step."""


@dataclass(frozen=True)
class Frames:
    """Arrays by name, with the T snapshots as the first dimension.

    positions T h w h w; filters T n p q C with shares T n; distances T L H with uniform T, the distance of uniform
    attention; rollout T h w.
    """

    arrays: Mapping[str, Floats]
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Subject -> reason why it does not apply to this model."""

    @property
    def subjects(self) -> list[str]:
        return [name for name in SUBJECTS if name in self.arrays]


def compute_frames(
    nets: Iterable[Net], what: Sequence[str] = (), *, images: Tensor | None = None, image: Tensor | None = None
) -> Frames:
    """Compute the arrays of each network, the snapshots of one run in order.

    `what`: some of `SUBJECTS`; default all. Attention distances are averaged over `images`, the rollout is that of
    `image` (both B C H W); without them, these subjects are skipped.
    """
    for name in what:
        if name not in SUBJECTS:
            raise ConfigError(f"unknown timeline {name!r}{did_you_mean(name, SUBJECTS)}")
    collected: dict[str, list[Floats]] = {}
    skipped: dict[str, str] = {}
    for net in nets:
        for subject in what or SUBJECTS:
            if subject in skipped:
                continue
            try:
                found = SUBJECTS[subject](net, image if subject == "rollout" else images)
            except ModelError as error:
                skipped[subject] = str(error)
                continue
            for name, values in found.items():
                collected.setdefault(name, []).append(values)
    arrays = {name: np.stack(values) for name, values in collected.items()}
    if "filters" in arrays:
        arrays["filters"], arrays["shares"] = align_filters(arrays["filters"], arrays["shares"])
    return Frames(arrays, skipped)


def align_filters(patterns: Floats, shares: Floats) -> tuple[Floats, Floats]:
    """T n p q C and T n: reorder and sign the components of each snapshot to match those of the next one.

    The last snapshot keeps its order. Pairs maximize the sum of absolute cosine similarities.
    """
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

    patterns, shares = patterns.copy(), shares.copy()
    flat = patterns.reshape(*patterns.shape[:2], -1)  # T n d, each of length 1
    for frame in range(len(patterns) - 2, -1, -1):
        cosines = flat[frame + 1] @ flat[frame].T  # n n
        _, order = linear_sum_assignment(-np.abs(cosines))
        signs = np.where(cosines[np.arange(len(order)), order] < 0, -1.0, 1.0)
        flat[frame], shares[frame] = flat[frame][order] * signs[:, None], shares[frame][order]
    return patterns, shares


def _positions(net: Net, _: Tensor | None) -> dict[str, Floats]:
    return {"positions": position_similarity(net)}


def _filters(net: Net, _: Tensor | None) -> dict[str, Floats]:
    patterns, shares = filter_components(net)
    return {"filters": patterns, "shares": shares}


def _distance(net: Net, images: Tensor | None) -> dict[str, Floats]:
    images = _require_images(images)
    if isinstance(net, Swin):
        raise ModelError("the attention of a Swin Transformer does not leave its windows: distances are not drawn.")
    found, size = attention_distance(net, images), (images.shape[2], images.shape[3])
    assert isinstance(net, ViT)  # or it was refused
    return {"distances": found.numpy(), "uniform": np.array(uniform_distance(net.config.grid_of(size), size))}


def _rollout(net: Net, image: Tensor | None) -> dict[str, Floats]:
    return {"rollout": rollout_map(net, _require_images(image))[0].double().numpy()}


def _require_images(images: Tensor | None) -> Tensor:
    if images is None:
        raise ModelError(NO_IMAGE)
    return images


SUBJECTS: dict[str, Callable[[Net, Tensor | None], dict[str, Floats]]] = {
    "positions": _positions,
    "filters": _filters,
    "distances": _distance,
    "rollout": _rollout,
}
"""Subject -> function that computes its arrays."""

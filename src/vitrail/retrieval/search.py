"""`vitrail.search`: the stored images that are most similar to some images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, overload

import torch

from vitrail.data.decode import ImageLike
from vitrail.data.preprocess import is_image_list
from vitrail.errors import ConfigError, VitrailError
from vitrail.model import Model
from vitrail.open_model import load
from vitrail.retrieval.feature_index import FeatureIndex, Match
from vitrail.retrieval.query_features import QueryEncoder

SELF_SIMILARITY = 0.999
"""An image is its own neighbor if the names agree and the similarity is at least this."""
QUERIES_AT_ONCE = 1024
"""Queries compared with the stored features in one pass."""


@overload
def search(  # type: ignore[overload-overlap]
    images: ImageLike, index: str | Path | FeatureIndex, *, model: str | Path | Model, top: int = 10,
    exclude_self: bool = False, batch_size: int = 32,
) -> list[Match]: ...  # fmt: skip
@overload
def search(
    images: Iterable[ImageLike], index: str | Path | FeatureIndex, *, model: str | Path | Model, top: int = 10,
    exclude_self: bool = False, batch_size: int = 32,
) -> list[list[Match]]: ...  # fmt: skip
def search(
    images: Any,
    index: str | Path | FeatureIndex,
    *,
    model: str | Path | Model,
    top: int = 10,
    exclude_self: bool = False,
    batch_size: int = 32,
) -> Any:
    """The `top` most similar images of an image, most similar first; for several images, a list of such lists.

    index         the features of `vitrail embed`, a file or a folder of parts, or an open `FeatureIndex`
    model         the model that made the features; any other is an error
    exclude_self  leave out the image itself, where it is among the features under its own name
    """
    opened = index if isinstance(index, FeatureIndex) else FeatureIndex.open(index)
    encoder = QueryEncoder.for_features(
        model if isinstance(model, Model) else load(model), opened.metadata, opened.store.path
    )
    found = []
    given = images if is_image_list(images) else [images]
    for answer in search_stream(given, opened, encoder, top=top, exclude_self=exclude_self, batch_size=batch_size):
        if isinstance(answer, VitrailError):
            raise answer
        found.append(answer)
    return found if is_image_list(images) else found[0]


def search_stream(
    images: Iterable[ImageLike],
    index: FeatureIndex,
    encoder: QueryEncoder,
    *,
    top: int = 10,
    exclude_self: bool = False,
    batch_size: int = 32,
) -> Iterator[list[Match] | VitrailError]:
    """Yield the matches of each image, or the error if it cannot be read. Images are searched many at a time."""
    if top < 1:
        raise ConfigError(f"top={top}: expected at least 1.")
    remaining = iter(images)
    while group := list(islice(remaining, QUERIES_AT_ONCE)):
        features = list(encoder.embed(group, batch_size))
        readable = [vector for vector in features if not isinstance(vector, VitrailError)]
        found = iter(index.search(torch.stack(readable), top + exclude_self) if readable else ())
        for image, vector in zip(group, features, strict=True):
            if isinstance(vector, VitrailError):
                yield vector
                continue
            matches = next(found)
            yield (without_self(matches, image) if exclude_self else matches)[:top]


def without_self(matches: Sequence[Match], image: ImageLike) -> list[Match]:
    """Matches without the one that is the image itself: its key ends the image's path, and it is as good as equal."""
    if not isinstance(image, str | Path):
        return list(matches)
    names = Path(image).expanduser().absolute().parts
    for i, match in enumerate(matches):
        key = PurePath(match.key).parts
        if match.similarity >= SELF_SIMILARITY and key == names[len(names) - len(key) :]:
            return [*matches[:i], *matches[i + 1 :]]
    return list(matches)

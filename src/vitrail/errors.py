"""Everything vitrail raises on purpose.

    VitrailError
    ├── ConfigError        a setting that cannot be: unknown name, wrong value, sizes that do not fit
    ├── ModelError         a network asked for something it cannot do
    ├── ImageError         bytes that are not an image, or an image that cannot be used
    ├── DataError          images and labels that cannot be learned from or measured on
    ├── TrainError         a run that cannot start, go on or be resumed
    ├── CheckpointError    a file of weights that cannot be read or written
    │   ├── FormatError    tensors of no known layout, leftovers, missing ones, wrong shapes
    │   └── ConversionError  the target format has no place for part of this model
    └── NotFoundError           no such file, model, label list or hub repository

Each message is one sentence or two that say what was got, what was wanted and what to try. The
command line prints it alone; `--debug` adds the traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class VitrailError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(VitrailError, ValueError):
    """A setting that cannot be."""


class ModelError(VitrailError, ValueError):
    """A network asked for something it cannot do."""


class ImageError(VitrailError, ValueError):
    """Bytes that are not an image, or an image that cannot be used."""


class DataError(VitrailError, ValueError):
    """Images and labels that cannot be learned from or measured on."""


class TrainError(VitrailError):
    """A run that cannot start, go on or be resumed."""


class CheckpointError(VitrailError):
    """A file of weights that cannot be read or written."""


class FormatError(CheckpointError):
    """Tensors of no known layout, leftovers, missing ones, wrong shapes."""


class ConversionError(CheckpointError):
    """The target format has no place for part of this model."""


class NotFoundError(VitrailError, LookupError):
    """No such file, model, label list or hub repository."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or a short list of what there is when nothing is near."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    rest = f" and {len(known) - 8} more" if len(known) > 9 else ""
    return f"; there is {', '.join(known[:8] if rest else known)}{rest}."

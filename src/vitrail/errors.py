"""The exceptions that vitrail raises.

    VitrailError
    ├── ConfigError          an invalid setting: unknown name, wrong value, incompatible sizes
    ├── ModelError           a request that a model cannot fulfill
    ├── ImageError           data that is not an image, or an image that cannot be used
    ├── DataError            a dataset that cannot be trained or evaluated on
    ├── TrainError           a run that cannot start, continue or be resumed
    │   └── DivergenceError  the loss of a step is not finite
    ├── CheckpointError      a weights file that cannot be read or written
    │   ├── FormatError      unknown layout, unexpected or missing tensors, wrong shapes
    │   └── ConversionError  the target format cannot represent part of this model
    ├── NotFoundError        no such file, model, label list or hub repository
    └── PluginError          code from another package that cannot be imported or fails

Each message has one or two sentences: what was got, what was expected, what to try. The command line
prints only the message; `--debug` adds the traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class VitrailError(Exception):
    """Base class of vitrail's exceptions."""


class ConfigError(VitrailError, ValueError):
    """An invalid setting."""


class ModelError(VitrailError, ValueError):
    """A request that a model cannot fulfill."""


class ImageError(VitrailError, ValueError):
    """Data that is not an image, or an image that cannot be used."""


class DataError(VitrailError, ValueError):
    """A dataset that cannot be trained or evaluated on."""


class TrainError(VitrailError):
    """A run that cannot start, continue or be resumed."""


class DivergenceError(TrainError):
    """The loss of a training step is not finite."""


class CheckpointError(VitrailError):
    """A weights file that cannot be read or written."""


class FormatError(CheckpointError):
    """Unknown layout, unexpected or missing tensors, wrong shapes."""


class ConversionError(CheckpointError):
    """The target format cannot represent part of this model."""


class NotFoundError(VitrailError, LookupError):
    """No such file, model, label list or hub repository."""


class PluginError(VitrailError):
    """Code from another package that cannot be imported or fails."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """End of an error message: `; did you mean 'x'?`, or the known names when none is similar."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    more = f" and {len(known) - 8} more" if len(known) > 9 else ""
    return f"; available: {', '.join(known[:8] if more else known)}{more}."


def first_line(error: Exception) -> str:
    """The first line of an error message, without the final period."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")

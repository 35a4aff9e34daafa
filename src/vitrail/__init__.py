"""Vision Transformers: build any, load every public checkpoint exactly, look inside, run fast."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrail.api import (
        Evaluation,
        Model,
        Prediction,
        Run,
        create,
        create_model,
        evaluate,
        export,
        finetune,
        load,
        train,
    )
    from vitrail.config import BiTConfig, PreprocessConfig, StemConfig, TrainConfig, ViTConfig
    from vitrail.errors import VitrailError
    from vitrail.models import BiT, Output, ViT

    __version__: str

# Where each public name lives. They are imported when first used: `import vitrail` costs no torch.
_HOMES = {
    "Evaluation": "vitrail.api",
    "Model": "vitrail.api",
    "Prediction": "vitrail.api",
    "Run": "vitrail.api",
    "create": "vitrail.api",
    "evaluate": "vitrail.api",
    "export": "vitrail.api",
    "finetune": "vitrail.api",
    "create_model": "vitrail.api",
    "load": "vitrail.api",
    "train": "vitrail.api",
    "BiTConfig": "vitrail.config",
    "PreprocessConfig": "vitrail.config",
    "StemConfig": "vitrail.config",
    "TrainConfig": "vitrail.config",
    "ViTConfig": "vitrail.config",
    "VitrailError": "vitrail.errors",
    "BiT": "vitrail.models",
    "Output": "vitrail.models",
    "ViT": "vitrail.models",
}

__all__ = [
    "BiT",
    "BiTConfig",
    "Evaluation",
    "Model",
    "Output",
    "Prediction",
    "PreprocessConfig",
    "Run",
    "StemConfig",
    "TrainConfig",
    "ViT",
    "ViTConfig",
    "VitrailError",
    "__version__",
    "create",
    "create_model",
    "evaluate",
    "export",
    "finetune",
    "load",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in _HOMES:
        found = getattr(importlib.import_module(_HOMES[name]), name)
        package = sys.modules.get(f"vitrail.{name}")
        if package is not None:  # of the function's name: what is in it stays in reach, as vitrail.train.loop
            found.__dict__.update({key: value for key, value in vars(package).items() if not key.startswith("_")})
        return found
    raise AttributeError(f"module 'vitrail' has no attribute {name!r}")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # an import that is felt in `vitrail --help`

    try:
        return version("vitrail")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0+unknown"


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """This package: `vitrail.train`, `evaluate` and `export` are always the functions of these names."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _HOMES or not isinstance(value, ModuleType):  # importing vitrail/train would bind its name
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

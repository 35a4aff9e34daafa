"""Objects passed to `train` in place of names: their names in config.json, and the objects when a run needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vitrail.config import pair
from vitrail.config.train import OBJECTIVES
from vitrail.data.sources.base import SourceSplits
from vitrail.data.sources.dataset import splits_from
from vitrail.errors import FormatError, ModelError, TrainError
from vitrail.model import Model
from vitrail.models import NETWORKS, BiT, Net, Swin, ViT
from vitrail.models.base import eval_mode
from vitrail.models.families import default_family
from vitrail.plugins import IN_MEMORY, import_reference, load_plugin, reference_to
from vitrail.weights.family_defaults import default_preprocess
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.module_reader import read_module

GROUPS = {"objective": "objectives", "callbacks": "callbacks", "trackers": "trackers"}
"""Setting -> group of entry points."""
NETWORK_CLASS = "python:"
"""Prefix of init_from for a network in memory of an importable subclass of ViT, BiT or Swin."""
MAX_RELATIVE_DIFFERENCE = 1e-4


@dataclass
class CustomObjects:
    """The objects of a run by setting and name."""

    objects: dict[tuple[str, str], Any] = field(default_factory=dict)
    init_model: tuple[Net, ModelInfo] | None = None
    """The network that training starts from, with its preprocessing and class names; a copy."""

    def add(self, setting: str, value: Any) -> str:
        """The name of a value in config.json; a name is returned as it is."""
        if isinstance(value, str):
            return value
        name = reference_to(value)
        same = 2
        while self.objects.get((setting, name), value) is not value:
            name, same = f"{reference_to(value)}-{same}", same + 1
        self.objects[setting, name] = value
        return name

    def add_all(self, setting: str, values: Any) -> tuple[str, ...]:
        return tuple(self.add(setting, value) for value in (values if isinstance(values, Sequence) else [values]))

    def add_data(self, data: Any) -> str:
        """The name of a dataset, or of a tuple or dict of datasets; a spec is returned as it is."""
        if isinstance(data, str):
            return data
        first = data
        if isinstance(data, tuple) and data:
            first = data[0]
        elif isinstance(data, dict) and data:
            first = next(iter(data.values()))
        name = str(getattr(first, "name", None) or type(first).__name__)
        self.objects["data", IN_MEMORY + name] = splits_from(data, name)
        return IN_MEMORY + name

    def add_model(self, model: nn.Module | Model) -> str:
        """The init_from of a network in memory."""
        self.init_model = read_network(model)
        kind = type(self.init_model[0])
        reference = reference_to(kind)
        if kind in NETWORKS.values() or reference.startswith(IN_MEMORY):
            return IN_MEMORY + kind.__name__
        return NETWORK_CLASS + reference

    def data(self, source: str) -> SourceSplits | None:
        """The dataset for a name in config.json; None for a spec."""
        found: SourceSplits | None = self.objects.get(("data", source))
        if found is None and source.startswith(IN_MEMORY):
            raise _pass_again("data.source", source, "data=DATASET")
        return found

    def find(self, setting: str, name: str) -> Any:
        """The object of a name in config.json: passed, imported, or another package's."""
        if (setting, name) in self.objects:
            return self.objects[setting, name]
        if name.startswith(IN_MEMORY):
            raise _pass_again(setting, name, f"{setting}=OBJECT")
        if ":" in name:
            return import_reference(name)
        return load_plugin(GROUPS[setting], name)

    def objective(self, name: str) -> Any:
        """The objective of this name; None for vitrail's own."""
        return None if name in OBJECTIVES else self.find("objective", name)

    def network_class(self, init_from: str | None, *, weights: bool) -> type[Net] | None:
        """The class of a network that is a subclass of ViT, BiT or Swin. `weights`: the run needs its weights, too."""
        in_memory = init_from is not None and init_from.startswith((IN_MEMORY, NETWORK_CLASS))
        if self.init_model is not None:
            return type(self.init_model[0])
        own = [IN_MEMORY + kind.__name__ for kind in NETWORKS.values()]
        if init_from is None or not in_memory or (not weights and init_from in own):
            return None
        if weights or init_from.startswith(IN_MEMORY):
            raise _pass_again("init_from", init_from, "model=NETWORK")
        found = import_reference(init_from.removeprefix(NETWORK_CLASS))
        if not (isinstance(found, type) and issubclass(found, ViT | BiT | Swin)):
            raise TrainError(f"init_from={init_from} is not a subclass of vitrail.ViT, vitrail.BiT or vitrail.Swin.")
        return found


def _pass_again(setting: str, name: str, how: str) -> TrainError:
    return TrainError(
        f"{setting}={name} was an object in memory, which config.json cannot store; pass it again: "
        f"vitrail.train(..., {how})."
    )


def read_network(model: nn.Module | Model) -> tuple[Net, ModelInfo]:
    """A copy of a network, and its info. Networks of other libraries are converted; others are refused."""
    if isinstance(model, Model):
        return copy_network(model.net, type(model.net)), model.info
    if isinstance(model, ViT | BiT | Swin):
        _check_subclass(model)
        family = default_family(model.config)
        info = ModelInfo(config=model.config, preprocess=default_preprocess(family, model.config), family=family)
        return copy_network(model, type(model)), info
    if not isinstance(model, nn.Module):
        raise ModelError(f"got model={type(model).__name__}, expected a name, a vitrail.Model or an nn.Module.")
    try:
        return read_module(model, overrides={})
    except FormatError as error:
        raise ModelError(
            f"model={type(model).__name__} cannot be trained, because run folders, checkpoints and reports need a "
            f"network that vitrail can load. {error} For another architecture, subclass vitrail.ViT or write your own "
            "training loop."
        ) from error


@torch.no_grad()
def copy_network(net: Net, kind: type[Net]) -> Net:
    """A copy of a network as an object of another class, with the same config."""
    with torch.device("meta"):
        other = kind(net.config)  # type: ignore[arg-type]
    other.load_state_dict({name: t.detach().cpu().clone() for name, t in net.state_dict().items()}, assign=True)
    return other.train(net.training)


@torch.no_grad()
def _check_subclass(net: Net) -> None:
    """Raise ModelError unless a plain network with the same weights has the same outputs in evaluation mode."""
    base = NETWORKS[type(net.config)]
    if type(net) is base:
        return
    name = type(net).__name__
    with torch.device("meta"):
        expected = {key: t.shape for key, t in base(net.config).state_dict().items()}  # type: ignore[arg-type]
    own = sorted(set(net.state_dict()) ^ set(expected))
    if own:
        raise ModelError(
            f"{name} differs from a {base.__name__} in the tensor {own[0]}, but model folders store the tensors of a "
            f"{base.__name__}; put parameters that only training needs into an objective."
        )
    images = torch.randn(
        2, net.config.channels, *pair(net.config.image_size), generator=torch.Generator().manual_seed(0)
    )
    plain = copy_network(net, base)
    copied = copy_network(net, type(net))
    with eval_mode(copied), eval_mode(plain):
        got, expects = copied(images), plain(images)
    if float((got - expects).abs().max()) > MAX_RELATIVE_DIFFERENCE * max(float(expects.abs().max()), 1.0):
        raise ModelError(
            f"in evaluation mode, the outputs of {name} differ from those of a {base.__name__} with the same weights, "
            "which is what vitrail.load builds from the model of a run; change only what happens in training."
        )

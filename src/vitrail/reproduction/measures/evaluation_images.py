"""Images on which measurements run a finished model, and the networks of its run."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitrail.data.sources import open_data
from vitrail.data.sources.base import Source
from vitrail.errors import TrainError
from vitrail.models import Net
from vitrail.runs.run_folder import RunFolder
from vitrail.training.runs import Run
from vitrail.training.snapshots import find_snapshots
from vitrail.weights import checkpoint

# B images, C channels

UNLABELED = -1


def evaluation_images(run: Run, count: int) -> tuple[Tensor, Tensor, list[npt.NDArray[np.uint8]]]:
    """At most `count` evenly spaced test images: B C H W on the run's device, classes B, and their pixels, H W C."""
    splits = open_data(run.config.data)
    return _read(run, splits.validation if splits.test is None else splits.test, count)


def training_images(run: Run, count: int) -> Tensor:
    """At most `count` evenly spaced training images, without augmentation: B C H W on the run's device."""
    return _read(run, open_data(run.config.data).train, count)[0]


def _read(run: Run, source: Source, count: int) -> tuple[Tensor, Tensor, list[npt.NDArray[np.uint8]]]:
    model = run.model
    indices = np.unique(np.linspace(0, len(source) - 1, min(count, len(source))).round().astype(int)).tolist()
    samples = [source[i] for i in indices]
    pixels = [model.preprocess.pixels(sample.image) for sample in samples]
    images = model.preprocess.normalize(torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2))
    classes = [sample.target if isinstance(sample.target, int) else UNLABELED for sample in samples]
    return images.to(model.device), torch.tensor(classes, device=model.device), pixels


def networks_by_step(run: Run) -> dict[int, Net]:
    """The networks of the run's snapshots by step, the first of them untrained, on the run's device."""
    found = find_snapshots(RunFolder(run.path).snapshots)
    if 0 not in found:
        raise TrainError(f"{run.path} has no snapshot of the untrained network; the run needs snapshot_every.")
    return {step: checkpoint.read(path)[0].to(run.model.device).eval() for step, path in found.items()}


def untrained_network(run: Run) -> Net:
    """The network before the first step."""
    return networks_by_step(run)[0]


@torch.no_grad()
def predict(net: Net, images: Tensor, batch_size: int = 500) -> Tensor:
    """B C H W -> the predicted classes, B."""
    return torch.cat([net(part).argmax(1) for part in images.split(batch_size)])

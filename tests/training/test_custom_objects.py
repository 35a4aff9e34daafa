"""`vitrail.train` with objects of one's own: data, network, objective, callbacks; how such runs are resumed."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import import_peer
from torch import Tensor, nn
from torch.utils.data import Dataset
from training.small_runs import at_step, digits_config, identical_weights, logged_metrics, send_sigterm

import vitrail
from vitrail.data.sources import open_data
from vitrail.errors import ConfigError, ModelError, PluginError, TrainError
from vitrail.models import ViT, build
from vitrail.objectives import LabelLoss, Objective
from vitrail.objectives.base import weighted_sums
from vitrail.training.callbacks import RunView

pytestmark = pytest.mark.usefixtures("quick_disk", "in_tmp_dir")


def train(config: Any, **options: Any) -> vitrail.Run:
    return vitrail.train(config, report=False, **options)


def cross_entropy(net: Any, images: Tensor, targets: Tensor, weights: Tensor, sample_seeds: Any) -> dict[str, Tensor]:
    logits = net(images, sample_seeds)
    correct = (logits.argmax(-1) == targets).to(logits.dtype)
    return {"loss": F.cross_entropy(logits, targets, reduction="none"), "correct": correct}


class Digits(Dataset[Any]):
    """The digits as an ordinary dataset of float tensors."""

    def __init__(self, split: str) -> None:
        splits = open_data(vitrail.TrainConfig(model=vitrail.ViTConfig()).data)
        source = splits.train if split == "train" else splits.test
        self.images, self.targets = torch.from_numpy(source.pixels), source.targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index].permute(2, 0, 1) / 255, int(self.targets[index])


def test_a_dataset_gives_the_same_run_as_the_same_images_by_name():
    by_name = train(digits_config(6), out="name")
    own = train(digits_config(6), data=(Digits("train"), Digits("test")), out="own")
    assert own.config.data.source == "memory:Digits"
    assert own.model.labels == tuple("0123456789")
    assert identical_weights(by_name.path, own.path)
    assert own.scores.top1 == by_name.scores.top1


def test_a_function_as_objective_gives_the_same_run_as_classify():
    """Everything but rounding in the sums is the same."""
    plain = train(digits_config(6), out="plain")
    own = train(digits_config(6), objective=cross_entropy, out="own")
    losses = [[line["loss"] for line in logged_metrics(run.path) if "loss" in line] for run in (plain, own)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    accuracy = [[line["accuracy"] for line in logged_metrics(run.path) if "loss" in line] for run in (plain, own)]
    assert accuracy[0] == accuracy[1]


class Scaled(Objective):
    """Classification with a loss that is scaled, and a parameter of its own."""

    def __init__(self, net: Any, factor: float = 1.0) -> None:
        super().__init__(net)
        self.labels = LabelLoss(vitrail.TrainConfig(model=vitrail.ViTConfig()).classify, net.config.num_classes)
        self.factor, self.temperature = factor, nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor, targets: Tensor, weights: Tensor, sample_seeds: Any = None) -> dict[str, Tensor]:
        loss = self.labels(self.net(images, sample_seeds) * self.temperature, targets)
        return weighted_sums({"loss": self.factor * loss}, weights)


@pytest.mark.parametrize("objective", [Scaled, functools.partial(Scaled, factor=2.0)])
def test_a_subclass_of_objective_is_trained_with_its_parameters(objective: Any):
    with at_step(4, lambda logger: values.append(float(logger.trainer.objective.temperature.detach()))):
        values: list[float] = []
        run = train(digits_config(5), objective=objective)
    assert values[0] != 1
    assert run.finished
    assert type(run.model.net) is ViT


def masked_mean(net: Any, images: Tensor, *_: Any) -> dict[str, Tensor]:
    """Predict an image's mean from its features; needs no labels."""
    return {"loss": (net(images).mean(-1) - images.flatten(1).mean(-1)) ** 2}


masked_mean.requires_labels = False  # type: ignore[attr-defined]


def test_an_objective_without_labels_is_evaluated_by_its_own_values():
    run = train(digits_config(6), objective=masked_mean)
    evaluations = [line["evaluation"] for line in logged_metrics(run.path) if "evaluation" in line]
    assert set(evaluations[0]) == {"loss", "count"}
    assert evaluations[-1]["loss"] < 1
    assert run.config.model.num_classes == 0


@pytest.mark.parametrize(
    ("objective", "error", "message"),
    [
        (lambda *_: {"loss": torch.zeros(())}, ModelError, "one value for each of the 64 images, not their mean"),
        (
            lambda *_: {"nothing": torch.zeros(64)},
            ModelError,
            'returned a dict of nothing; expected a dict with "loss"',
        ),
        (lambda *_: torch.zeros(64), ModelError, "returned Tensor"),
        (lambda *_: 1 / 0, ModelError, r"failed with images \(64, 1, 8, 8\) and targets \(64,\) .*ZeroDivisionError"),
        (nn.Linear, ConfigError, "the objective is the class Linear; expected a function"),
        ("focal", ConfigError, r"objective='focal' is not a valid value; available: classify"),
        ("no_such_module:focal", PluginError, r"no_such_module:focal cannot be imported .*package.module:name"),
    ],
)
def test_a_wrong_objective_is_refused_with_what_was_expected(objective: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        train(digits_config(2), objective=objective)


class Recorder:
    """A callback with every method."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def on_start(self, run: RunView) -> None:
        self.calls.append(("start", run.step, run.resumed, run.folder, run.total_steps, run.labels[:2]))

    def on_step(self, run: RunView) -> None:
        self.calls.append(("step", run.step))

    def on_log(self, run: RunView, metrics: Any) -> None:
        assert metrics["loss"] > 0
        self.calls.append(("log", run.step))

    def on_evaluation(self, run: RunView, scores: Any) -> None:
        assert 0 <= scores["top1"] <= 1
        self.calls.append(("evaluation", run.step))

    def on_checkpoint(self, run: RunView, folder: Path) -> None:
        assert (folder / "state.json").exists()
        self.calls.append(("checkpoint", run.step))

    def on_end(self, run: RunView, status: str) -> None:
        self.calls.append(("end", run.step, status, (run.folder / "model").exists()))


def test_callbacks_are_called_in_order_and_change_nothing():
    recorder = Recorder()
    train(digits_config(5), out="plain")
    run = train(digits_config(5, compare=["seed=1"]), callbacks=[recorder], out="own")
    assert recorder.calls == [
        ("start", 0, False, Path("own"), 5, ("0", "1")),
        ("step", 1), ("step", 2), ("step", 3), ("log", 3), ("step", 4), ("checkpoint", 4), ("step", 5), ("log", 5),
        ("evaluation", 5), ("checkpoint", 5), ("end", 5, "finished", True),
    ]  # fmt: skip
    assert identical_weights(Path("plain"), Path("own"))
    assert run.config.callbacks == ("memory:Recorder",)


class OnlyEnd:
    def on_end(self, run: RunView, status: str) -> None:
        raise RuntimeError("cannot upload")


def test_an_exception_in_a_callback_names_the_callback():
    with pytest.raises(
        TrainError, match=r"the callback OnlyEnd failed in on_end at step 2: RuntimeError: cannot upload"
    ):
        train(digits_config(2), callbacks=[OnlyEnd()])
    with pytest.raises(TrainError, match="the callback Digits has none of the methods on_start, on_step"):
        train(digits_config(2), callbacks=[Digits("test")], out="other")
    assert not Path("other").exists()


def own_objects() -> dict[str, Any]:
    def loss(*arguments: Any) -> dict[str, Tensor]:
        return cross_entropy(*arguments)

    return {"data": (Digits("train"), Digits("test")), "objective": loss, "callbacks": [Recorder()]}


def test_a_stopped_run_continues_with_the_objects_passed_again():
    objects = own_objects()
    with at_step(3, send_sigterm):
        assert train(digits_config(6), out="run", **objects).stop_reason == "SIGTERM"
    assert objects["callbacks"][0].calls[-1] == ("end", 3, "stopped", False)
    config = json.loads(Path("run/config.json").read_text())
    assert (config["data"]["source"], config["objective"]) == ("memory:Digits", "memory:loss")
    for missing, message in (
        ("data", "data.source=memory:Digits was an object in memory, .* pass it again: .*data=DATASET"),
        ("objective", "objective=memory:loss was an object in memory, .* pass it again: .*objective=OBJECT"),
        ("callbacks", "callbacks=memory:Recorder was an object in memory"),
    ):
        with pytest.raises(TrainError, match=message):
            train(digits_config(6), out="run", resume=True, **{k: v for k, v in objects.items() if k != missing})
    again = own_objects()
    assert train(digits_config(6), out="run", auto_resume=True, **again).finished
    assert again["callbacks"][0].calls[0][:3] == ("start", 3, True)
    assert train(digits_config(6), out="whole", **own_objects()).finished
    assert identical_weights(Path("run"), Path("whole"))


def test_what_a_run_was_not_started_with_is_refused_when_it_is_resumed():
    train(digits_config(2), out="run")
    with pytest.raises(ConfigError, match=r"objective is classify and cannot be changed"):
        train(digits_config(2), out="run", resume=True, objective=cross_entropy)
    with pytest.raises(ConfigError, match=r"data.source is digits and cannot be changed"):
        train(digits_config(2), out="run", resume=True, data=Digits("train"))
    assert train(digits_config(2), out="run", resume=True, callbacks=[Recorder()]).finished


def small_vit(kind: type[ViT] = ViT, **changes: Any) -> ViT:
    config = digits_config(2).model.replace(num_classes=10, **changes)
    plain = build(config, seed=5)
    with torch.no_grad():
        plain.head.weight.normal_(generator=torch.Generator().manual_seed(1))
    net = kind(config)
    net.load_state_dict(plain.state_dict())
    return net


def first_snapshot(folder: str) -> dict[str, Tensor]:
    state: dict[str, Tensor] = vitrail.load(Path(folder) / "snapshots" / "00000000").net.state_dict()
    return state


def test_a_network_is_the_start_with_its_head_and_stays_unchanged():
    net = small_vit()
    before = {name: t.clone() for name, t in net.state_dict().items()}
    run = train(digits_config(2, snapshot_every="2 steps"), model=net, out="run")
    assert all(tensor.equal(before[name]) for name, tensor in net.state_dict().items())
    assert all(tensor.equal(before[name]) for name, tensor in first_snapshot("run").items())
    assert not identical_to(run.model.net, before)
    assert run.config.init_from == "memory:ViT"
    assert train(digits_config(4), out="run", resume=True, overrides=["duration=4 steps"]).finished  # needs no object


def identical_to(net: nn.Module, state: dict[str, Tensor]) -> bool:
    return all(tensor.equal(state[name]) for name, tensor in net.state_dict().items())


def test_a_network_with_other_classes_gets_a_head_of_zeros():
    train(digits_config(2, snapshot_every="2 steps"), model=small_vit().with_classes(3), out="run")
    assert not first_snapshot("run")["head.weight"].any()
    assert first_snapshot("run")["head.weight"].shape[0] == 10
    again = {"model": small_vit().with_classes(3), "auto_resume": True}
    assert train(digits_config(2, snapshot_every="2 steps"), out="run", **again).finished  # has nothing to do


class NoisyViT(ViT):
    """Adds noise in training."""

    def forward(self, images: Tensor, sample_seeds: Tensor | None = None) -> Tensor:
        return super().forward(images + 0.5 * self.training, sample_seeds)


class OtherViT(ViT):
    def forward(self, images: Tensor, sample_seeds: Tensor | None = None) -> Tensor:
        return super().forward(images, sample_seeds) * 2


class LargerViT(ViT):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra = nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize("importable", [True, False])
def test_a_subclass_of_vit_changes_training_and_is_needed_to_resume(importable: bool):
    class LocalViT(NoisyViT):
        pass

    kind = NoisyViT if importable else LocalViT
    plain = train(digits_config(4), model=small_vit(), out="plain")
    with at_step(2, send_sigterm):
        train(digits_config(4), model=small_vit(kind), out="noisy")
    if importable:
        noisy = train(digits_config(4), out="noisy", resume=True)
        assert noisy.config.init_from == f"python:{__name__}:NoisyViT"
    else:
        with pytest.raises(TrainError, match="init_from=memory:LocalViT was an object in memory"):
            train(digits_config(4), out="noisy", resume=True)
        noisy = train(digits_config(4), out="noisy", resume=True, model=small_vit(kind))
    whole = train(digits_config(4), model=small_vit(NoisyViT), out="whole")
    assert type(noisy.model.net) is ViT
    assert identical_weights(noisy.path, whole.path)
    assert not identical_weights(noisy.path, plain.path)


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (lambda: small_vit(OtherViT), "outputs of OtherViT differ from those of a ViT with the same weights"),
        (lambda: LargerViT(small_vit().config), "LargerViT differs from a ViT in the tensor extra"),
        (
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
            "model=Sequential cannot be trained, because run folders",
        ),
        (lambda: 3, "got model=int, expected a name, a vitrail.Model or an nn.Module"),
    ],
)
def test_a_network_that_vitrail_load_could_not_read_back_is_refused(net: Any, message: str):
    with pytest.raises(ModelError, match=message):
        train(digits_config(2), model=net())


def test_a_network_of_timm_is_converted_and_trained():
    timm = import_peer("timm")
    options = {"img_size": 32, "patch_size": 16, "embed_dim": 48, "depth": 1, "num_heads": 3, "num_classes": 10}
    net = timm.create_model("vit_tiny_patch16_224", **options)
    run = train(digits_config(2, preprocess=None, augment={"crop": "none"}), model=net, out="run")
    assert (run.config.model.width, run.config.model.channels, run.model.info.preprocess.channels) == (48, 3, 3)
    assert run.model.labels == tuple("0123456789")


def test_a_model_brings_its_preprocessing():
    first = train(digits_config(2), out="first").model
    run = train(digits_config(2, preprocess=None), model=first, out="second")
    assert run.model.info.preprocess == first.info.preprocess
    assert np.isfinite(run.scores.loss)

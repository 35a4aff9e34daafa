"""Networks beside other people's tools: transformers' Trainer, accelerate, torchvision's extractor, torch's own."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import randomized, relative
from conftest import import_peer
from models.test_compile import KINDS
from small_models import model, small
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.optim.swa_utils import AveragedModel

import vitrail
from vitrail.models import Net, build


def net_of(kind: str) -> Net:
    return randomized(build(KINDS[kind]))


class Stripes(torch.utils.data.Dataset):
    """Images of five classes, each with a bright stripe of its own."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> dict[str, Any]:
        label = i % 5
        image = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(i)) / 3
        image[:, 6 * label : 6 * label + 6] += 2
        return {"images": image, "labels": label}


@pytest.mark.peer
def test_transformers_trainer_trains_evaluates_saves_and_resumes(tmp_path: Path) -> None:
    transformers = import_peer("transformers")
    import_peer("accelerate")

    class ImageTrainer(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **_):
            logits = model(inputs["images"])
            loss = F.cross_entropy(logits, inputs["labels"])
            return (loss, {"logits": logits}) if return_outputs else loss

    def accuracy(found: Any) -> dict[str, float]:
        assert found.predictions.shape == (40, 5)
        return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}

    def trainer(net: Net, epochs: int) -> Any:
        options = {"per_device_train_batch_size": 10, "learning_rate": 1e-3, "save_strategy": "epoch", "use_cpu": True}
        quiet = {"report_to": ["tensorboard"], "disable_tqdm": True, "dataloader_pin_memory": False}
        arguments = transformers.TrainingArguments(
            str(tmp_path), num_train_epochs=epochs, label_names=["labels"], **options, **quiet
        )
        data = {"train_dataset": Stripes(), "eval_dataset": Stripes()}
        return ImageTrainer(model=net, args=arguments, compute_metrics=accuracy, **data)

    vit = model(small())
    first = trainer(vit.net, 12)
    before = first.evaluate()["eval_accuracy"]
    first.train()
    after = first.evaluate()
    assert after["eval_accuracy"] > max(before, 0.9)

    again = model(small())
    second = trainer(again.net, 14)
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 56
    assert second.evaluate()["eval_loss"] < after["eval_loss"]

    vit.save(tmp_path / "model")  # as it was trained
    saved = vitrail.load(tmp_path / "model")
    images = torch.stack([Stripes()[i]["images"] for i in range(5)])
    with torch.no_grad():
        assert saved.net(images).argmax(-1).tolist() == [0, 1, 2, 3, 4]


def test_configs_stay_frozen_but_for_what_the_trainer_sets() -> None:
    for config in (vitrail.ViTConfig(), vitrail.BiTConfig()):
        same = config.replace()
        config.use_cache = False
        assert config == same
        assert hash(config) == hash(same)
        assert "use_cache" not in config.to_dict()
        for name in ("width", "widht"):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(config, name, 3)


@pytest.mark.peer
@pytest.mark.parametrize("kind", ["plain", "distilled", "rope, registers", "dropouts", "hybrid", "bit"])
def test_torchvisions_feature_extractor(kind: str) -> None:
    extraction = import_peer("torchvision.models.feature_extraction")
    net, images = net_of(kind), torch.randn(2, 3, 32, 32)
    middle = "stages.0" if kind == "bit" else "blocks.0"
    quiet = {"suppress_diff_warning": True}  # dropout is a node in training only
    _, names = extraction.get_graph_node_names(net, **quiet)
    assert {"norm", "head"} <= set(names)
    assert any(name.startswith(f"{middle}.") for name in names)
    extractor = extraction.create_feature_extractor(net, {middle: "middle", "norm": "norm"}, **quiet).eval()
    with torch.no_grad():
        found = extractor(images)
        if kind == "bit":
            expected = net.features(images, layers=[0]).feature_maps[0]
        else:
            expected = net.features(images, layers=[0]).tokens[0]
        assert relative(found["middle"], expected) <= 1e-5
        again = pickle.loads(pickle.dumps(extractor))(images)
    assert torch.equal(again["norm"], found["norm"])
    extractor.train()(images)["norm"].sum().backward()


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def kernels(net: nn.Module) -> list[nn.Module]:
    found = [m for m in net.modules() if isinstance(getattr(m, "weight", None), Tensor) and m.weight.ndim > 1]
    assert found
    return found


def saved(net: Net) -> Any:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pruned(net: Net) -> None:
    for module in kernels(net):
        prune.l1_unstructured(module, "weight", 0.3)


def pruned_twice(net: Net) -> None:
    pruned(net)
    net(torch.randn(1, 3, 32, 32))
    pruned(net)


def parametrized(net: Net) -> None:
    for module in kernels(net):
        parametrize.register_parametrization(module, "weight", Doubled())


def averaged(net: Net) -> nn.Module:
    average = AveragedModel(net)
    average.update_parameters(net)
    average.update_parameters(randomized(copy.deepcopy(net), seed=1))
    return average.eval()


TOOLS: dict[str, Callable[[Net], nn.Module | None]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda net: pickle.loads(pickle.dumps(net)),
    "torch.save": saved,
    "prune": pruned,
    "prune twice": pruned_twice,
    "parametrize": parametrized,
    "AveragedModel": averaged,
}


@torch.no_grad()
@pytest.mark.parametrize("kind", ["plain", "hybrid", "bit"])
@pytest.mark.parametrize("tool", TOOLS)
def test_torchs_tools_after_an_evaluation(tool: str, kind: str) -> None:
    """What evaluation has cached does not outlive a change of the weights."""
    net, images = net_of(kind), torch.randn(2, 3, 32, 32)
    before = net(images)
    changed = TOOLS[tool](net) or net
    fresh = copy.deepcopy(changed).train().eval()  # which forgets what was cached
    assert relative(changed(images), fresh(images)) <= 1e-6
    same = tool in ("deepcopy", "pickle", "torch.save")
    assert (relative(changed(images), before) <= 1e-6) == same

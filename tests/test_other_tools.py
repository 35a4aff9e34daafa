"""Networks with other libraries: transformers' Trainer, accelerate, torchvision's extractor, torch's tools."""

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


def make_net(kind: str) -> Net:
    return randomized(build(KINDS[kind]))


class Stripes(torch.utils.data.Dataset):
    """Images of five classes, each with a bright stripe at its own position."""

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

    def accuracy(prediction: Any) -> dict[str, float]:
        assert prediction.predictions.shape == (40, 5)
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

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

    resumed_model = model(small())
    second = trainer(resumed_model.net, 14)
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 56
    assert second.evaluate()["eval_loss"] < after["eval_loss"]

    vit.save(tmp_path / "model")  # with the trained weights
    saved = vitrail.load(tmp_path / "model")
    images = torch.stack([Stripes()[i]["images"] for i in range(5)])
    with torch.no_grad():
        assert saved.net(images).argmax(-1).tolist() == [0, 1, 2, 3, 4]


def test_configs_are_frozen_except_for_use_cache() -> None:
    for config in (vitrail.ViTConfig(), vitrail.BiTConfig()):
        copied = config.replace()
        config.use_cache = False
        assert config == copied
        assert hash(config) == hash(copied)
        assert "use_cache" not in config.to_dict()
        for name in ("width", "widht"):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(config, name, 3)


@pytest.mark.peer
@pytest.mark.parametrize("kind", ["plain", "distilled", "rope, registers", "dropouts", "hybrid", "bit"])
def test_torchvision_feature_extractor(kind: str) -> None:
    extraction = import_peer("torchvision.models.feature_extraction")
    net, images = make_net(kind), torch.randn(2, 3, 32, 32)
    block_name = "stages.0" if kind == "bit" else "blocks.0"
    quiet = {"suppress_diff_warning": True}  # dropout is a node in training only
    _, names = extraction.get_graph_node_names(net, **quiet)
    assert {"norm", "head"} <= set(names)
    assert any(name.startswith(f"{block_name}.") for name in names)
    extractor = extraction.create_feature_extractor(net, {block_name: "middle", "norm": "norm"}, **quiet).eval()
    with torch.no_grad():
        outputs = extractor(images)
        if kind == "bit":
            expected = net.features(images, layers=[0]).feature_maps[0]
        else:
            expected = net.features(images, layers=[0]).tokens[0]
        assert relative(outputs["middle"], expected) <= 1e-5
        unpickled = pickle.loads(pickle.dumps(extractor))(images)
    assert torch.equal(unpickled["norm"], outputs["norm"])
    extractor.train()(images)["norm"].sum().backward()


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def kernel_modules(net: nn.Module) -> list[nn.Module]:
    modules = [m for m in net.modules() if isinstance(getattr(m, "weight", None), Tensor) and m.weight.ndim > 1]
    assert modules
    return modules


def save_and_load(net: Net) -> Any:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def prune_kernels(net: Net) -> None:
    for module in kernel_modules(net):
        prune.l1_unstructured(module, "weight", 0.3)


def prune_kernels_twice(net: Net) -> None:
    prune_kernels(net)
    net(torch.randn(1, 3, 32, 32))
    prune_kernels(net)


def parametrize_kernels(net: Net) -> None:
    for module in kernel_modules(net):
        parametrize.register_parametrization(module, "weight", Doubled())


def average_weights(net: Net) -> nn.Module:
    average = AveragedModel(net)
    average.update_parameters(net)
    average.update_parameters(randomized(copy.deepcopy(net), seed=1))
    return average.eval()


TOOLS: dict[str, Callable[[Net], nn.Module | None]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda net: pickle.loads(pickle.dumps(net)),
    "torch.save": save_and_load,
    "prune": prune_kernels,
    "prune twice": prune_kernels_twice,
    "parametrize": parametrize_kernels,
    "AveragedModel": average_weights,
}


@torch.no_grad()
@pytest.mark.parametrize("kind", ["plain", "hybrid", "bit"])
@pytest.mark.parametrize("tool", TOOLS)
def test_torch_tools_after_an_evaluation(tool: str, kind: str) -> None:
    """Tensors cached in evaluation mode are discarded when the weights change."""
    net, images = make_net(kind), torch.randn(2, 3, 32, 32)
    before = net(images)
    changed = TOOLS[tool](net) or net
    fresh = copy.deepcopy(changed).train().eval()  # clears the cache
    assert relative(changed(images), fresh(images)) <= 1e-6
    same = tool in ("deepcopy", "pickle", "torch.save")
    assert (relative(changed(images), before) <= 1e-6) == same

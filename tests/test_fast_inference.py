"""`vitrail.load` with dtype="float8" and with compile=True: the same outputs, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compare import randomized, relative
from conftest import need_extra
from torch._dynamo.utils import counters

import vitrail
from vitrail.config import ViTConfig
from vitrail.errors import ConfigError, ModelError
from vitrail.models import ViT, build
from vitrail.models.compiled import compile_blocks
from vitrail.models.model_names import config_from_name

SMALL = {"image_size": 32, "patch_size": 8, "width": 64, "depth": 4, "num_heads": 2, "mlp_dim": 128, "num_classes": 5}
NETS: dict[str, dict[str, object]] = {
    "ViT-Ti/16": {"image_size": 32, "depth": 2},
    "R26+ViT-S/32": {"image_size": 64, "depth": 2},
    "BiT-R50x1": {"image_size": 64},
    "Swin-T": {"image_size": 64, "depths": (2, 2), "num_heads": (3, 6)},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    model = vitrail.create_model("ViT-Ti/16", image_size=32, patch_size=8, num_classes=5, depth=2, drop_path=0.1)
    randomized(model.net)
    model.save(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", NETS)
def test_compiled_blocks_give_the_same_outputs(name: str) -> None:
    torch.compiler.reset()
    counters.clear()
    net = randomized(build(config_from_name(name, num_classes=3, **NETS[name]))).eval()
    side = NETS[name]["image_size"]
    images = torch.randn(2, 3, side, side)
    with torch.no_grad():
        expected = net(images)
        compile_blocks(net, backend="aot_eager")
        assert relative(net(images), expected) <= 1e-5
    assert counters["stats"]["unique_graphs"] > 0


def test_equal_blocks_share_their_code_and_a_second_batch_size_adds_one_version() -> None:
    torch.compiler.reset()
    counters.clear()
    net = randomized(ViT(ViTConfig(**SMALL))).eval()
    compile_blocks(net, backend="aot_eager")
    with torch.no_grad():
        net(torch.randn(2, 3, 32, 32))
        first = counters["stats"]["unique_graphs"]
        net(torch.randn(3, 3, 32, 32))
        second = counters["stats"]["unique_graphs"]
        net(torch.randn(5, 3, 32, 32))
    assert first <= 2, "one, and one of the last block, which computes the class token only"
    assert counters["stats"]["unique_graphs"] == second <= 2 * first


def test_intermediate_outputs_are_those_of_the_plain_network() -> None:
    torch.compiler.reset()
    net, images = randomized(ViT(ViTConfig(**SMALL))).eval(), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = net.features(images, ("tokens", "attention"))
        compile_blocks(net, backend="aot_eager")
        found = net.features(images, ("tokens", "attention"))
    for ours, theirs in zip((*found.tokens, *found.attention), (*expected.tokens, *expected.attention), strict=True):
        assert relative(ours, theirs) <= 1e-5


def test_hooks_see_the_outputs_of_compiled_blocks() -> None:
    net = randomized(ViT(ViTConfig(**SMALL))).eval()
    compile_blocks(net, backend="aot_eager")
    seen: list[torch.Tensor] = []
    net.blocks[1].register_forward_hook(lambda module, args, out: seen.append(out))
    with torch.no_grad():
        net(torch.randn(2, 3, 32, 32))
    assert [x.shape for x in seen] == [(2, 17, 64)]


def test_a_model_is_loaded_in_8_bits_and_cannot_be_written(file: Path, tmp_path: Path) -> None:
    model, plain = vitrail.load(file, dtype="float8"), vitrail.load(file)
    assert (model.precision, plain.precision) == ("float8", "float32")
    assert model.dtype == torch.bfloat16
    image = torch.randint(0, 256, (32, 32, 3), dtype=torch.uint8).numpy()
    assert 1e-3 < relative(model.logits([image]), plain.logits([image])) < 0.15
    with pytest.raises(ModelError, match="float8 cannot be written; load it with another dtype"):
        model.save(tmp_path / "written")


def test_networks_without_transformer_blocks_have_no_8_bits() -> None:
    from vitrail.models.eight_bit_net import to_eight_bit

    with pytest.raises(ModelError, match="only, not for BiT"):
        to_eight_bit(build(config_from_name("BiT-R50x1", num_classes=3)))


def test_networks_in_8_bits_are_not_resized(file: Path) -> None:
    with pytest.raises(ModelError, match="cannot be changed; load it with the size"):
        vitrail.load(file, dtype="float8").net.resized(64)
    assert vitrail.load(file, dtype="float8", image_size=64).config.image_size in (64, (64, 64))


@pytest.mark.parametrize(("name", "message"), [("flaot8", "mean 'float8'"), ("float8", "when a model is loaded")])
def test_other_dtypes_are_named(file: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        vitrail.load(file).to(dtype=name)


def test_gradients_pass_through_8_bit_layers(file: Path) -> None:
    net = vitrail.load(file, dtype="float8").net.float()
    images = torch.randn(1, 3, 32, 32, requires_grad=True)
    net(images).sum().backward()
    assert images.grad is not None
    assert images.grad.abs().sum() > 0


def test_an_exported_file_is_not_compiled(tmp_path: Path, file: Path) -> None:
    need_extra("export")
    vitrail.export(vitrail.load(file), tmp_path / "model.onnx", to="onnx")
    with pytest.raises(ConfigError, match="compile cannot be changed"):
        vitrail.load(tmp_path / "model.onnx", compile=True)


def test_blocks_of_a_loaded_model_are_compiled(file: Path) -> None:
    model = vitrail.load(file, compile=True)
    assert all(block._compiled_call_impl is not None for block in model.net.blocks)

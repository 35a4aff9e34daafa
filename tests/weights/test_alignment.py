"""Where a tensor lies in its file decides nothing: not the address it is used at, and so not a bit of the output."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import small
from torch import Tensor, nn
from train.small_runs import digits

from vitrail.models import Net, build
from vitrail.train.checkpointing import CheckpointManager, Progress
from vitrail.train.distributed import DistributedContext
from vitrail.train.setup import prepare_run
from vitrail.train.trainer import Trainer
from vitrail.weights import checkpoint
from vitrail.weights.archive import ALIGNMENT, align_tensor, open_archive
from vitrail.weights.model_info import ModelInfo, default_preprocess
from vitrail.weights.timm import TIMM_FORMAT
from vitrail.weights.writers import write_safetensors

WIDE = {"width": 48, "num_heads": 3, "mlp_dim": 20, "num_classes": 5, "depth": 1}
"""Sizes that are no multiples of ALIGNMENT, and a product with one row, whose bits depend on the address."""


def network(**changes: object) -> tuple[Net, ModelInfo]:
    config = small(**WIDE | changes)
    torch.manual_seed(0)
    net = build(config).eval()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.2)
    return net, ModelInfo(config=config, preprocess=default_preprocess("ViT", config))


def in_safetensors(tensors: Mapping[str, Tensor], path: Path, start: int) -> None:
    """By hand: the data begin at `start` past a multiple of ALIGNMENT."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": [*tensor.shape], "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * ((start - 8 - len(text)) % ALIGNMENT)
    data = b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def in_one_storage(tensors: Mapping[str, Tensor], path: Path, start: int) -> None:
    """As views of one flat buffer, as flattened parameters are saved."""
    flat = torch.empty(start // 4 + sum(t.numel() for t in tensors.values()))
    views, end = {}, start // 4
    for name, tensor in tensors.items():
        views[name] = flat[end : end + tensor.numel()].view(tensor.shape).copy_(tensor)
        end += tensor.numel()
    torch.save(views, path)


def in_repacked_zip(tensors: Mapping[str, Tensor], path: Path, start: int) -> None:
    """As torch.save writes them, then packed anew by another program, which knows nothing of alignment."""
    torch.save({name: tensor.clone() for name, tensor in tensors.items()}, path)
    with zipfile.ZipFile(path) as file:
        parts = [(info, file.read(info)) for info in file.infolist()]
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(zipfile.ZipInfo(f"{path.stem}/{'x' * start}"), b"")  # moves what follows
        for info, data in parts:
            plain = zipfile.ZipInfo(info.filename)  # without the padding
            file.writestr(plain, data)


FILES: dict[str, Callable[[Mapping[str, Tensor], Path, int], None]] = {
    "safetensors": in_safetensors,
    "one storage": in_one_storage,
    "zip": in_repacked_zip,
}


def logits(net: nn.Module) -> Tensor:
    images = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found: Tensor = net(images)
    return found


def away(tensors: Mapping[str, Tensor]) -> list[str]:
    return [name for name, tensor in tensors.items() if tensor.data_ptr() % ALIGNMENT]


@pytest.mark.parametrize("kind", FILES)
def test_a_model_gives_the_same_bits_wherever_its_tensors_lie_in_a_file(kind: str, tmp_path: Path) -> None:
    net, info = network()
    theirs = TIMM_FORMAT.table(info.config).write(net.state_dict(), info.config)
    for start in (0, 4, 16, 32, 60):
        path = tmp_path / f"{start}.pth"
        FILES[kind](theirs, path, start)
        archive = open_archive(path)
        if start:
            assert away({name: archive.tensors[name] for name in theirs})
        read, _ = checkpoint.read(path, overrides={"num_heads": 3})
        assert away(read.state_dict()) == []
        assert torch.equal(logits(read), logits(net)), start


def test_what_numpy_has_allocated_is_moved_too(tmp_path: Path) -> None:
    net, info = network(activation="gelu-tanh", resample="google")
    checkpoint.write(net, info, tmp_path / "x.npz", to="google", approximate=True)
    read, _ = checkpoint.read(tmp_path / "x.npz")
    assert away(read.state_dict()) == []
    assert torch.equal(logits(read), logits(net))


def test_a_part_of_a_tensor_is_moved_where_the_whole_lies_well(tmp_path: Path) -> None:
    """The patches' positions follow the class token's row of 96 bytes."""
    net, info = network(width=24)
    theirs = TIMM_FORMAT.table(info.config).write(net.state_dict(), info.config)
    torch.save({name: tensor.clone() for name, tensor in theirs.items()}, tmp_path / "x.pth")
    assert away({"pos_embed": open_archive(tmp_path / "x.pth").tensors["pos_embed"]}) == []
    read, _ = checkpoint.read(tmp_path / "x.pth", overrides={"num_heads": 3})
    assert away(read.state_dict()) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_tensors_kept_as_they_are_stored_are_moved_too(tmp_path: Path, dtype: torch.dtype) -> None:
    net, info = network()
    checkpoint.write(net.to(dtype), info, tmp_path / "m")
    read, _ = checkpoint.read(tmp_path / "m", dtype=None)
    assert away(read.state_dict()) == []
    assert {t.dtype for t in read.state_dict().values()} == {dtype}


def test_only_what_lies_badly_is_copied() -> None:
    whole = torch.arange(64.0)
    assert align_tensor(whole) is whole
    moved = align_tensor(whole[1:])
    assert moved.data_ptr() % ALIGNMENT == 0
    assert torch.equal(moved, whole[1:])
    assert torch.equal(align_tensor(whole.view(8, 8).T), whole.view(8, 8).T)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_our_own_files_are_used_where_they_lie(tmp_path: Path, kind: torch.dtype) -> None:
    """All but what is smaller than a step or no multiple of it."""
    net, info = network(width=64, num_heads=4, mlp_dim=128)
    checkpoint.write(net.to(kind), info, tmp_path / "m")
    tensors = open_archive(tmp_path / "m").tensors
    odd = {name for name in tensors if tensors[name].nbytes % ALIGNMENT}
    assert odd == {"head.bias"}
    assert set(away({name: tensors[name] for name in tensors if name not in odd})) == set()


def test_types_of_every_size_lie_where_they_can_be_read(tmp_path: Path) -> None:
    kinds = (torch.uint8, torch.float64, torch.bfloat16, torch.bool, torch.int32, torch.float8_e4m3fn)
    tensors = {f"{i}": torch.ones(i + 1).to(kind) for i, kind in enumerate(kinds)} | {"none": torch.empty(0, 3)}
    write_safetensors(tmp_path / "x", tensors)
    found = open_archive(tmp_path / "x").tensors
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert np.array_equal(found[name].view(torch.uint8).numpy(), tensor.view(torch.uint8).numpy())


def test_the_best_weights_of_a_resumed_run_are_used_where_those_of_the_first_sitting_would_be(tmp_path: Path) -> None:
    """A run that is resumed after its best step reads them from the disk, and must measure the same to the last bit."""
    distributed = DistributedContext(torch.device("cpu"))
    trainer = Trainer(prepare_run(digits(), distributed), distributed)
    checkpoints = CheckpointManager(tmp_path, distributed)
    expected = trainer.model_weights()
    checkpoints.save_best({"a": torch.ones(3)} | expected, Progress(step=1))  # three numbers, which move what follows
    checkpoints.close()
    found = CheckpointManager(tmp_path, distributed).read_best(1)
    assert found is not None
    assert away(found)
    assert away(trainer.build_model({name: found[name] for name in expected}).state_dict()) == []

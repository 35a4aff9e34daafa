"""Alignment of loaded tensors: outputs do not depend on the offset of a tensor in its file, bit for bit."""

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
from training.small_runs import digits_config

from vitrail.models import Net, build
from vitrail.runtime.distributed import DistributedContext
from vitrail.training.checkpointing import CheckpointManager, Progress
from vitrail.training.final_model import WholeModel, final_model
from vitrail.training.setup import prepare_run
from vitrail.training.trainer import Trainer
from vitrail.weights import checkpoint
from vitrail.weights.archive import ALIGNMENT, align_tensor, open_archive
from vitrail.weights.family_defaults import default_preprocess
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.timm import TIMM_FORMAT
from vitrail.weights.writers import write_safetensors

WIDE = {"width": 48, "num_heads": 3, "mlp_dim": 20, "num_classes": 5, "depth": 1}
"""Tensor sizes that are not multiples of ALIGNMENT. The last bits of one-row products depend on alignment."""


def random_network(**changes: object) -> tuple[Net, ModelInfo]:
    config = small(**WIDE | changes)
    torch.manual_seed(0)
    net = build(config).eval()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.2)
    return net, ModelInfo(config=config, preprocess=default_preprocess("ViT", config))


def save_misaligned_safetensors(tensors: Mapping[str, Tensor], path: Path, start: int) -> None:
    """Writes a safetensors file whose data start `start` bytes past a multiple of ALIGNMENT."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": [*tensor.shape], "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    header_bytes = json.dumps(header).encode()
    header_bytes += b" " * ((start - 8 - len(header_bytes)) % ALIGNMENT)
    data = b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors.values())
    path.write_bytes(len(header_bytes).to_bytes(8, "little") + header_bytes + data)


def save_views_of_one_storage(tensors: Mapping[str, Tensor], path: Path, start: int) -> None:
    """Saves the tensors as views of one flat storage, as flattened parameters are saved."""
    flat = torch.empty(start // 4 + sum(t.numel() for t in tensors.values()))
    views, end = {}, start // 4
    for name, tensor in tensors.items():
        views[name] = flat[end : end + tensor.numel()].view(tensor.shape).copy_(tensor)
        end += tensor.numel()
    torch.save(views, path)


def save_repacked_zip(tensors: Mapping[str, Tensor], path: Path, start: int) -> None:
    """Saves the tensors with torch.save and repacks the zip archive without alignment padding."""
    torch.save({name: tensor.clone() for name, tensor in tensors.items()}, path)
    with zipfile.ZipFile(path) as file:
        members = [(info, file.read(info)) for info in file.infolist()]
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(zipfile.ZipInfo(f"{path.stem}/{'x' * start}"), b"")  # shifts the following members
        for info, data in members:
            unpadded = zipfile.ZipInfo(info.filename)  # without the padding
            file.writestr(unpadded, data)


SAVERS: dict[str, Callable[[Mapping[str, Tensor], Path, int], None]] = {
    "safetensors": save_misaligned_safetensors,
    "one storage": save_views_of_one_storage,
    "zip": save_repacked_zip,
}


def logits(net: nn.Module) -> Tensor:
    images = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        output: Tensor = net(images)
    return output


def misaligned(tensors: Mapping[str, Tensor]) -> list[str]:
    return [name for name, tensor in tensors.items() if tensor.data_ptr() % ALIGNMENT]


@pytest.mark.parametrize("kind", SAVERS)
def test_output_bits_do_not_depend_on_tensor_offsets_in_the_file(kind: str, tmp_path: Path) -> None:
    net, info = random_network()
    timm_tensors = TIMM_FORMAT.table(info.config).write(net.state_dict(), info.config)
    for start in (0, 4, 16, 32, 60):
        path = tmp_path / f"{start}.pth"
        SAVERS[kind](timm_tensors, path, start)
        archive = open_archive(path)
        if start:
            assert misaligned({name: archive.tensors[name] for name in timm_tensors})
        loaded, _ = checkpoint.read(path, overrides={"num_heads": 3})
        assert misaligned(loaded.state_dict()) == []
        assert torch.equal(logits(loaded), logits(net)), start


def test_tensors_from_npz_files_are_aligned(tmp_path: Path) -> None:
    net, info = random_network(activation="gelu-tanh", resample="google")
    checkpoint.write(net, info, tmp_path / "x.npz", to="google", approximate=True)
    loaded, _ = checkpoint.read(tmp_path / "x.npz")
    assert misaligned(loaded.state_dict()) == []
    assert torch.equal(logits(loaded), logits(net))


def test_misaligned_slices_of_aligned_tensors_are_aligned(tmp_path: Path) -> None:
    """The position embeddings of the patches follow the class token's row of 96 bytes."""
    net, info = random_network(width=24)
    timm_tensors = TIMM_FORMAT.table(info.config).write(net.state_dict(), info.config)
    torch.save({name: tensor.clone() for name, tensor in timm_tensors.items()}, tmp_path / "x.pth")
    assert misaligned({"pos_embed": open_archive(tmp_path / "x.pth").tensors["pos_embed"]}) == []
    loaded, _ = checkpoint.read(tmp_path / "x.pth", overrides={"num_heads": 3})
    assert misaligned(loaded.state_dict()) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_tensors_read_in_their_stored_dtype_are_aligned(tmp_path: Path, dtype: torch.dtype) -> None:
    net, info = random_network()
    checkpoint.write(net.to(dtype), info, tmp_path / "m")
    loaded, _ = checkpoint.read(tmp_path / "m", dtype=None)
    assert misaligned(loaded.state_dict()) == []
    assert {t.dtype for t in loaded.state_dict().values()} == {dtype}


def test_only_misaligned_tensors_are_copied() -> None:
    tensor = torch.arange(64.0)
    assert align_tensor(tensor) is tensor
    aligned = align_tensor(tensor[1:])
    assert aligned.data_ptr() % ALIGNMENT == 0
    assert torch.equal(aligned, tensor[1:])
    assert torch.equal(align_tensor(tensor.view(8, 8).T), tensor.view(8, 8).T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vitrail_files_store_tensors_aligned(tmp_path: Path, dtype: torch.dtype) -> None:
    """Every tensor whose size is a multiple of ALIGNMENT is used without a copy."""
    net, info = random_network(width=64, num_heads=4, mlp_dim=128)
    checkpoint.write(net.to(dtype), info, tmp_path / "m")
    tensors = open_archive(tmp_path / "m").tensors
    unaligned = {name for name in tensors if tensors[name].nbytes % ALIGNMENT}
    assert unaligned == {"head.bias"}
    assert set(misaligned({name: tensors[name] for name in tensors if name not in unaligned})) == set()


def test_tensors_of_every_dtype_can_be_read(tmp_path: Path) -> None:
    dtypes = (torch.uint8, torch.float64, torch.bfloat16, torch.bool, torch.int32, torch.float8_e4m3fn)
    tensors = {f"{i}": torch.ones(i + 1).to(dtype) for i, dtype in enumerate(dtypes)} | {"none": torch.empty(0, 3)}
    write_safetensors(tmp_path / "x", tensors)
    stored = open_archive(tmp_path / "x").tensors
    for name, tensor in tensors.items():
        assert stored[name].dtype == tensor.dtype
        assert np.array_equal(stored[name].view(torch.uint8).numpy(), tensor.view(torch.uint8).numpy())


def test_best_weights_of_a_resumed_run_are_aligned(tmp_path: Path) -> None:
    """A run resumed after its best step reads them from the disk, and must give the same metrics bit for bit."""
    distributed = DistributedContext(torch.device("cpu"))
    trainer = Trainer(prepare_run(digits_config(), distributed), distributed)
    checkpoints = CheckpointManager(tmp_path, distributed)
    expected = trainer.network_tensors()
    checkpoints.save_best({"a": torch.ones(3)} | expected, Progress(step=1))  # misaligns the other tensors
    checkpoints.close()
    best = CheckpointManager(tmp_path, distributed).read_best(1, expected)
    assert best is not None
    assert misaligned(best)
    model = final_model(trainer, {name: best[name] for name in expected})
    assert isinstance(model, WholeModel)
    assert misaligned(model.net.state_dict()) == []

"""Initialization of a network whose weights are sharded over processes (FSDP2), on a CPU with gloo."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from small_models import small
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from vitrail.models import build

CONFIG = small(image_size=16, patch_size=4, width=64, mlp_dim=96, num_registers=2, pre_logits=16)


def initialize_sharded(rank: int, rendezvous: str, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    net = build(CONFIG, meta=True)
    mesh = init_device_mesh("cpu", (2,))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    net.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(7)
    net.initialize(0)
    full_state = {name: p.full_tensor() for name, p in net.named_parameters()}
    logits = net.eval()(torch.ones(2, 3, 16, 16))
    if rank == 0:
        torch.save({"state": full_state, "logits": logits.detach()}, out)
    dist.destroy_process_group()


@pytest.mark.filterwarnings("default")
def test_every_sharded_parameter_is_initialized(tmp_path: Path) -> None:
    mp.spawn(initialize_sharded, (str(tmp_path / "rendezvous"), str(tmp_path / "out.pt")), nprocs=2)
    saved = torch.load(tmp_path / "out.pt")
    plain = build(CONFIG, seed=0)
    for name, parameter in plain.named_parameters():
        got = saved["state"][name]
        assert not (got == 7).any(), name
        if parameter.detach().std() > 0:  # other random numbers from the same distribution
            assert float(got.detach().std()) == pytest.approx(float(parameter.detach().std()), rel=0.5), name
    bound = math.sqrt(6 / 128)
    assert float(saved["state"]["blocks.0.attention.qkv.weight"].detach().abs().max()) <= bound
    assert saved["logits"].isfinite().all()

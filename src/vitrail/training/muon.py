"""Muon that orthogonalizes all matrices of one shape in one batch.

torch.optim.Muon processes one matrix at a time, with about twenty small kernels each: for a ViT of 9 blocks and width
384 on an H200 the optimizer then takes almost as long as the network (46 ms per step instead of 26 with AdamW, batch
1024 of 65 tokens). All blocks have the same shapes, so their matrices are stacked: the same arithmetic in a ninth of
the kernel launches.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vitrail.runtime import private_torch
from vitrail.training.parallel import full_tensor, local_shard, local_tensor, shard_like

MOMENTUM_BUFFER = "momentum_buffer"
"""torch's key for Muon's state of a parameter."""
MAX_GATHERED = 1 << 25
"""Elements of the matrices of a sharded objective that are gathered at a time: 128 MiB, however large the model is."""


class Muon(torch.optim.Muon):
    """torch.optim.Muon, batched; same options and same state."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step(group, [p for p in group["params"] if p.grad is not None])
        return loss

    def _step(self, group: dict[str, Any], matrices: list[Tensor]) -> None:
        if not matrices:
            return
        lr, momentum = float(group["lr"]), group["momentum"]
        # Each process updates its shard; only the matrices to orthogonalize have to be gathered.
        parts = [local_tensor(p) for p in matrices]
        gradients = [local_tensor(p.grad) for p in matrices if p.grad is not None]
        memory = [self._momentum_buffer(p) for p in matrices]
        near = [local_tensor(m) for m in memory]
        private_torch.foreach_lerp_(near, gradients, 1 - momentum)
        updates = private_torch.foreach_lerp(gradients, near, momentum) if group["nesterov"] else near
        private_torch.foreach_mul_(parts, 1 - lr * group["weight_decay"])
        indices_by_shape: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, matrix in enumerate(matrices):
            indices_by_shape[tuple(matrix.shape)].append(i)
        sharded = isinstance(matrices[0], DTensor)
        for shape, same_shape in indices_by_shape.items():
            scale = lr * lr_scale(shape, group["adjust_lr_fn"])
            for members in split_batches(same_shape, math.prod(shape)) if sharded else [same_shape]:
                stacked = torch.stack([full_tensor(shard_like(memory[i], updates[i])) for i in members])
                turned = orthogonalize(stacked, group["ns_coefficients"], group["ns_steps"], group["eps"])
                moves = [local_shard(matrices[i], move) for i, move in zip(members, turned.unbind(), strict=True)]
                private_torch.foreach_add_([parts[i] for i in members], moves, alpha=-scale)

    def _momentum_buffer(self, matrix: Tensor) -> Tensor:
        state = self.state[matrix]
        if MOMENTUM_BUFFER not in state:
            state[MOMENTUM_BUFFER] = torch.zeros_like(matrix, memory_format=torch.preserve_format)
        found = state[MOMENTUM_BUFFER]
        assert isinstance(found, Tensor)
        return found


def orthogonalize(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Newton-Schulz iteration, B m n -> B m n: moves the singular values of each matrix towards 1.

    In bfloat16 on a GPU, as in torch; in the dtype of the matrices on a CPU.
    """
    a, b, c = coefficients
    x = matrices.to(torch.bfloat16) if matrices.device.type == "cuda" else matrices.clone()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / x.flatten(1).norm(dim=1).clamp(min=eps)[:, None, None]
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


def split_batches(indices: list[int], elements: int) -> list[list[int]]:
    """Indices of matrices with this number of elements, in batches of at most MAX_GATHERED elements, or one matrix."""
    count = max(MAX_GATHERED // elements, 1)
    return [indices[start : start + count] for start in range(0, len(indices), count)]


def lr_scale(shape: tuple[int, ...], rule: str | None) -> float:
    """The factor of the learning rate for a matrix of this shape, by torch's `adjust_lr_fn`."""
    rows, columns = shape
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))

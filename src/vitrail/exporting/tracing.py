"""Trace a network for export, with or without normalization and softmax."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.config import pair
from vitrail.engines.export_metadata import ExportMetadata
from vitrail.engines.optional_packages import silence_exporters
from vitrail.models import Net, Swin
from vitrail.models.layers import Attention, QKTransform, QKVProjection
from vitrail.models.resnet import StandardizedConv
from vitrail.models.swin_layers import PositionBias, WindowAttention
from vitrail.models.windows import WindowPlan

# B images, H x W pixels, C channels; N tokens, D width, H heads, K = D // H

MAX_BATCH = 65536
"""Upper bound of a dynamic batch size."""


class ExportModule(nn.Module):
    """Pixels 0 to 255, B H W C, or normalized images, B C H W -> logits, probabilities or features.

    Resizing and cropping are not included, since they depend on the image.
    """

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(self, net: Net, metadata: ExportMetadata, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.net = fold_weight_standardization(copy.deepcopy(net).to("cpu").eval().requires_grad_(False)).to(dtype)
        fold_windows(self.net, pair(metadata.info.preprocess.image_size))
        for module in self.net.modules():
            if isinstance(module, Attention | WindowAttention):
                module.qkv = with_key_bias(module.qkv)  # type: ignore[assignment]
        if metadata.to != "pt2":  # torch runs its fused operator
            unfuse_attention(self.net)
        self.dtype, self.normalize_inside, self.output_type = dtype, metadata.normalize_inside, metadata.output_type
        self.multi_label = metadata.info.multi_label
        for name in ("mean", "std"):
            values = torch.tensor(getattr(metadata.info.preprocess, name), dtype=torch.float32)
            self.register_buffer(f"pixel_{name}", values[:, None, None])  # `mean` is also the name of an operator

    def forward(self, pixels: Tensor) -> Tensor:
        images = pixels
        if self.normalize_inside:
            images = (pixels.permute(0, 3, 1, 2).to(torch.float32) / 255 - self.pixel_mean) / self.pixel_std
        outputs: Tensor = self.net(images.to(self.dtype)).to(torch.float32)
        if self.output_type != "probabilities":
            return outputs
        return outputs.sigmoid() if self.multi_label else outputs.softmax(-1)


class FoldedConv(StandardizedConv):
    """A StandardizedConv whose stored weight is already standardized."""

    def kernel(self) -> Tensor:
        return self.weight


@torch.no_grad()
def fold_weight_standardization(net: Net) -> Net:
    """Standardize the weights of all StandardizedConv layers in place, instead of in every forward pass."""
    for module in net.modules():
        if isinstance(module, StandardizedConv):
            module.weight.copy_(module.kernel().clone())
            module.__class__ = FoldedConv
    return net


class FoldedBias(nn.Module):
    """The position bias of a Swin Transformer's block for maps of one size: nW H N N, or 1 H N N without a shift."""

    bias: Tensor
    mask: Tensor

    def __init__(self, module: PositionBias, plan: WindowPlan) -> None:
        super().__init__()
        bias = module.bias(plan)[None]
        mask = torch.zeros(1) if plan.mask is None else torch.where(plan.mask, module.mask_value, 0.0)[:, None]
        self.register_buffer("bias", bias)  # two buffers take less space than their sum
        self.register_buffer("mask", mask)
        self.shifted = plan.mask is not None

    def forward(self, plan: WindowPlan, like: Tensor) -> Tensor:
        """The bias, with the dtype of `like`."""
        return (self.bias + self.mask if self.shifted else self.bias).to(like.dtype)


@torch.no_grad()
def fold_windows(net: Net, image_size: tuple[int, int]) -> None:
    """Compute the windows and position biases of a Swin Transformer in place, instead of in every forward pass."""
    if not isinstance(net, Swin):
        return
    grids = net.config.stage_grids(net.config.grid_of(image_size))
    for name, module in net.named_modules():
        if isinstance(module, WindowAttention):
            grid = grids[int(name.split(".")[1])]
            plan = module.plan(grid, net.patch.weight)
            module.bias = FoldedBias(module.bias, plan)  # type: ignore[assignment]
            module.plan = partial(_same_plan, plan)  # type: ignore[method-assign]


def with_key_bias(qkv: QKVProjection) -> nn.Linear:
    """A plain Linear with the same outputs: the bias of the keys is zero."""
    plain = nn.Linear(qkv.in_features, qkv.out_features, bias=qkv.bias is not None)
    plain.weight = qkv.weight
    if qkv.bias is not None and qkv.key_bias:
        plain.bias = qkv.bias
    elif qkv.bias is not None:
        queries, values = qkv.bias.chunk(2)
        plain.bias = nn.Parameter(torch.cat([queries, torch.zeros_like(queries), values]), requires_grad=False)
    return plain


def _same_plan(plan: WindowPlan, grid: tuple[int, int], like: Tensor) -> WindowPlan:
    assert grid == plan.grid
    return plan


class PlainAttention(Attention):
    """Multi-head self-attention in plain operators, in a form that other engines fuse.

    The scale is part of the weights, and q, k and v are split before they are transposed: an int8 ViT-Ti/16 is about
    10 % faster in OpenVINO.
    """

    scale: float
    """Scale of q that is not part of the weights."""

    def mix(
        self,
        x: Tensor,
        qk_transform: QKTransform | None = None,
        weights_out: list[Tensor] | None = None,
        num_queries: int | None = None,
    ) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        q, k, bias = self.q_norm(q), self.k_norm(k), None  # each B H N K
        if qk_transform is not None:
            q, k, bias = qk_transform(q, k)
        if num_queries is not None:
            q, bias = q[:, :, :num_queries], None if bias is None else bias[:, :, :num_queries]
        logits = (q if self.scale == 1 else q * self.scale) @ k.transpose(-2, -1)  # B H N N
        weights = (logits if bias is None else logits + bias).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


@torch.no_grad()
def unfuse_attention(net: Net) -> None:
    """Replace Attention by PlainAttention, in place; the outputs stay the same up to rounding."""
    for module in net.modules():
        if type(module) is not Attention:
            continue
        width = module.out.in_features
        scale = (width // module.num_heads) ** -0.5
        # Relative position embeddings are multiplied with unscaled queries.
        folded = not module.has_qk_norm and getattr(net.config, "position", None) != "relative"
        for part in (module.qkv.weight, module.qkv.bias) if folded else ():
            if part is not None:
                part[:width] *= scale
        module.__class__ = PlainAttention
        cast(PlainAttention, module).scale = 1.0 if folded else scale


def trace(net: Net, metadata: ExportMetadata) -> torch.export.ExportedProgram:
    """Trace the network as it is exported, for the batch size of the metadata."""
    dtype = torch.bfloat16 if (metadata.to, metadata.precision) == ("pt2", "bfloat16") else torch.float32
    module = ExportModule(net, metadata, dtype).eval()
    shapes: Any = None
    if metadata.batch_size is None:
        shapes = ({0: torch.export.Dim("batch", min=1, max=MAX_BATCH)},)
    with silence_exporters(), torch.no_grad():
        return torch.export.export(module, (torch.from_numpy(example_input(metadata)),), dynamic_shapes=shapes)


def example_input(metadata: ExportMetadata, count: int | None = None) -> np.ndarray[Any, Any]:
    """Black images of the input's shape and dtype; `count` or the fixed batch size, else two."""
    dtype = np.uint8 if metadata.takes_uint8 else np.float32
    return np.zeros((count or metadata.batch_size or 2, *metadata.image_shape), dtype)

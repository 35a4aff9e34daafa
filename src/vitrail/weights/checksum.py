"""Checksum of a network's weights."""

from __future__ import annotations

import zlib

import torch
from torch import nn


def weights_checksum(net: nn.Module) -> str:
    """CRC-32 of a network's state dict, as eight hexadecimal digits."""
    checksum = 0
    for tensor in net.state_dict().values():
        checksum = zlib.crc32(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data, checksum)
    return f"{checksum:08x}"

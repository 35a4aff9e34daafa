"""Compiling a network block by block, for inference."""

from __future__ import annotations

import re
from typing import Any

from vitrail.models.base import BaseNet
from vitrail.runtime import private_torch

BLOCK = re.compile(r"(.*\.)?(blocks\.\d+|stages\.\d+\.\d+)")
"""Names of the blocks of a ViT, a Swin Transformer, and a ResNet."""
MAX_COMPILED = 64
"""Versions of one function: a block is compiled for every sequence of settings that networks of a process have."""


def compile_blocks(net: BaseNet, **options: Any) -> None:
    """torch.compile each block in place, with its options: for all methods of the network, hooks included.

    Equal blocks share their code, so this takes as long as compiling one of them, which happens in the first call. A
    second batch size compiles code for any batch size.
    """
    private_torch.raise_recompile_limit(MAX_COMPILED)
    for name, module in net.named_modules():
        if BLOCK.fullmatch(name):
            module.compile(**options)

"""Files in the formats of OpenAI's CLIP and open_clip, with the outputs of the original code.

`golden/open_clip_io.npz` holds names, shapes and outputs. The weights are drawn by name, as in the script that made it.
"""

from __future__ import annotations

import json
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conftest import golden
from safetensors.torch import save_file
from torch import Tensor, nn

State = dict[str, Tensor]


def draw(name: str, shape: list[int]) -> Tensor:
    """Random weights that depend only on the name; NumPy guarantees that RandomState's streams do not change."""
    noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(tuple(shape)).astype(np.float32)
    if len(shape) < 2:
        weights = 1 + 0.2 * noise if name.endswith(".weight") else 0.3 * noise
    elif name.endswith(("embedding", "query")):
        weights = 0.3 * noise
    else:
        weights = noise / np.float32(np.prod(shape[1:]) ** 0.5)
    return torch.from_numpy(np.asarray(weights, dtype=np.float32)).reshape(shape)


def images(height: int, width: int) -> Tensor:
    """Two images of unit variance."""
    return draw("images", [2, 3, height, width]) * (3 * height * width) ** 0.5


@cache
def _golden_values() -> dict[str, Any]:
    with np.load(golden("open_clip_io.npz")) as file:
        return dict(file)


def golden_value(name: str) -> Any:
    """A value of the golden file: text is parsed as JSON, numbers become a tensor."""
    value = _golden_values()[name]
    return json.loads(str(value)) if value.dtype.kind == "U" else torch.from_numpy(value)


@cache
def _random_state(case: str) -> State:
    return {name: draw(name, shape) for name, shape in golden_value(f"{case}.shapes").items()}


def state_dict_of(case: str) -> State:
    return dict(_random_state(case))


def openai_state_dict(half: bool = True) -> State:
    """OpenAI's state dict as published: matrices in half precision, and three integers besides the weights."""
    state = state_dict_of("openai")
    if half:
        state |= {name: state[name].half() for name in golden_value("openai.half")}
    numbers = {"input_resolution": 32, "context_length": 5, "vocab_size": 11}
    return state | {name: torch.tensor(value) for name, value in numbers.items()}


def open_clip_config(case: str, **preprocess: Any) -> dict[str, Any]:
    """The content of open_clip_config.json."""
    return {"model_cfg": golden_value(f"{case}.config"), "preprocess_cfg": preprocess}


def save_repository(case: str, folder: Path, **preprocess: Any) -> Path:
    """Writes a folder as open_clip's push_to_hf_hub does."""
    save_file(state_dict_of(case), folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text(json.dumps(open_clip_config(case, **preprocess)))
    return folder


class Node(nn.Module):
    """A module for each part of a dotted name; TorchScript requires a forward method."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class QuickGELU(Node):
    pass


def as_module(state: State) -> nn.Module:
    """A tree of modules with this state dict."""
    root: nn.Module = Node()
    for name, value in state.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, Node())
            module = getattr(module, part)
        module.register_buffer(leaf, value)
    return root


def save_torchscript(state: State, path: Path, quick: bool = False) -> Path:
    """Writes a TorchScript archive of these tensors with torch.jit."""
    root = as_module(state)
    if quick:
        mlp = root.get_submodule("visual.transformer.resblocks.0.mlp")
        mlp.add_module("gelu", QuickGELU())
    torch.jit.script(root).save(path)
    return path

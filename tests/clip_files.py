"""Files as OpenAI's CLIP and open_clip publish them, with weights drawn by name, and what their own code made of them.

`golden/open_clip_io.npz` holds names, shapes and outputs; the weights are drawn here as they were there.
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
    """Numbers that depend on the name alone; NumPy keeps RandomState's streams as they are."""
    noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(tuple(shape)).astype(np.float32)
    if len(shape) < 2:
        drawn = 1 + 0.2 * noise if name.endswith(".weight") else 0.3 * noise
    elif name.endswith(("embedding", "query")):
        drawn = 0.3 * noise
    else:
        drawn = noise / np.float32(np.prod(shape[1:]) ** 0.5)
    return torch.from_numpy(np.asarray(drawn, dtype=np.float32)).reshape(shape)


def images(height: int, width: int) -> Tensor:
    """Two images of unit variance."""
    return draw("images", [2, 3, height, width]) * (3 * height * width) ** 0.5


@cache
def _recorded() -> dict[str, Any]:
    with np.load(golden("open_clip_io.npz")) as found:
        return dict(found)


def recorded(name: str) -> Any:
    """A value of the golden file: text as what it says in JSON, numbers as a tensor."""
    value = _recorded()[name]
    return json.loads(str(value)) if value.dtype.kind == "U" else torch.from_numpy(value)


@cache
def _drawn(case: str) -> State:
    return {name: draw(name, shape) for name, shape in recorded(f"{case}.shapes").items()}


def state_of(case: str) -> State:
    return dict(_drawn(case))


def openai(half: bool = True) -> State:
    """OpenAI's dictionary, as its published archive gives it: matrices in half precision, three numbers beside."""
    state = state_of("openai")
    if half:
        state |= {name: state[name].half() for name in recorded("openai.half")}
    numbers = {"input_resolution": 32, "context_length": 5, "vocab_size": 11}
    return state | {name: torch.tensor(value) for name, value in numbers.items()}


def sidecar(case: str, **preprocess: Any) -> dict[str, Any]:
    """open_clip_config.json."""
    return {"model_cfg": recorded(f"{case}.config"), "preprocess_cfg": preprocess}


def repository(case: str, folder: Path, **preprocess: Any) -> Path:
    """A folder as open_clip's push_to_hf_hub fills it."""
    save_file(state_of(case), folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text(json.dumps(sidecar(case, **preprocess)))
    return folder


class Branch(nn.Module):
    """A module for each part of a dotted name; forward is only there to be compiled."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class QuickGELU(Branch):
    pass


def as_module(state: State) -> nn.Module:
    """The tree of modules whose state dict this is."""
    root: nn.Module = Branch()
    for name, value in state.items():
        *path, leaf = name.split(".")
        node = root
        for part in path:
            if not hasattr(node, part):
                node.add_module(part, Branch())
            node = getattr(node, part)
        node.register_buffer(leaf, value)
    return root


def scripted(state: State, path: Path, quick: bool = False) -> Path:
    """A TorchScript archive with these tensors, written by torch."""
    root = as_module(state)
    if quick:
        mlp = root.get_submodule("visual.transformer.resblocks.0.mlp")
        mlp.add_module("gelu", QuickGELU())
    torch.jit.script(root).save(path)
    return path

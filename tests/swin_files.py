"""Files in the format of Microsoft's Swin Transformer, with the outputs of the original code.

`golden/microsoft_swin_io.npz` holds names, shapes and outputs. The weights are drawn by name. The file is written by

    python tests/swin_files.py CHECKOUT

with a checkout of github.com/microsoft/Swin-Transformer (here: commit f82860b), whose code it imports and runs.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from clip_files import draw
from torch import Tensor

GOLDEN = Path(__file__).parent / "golden" / "microsoft_swin_io.npz"
SMALL: dict[str, Any] = {"embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4, "num_classes": 5}
CASES: dict[str, dict[str, Any]] = {
    "v1": {"version": 1, "img_size": 64, **SMALL},
    "v1 small map": {"version": 1, "img_size": 32, **SMALL},  # its last map has one window
    "v1 clamped": {"version": 1, "img_size": 16, **SMALL},  # its last map is smaller than the window
    "v1 four stages": {
        "version": 1, "img_size": 64, **SMALL, "depths": [1, 2, 2, 1], "num_heads": [1, 2, 2, 4], "window_size": 2,
    },
    "v2": {"version": 2, "img_size": 64, **SMALL},
    "v2 pretrained": {"version": 2, "img_size": 32, **SMALL, "pretrained_window_sizes": [3, 2]},
    "v2 large scale": {"version": 2, "img_size": 64, **SMALL, "logit_scale": 5.0},  # above its upper bound, ln 100
}  # fmt: skip
"""Arguments of the original's classes; `logit_scale` replaces the drawn values."""
BUFFERS = ("relative_position_index", "relative_coords_table", "attn_mask")
RESIZED_WINDOW = 7
"""Window size to which the original's loader resizes the tables of the case "v1"."""


def images(side: int) -> Tensor:
    """Two images of unit variance."""
    return draw("images", [2, 3, side, side]) * (3 * side * side) ** 0.5


@cache
def golden_values() -> dict[str, Any]:
    with np.load(GOLDEN) as file:
        return {name: json.loads(str(v)) if v.dtype.kind == "U" else torch.from_numpy(v) for name, v in file.items()}


def state_dict_of(case: str) -> dict[str, Tensor]:
    """The weights and buffers of a case, as the original's file has them."""
    values = golden_values()
    state = {name: _drawn(case, name, shape) for name, shape in values[f"{case}.shapes"].items()}
    buffers = {name.partition(".buffer.")[2]: v for name, v in values.items() if name.startswith(f"{case}.buffer.")}
    return state | buffers


def _drawn(case: str, name: str, shape: list[int]) -> Tensor:
    scale = CASES[case].get("logit_scale")
    if scale is not None and name.endswith("logit_scale"):
        return torch.full(shape, scale)
    return draw(f"{case} {name}", shape)


def make_golden_file(checkout: Path) -> None:
    """Run the original's code on each case and write the golden file."""
    sys.path.insert(0, str(checkout))
    from models.swin_transformer import SwinTransformer  # type: ignore[import-not-found]
    from models.swin_transformer_v2 import SwinTransformerV2  # type: ignore[import-not-found]

    values: dict[str, Any] = {}
    for case, arguments in CASES.items():
        arguments = {k: v for k, v in arguments.items() if k not in ("version", "logit_scale")}
        make = SwinTransformer if CASES[case]["version"] == 1 else SwinTransformerV2
        model = make(**arguments, drop_path_rate=0.0).eval()
        state = model.state_dict()
        shapes = {name: list(t.shape) for name, t in state.items() if not name.endswith(BUFFERS)}
        values[f"{case}.shapes"] = json.dumps(shapes)
        for name, tensor in state.items():
            if name.endswith(BUFFERS):
                values[f"{case}.buffer.{name}"] = tensor.numpy()
        model.load_state_dict(state | {name: _drawn(case, name, shape) for name, shape in shapes.items()})
        x = images(arguments["img_size"])
        with torch.no_grad():
            values[f"{case}.logits"] = model(x).numpy()
            maps = model.patch_embed(x)
            for stage, layer in enumerate(model.layers):  # the original merges at the end of a stage
                for block in layer.blocks:
                    maps = block(maps)
                values[f"{case}.stage{stage}"] = maps.mean(-1).numpy()
                maps = maps if layer.downsample is None else layer.downsample(maps)
        if case == "v1":
            values["v1.resized"] = _resized_table(model, make, arguments)
    np.savez_compressed(GOLDEN, **values)


def _resized_table(model: Any, make: Any, arguments: dict[str, Any]) -> Any:
    """The first table of position biases after the original's loader has resized it."""
    import logging
    import tempfile
    from types import SimpleNamespace

    from utils import load_pretrained  # type: ignore[import-not-found]

    side = RESIZED_WINDOW * arguments["img_size"] // arguments["window_size"]
    larger = make(**arguments | {"window_size": RESIZED_WINDOW, "img_size": side})
    with tempfile.NamedTemporaryFile(suffix=".pth") as file:
        torch.save({"model": model.state_dict()}, file.name)
        config = SimpleNamespace(MODEL=SimpleNamespace(PRETRAINED=file.name))
        load_pretrained(config, larger, logging.getLogger("original"))
    return larger.layers[0].blocks[0].attn.relative_position_bias_table.detach().numpy()


if __name__ == "__main__":
    make_golden_file(Path(sys.argv[1]))

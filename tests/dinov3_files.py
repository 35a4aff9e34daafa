"""Files in the format of DINOv3's own code, with its outputs.

`golden/dinov3_io.npz` holds names, shapes, fixed values and outputs. The weights are drawn by name. It is written by

    python tests/dinov3_files.py CHECKOUT

with a checkout of github.com/facebookresearch/dinov3 (here: commit 6876159), whose code it imports and runs.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from clip_files import draw, images
from torch import Tensor

GOLDEN = Path(__file__).parent / "golden" / "dinov3_io.npz"
RELEASED: dict[str, Any] = {
    "img_size": 224,
    "patch_size": 16,
    "pos_embed_rope_dtype": "fp32",
    "layerscale_init": 1e-5,
    "norm_layer": "layernormbf16",
    "n_storage_tokens": 4,
    "mask_k_bias": True,
}
"""Arguments that all released ViTs share."""
SMALL: dict[str, Any] = {**RELEASED, "embed_dim": 64, "depth": 2, "num_heads": 2}
CASES: dict[str, dict[str, Any]] = {
    "mlp": {**SMALL, "ffn_ratio": 2.0},
    "swiglu": {**SMALL, "ffn_ratio": 6, "ffn_layer": "swiglu"},
    "7b": {
        **SMALL,
        "ffn_ratio": 3,
        "ffn_layer": "swiglu64",
        "qkv_bias": False,
        "untie_global_and_local_cls_norm": True,
    },
    "other base": {**SMALL, "num_heads": 4, "pos_embed_rope_base": 1000.0},
    "as released": {**SMALL, "ffn_ratio": 2.0},
}
FIXED = ("rope_embed.periods", ".bias_mask")
AS_RELEASED = "as released"
"""The case whose periods are rounded to bfloat16 and whose first mask is zero, as in released files."""
SIZES = ((64, 64), (48, 112))
"""Heights and widths of the images."""


@cache
def golden_values() -> dict[str, Any]:
    with np.load(GOLDEN) as file:
        return {name: json.loads(str(v)) if v.dtype.kind == "U" else torch.from_numpy(v) for name, v in file.items()}


def state_dict_of(case: str) -> dict[str, Tensor]:
    """The weights and fixed values of a case, as the original's file has them."""
    values = golden_values()
    state = {name: draw(f"{case} {name}", shape) for name, shape in values[f"{case}.shapes"].items()}
    fixed = {name.partition(".fixed.")[2]: v for name, v in values.items() if name.startswith(f"{case}.fixed.")}
    return state | fixed


def make_golden_file(checkout: Path) -> None:
    """Run the original's code on each case and write the golden file."""
    sys.path.insert(0, str(checkout))
    from dinov3.models.vision_transformer import DinoVisionTransformer  # type: ignore[import-not-found]

    values: dict[str, Any] = {}
    for case, arguments in CASES.items():
        model = DinoVisionTransformer(**arguments)
        model.init_weights()
        state = model.eval().state_dict()
        if case == AS_RELEASED:
            state["rope_embed.periods"] = state["rope_embed.periods"].bfloat16().float()
            state["blocks.0.attn.qkv.bias_mask"] = torch.zeros_like(state["blocks.0.attn.qkv.bias_mask"])
        shapes = {name: list(t.shape) for name, t in state.items() if not name.endswith(FIXED)}
        values[f"{case}.shapes"] = json.dumps(shapes)
        values |= {f"{case}.fixed.{name}": t.numpy() for name, t in state.items() if name.endswith(FIXED)}
        model.load_state_dict(state | {name: draw(f"{case} {name}", shape) for name, shape in shapes.items()})
        for height, width in SIZES:
            with torch.no_grad():
                outputs = model.forward_features(images(height, width))
            values[f"{case}.{height}x{width}.class"] = outputs["x_norm_clstoken"].numpy()
            values[f"{case}.{height}x{width}.patches"] = outputs["x_norm_patchtokens"].mean(-1).numpy()
    np.savez_compressed(GOLDEN, **values)


if __name__ == "__main__":
    make_golden_file(Path(sys.argv[1]))

"""The SwinConfig of a file: sizes from the tensors, conventions from the library; what the formats cannot express."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from vitrail.config import PreprocessConfig, SwinConfig, pair
from vitrail.config.swin import Grid, WindowRule
from vitrail.errors import FormatError
from vitrail.weights.archive import Archive
from vitrail.weights.family_defaults import default_preprocess
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.swin_names import SwinNaming

UNCOVERED = {"microsoft": "refuse", "timm": "refuse", "torchvision": "ignore", "huggingface": "pad"}
"""Library -> what it does with images whose size is not a multiple of the patch size."""
MASK_VALUE = -100.0
RELEASED_V2 = {7: 224, 8: 256, 12: 192, 16: 256, 24: 384}
"""Window size -> image size of the released versions 2."""


def is_swin(archive: Archive, naming: SwinNaming) -> bool:
    """Whether the tensors are those of a Swin Transformer under this library's names."""
    first = naming.block_name(0, 0)
    marks = (f"{naming.attention}relative_position_bias_table", f"{naming.attention}logit_scale")
    return f"{naming.patch}.weight" in archive.tensors and any(f"{first}{mark}" in archive.tensors for mark in marks)


def infer_config(archive: Archive, naming: SwinNaming, stated: dict[str, Any]) -> tuple[SwinConfig, list[str]]:
    """The config of a file, and notes.

    `stated`: fields that a sidecar gives, such as image_size and window_size; `windows_in_use`: window size of each
    stage after it was adapted to small maps.
    """
    stated = dict(stated)
    names, library = archive.tensors, naming.library
    _reject_unsupported(archive, naming)
    depths = _depths(archive, naming)
    version = 2 if _any_block(archive, naming, depths, f"{naming.attention}logit_scale") else 1
    width, channels, *patch = _shape(archive, naming, f"{naming.patch}.weight")
    hidden = _block_shape(archive, naming, depths, f"{naming.up}.weight")
    heads = tuple(_num_heads(archive, naming, stage, blocks, version) for stage, blocks in enumerate(depths))
    biases = ("qkv.bias", "q_bias", "v_bias", "query.bias", "value.bias")
    head = next((archive.shape(n) for n in (f"{naming.head}.weight", f"{naming.head}.bias") if n in names), (0,))
    options: dict[str, Any] = {
        "version": version,
        "patch_size": tuple(patch),
        "channels": channels,
        "num_classes": head[0],
        "width": width,
        "depths": depths,
        "num_heads": heads,
        "mlp_ratio": hidden[0] / hidden[1],
        "qkv_bias": any(_any_block(archive, naming, depths, f"{naming.attention}{bias}") for bias in biases),
        "window_rule": _window_rule(library, version),
        "uncovered": UNCOVERED[library],
    }
    windows, notes = _windows(archive, naming, options, stated)
    return SwinConfig(**options | windows | {k: v for k, v in stated.items() if k not in windows}), notes


def _window_rule(library: str, version: int) -> WindowRule:
    """transformers decides the windows of version 1 in each forward pass, as the original does for its image size."""
    if library == "huggingface" and version == 1:
        return "microsoft"
    rules: dict[str, WindowRule] = {"microsoft": "microsoft", "timm": "timm", "torchvision": "torchvision"}
    return rules.get(library, "huggingface")


def _reject_unsupported(archive: Archive, naming: SwinNaming) -> None:
    for name in ("absolute_pos_embed", "embeddings.position_embeddings"):
        if name in archive.tensors:
            raise FormatError(
                f"this Swin Transformer has absolute position embeddings ({name}), which no released one has and "
                "vitrail does not support."
            )


def _depths(archive: Archive, naming: SwinNaming) -> tuple[int, ...]:
    """The number of blocks in each stage."""
    number = re.escape(naming.block)
    for placeholder in ("{s}", "{i}", "{odd}"):
        number = number.replace(re.escape(placeholder), r"(\d+)")
    matches = [match for name in archive.tensors if (match := re.match(number, name))]
    torchvision = "{odd}" in naming.block  # whose even numbers are merges
    blocks = [
        (int(m[1]) // 2 if torchvision else int(m[1]), int(m[2])) for m in matches if not torchvision or int(m[1]) % 2
    ]
    stages = range(1 + max(stage for stage, _ in blocks))
    return tuple(1 + max((block for s, block in blocks if s == stage), default=-1) for stage in stages)


def _shape(archive: Archive, naming: SwinNaming, name: str) -> tuple[int, ...]:
    if name not in archive.tensors:
        raise FormatError(f"read as {naming.library} (Swin), the tensors do not fit: missing {name}.")
    return archive.shape(name)


def _any_block(archive: Archive, naming: SwinNaming, depths: tuple[int, ...], name: str) -> bool:
    return any(
        f"{naming.block_name(s, i)}{name}" in archive.tensors for s, blocks in enumerate(depths) for i in range(blocks)
    )


def _block_shape(archive: Archive, naming: SwinNaming, depths: tuple[int, ...], name: str) -> tuple[int, ...]:
    """The shape of a tensor of the first block that has it: a file may lack one, which is reported later."""
    for stage, blocks in enumerate(depths):
        for block in range(blocks):
            if (full := f"{naming.block_name(stage, block)}{name}") in archive.tensors:
                return archive.shape(full)
    return _shape(archive, naming, f"{naming.block_name(0, 0)}{name}")


def _stage_shape(archive: Archive, naming: SwinNaming, stage: int, blocks: int, name: str) -> tuple[int, ...] | None:
    found = (f"{naming.block_name(stage, block)}{name}" for block in range(blocks))
    return next((archive.shape(full) for full in found if full in archive.tensors), None)


def _num_heads(archive: Archive, naming: SwinNaming, stage: int, blocks: int, version: int) -> int:
    name = f"{naming.attention}{'relative_position_bias_table' if version == 1 else 'logit_scale'}"
    shape = _stage_shape(archive, naming, stage, blocks, name)
    if shape is None:
        return _shape(archive, naming, f"{naming.block_name(stage, 0)}{name}")[0]
    return shape[1] if version == 1 else shape[0]


def _windows(
    archive: Archive, naming: SwinNaming, options: dict[str, Any], stated: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Options for the image size and the windows: stated, or found in the tensors, or those of the released models."""
    rows = [_table_rows(archive, naming, stage, blocks) for stage, blocks in enumerate(options["depths"])]
    in_use, size = stated.pop("windows_in_use", None), stated.get("image_size")
    if in_use:
        windows = [pair(tuple(window)) for window in in_use]
        side = max(max(window) for window in windows)
        found = _describe(
            options | {"image_size": size}, [(side, side)], lambda config, s: config.table_window(s) == windows[s]
        )
        return {"image_size": size, **(found or {"stage_window_sizes": tuple(windows)})}, []
    if None in rows:  # version 2 without buffers
        return _stated_windows(stated), []
    notes, squares = [], [_square_window(count) for count in rows]
    size = size or _image_size_of_masks(archive, naming, options["patch_size"], squares[0])
    if not size:
        scale = 2 ** (len(rows) - 1)
        size = tuple(scale * (squares[-1] or 7) * patch for patch in options["patch_size"])
        notes.append(
            f"the file does not store the image size: {size[0]}x{size[1]} is assumed, for which the last stage has one "
            "window; pass image_size=... if that is wrong."
        )
    given = stated.get("window_size", ())
    candidates = [pair(given)] if isinstance(given, int) or len(given) == 2 else []
    candidates += [(window, window) for window in squares if window]
    found = _describe(
        options | {"image_size": size}, candidates, lambda config, s: _rows(config.table_window(s)) == rows[s]
    )
    if not found and None in squares:
        raise FormatError(
            f"the tables of position biases have {rows} rows: windows that are not square at image_size={size}, which "
            "does not fit; pass image_size=(height, width)."
        )
    found = found or {"stage_window_sizes": tuple((window, window) for window in squares if window)}
    return {"image_size": size, **found, **_pretrained_windows(archive, naming, len(rows))}, notes


def _stated_windows(stated: dict[str, Any]) -> dict[str, Any]:
    if "window_size" not in stated:
        raise FormatError(
            "the file does not store the window size of this Swin Transformer V2; pass window_size=8 and "
            "image_size=256, or the model's own; for models that were pre-trained with another window, such as "
            "window12to16 and window12to24, also pretrained_window_sizes=12,12,12,6, for the others 0,0,0,0."
        )
    window = pair(stated["window_size"])
    return {"window_size": window, "image_size": stated.get("image_size", RELEASED_V2.get(window[0], 32 * window[0]))}


def _describe(
    options: dict[str, Any], candidates: Sequence[Grid], fits: Callable[[SwinConfig, int], bool]
) -> dict[str, Any]:
    """The first window size that, adapted to the maps by the library's rule, fits every stage; empty if none does."""
    for window in candidates:
        config = SwinConfig(**options | {"window_size": window})
        if all(fits(config, stage) for stage in range(len(config.depths))):
            return {"window_size": window}
    return {}


def _table_rows(archive: Archive, naming: SwinNaming, stage: int, blocks: int) -> int | None:
    """Rows of a stage's table of position biases, or of distances (version 2); None without either."""
    table = _stage_shape(archive, naming, stage, blocks, f"{naming.attention}relative_position_bias_table")
    distances = _stage_shape(archive, naming, stage, blocks, f"{naming.attention}relative_coords_table")
    return table[0] if table else math.prod(distances[1:3]) if distances else None


def _rows(window: Grid) -> int:
    return (2 * window[0] - 1) * (2 * window[1] - 1)


def _square_window(rows: int | None) -> int | None:
    side = math.isqrt(rows or 0)
    return (side + 1) // 2 if rows and side * side == rows and side % 2 else None


def _image_size_of_masks(archive: Archive, naming: SwinNaming, patch: tuple[int, ...], window: int | None) -> Any:
    """The image size from the mask of the first shifted block, if the file has it; for a square image."""
    name = f"{naming.block_name(0, 1)}attn_mask"
    if name not in archive.tensors or not window:
        return None
    windows = math.isqrt(archive.shape(name)[0])
    return tuple(windows * window * side for side in patch)


def _pretrained_windows(archive: Archive, naming: SwinNaming, stages: int) -> dict[str, Any]:
    """Window sizes of the pre-training, which scale the stored tables of distances (version 2)."""
    sizes = []
    for stage in range(stages):
        name = f"{naming.block_name(stage, 0)}{naming.attention}relative_coords_table"
        if name not in archive.tensors or archive.shape(name)[1] == 1:
            return {}
        window = (archive.shape(name)[1] + 1) // 2
        largest = 2 ** (3 * float(archive.tensors[name].max())) - 1  # of t = 8 d / (w - 1)
        trained = 1 + round(8 * (window - 1) / largest)
        sizes.append(0 if trained == window else trained)
    return {"pretrained_window_sizes": tuple(sizes)} if any(sizes) else {}


def swin_info(
    archive: Archive,
    config: SwinConfig,
    preprocess: PreprocessConfig | None = None,
    notes: Sequence[str] = (),
    labels: tuple[str, ...] | None = None,
) -> ModelInfo:
    """The model info of a file; without stated preprocessing, that of the released models is assumed."""
    family = "Swin" if config.version == 1 else "SwinV2"
    if preprocess is None:
        preprocess = default_preprocess(family, config)
        notes = [*notes, f"the file does not store preprocessing; {family}'s default is used: {preprocess.summary()}."]
    return ModelInfo(
        config=config,
        preprocess=preprocess,
        labels=labels,
        family=family,
        task="classify" if config.num_classes else "embed",
        origin=archive.source,
        notes=tuple(notes),
    )


def unsupported_parts(naming: SwinNaming, info: ModelInfo) -> list[str]:
    """What the library's code cannot compute, or its files cannot state."""
    config = info.config
    assert isinstance(config, SwinConfig)
    library, square = naming.library, all(height == width for height, width in config.window_sizes)
    uniform = len(set(config.window_sizes)) == 1
    parts = {
        "windows that are not square": not square,
        "windows whose size differs between stages": not uniform
        and (library in ("torchvision", "huggingface", "microsoft") or config.version == 2),
        "pretrained_window_sizes": library == "torchvision" and any(config.pretrained_window_sizes),
        "a network without a head": library == "torchvision" and not config.num_classes,
        f"{config.channels} channels (torchvision has 3)": library == "torchvision" and config.channels != 3,
        "an image that is not square": library in ("microsoft",) and len(set(pair(config.image_size))) > 1,
        "query, key and value projections without bias": library == "torchvision" and not config.qkv_bias,
    }
    reasons = [name for name, present in parts.items() if present]
    if not reasons and config.version == 1 and not _same_tables(config, library):
        reasons.append(f"tables of position biases for these windows at image_size={config.image_size}")
    return reasons


def _same_tables(config: SwinConfig, library: str) -> bool:
    """Whether the library builds tables of the same sizes for this config."""
    stages = range(len(config.depths))
    if library == "huggingface":
        return [config.table_window(stage) for stage in stages] == list(config.window_sizes)
    theirs = config.replace(window_rule=_window_rule(library, config.version))
    return [config.table_window(stage) for stage in stages] == [theirs.table_window(stage) for stage in stages]


def inexact_conventions(naming: SwinNaming, info: ModelInfo) -> list[str]:
    """Values fixed in the library's code that differ from the config's, at the config's image size."""
    config = info.config
    assert isinstance(config, SwinConfig)
    rule = _window_rule(naming.library, config.version)
    parts = {
        f"a norm epsilon of {config.norm_eps:g} ({naming.library} has 1e-5)": config.norm_eps != 1e-5,
        f"mask_value={config.mask_value:g}": config.mask_value != MASK_VALUE
        and not (naming.library == "huggingface" and config.version == 2),
        f"window_rule={config.window_rule!r} at image_size={config.image_size}": _places_differently(config, rule),
    }
    return [name for name, present in parts.items() if present]


def _places_differently(config: SwinConfig, rule: WindowRule) -> bool:
    """Whether the windows of any stage differ between two rules at the config's image size."""
    theirs = config.replace(window_rule=rule)
    return any(
        _placement(config, stage, grid) != _placement(theirs, stage, grid)
        for stage, grid in enumerate(config.stage_grids(config.grid))
    )


def _placement(config: SwinConfig, stage: int, grid: Grid) -> tuple[Any, bool]:
    shape = config.window_placement(stage).on(grid)
    if config.depths[stage] == 1:  # no block is shifted
        shape = shape._replace(shift=(0, 0))
    padded = any(side % size for side, size in zip(grid, shape.size, strict=True))
    return shape, padded and any(shape.shift) and config.window_rule == "timm"

"""Versions of the files vitrail writes: run settings, model folders, checkpoints, export metadata, feature files.

Version 2 uses the field names of this release. Version 1, which had other names for many fields, is upgraded when it is
read; this module is the only place that knows the old names. A version that is newer than this release is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from vitrail.errors import FormatError

VERSION = 2

Document = Literal["run", "model", "checkpoint", "result", "export", "features", "index", "parts"]

KEYS: dict[Document, str] = {
    "run": "format_version",
    "model": "version",
    "checkpoint": "format_version",
    "result": "format_version",
    "export": "version",
    "features": "format_version",
    "index": "format_version",
    "parts": "format_version",
}
"""The field that holds a document's version. Version 1 of runs, checkpoints, results and features has none."""

RENAMED: dict[str, dict[str, str]] = {
    "run": {
        "image": "image_size",
        "start": "init_from",
        "batch": "batch_size",
        "accumulate": "grad_accum_steps",
        "recompute": "gradient_checkpointing",
    },
    "run.data": {
        "picture": "image_column",
        "label": "label_column",
        "classes": "class_names",
        "bad_share": "max_bad_fraction",
    },
    "run.augment": {
        "layers": "num_ops",
        "jitter": "color_jitter",
        "mix_chance": "mix_prob",
        "unmixed": "mix_off",
    },
    "run.classify": {"smoothing": "label_smoothing", "weights": "class_weights"},
    "run.masked_patch": {"share": "mask_ratio", "masked": "mask_token_prob", "replaced": "random_patch_prob"},
    "run.distill": {"share": "alpha"},
    "run.optim": {"clip": "grad_clip", "train": "trainable", "head_lr": "head_lr_factor"},
    "run.schedule": {"floor": "min_lr_ratio"},
    "preprocess": {"image": "image_size", "centre": "crop_rounding"},
    "vit": {
        "image": "image_size",
        "patch": "patch_size",
        "classes": "num_classes",
        "heads": "num_heads",
        "mlp": "mlp_dim",
        "registers": "num_registers",
        "path_dropout": "drop_path",
        "position_std": "position_init_std",
    },
    "stem": {"width": "width_factor"},
    "bit": {"image": "image_size", "classes": "num_classes", "width": "width_factor"},
    "model": {"several": "multi_label", "kind": "config_type"},
    "checkpoint": {
        "best": "best_score",
        "stale": "evaluations_since_best",
        "skipped": "skipped_steps",
        "seconds": "elapsed_seconds",
        "meter": "metric_sums",
        "stream": "stream_states",
        "unwritten": "unwritten_metrics",
        "unreadable": "unreadable_images",
        "began": "model_origin",
        "pictures": "num_images",
        "data": "data_fingerprint",
        "teacher": "teacher_checksum",
        "total": "total_steps",
        "evaluation_due": "evaluation_pending",
        "ran_on": "environment",
    },
    "result": {"stopped": "stop_reason", "compared": "comparisons"},
    "export": {"card": "model_info"},
    "features": {"place": "features", "pictures": "images", "normalise": "normalize", "batch": "batch_size"},
}
"""Section of a document -> old field name -> new field name."""

NEW_VALUES: dict[tuple[str, str], dict[str, str]] = {
    ("run.masked_patch", "target"): {"mean-colour": "mean-color"},
    ("features", "place"): {
        "what the head sees": "head input",
        "the last layer's token": "last layer, token",
        "the last layer's mean": "last layer, mean",
        "the last layer's token+mean": "last layer, token+mean",
    },
}
"""Section and field -> old value -> new value."""


def upgrade(document: Document, values: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the fields of a document to those of this release, and drop its version; FormatError if it is newer."""
    key = KEYS[document]
    if not isinstance(values, Mapping):
        raise TypeError(f"expected a JSON object, got {type(values).__name__}")
    version = values.get(key, 1)
    if version not in (1, VERSION):
        raise FormatError(f"got {key}={version!r}, expected at most {VERSION}; a newer vitrail wrote this file.")
    rest = {name: value for name, value in values.items() if name != key}
    if document == "run":  # early runs of version 2 have the old name, too
        rest = _upgrade_trackers(rest)
    if version == VERSION and document != "export":  # as have early exports
        return rest
    upgraders = {"run": _upgrade_run, "model": _upgrade_model, "result": _upgrade_result, "features": _upgrade_features}
    return upgraders[document](rest) if document in upgraders else _rename_fields(document, rest)


def _rename_fields(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    names = RENAMED.get(section, {})  # a section that is newer than version 1 has none
    return {
        names.get(name, name): NEW_VALUES.get((section, name), {}).get(value, value)
        if isinstance(value, str)
        else value
        for name, value in values.items()
    }


def _upgrade_model(values: dict[str, Any]) -> dict[str, Any]:
    network = _upgrade_network(values["model"])
    preprocess = _rename_fields("preprocess", values["preprocess"])
    return _rename_fields("model", values) | {"model": network, "preprocess": preprocess}


def _upgrade_run(values: dict[str, Any]) -> dict[str, Any]:
    found = _rename_fields("run", values)
    for name, part in found.items():
        if isinstance(part, Mapping):
            found[name] = _upgrade_network(part) if name == "model" else _rename_fields(_section(name), part)
    if "compare" in found:
        found["compare"] = [_upgrade_override(text) for text in found["compare"]]
    return found


def _upgrade_trackers(values: dict[str, Any]) -> dict[str, Any]:
    """`tensorboard: true` -> `trackers: ["tensorboard"]`."""
    if "tensorboard" not in values:
        return values
    rest = {name: value for name, value in values.items() if name != "tensorboard"}
    return {"trackers": ["tensorboard"] if values["tensorboard"] else [], **rest}


def _upgrade_result(values: dict[str, Any]) -> dict[str, Any]:
    found = _rename_fields("result", values)
    return found | {"comparisons": [_upgrade_result(other) for other in found.get("comparisons", [])]}


def _upgrade_features(values: dict[str, Any]) -> dict[str, Any]:
    found = _rename_fields("features", values)
    if isinstance(found.get("preprocess"), Mapping):
        found["preprocess"] = _rename_fields("preprocess", found["preprocess"])
    return found


def _upgrade_network(values: Mapping[str, Any]) -> dict[str, Any]:
    found = _rename_fields("vit" if "depth" in values else "bit", values)
    if isinstance(found.get("stem"), Mapping):
        found["stem"] = _rename_fields("stem", found["stem"])
    return found


def _section(name: str) -> str:
    return name if name in RENAMED else f"run.{name}"


def _upgrade_override(text: str) -> str:
    """`model.heads=4` -> `model.num_heads=4`."""
    path, equals, value = text.partition("=")
    *outer, name = path.split(".")
    sections = {(): ("run",), ("model",): ("vit", "bit"), ("model", "stem"): ("stem",)}
    for section in sections.get(tuple(outer), (_section(".".join(outer)),)):
        name = RENAMED.get(section, {}).get(name, name)
    return ".".join((*outer, name)) + equals + value

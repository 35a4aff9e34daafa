"""Read a checkpoint of any format; write a network in any format that can represent it."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.config import NetConfig, SwinConfig
from vitrail.errors import CheckpointError, FormatError, ModelError, NotFoundError, did_you_mean, first_line
from vitrail.models import Net, build
from vitrail.models.families import FAMILIES
from vitrail.plugins import load_plugin, plugin_names
from vitrail.weights import dinov3, google, google_bit, open_clip
from vitrail.weights.archive import Archive, align_tensor, open_archive
from vitrail.weights.facebook import FACEBOOK
from vitrail.weights.family_defaults import default_preprocess, family_conventions
from vitrail.weights.file_type import DOWNLOAD_AGAIN, summarize_names
from vitrail.weights.format import Format
from vitrail.weights.huggingface import HUGGINGFACE
from vitrail.weights.huggingface_config import check_model_type
from vitrail.weights.microsoft import MICROSOFT
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.native import NATIVE
from vitrail.weights.sidecars import stated_model
from vitrail.weights.size_limits import check_names, check_sizes
from vitrail.weights.timm import TIMM_FORMAT
from vitrail.weights.timm_swin import TIMM_SWIN
from vitrail.weights.tipsv2 import TIPSV2
from vitrail.weights.torchvision import TORCHVISION
from vitrail.weights.torchvision_swin import TORCHVISION_SWIN
from vitrail.weights.unsupported import reject_architecture, reject_tensors

FORMATS: tuple[Format, ...] = (
    NATIVE,
    *dinov3.FORMATS,
    TIPSV2,
    FACEBOOK,
    TIMM_FORMAT,
    HUGGINGFACE,
    TORCHVISION,
    MICROSOFT,
    TIMM_SWIN,
    TORCHVISION_SWIN,
    *open_clip.FORMATS,
    *google.FORMATS,
    *google_bit.FORMATS,
)
"""vitrail's own, in the order in which they are tried."""
EXPORT_SUFFIXES = (".onnx", ".pt2", ".xml")
"""Suffixes of files that `vitrail export` writes. Weights cannot be read from them."""
_MOVE_HINT = "if that file belongs to other weights, move these weights to their own folder."


def all_formats() -> Iterator[Format]:
    """vitrail's formats, then those of other packages, which are imported only if they are reached."""
    yield from FORMATS
    for name in plugin_names("formats"):
        yield load_plugin("formats", name)


def detect_format(archive: Archive, family: str | None = None) -> tuple[Format, Archive]:
    """The format of an archive, and the archive with the names that the format's table uses.

    A sidecar file that names a model decides. Without one the tensor names and shapes decide; `family` resolves what
    they leave open. Ignored tensors are listed in the archive's notes.
    """
    stated = stated_model(archive)
    try:
        if stated.library == "timm":
            reject_architecture(stated.model)
        elif stated.library == "huggingface":
            check_model_type(stated.model)
        elif not stated.library:
            reject_tensors(archive.tensors, family)
    except FormatError as error:
        raise FormatError(f"{archive.source}: {error}") from None
    allowed = {stated.library, "open_clip" if "open_clip_config.json" in archive.sidecars else ""}
    for form in all_formats():
        if stated.library and form.name not in allowed:
            continue
        prefix = form.detect(archive)
        if prefix is None:
            continue
        beside = [n for n in archive.tensors if not n.startswith(prefix)]
        unexpected = [n for n in beside if not any(fnmatch.fnmatchcase(n, p) for p in form.ignored_outside)]
        if unexpected:
            raise FormatError(
                f"{archive.source}: read as {form.name}, the tensors do not match: unexpected outside {prefix!r}: "
                f"{summarize_names(unexpected, limit=8)}."
            )
        ignored_notes = [f"ignored tensors outside {prefix!r}: {summarize_names(beside)}."] if beside else []
        inside = archive.tensors.strip_prefix(prefix).rename(form.normalize_name)
        return form, replace(archive, tensors=inside, notes=[*archive.notes, *ignored_notes])
    names = list(archive.tensors)
    names_summary = f"({', '.join(names[:4])}, ... {len(names)} in all)"
    if stated.library:
        raise FormatError(
            f"{archive.source}: {stated.file} names {stated.library}'s {stated.model}, but vitrail reads no "
            f"{stated.library} model with these tensor names {names_summary}; {_MOVE_HINT}"
        )
    supported = ", ".join(dict.fromkeys(f.name for f in all_formats()))
    message = (
        f"{archive.source}: the tensor names {names_summary} match no known format; known formats are {supported}."
    )
    raise FormatError(_with_hint(archive, message))


def _with_hint(archive: Archive, message: str) -> str:
    """Add a hint to a message if a sidecar file belongs to other weights or a transformers config is missing."""
    stated = stated_model(archive)
    beside = stated.library in ("timm", "huggingface") and stated.file not in archive.metadata
    if beside and "unexpected" in message:
        return f"{message} {stated.file} names {stated.library}'s {stated.model}; {_MOVE_HINT}"
    bare = not stated.library and any("embeddings.patch_embed" in name for name in archive.tensors)
    return f"{message.rstrip('.')}; put its config.json beside it to say which model it is." if bare else message


def read(
    path: str | Path | Archive,
    *,
    section: str | None = None,
    family: str | None = None,
    dtype: torch.dtype | None = torch.float32,
    check_finite: bool = True,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[Net, ModelInfo]:
    """The network, in evaluation mode, and the model info from a file, folder or open archive.

    Tensors are memory-mapped if their layout and address allow it, else copied. `dtype=None` keeps the stored dtype;
    `check_finite=False` accepts NaN and infinity; `family` is used if the file does not state it; `overrides` replaces
    config fields (activation="gelu-quick") and supplies those that the file does not state (num_heads=4,
    image_size=(224, 448)).
    """
    if not isinstance(path, Archive) and Path(path).suffix.lower() in EXPORT_SUFFIXES and Path(path).is_file():
        raise CheckpointError(
            f"{path} is an exported model: it can be run, but not explained, modified or trained; "
            "use the checkpoint it was exported from."
        )
    family = _canonical_family(family)
    with closing(path if isinstance(path, Archive) else open_archive(path, section=section)) as opened:
        form, archive = detect_format(_with_header_sidecars(opened), family)
        archive.hints.update(overrides or {}, **({"family": family} if family else {}))
        with _explain_format_errors(form, archive):
            check_names(archive.tensors)
            info = form.infer_info(archive)
        info = _apply_overrides(info, family, overrides or {})
        with _explain_format_errors(form, archive):
            check_sizes(info, archive.tensors)
            net = build(info.config, meta=True)
            state = form.table(info.config).read(archive.tensors, net, info.config)
    stored = {t.dtype for t in state.values()}
    if integer_dtypes := [str(d).removeprefix("torch.") for d in stored if not d.is_floating_point]:
        raise FormatError(
            f"{archive.source}: its weights are quantized ({', '.join(sorted(integer_dtypes))}), and vitrail does not "
            "read their scales; use the floating-point weights they were made from."
        )
    if check_finite:
        _check_finite(state, archive.source)
    if dtype is not None:
        state = {name: t.to(dtype) for name, t in state.items()}
        if stored != {dtype}:
            kinds = ", ".join(sorted(str(d).removeprefix("torch.") for d in stored))
            info = info.with_notes(f"stored as {kinds}, loaded as {str(dtype).removeprefix('torch.')}.")
    net.load_state_dict({name: align_tensor(t) for name, t in state.items()}, assign=True)
    return net.eval(), info.with_notes(*archive.notes)


def write(
    net: Net,
    info: ModelInfo,
    path: str | Path,
    *,
    to: str = "vitrail",
    overwrite: bool = False,
    approximate: bool = False,
) -> list[str]:
    """Write in the named format and return notes for the user; ConversionError is raised before anything is written."""
    form = format_for(to, info)
    form.check_writable(info, approximate)
    _check_shapes(net, info)
    theirs = form.table(info.config).write(net.state_dict(), info.config)
    assert form.write is not None
    try:
        Path(path).expanduser().absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"could not create the folder for {path}: {error.strerror or error}.") from None
    return form.write(Path(path), theirs, info, overwrite) or []


def _check_shapes(net: Net, info: ModelInfo) -> None:
    """Raise ModelError if the network's tensors do not match its config: the file could not be read back."""
    expected = build(info.config, meta=True).state_dict()
    for name, tensor in net.state_dict().items():
        if name in expected and tensor.shape != expected[name].shape:
            raise ModelError(
                f"the network's {name} is {tuple(tensor.shape)}, but its config gives {tuple(expected[name].shape)}: a "
                "module was replaced. Use with_classes, with_channels or resized, which change both."
            )


def format_for(name: str, info: ModelInfo) -> Format:
    """The format of this name that can represent the model, or most of it: kinds of networks have their own tables."""
    named = [f for f in FORMATS if f.name == name]
    if not named:
        named = [load_plugin("formats", name, builtin={f.name for f in FORMATS})]
    of_kind = [f for f in named if f.is_for(info.config)] or named
    return min(of_kind, key=lambda form: len(form.missing_parts(info)))


def _with_header_sidecars(archive: Archive) -> Archive:
    """Add the JSON files stored in a safetensors header to the archive's sidecars."""
    named = {name: text for name, text in archive.metadata.items() if name.endswith(".json")}
    try:
        return replace(archive, sidecars=archive.sidecars | {name: json.loads(text) for name, text in named.items()})
    except ValueError as error:
        raise CheckpointError(
            f"{archive.source}: its header is damaged ({first_line(error)}); {DOWNLOAD_AGAIN}."
        ) from None


@contextmanager
def _explain_format_errors(form: Format, archive: Archive) -> Iterator[None]:
    """Turn errors while reading a file into one sentence that names the file and the format."""
    try:
        yield
    except FormatError as error:
        message = _with_hint(archive, str(error))
        message = message if message.startswith("read as") else f"read as {form.name}: {message}"
        raise FormatError(str(error) if archive.source in str(error) else f"{archive.source}: {message}") from error
    except CheckpointError:
        raise
    except KeyError as error:
        raise FormatError(f"{archive.source}: read as {form.name}, {error.args[0]} is missing.") from error
    except (ArithmeticError, AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise FormatError(
            f"{archive.source}: read as {form.name}, its parts do not match: {first_line(error)}."
        ) from error


def _canonical_family(family: str | None) -> str | None:
    """A family's name with the capitalization of FAMILIES."""
    canonical = next((name for name in FAMILIES if name.lower() == str(family).lower()), family)
    if canonical is not None and canonical not in FAMILIES:
        raise NotFoundError(f"unknown family {family!r}{did_you_mean(canonical, FAMILIES)}")
    return canonical


def _apply_overrides(info: ModelInfo, family: str | None, changes: Mapping[str, Any]) -> ModelInfo:
    """Apply the caller's family and config overrides, which take precedence over assumptions."""
    if changes:
        config = info.config.replace(**changes)
        _check_windows(info, config)
        info = info.replace(config=config)
    if family is None:
        return info
    info = info.replace(notes=tuple(n for n in info.notes if "preprocessing" not in n))
    if family == info.family:  # nothing new
        return info
    fixed = {k: v for k, v in family_conventions(family, info.config).items() if k not in changes}
    config = info.config.replace(**fixed)
    return info.replace(config=config, family=family, preprocess=default_preprocess(family, config))


def _check_windows(info: ModelInfo, changed: NetConfig) -> None:
    """Raise FormatError for other windows of a Swin Transformer whose tables of position biases are as stored."""
    stored = info.config
    if not isinstance(stored, SwinConfig) or not isinstance(changed, SwinConfig) or stored.version == 2:
        return
    if (windows := changed.window_sizes) != stored.window_sizes and any(
        changed.table_window(stage) != stored.table_window(stage) for stage in range(len(stored.depths))
    ):
        raise FormatError(
            f"{info.origin}: got windows of {windows[0][0]}x{windows[0][1]} tokens, but the file's tables of position "
            f"biases are for {stored.window_sizes[0][0]}x{stored.window_sizes[0][1]}; load it without and use "
            "net.with_window, which resamples them."
        )


@torch.no_grad()
def _check_finite(state: Mapping[str, Tensor], source: str) -> None:
    # aminmax needs one pass and no mask as large as the weights.
    bad = [n for n, t in state.items() if t.numel() and not torch.stack(torch.aminmax(t)).isfinite().all()]
    if bad:
        names_summary = ", ".join(bad[:4]) + (f" and {len(bad) - 4} more" if len(bad) > 4 else "")
        raise CheckpointError(
            f"{source}: NaN or infinity in {names_summary}: the file is damaged or the run diverged; "
            "try an earlier checkpoint (check_finite=False loads it anyway)."
        )

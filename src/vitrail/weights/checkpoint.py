"""Any file of weights -> network and card; network and card -> any format that can express them."""

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

from vitrail.errors import CheckpointError, FormatError, ModelError, NotFound, nearest
from vitrail.models import Net, build
from vitrail.models.families import FAMILIES
from vitrail.weights import google, google_bit, open_clip
from vitrail.weights.card import Card, conventions_of, usual_preprocess
from vitrail.weights.facebook import FACEBOOK
from vitrail.weights.files import Archive, aligned, open_archive
from vitrail.weights.format import Format
from vitrail.weights.huggingface import HUGGINGFACE
from vitrail.weights.kinds import AGAIN, few, first_line
from vitrail.weights.native import NATIVE
from vitrail.weights.rules import listed
from vitrail.weights.timm import TIMM_FORMAT
from vitrail.weights.torchvision import TORCHVISION

FORMATS: tuple[Format, ...] = (
    NATIVE,
    FACEBOOK,
    TIMM_FORMAT,
    HUGGINGFACE,
    TORCHVISION,
    *open_clip.FORMATS,
    *google.FORMATS,
    *google_bit.FORMATS,
)
"""In the order they are tried."""
EXPORTED = (".onnx", ".pt2", ".xml")
"""What `vitrail export` writes; no weights can be had from it."""


def recognise(archive: Archive) -> tuple[Format, Archive]:
    """The format of these tensors, and the tensors under the names its table uses; the rest is said aloud."""
    for form in FORMATS:
        prefix = form.recognise(archive)
        if prefix is None:
            continue
        beside = [n for n in archive.tensors if not n.startswith(prefix)]
        strange = [n for n in beside if not any(fnmatch.fnmatchcase(n, p) for p in form.outside)]
        if strange:
            raise FormatError(
                f"{archive.source}: read as {form.name}, the tensors do not fit: left over beside {prefix!r} "
                f"{listed(strange)}."
            )
        aside = [f"left aside what stands beside {prefix!r}: {few(beside)}."] if beside else []
        inside = archive.tensors.under(prefix).renamed(form.spelling)
        return form, replace(archive, tensors=inside, notes=[*archive.notes, *aside])
    names = list(archive.tensors)
    raise FormatError(
        f"{archive.source}: the names are of no known format ({', '.join(names[:4])}, ... {len(names)} in all); "
        f"known are {', '.join(dict.fromkeys(f.name for f in FORMATS))}."
    )


def read(
    path: str | Path,
    *,
    section: str | None = None,
    family: str | None = None,
    dtype: torch.dtype | None = torch.float32,
    finite: bool = True,
    changes: Mapping[str, Any] | None = None,
) -> tuple[Net, Card]:
    """Network (in evaluation mode) and card from a file or folder.

    Tensors are mapped from the file where their layout and address allow, else copied. `dtype=None`
    keeps what is stored; `finite=False` lets NaN and infinity pass; `family` settles what the file does
    not say; `changes` override fields of the config (activation="gelu-quick"), and stand in for those the
    file cannot tell (heads=4, image=(224, 448)).
    """
    if Path(path).suffix.lower() in EXPORTED and Path(path).is_file():
        raise CheckpointError(
            f"{path} is exported: it can be run, but not looked into, changed or trained; "
            "take the checkpoint it was made from."
        )
    with closing(open_archive(path, section=section)) as opened:
        form, archive = recognise(_headed(opened))
        archive.told.update(changes or {})
        with _reading(form, archive):
            card = form.describe(archive)
        card = _settled(card, family, changes or {})
        with _reading(form, archive):
            net = build(card.config, skeleton=True)
            state = form.table(card.config).read(archive.tensors, net, card.config)
    if finite:
        _check_finite(state, archive.source)
    stored = {t.dtype for t in state.values()}
    if dtype is not None:
        state = {name: t.to(dtype) for name, t in state.items()}
        if stored != {dtype}:
            kinds = ", ".join(sorted(str(d).removeprefix("torch.") for d in stored))
            card = card.noting(f"stored as {kinds}, loaded as {str(dtype).removeprefix('torch.')}.")
    net.load_state_dict({name: aligned(t) for name, t in state.items()}, assign=True)
    return net.eval(), card.noting(*archive.notes)


def write(
    net: Net,
    card: Card,
    path: str | Path,
    *,
    to: str = "vitrail",
    overwrite: bool = False,
    approximate: bool = False,
) -> list[str]:
    """Write in a format by name, or raise Inexpressible before anything is written; what to say aloud comes back."""
    form = format_for(to, card)
    form.check(card, approximate)
    _check_shapes(net, card)
    theirs = form.table(card.config).write(net.state_dict(), card.config)
    assert form.write is not None
    try:
        Path(path).expanduser().absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"could not make the folder for {path}: {error.strerror or error}.") from None
    return form.write(Path(path), theirs, card, overwrite) or []


def _check_shapes(net: Net, card: Card) -> None:
    """Raise ModelError where the network is not what its config says, and so could not be read again."""
    wanted = build(card.config, skeleton=True).state_dict()
    for name, tensor in net.state_dict().items():
        if name in wanted and tensor.shape != wanted[name].shape:
            raise ModelError(
                f"the network's {name} is {tuple(tensor.shape)}, and its config says {tuple(wanted[name].shape)}: a "
                "part was replaced. Use with_classes, with_channels or resized, which change both."
            )


def format_for(name: str, card: Card) -> Format:
    """The format of this name; Google's and big_vision's BiT have tables of their own."""
    named = [f for f in FORMATS if f.name == name]
    if not named:
        raise NotFound(f"no format is called {name!r}{nearest(name, {f.name for f in FORMATS})}")
    return next((f for f in named if not f.cannot(card)), named[0])


def _headed(archive: Archive) -> Archive:
    """With the JSON of its header, which in a file alone stands for the files that would lie beside it."""
    named = {name: text for name, text in archive.metadata.items() if name.endswith(".json")}
    try:
        return replace(archive, sidecars=archive.sidecars | {name: json.loads(text) for name, text in named.items()})
    except ValueError as error:
        raise CheckpointError(f"{archive.source}: its header is damaged ({first_line(error)}); {AGAIN}.") from None


@contextmanager
def _reading(form: Format, archive: Archive) -> Iterator[None]:
    """What goes wrong in reading a file that has a format's marks, in one sentence that names both."""
    try:
        yield
    except FormatError as error:
        said = str(error) if str(error).startswith("read as") else f"read as {form.name}: {error}"
        raise FormatError(str(error) if archive.source in said else f"{archive.source}: {said}") from error
    except CheckpointError:
        raise
    except KeyError as error:
        raise FormatError(f"{archive.source}: read as {form.name}, {error.args[0]} is missing.") from error
    except (ArithmeticError, AttributeError, IndexError, TypeError, ValueError) as error:
        raise FormatError(
            f"{archive.source}: read as {form.name}, its parts do not fit: {first_line(error)}."
        ) from error


def _settled(card: Card, family: str | None, changes: Mapping[str, Any]) -> Card:
    if changes:
        card = card.but(config=card.config.but(**changes))
    if family is None:
        return card
    family = next((known for known in FAMILIES if known.lower() == family.lower()), family)
    if family not in FAMILIES:
        raise NotFound(f"no family is called {family!r}{nearest(family, FAMILIES)}")
    if family == card.family:  # nothing new
        return card
    fixed = {k: v for k, v in conventions_of(family, card.config).items() if k not in changes}
    config = card.config.but(**fixed)
    notes = tuple(n for n in card.notes if "preprocessing" not in n)
    preprocess = usual_preprocess(family, config)
    return card.but(config=config, family=family, preprocess=preprocess, notes=notes)


@torch.no_grad()
def _check_finite(state: Mapping[str, Tensor], source: str) -> None:
    # The smallest and the largest in one pass, without a mask as large as the weights.
    bad = [n for n, t in state.items() if t.numel() and not torch.stack(torch.aminmax(t)).isfinite().all()]
    if bad:
        shown = ", ".join(bad[:4]) + (f" and {len(bad) - 4} more" if len(bad) > 4 else "")
        raise CheckpointError(
            f"{source}: {shown} hold NaN or infinity: a damaged file or a diverged run; "
            "an earlier checkpoint may be whole (finite=False loads it all the same)."
        )

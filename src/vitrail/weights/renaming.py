"""Tables that map tensor names between formats, used for reading and writing.

A rule pairs names of the other format ("theirs") with vitrail's names ("ours") and a transform of the tensors. Names
are patterns: `{i}` is the block index, `{s}` and `{u}` are a ResNet's stage and unit, `{s1}` and `{u1}` the same
counted from 1; a Swin Transformer's blocks are `{i}` of stage `{s}`. Tensors that a table does not cover, on either
side, are listed in an error.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vitrail.config import BiTConfig, NetConfig, SwinConfig, ViTConfig
from vitrail.errors import ConversionError, FormatError
from vitrail.weights.file_type import summarize_names

AnyConfig = NetConfig
TransformFunction = Callable[[Sequence[Tensor], AnyConfig], Sequence[Tensor]]


@dataclass(frozen=True)
class Transform:
    """A pair of functions, exact inverses of each other: `read` from the other format to ours, `write` back."""

    read: TransformFunction
    write: TransformFunction


def single_tensor(read: Callable[[Tensor], Tensor], write: Callable[[Tensor], Tensor]) -> Transform:
    """A transform of one tensor that does not depend on the config."""
    return Transform(lambda t, _: [read(t[0])], lambda t, _: [write(t[0])])


IDENTITY = single_tensor(lambda t: t, lambda t: t)
TRANSPOSE = single_tensor(lambda t: t.mT, lambda t: t.mT)
HWIO_TO_OIHW = single_tensor(lambda t: t.permute(3, 2, 0, 1), lambda t: t.permute(2, 3, 1, 0))
CLASS_TOKEN = single_tensor(lambda t: t.reshape(-1), lambda t: t.view(1, 1, -1))
TOKENS = single_tensor(lambda t: t.flatten(0, 1), lambda t: t[None])
FLATTEN = single_tensor(lambda t: t.reshape(-1), lambda t: t.view(1, 1, 1, -1))
"""1 1 1 C <-> C: group norms of big_vision's BiT."""
CONV1X1_TO_LINEAR = single_tensor(lambda t: t.flatten(1), lambda t: t[:, :, None, None])
"""Kernel of a 1x1 convolution <-> matrix."""
CONCAT_QKV = Transform(
    lambda t, _: [torch.cat(list(t))],
    lambda t, c: t[0].chunk(3) if t[0].shape[0] == 3 * _vit_width(c) else t[0].chunk(2),
)
"""Separate q, k, v (or k, v) <-> concatenated along the output dimension."""


def _read_position(tensors: Sequence[Tensor], config: AnyConfig) -> list[Tensor]:
    vit = as_vit(config)
    flat = tensors[0].flatten(0, -2)  # rows D
    table = flat[vit.num_positioned_prefix_tokens :].unflatten(0, vit.grid)
    return [flat[: vit.num_positioned_prefix_tokens], table] if vit.num_positioned_prefix_tokens else [table]


def _write_position(tensors: Sequence[Tensor], config: AnyConfig) -> list[Tensor]:
    *prefix, table = tensors
    return [torch.cat([*prefix, table.flatten(0, 1)])[None]]


POSITION = Transform(_read_position, _write_position)
"""1 rows D, prefix tokens first <-> `positions.0.prefix` (if any), `positions.0.table`."""
POSITION_NAMES = ("positions.0.prefix", "positions.0.table")
POSITION_FLAT = Transform(_read_position, lambda t, c: [_write_position(t, c)[0][0]])
"""The same without the leading 1: Hugging Face's CLIP and SigLIP store positions in an nn.Embedding."""


def as_vit(config: AnyConfig) -> ViTConfig:
    """Narrow the type, for formats without ResNets."""
    assert isinstance(config, ViTConfig)
    return config


def _vit_width(config: AnyConfig) -> int:
    return as_vit(config).width


@dataclass(frozen=True)
class Rule:
    """`Rule("embedding/kernel", "patch.weight", HWIO_TO_OIHW)`. Names that the network does not have are skipped."""

    theirs: str | tuple[str, ...]
    ours: str | tuple[str, ...]
    transform: Transform = IDENTITY


def weight_and_bias(theirs: str, ours: str, transform: Transform = IDENTITY) -> list[Rule]:
    """Rules for a layer's weight and bias."""
    return [Rule(f"{theirs}.{part}", f"{ours}.{part}", transform) for part in ("weight", "bias")]


@dataclass(frozen=True)
class BoundRule:
    """A rule with its indices filled in, without the names that the network does not have."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    transform: Transform


@dataclass
class RenameTable:
    """The rules of a format, and patterns of tensors to ignore."""

    name: str
    rules: Sequence[Rule]
    ignore: Sequence[str] = field(default_factory=tuple)
    """Glob patterns of tensors to ignore: decoders, mask tokens, text towers."""

    def read(self, theirs: Mapping[str, Tensor], skeleton: nn.Module, config: AnyConfig) -> dict[str, Tensor]:
        """Their tensors -> the skeleton's state_dict; FormatError lists missing, unexpected and misshapen tensors."""
        expected = skeleton.state_dict()
        state: dict[str, Tensor] = {}
        sources: dict[str, str] = {}
        used: set[str] = set()
        missing: list[str] = []
        for rule in self.bind(config, expected):
            absent = [name for name in rule.theirs if name not in theirs]
            if absent:
                missing += absent
                continue
            used.update(rule.theirs)
            tensors = self._apply(rule, [theirs[name] for name in rule.theirs], config)
            state.update(zip(rule.ours, tensors, strict=True))
            sources.update(dict.fromkeys(rule.ours, " and ".join(rule.theirs)))
        unexpected = [n for n in theirs if n not in used and not self.is_ignored(n)]
        uncovered = [n for n in expected if n not in state] if not missing else []
        wrong = [
            f"{name} {tuple(state[name].shape)} for {tuple(expected[name].shape)}"
            + (f", from {sources[name]}" if sources[name] != name else "")
            for name in state
            if state[name].shape != expected[name].shape
        ]
        self._raise_mismatch(missing + uncovered, unexpected, wrong)
        return {name: state[name] for name in expected}

    def write(self, ours: Mapping[str, Tensor], config: AnyConfig) -> dict[str, Tensor]:
        """Our tensors -> theirs; ConversionError lists tensors without a name in the format."""
        result: dict[str, Tensor] = {}
        used: set[str] = set()
        for rule in self.bind(config, ours):
            tensors = rule.transform.write([ours[name] for name in rule.ours], config)
            result.update(zip(rule.theirs, tensors, strict=True))
            used.update(rule.ours)
        if unnamed := [n for n in ours if n not in used]:
            raise ConversionError(f"{self.name}'s format has no name for {summarize_names(unnamed, limit=8)}.")
        return result

    def bind(self, config: AnyConfig, ours: Iterable[str]) -> Iterator[BoundRule]:
        """Each rule for each index, for the names in `ours`."""
        available = set(ours)
        for rule in self.rules:
            for index in _indices(rule, config):
                our_names = tuple(n.format(**index) for n in _as_tuple(rule.ours))
                our_names = tuple(n for n in our_names if n in available)
                if our_names:
                    yield BoundRule(tuple(n.format(**index) for n in _as_tuple(rule.theirs)), our_names, rule.transform)

    def is_ignored(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.ignore)

    def _apply(self, rule: BoundRule, tensors: list[Tensor], config: AnyConfig) -> Sequence[Tensor]:
        try:
            return rule.transform.read(tensors, config)
        except (RuntimeError, IndexError, ValueError) as error:
            shapes = ", ".join(f"{n} {tuple(t.shape)}" for n, t in zip(rule.theirs, tensors, strict=True))
            raise FormatError(
                f"read as {self.name}: {shapes} cannot become {' and '.join(rule.ours)}: {error}"
            ) from None

    def _raise_mismatch(self, missing: list[str], unexpected: list[str], wrong: list[str]) -> None:
        parts = []
        if missing:
            parts.append(f"missing {summarize_names(missing, limit=8)}")
        if unexpected:
            parts.append(f"unexpected {summarize_names(unexpected, limit=8)}")
        if wrong:
            parts.append(f"wrong shapes: {summarize_names(wrong, limit=8)}")
        if parts:
            raise FormatError(f"read as {self.name}, the tensors do not fit: {'; '.join(parts)}.")


def _as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _indices(rule: Rule, config: AnyConfig) -> Iterator[dict[str, int]]:
    pattern = _as_tuple(rule.ours)[0]
    if isinstance(config, SwinConfig):
        yield from _swin_indices(pattern, config)
    elif "{u}" in pattern:
        layers = config.layers if isinstance(config, BiTConfig) else config.stem.layers if config.stem else ()
        for s, units in enumerate(layers):
            for u in range(units):
                yield {"s": s, "u": u, "s1": s + 1, "u1": u + 1}
    elif "{i}" in pattern:
        for i in range(config.depth if isinstance(config, ViTConfig) else 0):
            yield {"i": i}
    else:
        yield {}


def _swin_indices(pattern: str, config: SwinConfig) -> Iterator[dict[str, int]]:
    if "{s}" not in pattern:
        yield {}
        return
    for s, blocks in enumerate(config.depths):
        numbers = {"s": s, "before": s - 1, "odd": 2 * s + 1, "even": 2 * s}
        if "{i}" in pattern:
            yield from (numbers | {"i": i} for i in range(blocks))
        elif s:  # the merge before the stage
            yield numbers

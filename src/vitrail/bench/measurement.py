"""Rows of results: medians over rounds, rates, and ratios to the best peer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from statistics import median
from typing import Any

from vitrail.bench.cases import OWN, PRODUCT, Case, Group

MAX_ERROR = {"float32": 1e-3, "bfloat16": 0.1, "int8": 0.1, "float8": 0.2}
"""Largest relative error with which a row counts as computing the same, by precision."""
MAX_TOP1_LOSS = 0.003
"""The same with labeled images: largest loss of top-1 accuracy."""
GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one case. The fields are the columns of the tables and the keys of the JSON."""

    model: str
    mode: str
    batch_size: int
    library: str
    version: str = ""
    setting: str
    precision: str
    images_per_s: float | None = None
    """Median over rounds."""
    spread: float | None = None
    """Highest minus lowest rate of the rounds, divided by the median."""
    step_ms: float | None = None
    """Of one batch, median over rounds."""
    ratio: float | None = None
    """Median over rounds of the rate divided by the baseline's in the same round."""
    tflops: float | None = None
    """TFLOP/s, with this package's FLOPs for every library."""
    share: float | None = None
    """Of the rate of a large matrix product in the same precision, measured in the same rounds."""
    memory_gb: float | None = None
    """Peak memory: allocated by torch on a GPU; on a CPU resident, beyond that of a process that has imported torch."""
    compile_s: float | None = None
    error: float | None = None
    """Relative error of the outputs, and in training of the gradients, compared with the plain float32 network."""
    top1: float | None = None
    """Accuracy on labeled images."""
    cpu_ms: float | None = None
    """CPU time of an image over all cores, median over rounds."""
    status: str = "ok"
    """ok; baseline; differs (...); or why there is no result."""
    rounds: tuple[float, ...] = ()
    """Images per second of each round."""

    @property
    def is_own(self) -> bool:
        return self.library == OWN

    @property
    def measured(self) -> bool:
        return self.images_per_s is not None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Row:
        return cls(**{**values, "rounds": tuple(values["rounds"])})


COLUMNS = tuple(each.name for each in fields(Row) if each.name != "rounds")
"""Of the tables; JSON has the rounds too."""


@dataclass(frozen=True)
class Benchmark:
    """All rows of a benchmark, and where they were measured."""

    environment: dict[str, Any]
    rows: list[Row]
    baselines: dict[str, str]
    """Title of a group -> what its ratios refer to."""
    unfinished: int = 0
    """Number of groups without results, for lack of time."""
    settings: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "environment": self.environment,
            "settings": self.settings,
            "baselines": self.baselines,
            "unfinished": self.unfinished,
            "rows": [row.to_dict() for row in self.rows],
        }


Reply = Mapping[str, Any]


def make_rows(group: Group, setups: Sequence[Reply], turns: Sequence[Sequence[Reply]]) -> list[Row]:
    """One row for each case but the matrix product; `setups` and `turns` are the replies of the cases' processes."""
    rows = [_row(group, *each) for each in zip(group.cases, setups, turns, strict=True)]
    products = {
        case.precision: row.tflops
        for case, row in zip(group.cases, rows, strict=True)
        if case.library == PRODUCT and row.tflops
    }
    rows = [row for row in rows if row.library != PRODUCT]
    rows = _with_agreement(rows)
    baseline = find_baseline(rows, group.baseline)
    return [_compared(row, baseline, products.get(row.precision.partition(" ")[0])) for row in rows]


def _row(group: Group, case: Case, setup: Reply, turns: Sequence[Reply]) -> Row:
    row = Row(
        model=case.model,
        mode=group.mode,
        batch_size=case.batch_size,
        library=case.library,
        version=setup.get("version", ""),
        setting=case.setting,
        precision=case.shown_precision,
        compile_s=setup.get("compile_s"),
        error=setup.get("error"),
        top1=setup.get("top1"),
    )
    if setup.get("chosen"):
        engine, _, precision = setup["chosen"].rpartition(" ")
        row = replace(row, setting=f"auto: {engine}", precision=precision)
    failed = next((reply for reply in (setup, *turns) if "reason" in reply), None)
    if failed is not None:
        return replace(row, status=failed["reason"])
    if not turns:
        return replace(row, status="not measured")
    steps = [reply["step_s"] for reply in turns]
    rates = [case.batch_size / seconds for seconds in steps]
    return replace(
        row,
        images_per_s=case.batch_size / median(steps),
        spread=(max(rates) - min(rates)) * median(steps) / case.batch_size,
        step_ms=1e3 * median(steps),
        tflops=setup["flops"] / median(steps) / 1e12,
        memory_gb=max(reply["peak_bytes"] for reply in turns) / GB,
        cpu_ms=1e3 * median(reply["cpu_s"] for reply in turns) / case.batch_size if case.device == "cpu" else None,
        rounds=tuple(rates),
    )


def _with_agreement(rows: Sequence[Row]) -> list[Row]:
    """Mark the rows whose outputs differ from the plain network's, by accuracy where it was measured."""
    plain = next((r.top1 for r in rows if r.is_own and r.setting == "eager" and r.precision == "float32"), None)
    return [replace(row, status=_difference(row, plain)) if row.measured else row for row in rows]


def _difference(row: Row, plain_top1: float | None) -> str:
    if row.top1 is not None and plain_top1 is not None:
        lost = plain_top1 - row.top1
        return "ok" if lost <= MAX_TOP1_LOSS + 1e-9 else f"differs: top-1 {100 * -lost:+.1f} points"
    allowed = MAX_ERROR[row.precision.partition(" ")[0]]
    if row.error is None or row.error <= allowed:
        return "ok"
    return f"differs: relative error {row.error:.2g}"


def find_baseline(rows: Sequence[Row], kind: str) -> Row | None:
    """The row that ratios refer to: the first, or the fastest other library whose outputs agree."""
    if kind == "first":
        return rows[0] if rows and rows[0].measured else None
    peers = [row for row in rows if not row.is_own and row.measured and row.status == "ok"]
    return max(peers, key=lambda row: row.images_per_s or 0, default=None)


def _compared(row: Row, baseline: Row | None, product_tflops: float | None) -> Row:
    if not row.measured:
        return row
    share = row.tflops / product_tflops if row.tflops and product_tflops else None
    if baseline is None:
        return replace(row, share=share)
    status = "baseline" if row is baseline or row == baseline else row.status
    ratio = median(own / other for own, other in zip(row.rounds, baseline.rounds, strict=True))
    return replace(row, share=share, ratio=ratio, status=status)

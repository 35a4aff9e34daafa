"""The whole benchmark: all groups of a request, kept in a folder, so that an interrupted run continues."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from vitrail.bench.cases import OWN, PRODUCT, Case, Group, Request, plan
from vitrail.bench.libraries import check_model
from vitrail.bench.measurement import Benchmark, Row
from vitrail.bench.result_tables import markdown
from vitrail.bench.turns import OUT_OF_TIME, ROUNDS, TimeLimit, measure_group
from vitrail.bench.workload import labeled_images, own_network
from vitrail.errors import ConfigError
from vitrail.kernels import choice
from vitrail.runtime import pick_device, resolve_precision
from vitrail.runtime.amx import disable_broken_amx
from vitrail.runtime.cores import usable_cores
from vitrail.runtime.cpu import detect_cpu
from vitrail.storage.atomic_write import write_json, write_text

RESERVE_S = 10.0
"""Of the time limit, for the tables and the chart."""
GPU_JOBS = 4
"""Cases that are set up at a time on a machine with enough cores; compilation takes one core."""
BFLOAT16_INSTRUCTIONS = {"AVX-512 BF16", "AMX BF16", "BF16"}


def benchmark(
    request: Request,
    out: Path | None = None,
    *,
    rounds: int = ROUNDS,
    turn_s: float | None = None,
    jobs: int | None = None,
    time_limit_s: float | None = None,
    command: str = "vitrail bench",
    progress: Callable[[str], None] = lambda what: None,
    show: Callable[[Group, Sequence[Row]], None] = lambda group, rows: None,
) -> Benchmark:
    """Measure the groups of a request, the most telling first; `show` gets the rows of each as soon as they are known.

    With `out`, results are kept there: groups that it has, measured with the same settings in the same environment,
    are not measured again. Groups that do not fit in the time limit are left for the next call.
    """
    device = benchmark_device(request.device)
    kernels = choice.describe(torch.device(device))
    groups = plan(request, device, computes_bfloat16(device), computes_float8(device), kernels)
    for model in dict.fromkeys(group.model for group in groups):
        check_model(model)
        if request.data is not None:  # before the first measurement
            case = Case(library=OWN, model=model, data=request.data, root=request.root)
            labeled_images(case, own_network(case)[1])
    return measure_groups(
        groups,
        device,
        out,
        rounds=rounds,
        turn_s=turn_s,
        jobs=jobs,
        time_limit_s=time_limit_s,
        command=command,
        progress=progress,
        show=show,
    )


def measure_groups(
    groups: Sequence[Group],
    device: str,
    out: Path | None,
    *,
    rounds: int,
    turn_s: float | None,
    jobs: int | None,
    time_limit_s: float | None,
    command: str,
    progress: Callable[[str], None],
    show: Callable[[Group, Sequence[Row]], None],
    summary: bool = True,
) -> Benchmark:
    """Measure these groups; see `benchmark`. `summary`: write JSON, tables and a chart of all rows."""
    start = time.monotonic()
    deadline = float("inf") if time_limit_s is None else start + time_limit_s - RESERVE_S
    environment = describe_environment(device)
    jobs = jobs or (min(GPU_JOBS, max(usable_cores() // 4, 1)) if device != "cpu" else 1)
    settings = {"rounds": rounds, "turn_s": turn_s, "jobs": jobs}
    rows: list[Row] = []
    baselines: dict[str, str] = {}
    unfinished, pace = 0, 0.0
    with _folder(out) as folder:
        variables = process_environment(folder)
        for group in groups:
            found = _read(folder, group, environment, settings)
            began = time.monotonic()
            if found is None and began + pace * group.weight < deadline:
                with suppress(TimeLimit):
                    found = measure_group(
                        group,
                        folder / "logs",
                        environment=variables,
                        jobs=jobs,
                        rounds=rounds,
                        turn_s=turn_s,
                        deadline=deadline,
                        progress=progress,
                    )
                    _write(folder, group, environment, settings, found)
                    pace = max(pace, (time.monotonic() - began) / group.weight)
            if found is None:
                unfinished += 1
                found = [_out_of_time(group, i) for i, case in enumerate(group.cases) if case.library != PRODUCT]
            rows += found
            baselines[group.title] = _describe_baseline(group, found)
            show(group, found)
        result = Benchmark(environment, rows, baselines, unfinished, settings)
        if out is not None and summary:
            _write_summary(out, result, command)
    return result


def _out_of_time(group: Group, index: int) -> Row:
    case = group.cases[index]
    return Row(
        model=group.model, mode=group.mode, batch_size=case.batch_size, library=case.library, setting=case.setting,
        precision=case.shown_precision, status=OUT_OF_TIME,
    )  # fmt: skip


def _describe_baseline(group: Group, rows: Sequence[Row]) -> str:
    row = next((row for row in rows if row.status == "baseline"), None)
    return "" if row is None else f"{row.library}, {row.setting}, {row.precision}"


def benchmark_device(name: str) -> str:
    """The device of this name; ConfigError for one whose time and memory are not measured here."""
    device = pick_device(name)
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"got device {device}, expected a CPU or a CUDA device; try --device cpu.")
    return str(device)


def computes_bfloat16(device: str) -> bool:
    """Whether bfloat16 is worth measuring on a device."""
    if device == "cpu":
        return bool(BFLOAT16_INSTRUCTIONS & set(detect_cpu().instructions))
    return resolve_precision("auto", pick_device(device)) == "bfloat16"


def computes_float8(device: str) -> bool:
    """Whether a device has matrix products of 8-bit floats: NVIDIA's from compute capability 8.9."""
    return device != "cpu" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def describe_environment(device: str) -> dict[str, Any]:
    """Device, cores, versions and kernels, which results depend on."""
    cpu = detect_cpu()
    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else None
    return {
        "device": gpu or (f"{usable_cores()} cores of {cpu}" if device == "cpu" else device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "isa_limit": os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
        "kernels": choice.describe(torch.device(device)),
    }


def process_environment(folder: Path) -> dict[str, str]:
    """Environment of the cases' processes: compiled code and exported files are shared by all, and kept in the folder.

    A new folder has none, so the first compilation of a case is a cold one.
    """
    disable_broken_amx()  # sets the variable that the processes inherit
    cache = folder.absolute() / "cache"
    # torch may have set its variables in this process already.
    caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "VITRAIL_ENGINES": "engines"}
    caches = {name: str(cache / where) for name, where in caches.items()}
    return {**os.environ, **caches, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    if out is None:
        with tempfile.TemporaryDirectory(prefix="vitrail-bench-") as folder:
            yield Path(folder)
        return
    out.mkdir(parents=True, exist_ok=True)
    yield out


def _read(folder: Path, group: Group, environment: Mapping[str, Any], settings: Mapping[str, Any]) -> list[Row] | None:
    """The rows of a group that has been measured with these settings in this environment, else None."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        saved = json.loads((folder / "groups" / f"{group.key}.json").read_text(encoding="utf-8"))
        if saved["environment"] == environment and saved["settings"] == settings:
            return [Row.from_dict(row) for row in saved["rows"]]
    return None


def _write(
    folder: Path, group: Group, environment: Mapping[str, Any], settings: Mapping[str, Any], rows: Sequence[Row]
) -> None:
    path = folder / "groups" / f"{group.key}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    saved = {"environment": environment, "settings": settings, "rows": [row.to_dict() for row in rows]}
    write_json(path, saved, overwrite=True)


def _write_summary(out: Path, result: Benchmark, command: str) -> None:
    """The whole result as JSON, as Markdown tables and as a bar chart."""
    write_json(out / "bench.json", {"command": command, **result.to_dict()}, overwrite=True)
    write_text(out / "bench.md", markdown(result, command), overwrite=True)
    if any(row.measured for row in result.rows):
        from vitrail.bench.speed_chart import speed_chart  # matplotlib takes a second
        from vitrail.explain.canvas import save

        save(speed_chart(result), out / "bench.png")

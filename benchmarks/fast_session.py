"""A session on a GPU that is lent for minutes: stages that can be interrupted, each result kept, a summary last.

    python benchmarks/fast_session.py preflight check kernels networks [--out build/fast] [--limit 570]
    python benchmarks/fast_session.py apply [--out build/fast]       # writes the choices into the source, without a GPU
    python benchmarks/fast_session.py bench [--out build/fast] [--limit 570]
    python benchmarks/fast_session.py families rest [--out build/fast] [--limit 570]

    preflight   GPU, versions, and the packages that are missing
    check       every kernel against float64: odd and real sizes, forward and backward, compiled, with CUDA graphs
    kernels     every kernel beside its plain twin at the sizes of ViT-B/16 and L/16
    networks    ViT-B/16 with each set of kernels, beside timm, inference and training
    bench       `vitrail bench`: B/16 and L/16 beside all libraries
    families    attention in windows; Swin-T and Swin-B with and without its kernel; Swin-T/B and DINOv3-L in the bench
    rest        S/16 and H/14, latency and attention maps in the bench

Every command of a stage is a process, which is started again behind a kernel that ends it, and ended when it is silent
for SILENT_S. A stage starts nothing that does not fit into what is left of --limit; the same --out continues, also on
another machine: OUT.tar.gz, which each call writes, is unpacked if OUT does not exist. Files for the caller are copied
to the folder $OUT, if there is one.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).parent
SILENT_S = 200
"""Compiling the training step of a ViT-L takes up to two minutes without a line."""
RESERVE_S = 15
"""Of the limit, for the summary."""
LINES = 90
"""Of the summary: the caller sees the end of the output only."""
PRODUCTS = {"triton": "triton_products.py", "quack": "quack_products.py"}
PACKAGES = (
    "triton", "quack", "timm", "torchvision", "transformers", "vit_pytorch", "einops", "typer", "rich", "safetensors",
    "huggingface_hub", "PIL", "pyarrow", "matplotlib", "sklearn", "numpy", "pytest",
)  # fmt: skip


@dataclass(frozen=True)
class Command:
    """A process of a stage: arguments after python, and the share of the stage's time that it may take."""

    name: str
    args: tuple[str, ...]
    seconds: float


def script(name: str, file: str, args: str, seconds: float) -> Command:
    return Command(name, (str(HERE / file), *args.split()), seconds)


def bench(name: str, args: str, seconds: float) -> Command:
    return Command(name, ("-m", "vitrail", "bench", *args.split()), seconds)


ROWS = "--json {out}/rows.jsonl"
TURNS = "--jobs 7 --rounds 3 --turn 0.5"
STAGES: dict[str, tuple[Command, ...]] = {
    "check": (script("check", "fast_path.py", f"check {ROWS}", 150),),
    "kernels": (
        script("B/16", "fast_path.py", f"gemm attention {ROWS}", 110),
        script("B/16 training", "fast_path.py", f"gemm attention --train {ROWS}", 90),
        script("L/16", "fast_path.py", f"gemm --model L/16 {ROWS}", 70),
    ),
    "networks": (
        script("inference", "fast_networks.py", "--out {out}/networks", 190),
        script("training", "fast_networks.py", "--train --out {out}/networks", 190),
    ),
    "blocks": (
        script("inference", "fast_path.py", f"block {ROWS}", 150),
        script("training", "fast_path.py", f"block --train {ROWS}", 100),
    ),
    "bench": (
        bench("B/16", "--models B/16 --jobs 7 --rounds 5 --turn 0.5 --out {out}/bench-B", 270),
        bench("L/16", "--models L/16 --jobs 7 --rounds 5 --turn 0.5 --out {out}/bench-L", 300),
    ),
    "families": (
        script("windows", "window_attention.py", f"--part kernels --stages 1,3 --rounds 3 {ROWS}", 100),
        bench("Swin-T", f"--models Swin-T {TURNS} --out {{out}}/bench-swin", 160),
        bench("DINOv3-L", f"--models DINOv3-L/16 {TURNS} --out {{out}}/bench-dinov3", 170),
        script("Swin-T with its kernel", "window_attention.py", f"--part networks --rounds 3 {ROWS}", 150),
        bench("Swin-B", f"--models Swin-B {TURNS} --out {{out}}/bench-swin-b", 200),
        bench("DINOv3-L, 768 px", f"--models DINOv3-L/16@768 {TURNS} --out {{out}}/bench-dinov3-768", 200),
    ),
    "rest": (
        bench("H/14", f"--models H/14 --against timm,torchvision {TURNS} --out {{out}}/bench-H", 300),
        bench("latency", f"--models B/16,Ti/16 --modes latency {TURNS} --out {{out}}/bench-latency", 150),
        bench("maps", f"--models B/16 --modes explain {TURNS} --out {{out}}/bench-maps", 90),
        bench("S/16", f"--models S/16 --against timm,torchvision {TURNS} --out {{out}}/bench-S", 150),
    ),
}


def preflight(out: Path) -> None:
    """Print what the machine has; nothing is measured."""
    code = (
        "import torch, triton, platform, os\n"
        "print(torch.cuda.get_device_name(), 'torch', torch.__version__, 'triton', triton.__version__,"
        " 'python', platform.python_version(), 'cores', os.cpu_count())\n"
        "print('cuDNN', torch.backends.cudnn.version(), 'GPU GB free', torch.cuda.mem_get_info()[0] / 1e9)\n"
    )
    subprocess.run([sys.executable, "-c", code], env=environment(), timeout=120, check=False)
    sys.path[:0] = environment()["PYTHONPATH"].split(os.pathsep)
    found = {name: importlib.util.find_spec(name) is not None for name in PACKAGES}
    print("packages:", ", ".join(name for name, there in found.items() if there))
    print("missing:", ", ".join(name for name, there in found.items() if not there) or "none", flush=True)


def environment() -> dict[str, str]:
    """The package from this folder, pure-Python packages that were brought along, and caches that survive a call."""
    paths = (ROOT / "src", HERE, ROOT / "build/peers")
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "TORCHINDUCTOR_COMPILE_THREADS": "4",  # of each process, several of which compile side by side
    }


def run(command: Command, stage: str, out: Path, end: float) -> str:
    """Run a command until it is finished, again behind each crash; returns how it ended."""
    from fast_rows import RESTART

    limit = min(time.monotonic() + command.seconds, end)
    for attempt in range(8):
        left = limit - time.monotonic()
        if left < 10:
            return "the time is over" if attempt else "left out: the time is over"
        args = [arg.format(out=out) for arg in command.args]
        if "bench" in args:
            args += ["--time-limit", f"{left + 10:.0f}s"]
        if args[0].endswith(("fast_path.py", "fast_networks.py")):
            args += ["--seconds", f"{left:.0f}"]
        print(f"\n== {stage}: {command.name} ({left:.0f} s left)", flush=True)
        status = follow([sys.executable, *args], out / "log.txt", limit + 60)
        if status == 0:
            return "done"
        if status is not None and status != RESTART and status > 0:
            return f"ended with status {status}"
        why = "was silent or late" if status is None else f"ended with status {status}"
        print(f"-- the process {why}; it is started again behind that candidate", flush=True)
    return "ended too often"


def follow(args: list[str], log: Path, end: float) -> int | None:
    """Run a process, copy what it prints to the console and the log; None: it was ended for silence or lateness."""
    process = subprocess.Popen(
        args, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), cwd=ROOT,
        start_new_session=True, errors="replace",
    )  # fmt: skip
    lines: SimpleQueue[str | None] = SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    with log.open("a", encoding="utf-8") as file:
        while True:
            try:
                line = lines.get(timeout=max(min(SILENT_S, end - time.monotonic()), 0.1))
            except Empty:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return None
            if line is None:
                return process.wait()
            file.write(line)
            if len(line) < 400 and "Warning" not in line:
                print(line, end="", flush=True)


def load_rows(out: Path) -> dict[str, list[dict[str, Any]]]:
    """Title -> rows of rows.jsonl."""
    from fast_rows import Results

    return {title: [asdict(row) for row in rows] for title, rows in Results(out / "rows.jsonl").tables().items()}


def load_groups(out: Path) -> list[dict[str, Any]]:
    """The rows of all groups that bench and fast_networks.py have measured."""
    files = sorted(out.glob("*/groups/*.json"))
    return [row for file in files for row in json.loads(file.read_text())["rows"]]


def choices(tables: Mapping[str, list[dict[str, Any]]], out: Path) -> dict[str, Any]:
    """The fastest tiling of each epilogue for ViT-B/16, and the fastest kernels of each network."""
    found: dict[str, Any] = {"tilings": {}}
    epilogues = {"GELU": "bias, GELU", "DGELU": "GELU' and sums", "RESIDUAL": "bias, residual"}
    for kind, (name, words) in itertools.product(PRODUCTS, epilogues.items()):
        slowness: dict[str, float] = {}
        for title, rows in tables.items():
            if words not in title or " 768" not in title:
                continue
            ran = [row for row in rows if row["name"].startswith(f"{kind} ") and row["ms"] and not row["note"]]
            for row in ran:
                tiling = row["name"].removeprefix(f"{kind} ")
                slowness[tiling] = slowness.get(tiling, 0.0) + row["ms"] / min(each["ms"] for each in ran)
        if slowness:
            found["tilings"].setdefault(kind, {})[name] = min(slowness, key=lambda tiling: slowness[tiling])
    log = out / "log.txt"
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else ():
        if line.startswith('{"model"'):
            entry = json.loads(line)
            found["gpu"] = entry["gpu"]
            found["training" if entry["train"] else "inference"] = entry["fastest"]
    return found


def measured(found: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """The entry of choice.MEASURED."""
    named = [text for kind in ("inference", "training") for text in found.get(kind, {}).values() if text != "plain"]
    pairs = dict(item.split("=") for text in named for item in text.split(","))
    return {operation: (backend,) for operation, backend in pairs.items()}


def summary(out: Path, ends: Mapping[str, str]) -> list[str]:
    """What was found, in few lines, the most important last."""
    tables, lines = load_rows(out), []
    checked = [row for title, rows in tables.items() if title.startswith("check") for row in rows]
    wrong = [row for row in checked if row["note"]]
    if checked:
        lines.append(f"checks: {len(checked) - len(wrong)} of {len(checked)} passed")
        lines += [f"  {row['name'][:60]}: {row['note'][:120]}" for row in wrong[:12]]
    for title, rows in tables.items():
        if title.startswith("check"):
            continue
        ran = [row for row in rows if row["ms"]]
        lines.append(f"{title}: {len(rows) - len(ran)} failed")
        for row in [*ran[:1], *sorted(ran[1:], key=lambda row: row["ms"])[:3]]:
            ratio = ran[0]["ms"] / row["ms"]
            lines.append(
                f"  {row['name'][:50]:50s} {row['ms']:8.3f} ms {ratio:5.2f} {row['error'] or 0:8.1e} {row['note'][:40]}"
            )
    for row in load_groups(out):
        rate = "" if row["images_per_s"] is None else f"{row['images_per_s']:9,.0f}/s"
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        status = "" if row["status"] == "ok" else row["status"][:50]
        name = f"{row['model']} {row['mode']} {row['library']} {row['precision'].partition(' ')[0]} {row['setting']}"
        lines.append(f"{name[:86]:86s} {rate} {ratio:5s} {row['memory_gb'] or 0:5.1f} GB {status}")
    lines += [f"{name}: {how}" for name, how in ends.items()]
    found = choices(tables, out)
    return [*lines, f"choices: {json.dumps(found)}", f"MEASURED: {measured(found)}"]


def apply(out: Path) -> None:
    """Write the choices into kernels/choice.py, and the tilings of the products."""
    found = choices(load_rows(out), out)
    for kind, tilings in found["tilings"].items():
        file = ROOT / f"src/vitrail/kernels/{PRODUCTS[kind]}"
        text = file.read_text()
        for name, tiling in tilings.items():
            text = re.sub(rf"^{name} = .*$", f'{name} = CONFIGS["{tiling}"]', text, flags=re.MULTILINE)
        file.write_text(text)
    file = ROOT / "src/vitrail/kernels/choice.py"
    entry = json.dumps({found["gpu"]: measured(found)}) if measured(found) else "{}"
    entry = re.sub(r"\[(\"\w+\")\]", r"(\1,)", entry)
    pattern = r"^(MEASURED: .*? = ).*?(?=^\"\"\"Name of a GPU)"
    file.write_text(re.sub(pattern, rf"\g<1>{entry}\n", file.read_text(), flags=re.MULTILINE | re.DOTALL))
    subprocess.run(["ruff", "format", "-q", str(file)], check=False)
    print(json.dumps(found, indent=2))


def forget_failures(out: Path) -> None:
    """Drop the rows that failed, and the groups that contain one: the code has changed."""
    from fast_rows import Results

    results = Results(out / "rows.jsonl")
    (out / "rows.jsonl").unlink(missing_ok=True)
    for (title, name), row in results.rows.items():
        if not row.note:
            results.write(title, name, row=asdict(row))
    for file in out.glob("*/groups/*.json"):
        if any(row["images_per_s"] is None for row in json.loads(file.read_text())["rows"]):
            file.unlink()


def keep(out: Path, lines: list[str]) -> None:
    """Write the summary and OUT.tar.gz, and copy both and the log to $OUT."""
    (out / "summary.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    archive = out.with_name(f"{out.name}.tar.gz")

    def small(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if "/cache" in entry.name else entry  # compiled code

    with tarfile.open(archive, "w:gz") as file:
        file.add(out, out.name, filter=small)
    if folder := os.environ.get("OUT"):
        for source in (archive, out / "summary.txt", out / "log.txt", out / "rows.jsonl"):
            if source.exists():
                shutil.copy(source, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", choices=("preflight", *STAGES, "apply", "summary"))
    parser.add_argument("--out", type=Path, default=ROOT / "build/fast")
    parser.add_argument("--limit", type=float, default=570, help="seconds, for all stages")
    parser.add_argument("--retry", action="store_true", help="measure what has failed again")
    options = parser.parse_args()
    out, end = options.out.absolute(), time.monotonic() + options.limit - RESERVE_S
    archive = out.with_name(f"{out.name}.tar.gz")
    if not out.exists() and archive.exists():
        with tarfile.open(archive) as file:
            file.extractall(out.parent, filter="data")
    out.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(HERE))
    if options.retry:
        forget_failures(out)
    ends: dict[str, str] = {}
    local: dict[str, Callable[[Path], None]] = {"preflight": preflight, "apply": apply, "summary": lambda out: None}
    try:
        for stage in options.stages:
            if stage in local:
                local[stage](out)
                continue
            for command in STAGES[stage]:
                ends[f"{stage}, {command.name}"] = run(command, stage, out, end)
    finally:
        lines = summary(out, ends)
        keep(out, lines)
        print("\n" + "=" * 100 + "\n" + "\n".join(lines[-LINES:]), flush=True)


if __name__ == "__main__":
    main()

"""Bulk inference on a local Ray, and in shards, against the plain command on the same cores; and with kills.

    python benchmarks/bulk.py                                        # 200,000 made images of 32 px, the shipped model
    python benchmarks/bulk.py --data imagenet-val-1k/ --images 5000 --model vit_tiny_patch16_224.safetensors
    python benchmarks/bulk.py --images 20000 --rounds 1              # shorter

The images are written to tar shards in a temporary folder; those of --data are repeated until there are --images. Each
run is a `vitrail embed` of its own, with all processes on the same --cores; the rounds are interleaved.

    rate       images per second, from the first part to the last: without the start, which is `start`
    ratio      median over rounds of the rate divided by that of the plain command
    driver     peak private memory of the command's process, `workers` of the largest actor or reader, `Ray` of all of
               Ray's own processes together; `store` is what Ray's object store has used
    bytes      whether all files are those of the plain command

The last row is a run whose actors are killed three times and whose driver twice with SIGKILL as parts appear.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from PIL import Image
from rich.console import Console
from rich.table import Table

from vitrail.bench.process_tree import descendants, memory_kib, part_actors, title
from vitrail.config import DataConfig
from vitrail.data.sources import open_source_splits

IMAGES_PER_TAR = 10_000
SIDE = 32
MEMORY = ("driver", "workers", "Ray", "store")


@dataclass
class Run:
    """One run of a command, or of several at once."""

    rate: float
    start: float
    """Seconds until the first part."""
    peak: dict[str, float] = field(default_factory=dict)
    """MiB."""
    same: bool = True
    rows: str = ""


def made_images(count: int) -> Iterator[bytes]:
    """Noise of 8 px enlarged to 32 px, as PNG; the same for the same number."""
    for number in range(count):
        small = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(small).resize((SIDE, SIDE)).save(buffer, "PNG", compress_level=1)
        yield buffer.getvalue()


def repeated_images(data: str, count: int) -> Iterator[bytes]:
    """The images of a data set, from the start again until there are `count`."""
    source = open_source_splits(DataConfig(source=data), require_labels=False).evaluation_source
    for number in range(count):
        image = source[number % len(source)].image
        if not isinstance(image, bytes):
            image = Path(str(image)).read_bytes()
        yield image


def write_tars(images: Iterator[bytes], folder: Path) -> None:
    folder.mkdir()
    for tar_number in range(10**6):
        chunk = list(islice(images, IMAGES_PER_TAR))
        if not chunk:
            return
        with tarfile.open(folder / f"train-{tar_number:05d}.tar", "w") as tar:
            for number, image in enumerate(chunk):
                for name, data in (("png", image), ("cls", b"0")):
                    info = tarfile.TarInfo(f"{tar_number * IMAGES_PER_TAR + number:09d}.{name}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


class PeakMemory(threading.Thread):
    """Samples the memory of a command and of all that it starts, ten times a second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.peak, self.stopped = pid, dict[str, float](), threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(0.1):
            sample = dict.fromkeys(MEMORY, 0) | {"driver": memory_kib(self.pid).get("RssAnon", 0)}
            for pid in descendants(self.pid):
                used, name = memory_kib(pid), title(pid)
                anonymous = used.get("RssAnon", 0)
                if "PartActor" in name or "ray" not in name:
                    sample["workers"] = max(sample["workers"], anonymous)
                else:
                    sample["Ray"] += anonymous
                if "/raylet/raylet" in name:
                    sample["store"] = used.get("RssShmem", 0)
            for what, kib in sample.items():
                self.peak[what] = max(self.peak.get(what, 0), kib / 1024)


def command(options: argparse.Namespace, data: Path, out: Path, *extra: object) -> list[str]:
    model = ["--model", options.model] if options.model else []
    fixed = ["--batch-size", options.batch_size, "--part-size", options.part_size, "--skip-bad"]
    arguments = ["--data", f"shards:{data}", *model, "--out", out, *fixed, *extra]
    return [sys.executable, "-m", "vitrail", "embed", *map(str, arguments)]


def parts(out: Path) -> list[Path]:
    return sorted(out.glob("part-*.parquet"))


def timed(commands: list[list[str]], out: Path, images: int) -> Run:
    """Run commands at the same time."""
    started = time.time()
    processes = [subprocess.Popen(each, stdout=subprocess.DEVNULL) for each in commands]
    samplers = [PeakMemory(process.pid) for process in processes]
    for sampler in samplers:
        sampler.start()
    statuses = [process.wait() for process in processes]
    for sampler in samplers:
        sampler.stopped.set()
    assert not any(statuses), statuses
    written = sorted((path.stat().st_mtime, pq.read_metadata(path).num_rows) for path in parts(out))
    first, last = written[0], written[-1]
    rate = (images - first[1]) / max(last[0] - first[0], 1e-9)
    peak = {
        what: max(sampler.peak.get(what, 0) for sampler in samplers) for what in ("driver", "workers", "Ray", "store")
    }
    return Run(rate, first[0] - started, peak)


def same_bytes(a: Path, b: Path) -> bool:
    names = [{path.name for path in folder.iterdir() if path.name[0] != "."} for folder in (a, b)]
    return names[0] == names[1] and all((a / name).read_bytes() == (b / name).read_bytes() for name in names[0])


def count_rows(out: Path) -> str:
    keys = [key for path in parts(out) for key in pq.read_table(path, columns=["key"])["key"].to_pylist()]
    return f"{len(keys):,} rows, {len(set(keys)):,} keys"


def killed(options: argparse.Namespace, data: Path, out: Path, plain: Path) -> str:
    """Kill three actors and two drivers as parts appear, and finish; returns what was killed when."""
    on_ray, total, log = command(options, data, out, "--on", "ray", "--actors", options.actors), len(parts(plain)), []
    plan = [("actor", 1), ("actor", 2), ("actor", 3), ("driver", 4), ("driver", 6)]  # sixteenths of the parts
    driver = subprocess.Popen(on_ray, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for what, sixteenths in plan:
        while len(parts(out)) < total * sixteenths // 16 or not part_actors(driver.pid):
            assert driver.poll() is None, f"the command ended before the kill of the {what}"
            time.sleep(0.01)
        log.append(f"{what} at part {len(parts(out))}")
        os.kill(part_actors(driver.pid)[0] if what == "actor" else driver.pid, signal.SIGKILL)
        if what == "driver":
            driver.wait()
            driver = subprocess.Popen(on_ray, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert driver.wait() == 0
    return ", ".join(log) + f", of {total}"


def measure(options: argparse.Namespace, folder: Path) -> None:
    data, plain = folder / "data", folder / "plain"
    began = time.time()
    write_tars(repeated_images(options.data, options.images) if options.data else made_images(options.images), data)
    print(f"{options.images:,} images written in {time.time() - began:.0f} s", file=sys.stderr)
    ways = {
        "plain": [()],
        f"Ray, {options.actors} actors": [("--on", "ray", "--actors", options.actors)],
        f"{options.cores} shards": [("--shard", f"{n + 1}/{options.cores}") for n in range(options.cores)],
    }
    found: dict[str, list[Run]] = {name: [] for name in ways}
    for number in range(options.rounds):
        for name, extras in ways.items():
            out = plain if name == "plain" and not number else folder / "out"
            if name.endswith("shards"):  # each with one of the cores
                commands = [["taskset", "-c", str(core), *command(options, data, out, *extra)]
                            for core, extra in zip(sorted(os.sched_getaffinity(0)), extras, strict=True)]  # fmt: skip
            else:
                commands = [command(options, data, out, *extra) for extra in extras]
            run = timed(commands, out, options.images)
            run.same, run.rows = same_bytes(out, plain), count_rows(out)
            found[name].append(run)
            if out != plain:
                shutil.rmtree(out)
    table = Table("", "rate", "ratio", "start, s", "driver, MiB", "workers", "Ray", "store", "bytes", "", box=None)
    for name, runs in found.items():
        ratio = statistics.median(run.rate / base.rate for run, base in zip(runs, found["plain"], strict=True))
        middle = {what: max(run.peak[what] for run in runs) for what in runs[0].peak}
        table.add_row(
            name, f"{statistics.median(run.rate for run in runs):.1f}", f"{ratio:.3f}",
            f"{statistics.median(run.start for run in runs):.1f}", *(f"{value:.0f}" for value in middle.values()),
            "the same" if all(run.same for run in runs) else "DIFFERENT", runs[0].rows,
        )  # fmt: skip
    if options.kills:
        log = killed(options, data, folder / "killed", plain)
        same = "the same" if same_bytes(folder / "killed", plain) else "DIFFERENT"
        table.add_row("Ray, killed", *[""] * 7, same, f"{count_rows(folder / 'killed')}; {log}")
    Console(width=200).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=200_000)
    parser.add_argument("--data", help="images to repeat; default: made images of 32 px")
    parser.add_argument("--model", help="default: the model that ships with vitrail")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--part-size", type=int, default=1024)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-kills", dest="kills", action="store_false")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    with tempfile.TemporaryDirectory(prefix="vitrail-bulk-") as folder:
        measure(options, Path(folder))


if __name__ == "__main__":
    main()

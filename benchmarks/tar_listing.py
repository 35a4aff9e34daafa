"""Time to list the members of a tar file, compared with Python's tarfile.

    python benchmarks/tar_listing.py [--members 20000] [--rounds 9]

Both read the same file of small members in turns; the ratio is the median of the rounds.
"""

from __future__ import annotations

import argparse
import io
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from vitrail.data.sources.tar import Member, iter_members


def write_archive(path: Path, members: int) -> None:
    with tarfile.open(path, "w") as archive:
        for i in range(members):
            info = tarfile.TarInfo(f"train/{i // 2:06d}.{('jpg', 'cls')[i % 2]}")
            info.size = (700, 3)[i % 2]
            archive.addfile(info, io.BytesIO(bytes(info.size)))


def list_members(path: Path) -> list[Member]:
    with path.open("rb") as file:

        def read(at: int, length: int) -> bytes:
            file.seek(at)
            return file.read(length)

        return list(iter_members(read, str(path), path.stat().st_size))


def list_with_tarfile(path: Path) -> list[Member]:
    with tarfile.open(path, "r:") as archive:
        return [Member(m.name, m.offset_data, m.size) for m in archive if m.isreg()]


def seconds(run: Callable[[Path], list[Member]], path: Path) -> float:
    start = time.perf_counter()
    run(path)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=9)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "small.tar"
        write_archive(path, chosen.members)
        assert list_members(path) == list_with_tarfile(path)
        pairs = [(seconds(list_members, path), seconds(list_with_tarfile, path)) for _ in range(chosen.rounds)]
    ours, peers = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(peer / own for own, peer in pairs)
    print(f"{chosen.members:,} members: {1e3 * ours:.0f} ms, tarfile {1e3 * peers:.0f} ms, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()

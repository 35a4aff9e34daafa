"""Time and memory of loading ViT-B/16 from safetensors, for vitrail and timm.

    python benchmarks/load.py [--rounds 7] [--json]

There are two files with the same tensors: one as timm and the safetensors library write it, with unaligned tensors,
which vitrail copies; and one as vitrail writes it, aligned, which vitrail maps ("aligned"). Each load runs in its own
process, with the file in the page cache; the loaders take turns. Imports are not counted. Time is measured until the
network is ready and until the first logits of one image, since a mapped file is read on first access. Memory is the
growth of the process: private pages, and peak resident pages, which include the mapped file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def prepare(folder: Path) -> dict[str, Path]:
    """Write two timm repositories of ViT-B/16 with random weights: aligned by vitrail, and unaligned as timm does."""
    import shutil

    import safetensors.torch
    import torch

    from vitrail.model import Model
    from vitrail.models import build
    from vitrail.models.model_names import config_from_name
    from vitrail.weights.family_defaults import default_preprocess
    from vitrail.weights.model_info import ModelInfo

    config = config_from_name("ViT-B/16", activation="gelu", resample="timm")
    net = build(config, seed=0)
    with torch.no_grad():
        net.head.weight.normal_(std=0.02)
    aligned, packed = folder / "aligned", folder / "packed"
    Model(net, ModelInfo(config=config, preprocess=default_preprocess("ViT", config, "timm"))).save(aligned, to="timm")
    shutil.copytree(aligned, packed)
    tensors = safetensors.torch.load_file(aligned / "model.safetensors")
    safetensors.torch.save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    return {"vitrail": packed, "aligned": aligned, "timm": packed}


def memory(field: str) -> int:
    """Memory of this process in bytes: VmHWM (peak resident) or RssAnon (private, now)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def measure(loader: str, path: str) -> None:
    """Load once in this process and print the measurements."""
    import torch

    torch.set_num_threads(2)
    if loader != "timm":
        import vitrail

        load = lambda: vitrail.load(path).net  # noqa: E731
    else:
        library = torch.library.Library("torchvision", "DEF")  # its import fails with a CPU-only torch
        if not hasattr(torch.ops.torchvision, "nms"):
            for name in ("nms", "qnms"):
                library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import timm

        load = lambda: timm.create_model(f"local-dir:{path}", pretrained=True).eval()  # noqa: E731
    images = torch.zeros(1, 3, 224, 224)
    torch.nn.Linear(8, 8)(torch.zeros(1, 8))
    private, resident = memory("RssAnon"), memory("VmHWM")
    start = time.perf_counter()
    net = load()
    loaded = time.perf_counter() - start
    after_private, after_resident = memory("RssAnon"), memory("VmHWM")
    with torch.inference_mode():
        net(images)
    first = time.perf_counter() - start
    weights = sum(p.numel() * p.element_size() for p in net.parameters())
    print(
        json.dumps(
            {
                "load_s": loaded,
                "first_logits_s": first,
                "private_mb": (after_private - private) / 2**20,
                "resident_peak_mb": (after_resident - resident) / 2**20,
                "weights_mb": weights / 2**20,
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("LOADER", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measure(*options.one)
        return
    results: dict[str, list[dict[str, float]]] = {"vitrail": [], "aligned": [], "timm": []}
    with tempfile.TemporaryDirectory() as folder:
        paths = prepare(Path(folder))
        for _ in range(options.rounds + 1):
            for loader, rows in results.items():
                command = [sys.executable, __file__, "--one", loader, str(paths[loader])]
                rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    summary = {
        loader: {key: round(statistics.median(row[key] for row in rows[1:]), 4) for key in rows[0]}
        for loader, rows in results.items()
    }
    if options.json:
        print(json.dumps(summary))
        return
    print(f"{'median of ' + str(options.rounds):24s} {'vitrail':>10s} {'aligned':>10s} {'timm':>10s} {'ratio':>7s}")
    for key in summary["vitrail"]:
        ours, mapped, theirs = (summary[loader][key] for loader in ("vitrail", "aligned", "timm"))
        print(f"{key:24s} {ours:10.3f} {mapped:10.3f} {theirs:10.3f} {ours / theirs:7.2f}")


if __name__ == "__main__":
    main()

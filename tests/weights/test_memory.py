"""Peak memory of reading a checkpoint, measured in a subprocess."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from vitrail.config import ViTConfig
from vitrail.models import ViT, build
from vitrail.weights import checkpoint
from vitrail.weights.family_defaults import default_preprocess
from vitrail.weights.model_info import ModelInfo

TINY = ViTConfig(image_size=8, patch_size=4, width=8, depth=1, num_heads=2, mlp_dim=8, num_classes=3, activation="gelu")

pytestmark = pytest.mark.usefixtures("quick_disk")

MEASURE = textwrap.dedent(
    """
    import re, sys
    from pathlib import Path
    from vitrail.weights import checkpoint
    def memory(kind):  # not getrusage, whose peak includes the parent's memory at the fork
        return 1024 * int(re.search(kind + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
    checkpoint.read(sys.argv[1])  # warm-up with a small checkpoint: all imports are done
    before = memory("VmRSS")
    net, _ = checkpoint.read(sys.argv[2])
    print(before, memory("VmHWM"), sum(p.nbytes for p in net.parameters()))
    """
)


@pytest.mark.parametrize("to", ["vitrail", "timm"])
def test_peak_memory_of_reading_is_at_most_1_1_times_the_weights(to: str, tmp_path: Path) -> None:
    """A third of ViT-B/16 in a subprocess: the peak, including the mapped file, is at most 1.1 times the weights."""
    status = Path("/proc/self/status")
    if not status.exists() or "VmHWM" not in status.read_text():
        pytest.skip("needs Linux's account of peak memory")
    for name, config in (("small", TINY), ("B", ViTConfig(activation="gelu", depth=4))):
        net = build(config, meta=True).to_empty(device="cpu")
        for parameter in net.parameters():
            torch.nn.init.ones_(parameter)
        info = ModelInfo(config=config, preprocess=default_preprocess("ViT", config))
        checkpoint.write(net, info, tmp_path / f"{name}.safetensors", to=to)
    assert isinstance(net, ViT)
    paths = [str(tmp_path / f"{name}.safetensors") for name in ("small", "B")]
    process = subprocess.run([sys.executable, "-c", MEASURE, *paths], capture_output=True, text=True, check=True)
    before, peak, weights = map(int, process.stdout.split())
    assert weights == sum(p.nbytes for p in net.parameters()) > 100e6
    assert peak - before <= 1.1 * weights, (peak - before) / weights

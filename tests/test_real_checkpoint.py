"""A published ViT-Ti/16 on real photographs: logits and accuracy recorded with timm."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import import_peer
from PIL import Image

import vitrail

FIRST_LOGITS = [-0.2992, -3.7845, 0.6543, -1.6553, 1.1882]  # of the first image, with timm's preprocessing


@pytest.fixture(scope="module")
def photographs(imagenet_val: Path) -> list[tuple[bytes, int]]:
    """The encoded images and their classes, in order."""
    images = []
    for shard in sorted(imagenet_val.glob("*.tar")):
        with tarfile.open(shard) as tar:
            files = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
        images += [
            (data, int(files[name.replace(".jpg", ".cls")])) for name, data in files.items() if name.endswith(".jpg")
        ]
    assert len(images) == 1000
    return images


@pytest.fixture(scope="module")
def vit(real_checkpoint: Path) -> vitrail.Model:
    import_peer("timm")  # provides ImageNet's class names
    return vitrail.load(real_checkpoint, labels="imagenet-1k")


def test_first_logits_match_those_recorded_with_timm(vit, photographs):
    logits = vit.logits(photographs[0][0])
    assert logits.shape == (1, 1000)
    assert logits[0, :5].tolist() == pytest.approx(FIRST_LOGITS, abs=1e-4)


def test_predict_command_gives_the_same_logits(real_checkpoint, photographs, tmp_path):
    image = tmp_path / "first.jpg"
    image.write_bytes(photographs[0][0])
    command = [sys.executable, "-m", "vitrail", "predict", str(image), "--model", str(real_checkpoint)]
    process = subprocess.run([*command, "--json", "--logits", "--device", "cpu"], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    [entry] = json.loads(process.stdout)
    assert entry["path"] == str(image)
    assert len(entry["logits"]) == 1000
    assert entry["logits"][:5] == pytest.approx(FIRST_LOGITS, abs=1e-4)
    assert entry["predictions"][0]["index"] == photographs[0][1]
    assert "the file does not store preprocessing" in process.stderr


@pytest.mark.peer
def test_logits_match_timm(vit, real_checkpoint, photographs):
    timm = import_peer("timm")
    peer = timm.create_model("vit_tiny_patch16_224.augreg_in21k_ft_in1k", checkpoint_path=str(real_checkpoint)).eval()
    transform = timm.data.create_transform(**timm.data.resolve_data_config(model=peer), is_training=False)
    encoded = [data for data, _ in photographs[::40]]
    images = torch.stack([transform(Image.open(io.BytesIO(data)).convert("RGB")) for data in encoded])
    with torch.no_grad():
        theirs = peer(images)
    assert (vit.logits(encoded) - theirs).abs().max() <= 1e-4


def test_class_names_match_timm(vit, photographs):
    import_peer("timm")
    best = vit.predict(photographs[0][0])[0]
    assert (best.label, best.index) == ("go-kart", 573)
    assert best.score == pytest.approx(0.990, abs=1e-3)
    assert len(vit.labels) == len(set(vit.labels)) == 1000
    assert vit.labels[0].startswith("tench")


@pytest.mark.slow
def test_accuracy_on_1000_photographs_matches_the_recorded_values(vit, photographs):
    logits = vit.logits([data for data, _ in photographs], batch_size=50)
    target = torch.tensor([index for _, index in photographs])
    best = logits.topk(5).indices == target[:, None]
    assert 100 * best[:, 0].float().mean() == pytest.approx(74.3, abs=1e-4)
    assert 100 * best.any(1).float().mean() == pytest.approx(93.0, abs=1e-4)
    assert F.cross_entropy(logits, target) == pytest.approx(0.9904, abs=5e-5)

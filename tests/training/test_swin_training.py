"""A Swin Transformer fine-tuned on a folder of images, then evaluated, probed, embedded and reported on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import model
from training.small_runs import make_photos

import vitrail
from vitrail.bulk.running import embed
from vitrail.config import SwinConfig
from vitrail.errors import ModelError
from vitrail.evaluation.feature_file import read_features
from vitrail.evaluation.features import FeatureSpec, extract, resolve_features
from vitrail.evaluation.probing import ProbeSettings, probe
from vitrail.models import Swin, build

SMALL: dict[str, Any] = {"image_size": 32, "width": 8, "depths": (2, 2), "num_heads": (1, 2), "window_size": 3}
QUICK = ("data.workers=0", "duration=30 steps", "optim.lr=5e-3", "evaluate_every=6 steps", "checkpoint_every=6 steps")

pytestmark = pytest.mark.usefixtures("quick_disk", "in_tmp_dir")


@pytest.fixture(scope="module")
def album(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_photos(tmp_path_factory.mktemp("album") / "photos", {"red": 16, "green": 16, "blue": 16}, side=40)


@pytest.mark.parametrize("version", [1, 2])
def test_fine_tuning_gives_a_run_with_a_report_that_can_be_evaluated_and_probed(version: int, album: Path) -> None:
    family = "Swin" if version == 1 else "SwinV2"
    model(SwinConfig(**SMALL, num_classes=7, version=version), labels=None, family=family).save("start")
    run = vitrail.finetune("start", str(album), overrides=QUICK, device="cpu", out="run")
    assert run.scores is not None
    report = Path("run/report.html").read_text(encoding="utf-8")
    title = "Swin Transformer" + (" V2" if version == 2 else "")
    for text in (f"{title}: width 8, 2-2 blocks, 1-2 heads", "Attention rollout: how much each of the 8 × 8 patches"):
        assert text in report
    assert "A Swin Transformer has no position embeddings" in report
    tuned = vitrail.load("run")
    assert tuned.labels == ("blue", "green", "red")
    assert tuned.info.family == family
    top1 = vitrail.evaluate(tuned, f"folder:{album}").top1.value
    assert top1 >= 0.5
    assert probe(tuned, f"folder:{album}", settings=ProbeSettings(methods=("knn",))).width == 16
    embed(tuned, f"folder:{album}", "features.parquet")
    assert read_features([Path("features.parquet")])[0].values.shape[1] == 16


def test_the_last_blocks_alone_can_be_trained(album: Path) -> None:
    model(SwinConfig(**SMALL, num_classes=3), labels=None, family="Swin").save("start")
    before = vitrail.load("start", num_classes=3).net.state_dict()
    vitrail.finetune("start", str(album), trainable=1, overrides=QUICK, device="cpu", out="run", report=False)
    after = vitrail.load("run").net.state_dict()
    changed = {
        name for name in after if after[name].shape != before[name].shape or not torch.equal(after[name], before[name])
    }
    assert changed
    assert all(name.startswith(("stages.1.blocks.1.", "norm.", "head.")) for name in changed)


def test_features_of_layers_have_the_width_of_their_stage() -> None:
    net = build(SwinConfig(**SMALL, num_classes=0))
    assert isinstance(net, Swin)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        tokens = net.features(images, "tokens").tokens
        spec = resolve_features(FeatureSpec(layers=(0, 2, -1), norm=False), net)
        assert (spec.layers, spec.pool) == ((0, 2, 4), "mean")
        found = extract(net, images, spec)
        assert torch.equal(found, torch.cat([tokens[n].mean(1) for n in (0, 2, 4)], dim=1))
        last = extract(net, images, resolve_features(FeatureSpec(layers=(-1,)), net))
        torch.testing.assert_close(last, net(images))
    with pytest.raises(ModelError, match="fits the layers of its last stage only, from 3; choose these, or no norm"):
        resolve_features(FeatureSpec(layers=(1, -1)), net)
    with pytest.raises(ModelError, match="a Swin Transformer has no class token to pool with 'token'"):
        resolve_features(FeatureSpec(pool="token"), net)


def test_pyramid_of_a_published_size_has_four_maps_with_their_strides() -> None:
    net = vitrail.create("swin_tiny_patch4_window7_224", num_classes=0, width=24, num_heads=(1, 2, 4, 8))
    maps = net.features(torch.randn(1, 3, 224, 320), "feature_maps").feature_maps
    assert net.config.strides == ((4, 4), (8, 8), (16, 16), (32, 32))
    assert [tuple(m.shape) for m in maps] == [(1, 24 << s, 224 // (4 << s), 320 // (4 << s)) for s in range(4)]

"""What is measured is what is claimed: every library computes our network's function, in every kind of work."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import import_peer, need_extra

from vitrail.bench.cases import OWN, PRODUCT, Case
from vitrail.bench.libraries import (
    LIBRARIES,
    import_library,
    libraries_for,
    network_config,
    peer_network,
    random_network,
)
from vitrail.bench.measurement import MAX_ERROR
from vitrail.bench.workload import PRODUCT_SIDE, make_workload, relative_error
from vitrail.models.flops import count_flops

TINY = Case(library=OWN, model="ViT-Ti/16@32", batch_size=3, changes={"depth": 2})
FLOPS = 3 * count_flops(network_config("ViT-Ti/16@32", {"depth": 2}))


SMALL_SWIN = {"width": 16, "depths": (2, 2), "num_heads": (1, 2), "window_size": 4}
NETWORKS = {
    "ViT-Ti/16@32": {"depth": 2},
    "DINOv3-S/16@32": {"depth": 2},
    "Swin-T@64": SMALL_SWIN,
    "SwinV2-T@64": SMALL_SWIN,
}
PAIRS = [(model, name) for model in NETWORKS for name in libraries_for(model) if LIBRARIES[name].same_function]


@pytest.mark.peer
@pytest.mark.parametrize(("model", "name"), PAIRS)
def test_peers_compute_the_function_of_our_network(model: str, name: str):
    import_peer(LIBRARIES[name].module)
    ours, info = random_network(network_config(model, NETWORKS[model]))
    library, version = import_library(name)
    images = torch.randn(2, 3, *info.config.image_size)
    with torch.no_grad():
        logits, spread = ours(images), ours(torch.randn_like(images))
        assert relative_error(peer_network(library, ours, info)(images), logits) < 1e-5
        assert relative_error(spread, logits) > 1e-3, "the logits do not depend on the image"
    assert version


def test_each_network_is_compared_with_the_libraries_that_have_it():
    """timm-fused is timm with a switch that only Swin Transformers (V1) need; torchvision has no rotary positions."""
    vits, swins = {"timm", "torchvision", "transformers"}, {"timm", "timm-fused", "torchvision", "transformers"}
    assert [set(libraries_for(name)) for name in ("B/16", "ViT-B/16", "Swin-T", "SwinV2-B", "DINOv3-L/16@768")] == [
        set(LIBRARIES), {*vits, "vit-pytorch"}, swins, swins - {"timm-fused"}, {"timm", "transformers"},
    ]  # fmt: skip


@pytest.mark.peer
@pytest.mark.parametrize("name", libraries_for(TINY.model))
@pytest.mark.parametrize("work", ["forward", "train"])
def test_peers_are_measured_and_checked(name: str, work: str):
    import_peer(LIBRARIES[name].module)
    load = make_workload(replace(TINY, library=name, work=work))
    assert load.error is not None
    assert load.error < 1e-5
    load.step()


@pytest.mark.parametrize("work", ["forward", "train", "attention", "rollout", "streamed rollout"])
def test_own_work_is_checked_and_its_flops_counted(work: str):
    load = make_workload(replace(TINY, work=work))
    assert load.error is not None
    assert load.error < 1e-5
    assert load.flops == FLOPS * (3 if work == "train" else 1)
    assert load.compile_s is None
    load.step()


def test_bfloat16_stays_within_the_allowed_error_and_is_not_exact():
    load = make_workload(replace(TINY, work="train", precision="bfloat16"))
    assert load.error is not None
    assert 1e-4 < load.error < MAX_ERROR["bfloat16"]


def test_8_bit_products_stay_within_the_allowed_error_and_are_not_bfloat16():
    errors = [make_workload(replace(TINY, precision=name)).error for name in ("bfloat16", "float8")]
    assert None not in errors
    assert 3 * errors[0] < errors[1] < MAX_ERROR["float8"]


def test_a_training_step_changes_the_weights_and_leaves_no_gradients(monkeypatch: pytest.MonkeyPatch):
    networks = []
    from vitrail.bench import workload

    def remembered(config: object) -> object:
        networks.append(random_network(config))  # type: ignore[arg-type]
        return networks[-1]

    monkeypatch.setattr(workload, "random_network", remembered)
    load = make_workload(replace(TINY, work="train"))
    [(net, _)] = networks
    before = [p.detach().clone() for p in net.parameters()]
    load.step()
    assert all(not torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize(
    ("library", "engine", "precision"),
    [(OWN, "torch", "float32"), ("onnxruntime", "onnxruntime", "float32"), ("openvino", "openvino", "int8")],
)
def test_engines_take_pixels(
    library: str, engine: str, precision: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    if engine != "torch":
        need_extra("export")
    monkeypatch.setenv("VITRAIL_ENGINES", str(tmp_path_factory.getbasetemp() / "bench-engines"))
    load = make_workload(replace(TINY, library=library, engine=engine, precision=precision, pixels=True))
    assert load.error is not None
    assert load.error <= MAX_ERROR[precision]
    load.step()


@pytest.mark.peer
def test_a_peer_with_pixels_normalizes_them_like_our_preprocessing():
    import_peer("timm")
    load = make_workload(replace(TINY, library="timm", pixels=True))
    assert load.error is not None
    assert load.error < 1e-5


def test_the_matrix_product_counts_its_flops():
    load = make_workload(Case(library=PRODUCT, work="product"))
    assert load.flops == 2 * PRODUCT_SIDE["cpu"] ** 3
    load.step()


@pytest.mark.peer
@pytest.mark.slow
def test_the_accuracy_of_a_real_checkpoint_is_that_of_the_model(real_checkpoint, imagenet_val):
    import_peer("timm")
    case = Case(
        library="timm",
        model=str(real_checkpoint),
        batch_size=8,
        pixels=True,
        data=f"shards:{sorted(imagenet_val.glob('*.tar'))[0]}",
    )
    load = make_workload(case)
    assert load.error is not None
    assert load.error < 1e-4
    assert load.top1 is not None
    assert 0.6 < load.top1 < 0.9

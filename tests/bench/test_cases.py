"""The plan of a benchmark: which cases are measured, in which order, on which device."""

from __future__ import annotations

import pytest

from vitrail.bench.cases import OWN, PRODUCT, Case, Request, full_name, plan
from vitrail.errors import ConfigError


def test_a_gpu_run_compares_all_libraries_compiled_in_bfloat16_the_base_model_first():
    groups = plan(Request(), "cuda", bfloat16=True)
    assert [(g.model, g.mode, g.batch_size) for g in groups[:4]] == [
        ("ViT-B/16", "train", 256),
        ("ViT-B/16", "inference", 512),
        ("ViT-L/16", "train", 128),
        ("ViT-L/16", "inference", 256),
    ]
    for group in groups:
        *cases, product = group.cases
        assert [case.library for case in cases] == [OWN, "timm", "torchvision", "transformers", "vit-pytorch"]
        assert {(case.compile, case.precision) for case in cases} == {("default", "bfloat16")}
        assert (product.library, product.precision) == (PRODUCT, "bfloat16")


def test_8_bit_products_and_plain_kernels_are_rows_of_their_own_where_they_differ():
    request = Request(models=("B/16",), modes=("train", "inference", "latency"), against=("timm",))
    groups = plan(request, "cuda", bfloat16=True, float8=True, kernels="mlp=triton")
    found = [[(case.library, case.precision, case.kernels) for case in group.cases] for group in groups]
    own, plain, small = (
        (OWN, "bfloat16", "auto"),
        (OWN, "bfloat16", "plain"),
        (OWN, "float8", "auto"),
    )
    timm, product, small_product = (
        ("timm", "bfloat16", "auto"),
        (PRODUCT, "bfloat16", "auto"),
        (PRODUCT, "float8", "auto"),
    )
    assert found == [
        [own, plain, timm, product],
        [own, small, plain, timm, product, small_product],
        [own, small, timm, product, small_product],
    ]
    assert groups[0].cases[1].setting == "compiled, fused AdamW, plain kernels"


def test_swin_and_large_images_have_smaller_batches():
    names = ("Swin-T", "Swin-B", "Swin-B@384", "DINOv3-L/16", "DINOv3-L/16@768")
    groups = plan(Request(models=names), "cuda", bfloat16=True)
    assert [g.batch_size for g in groups] == [256, 512, 128, 256, 32, 64, 128, 256, 8, 16]
    [swin, *_], [dinov3, *_] = groups, groups[-2:]
    assert [c.library for c in swin.cases] == [OWN, "timm", "timm-fused", "torchvision", "transformers", PRODUCT]
    assert [c.library for c in dinov3.cases] == [OWN, "timm", "transformers", PRODUCT]


def test_latency_on_a_gpu_uses_cuda_graphs_for_all_and_waits_for_each_image():
    [group] = plan(Request(models=("B/16",), modes=("latency",)), "cuda", bfloat16=True)
    assert group.batch_size == 1
    assert {(case.compile, case.synchronize) for case in group.cases[:-1]} == {("reduce-overhead", True)}


def test_explanations_are_compared_with_the_plain_forward_pass():
    [group] = plan(Request(models=("B/16",), modes=("explain",)), "cuda", bfloat16=True)
    assert group.baseline == "first"
    assert [case.work for case in group.cases] == ["forward", "attention", "rollout", "streamed rollout", "product"]


def test_a_cpu_run_has_every_engine_and_precision():
    groups = plan(Request(models=("Ti/16",)), "cpu", bfloat16=True)
    assert [group.batch_size for group in groups] == [1, 16]
    found = {(case.library, case.engine, case.compile, case.precision) for case in groups[0].cases}
    assert {(OWN, "torch", None, "float32"), (OWN, "torch", "default", "bfloat16")} <= found
    assert {("timm", "torch", None, "float32"), ("timm", "torch", "default", "bfloat16")} <= found
    assert (OWN, "auto", None, "float32") in found
    assert {"onnxruntime", "openvino"} <= {library for library, *_ in found}  # rows also where they are not installed
    assert all(case.pixels for case in groups[0].cases if case.library != PRODUCT)


def test_float32_is_float32_only():
    groups = plan(Request(models=("Ti/16",), precision="float32"), "cpu", bfloat16=True)
    assert {case.precision for group in groups for case in group.cases} == {"float32"}


def test_cases_survive_json():
    case = Case(library=OWN, changes={"depth": 3}, synchronize=True)
    assert Case.from_json(case.to_json()) == case


def test_groups_with_different_cases_have_different_files():
    keys = [g.key for r in (Request(), Request(against=("timm",)), Request(eager=True)) for g in plan(r, "cuda", True)]
    assert len(set(keys)) == len(keys) == 24


@pytest.mark.parametrize(
    ("short", "full"),
    [("B/16", "ViT-B/16"), ("Ti/16@32", "ViT-Ti/16@32"), ("DeiT-S/16", "DeiT-S/16"), ("runs/a", "runs/a")],
)
def test_short_names_are_vits(short: str, full: str):
    assert full_name(short) == full


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(against=("tim",)), "unknown library 'tim'"),
        (Request(modes=("training",)), "unknown mode 'training'"),
    ],
)
def test_unknown_names_are_refused(request_: Request, message: str):
    with pytest.raises(ConfigError, match=message):
        plan(request_, "cpu", bfloat16=False)

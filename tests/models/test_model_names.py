"""Names, sizes and golden counts of every published model."""

from __future__ import annotations

import re

import pytest
import torch
from conftest import ROOT, import_peer
from hypothesis import given
from hypothesis import strategies as st

from vitrail.config import BiTConfig, ViTConfig, pair
from vitrail.errors import NotFoundError
from vitrail.models import build
from vitrail.models.families import FAMILIES
from vitrail.models.flops import count_flops, count_parameters
from vitrail.models.model_names import SIZES, config_from_name, find_published, infer_num_heads, parse_name
from vitrail.models.published_models import PUBLISHED_MODELS, PublishedModel

# Parameters, and GFLOPs of one image at the model's own size. The counts of the sizes at 1000
# classes are those of the paper's code; a test below compares most of them with timm.
COUNTS = {
    "ViT-Ti/16": (5_717_416, 2.51),
    "ViT-Ti/16@384": (5_790_376, 9.36),
    "ViT-S/32": (22_878_952, 2.29),
    "ViT-S/32@384": (22_915_432, 6.89),
    "ViT-S/16": (22_050_664, 9.20),
    "ViT-S/16@384": (22_196_584, 30.98),
    "ViT-B/32": (88_224_232, 8.82),
    "ViT-B/32@384": (88_297_192, 26.09),
    "ViT-B/16": (86_567_656, 35.13),
    "ViT-B/16@384": (86_859_496, 110.97),
    "ViT-B/8": (86_576_872, 156.30),
    "ViT-L/32@384": (306_632_680, 90.55),
    "ViT-L/32": (306_535_400, 30.76),
    "ViT-L/16": (304_326_632, 123.11),
    "ViT-L/16@384": (304_715_752, 382.13),
    "ViT-H/14": (632_045_800, 334.59),
    "ViT-g/14": (1_012_611_432, 534.06),
    "ViT-G/14": (1_844_440_680, 967.50),
    "R+ViT-Ti/16": (6_337_704, 0.87),
    "R26+ViT-S/32": (36_431_912, 6.93),
    "R26+ViT-S/32@384": (36_468_392, 20.53),
    "R26+ViT-B/32": (101_383_976, 13.42),
    "R50+ViT-B/16": (98_659_112, 43.07),
    "R50+ViT-B/16@384": (98_950_952, 134.31),
    "R50+ViT-L/32": (328_994_856, 38.83),
    "R50+ViT-L/32@384": (329_092_136, 114.27),
    "BV-S/16": (22_122_472, 9.15),
    "BV-B/16": (87_006_184, 34.94),
    "DeiT-Ti/16": (5_717_416, 2.51),
    "DeiT-S/16": (22_050_664, 9.20),
    "DeiT-B/16": (86_567_656, 35.13),
    "DeiT-B/16@384": (86_859_496, 110.97),
    "DeiT-Ti/16-distilled": (5_910_800, 2.52),
    "DeiT-S/16-distilled": (22_436_432, 9.25),
    "DeiT-B/16-distilled": (87_338_192, 35.31),
    "DeiT-B/16-distilled@384": (87_630_032, 111.18),
    "DeiT3-S/16": (22_059_496, 9.20),
    "DeiT3-S/16@384": (22_205_416, 30.98),
    "DeiT3-B/16": (86_585_320, 35.13),
    "DeiT3-B/16@384": (86_877_160, 110.97),
    "DeiT3-L/16": (304_374_760, 123.11),
    "DeiT3-L/16@384": (304_763_880, 382.13),
    "DeiT3-H/14": (632_126_440, 334.59),
    "MAE-B/16": (85_798_656, 35.13),
    "MAE-L/16": (303_301_632, 123.11),
    "MAE-H/14": (630_764_800, 334.59),
    "DINO-S/16": (21_665_664, 9.20),
    "DINO-S/8": (21_670_272, 44.81),
    "DINO-B/16": (85_798_656, 35.13),
    "DINO-B/8": (85_807_872, 156.30),
    "DINOv2-S/14": (22_056_192, 93.39),
    "DINOv2-B/14": (86_579_712, 303.15),
    "DINOv2-L/14": (304_367_616, 1013.61),
    "DINOv2-g/14": (1_136_479_232, 3566.69),
    "DINOv2-S/14-reg": (22_057_728, 93.77),
    "DINOv2-B/14-reg": (86_582_784, 304.23),
    "DINOv2-L/14-reg": (304_371_712, 1017.10),
    "DINOv2-g/14-reg": (1_136_485_376, 3578.44),
    "DINOv3-S/16": (21_596_160, 9.40),
    "DINOv3-S+/16": (28_692_480, 12.24),
    "DINOv3-B/16": (85_659_648, 35.86),
    "DINOv3-L/16": (303_128_576, 125.68),
    "DINOv3-H+/16": (840_591_360, 344.23),
    "DINOv3-7B/16": (6_716_030_976, 2725.49),
    "CLIP-B/32": (87_849_216, 8.82),
    "CLIP-B/16": (86_192_640, 35.13),
    "CLIP-L/14": (303_966_208, 162.03),
    "CLIP-L/14@336": (304_293_888, 381.92),
    "SigLIP-B/16": (92_884_224, 35.42),
    "SigLIP-B/16@256": (92_930_304, 46.82),
    "SigLIP-B/16@384": (93_176_064, 112.13),
    "SigLIP-B/16@512": (93_520_128, 216.24),
    "SigLIP-L/16@256": (315_956_224, 162.56),
    "SigLIP-L/16@384": (316_283_904, 383.85),
    "SigLIP-SO400M/14@384": (428_225_600, 670.35),
    "SigLIP-SO400M/14": (427_680_704, 220.35),
    "BiT-R50x1": (25_549_352, 8.18),
    "BiT-R50x3": (217_319_080, 72.16),
    "BiT-R101x1": (44_541_480, 15.60),
    "BiT-R101x3": (387_934_888, 138.98),
    "BiT-R152x2": (236_335_208, 91.63),
    "BiT-R152x4": (936_533_224, 365.55),
    "Swin-T": (28_288_354, 8.98),
    "Swin-S": (49_606_258, 17.48),
    "Swin-B": (87_768_224, 30.86),
    "Swin-B@384": (87_903_584, 94.17),
    "Swin-L": (196_532_476, 68.95),
    "Swin-L@384": (196_735_516, 207.84),
    "Swin-S3-T": (28_328_674, 9.25),
    "Swin-S3-S": (49_737_298, 18.81),
    "Swin-S3-B": (71_125_762, 27.31),
    "SwinV2-T": (28_347_154, 11.84),
    "SwinV2-T-w16": (28_347_154, 14.94),
    "SwinV2-S": (49_728_418, 23.02),
    "SwinV2-S-w16": (49_728_418, 27.02),
    "SwinV2-B": (87_918_816, 40.55),
    "SwinV2-B-w16": (87_918_816, 46.49),
    "SwinV2-B-w12": (87_918_816, 25.03),
    "SwinV2-B-w12to16": (87_918_816, 46.49),
    "SwinV2-B-w12to24": (87_918_816, 117.44),
    "SwinV2-L-w12": (196_739_932, 55.21),
    "SwinV2-L-w12to16": (196_739_932, 101.14),
    "SwinV2-L-w12to24": (196_739_932, 246.82),
}


def test_every_variant_has_a_golden_count() -> None:
    assert set(COUNTS) == {v.name for v in PUBLISHED_MODELS}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_and_flop_counts_equal_the_golden_values(name: str) -> None:
    config = parse_name(name)
    count, gflops = COUNTS[name]
    assert count_parameters(config) == count
    assert count_flops(config) / 1e9 == pytest.approx(gflops, abs=0.005)


IN_TIMM = {
    v.name: name
    for v in PUBLISHED_MODELS
    for name in (v.hub_id.removeprefix("timm/"), *v.aliases)
    if "/" not in name and re.match(r"vit_\w+_(patch|r)|deit|resnetv2|swin\w+_\d+$", name)
}


@pytest.mark.peer
@pytest.mark.parametrize("variant", [v for v in PUBLISHED_MODELS if v.name in IN_TIMM], ids=lambda v: v.name)
def test_timms_model_of_this_name_has_the_same_parameter_count(variant: PublishedModel) -> None:
    timm = import_peer("timm")
    name = IN_TIMM[variant.name]
    if variant.hub_id.startswith("timm/"):
        checkpoint = variant.hub_id.removeprefix("timm/")
        assert checkpoint in timm.list_pretrained(checkpoint.partition(".")[0] + "*")
    config = parse_name(variant.name)
    with torch.device("meta"):
        theirs = timm.create_model(name, num_classes=config.num_classes)
    count = sum(p.numel() for p in theirs.parameters())
    if variant.name.startswith("DINOv2") and variant.name.endswith("reg"):
        count += config.width  # timm folds the class token's position into the token
    if variant.name.startswith("CLIP"):
        count -= config.num_classes  # timm's projection has a bias, of zeros
    assert count_parameters(config) == count


@pytest.mark.peer
def test_timm_style_aliases_are_timm_models() -> None:
    timm = import_peer("timm")
    names = [a for v in PUBLISHED_MODELS for a in v.aliases if "_patch" in a and "/" not in a]
    assert len(names) > 30
    assert [n for n in names if not timm.is_model(n)] == []


def test_names_are_accepted_in_any_spelling() -> None:
    assert parse_name("vit-b/16") == parse_name("ViT-B/16")
    assert parse_name("ViT-g/14").width == 1408
    assert parse_name("ViT-G/14").width == 1664
    assert parse_name("dinov2-g/14").width == 1536
    assert config_from_name("vit_base_patch16_224") == parse_name("ViT-B/16")
    assert config_from_name("timm/vit_base_patch16_224.augreg_in21k_ft_in1k") == parse_name("ViT-B/16")
    assert config_from_name("google/vit-base-patch16-384") == parse_name("ViT-B/16@384")
    assert find_published("dinov2_vits14_reg").name == "DINOv2-S/14-reg"
    assert config_from_name("ViT-S/8@96x64", num_classes=10).grid == (12, 8)
    assert config_from_name("BV-S/16-tok").num_positioned_prefix_tokens == 0
    assert config_from_name("R50+ViT-L/32").stem.layers == (3, 4, 6, 3)


@given(
    st.sampled_from(list(SIZES)),
    st.sampled_from([8, 14, 16, 32]),
    st.integers(1, 4),
    st.sampled_from(["ViT", "DeiT", "DINO"]),
)
def test_size_patch_and_image_size_combine_freely(size: str, patch: int, grid_side: int, family: str) -> None:
    config = parse_name(f"{family}-{size}/{patch}@{patch * grid_side}")
    assert isinstance(config, ViTConfig)
    assert (config.width, config.grid) == (SIZES[size].width, (grid_side, grid_side))
    assert infer_num_heads(config.width, config.mlp_dim) == config.num_heads


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ViT-B/17x", "unknown model 'ViT-B/17x'; did you mean 'ViT-B/"),
        ("ViT-X/16", "there is no size 'X'; the sizes are Ti, S, B"),
        ("R99+ViT-B/16", "no such hybrid; available: R\\+ViT-B/16"),
        ("BiT-R77x1", "BiT comes as R50, R101, R152"),
        ("resnet50", "unknown model 'resnet50'"),
        ("Swin-B/4", "unknown model 'Swin-B/4'"),
        ("Swin-X", "there is no such Swin Transformer; there are Swin-T, -S, -B, -L"),
        ("SwinV2-S3-T", "there is no such Swin Transformer"),
    ],
)
def test_unknown_names_suggest_known_ones(name: str, message: str) -> None:
    with pytest.raises(NotFoundError, match=message):
        config_from_name(name)


def test_every_name_refers_to_one_model() -> None:
    names = [n.lower() for v in PUBLISHED_MODELS for n in {v.name, v.hub_id.removeprefix("timm/"), *v.aliases} if n]
    assert {n for n in names if names.count(n) > 1} == {"vit-g/14"}, "only the case distinguishes g from G"
    assert find_published("ViT-G/14").name == "ViT-G/14"
    assert find_published("ViT-g/14").name == "ViT-g/14"


W = "tests/weights"
PARITY_TESTS = {
    "ViT": {
        "golden": f"{W}/test_google.py::google_token",
        "timm": f"{W}/test_timm.py::vit_base_patch16_224",
        "transformers": "tests/transformers_peers.py::ViTForImageClassification",
        "torchvision": f"{W}/test_torchvision.py::vit_b_16",
    },
    "BV": {"golden": f"{W}/test_google.py::bigvision_gap_sincos"},
    "DeiT": {
        "timm": f"{W}/test_timm.py::deit_tiny_distilled_patch16_224",
        "transformers": "tests/transformers_peers.py::DeiTForImageClassificationWithTeacher",
    },
    "DeiT3": {"timm": f"{W}/test_timm.py::deit3_small_patch16_224"},
    "MAE": {"timm": f"{W}/test_facebook.py::mae", "transformers": "tests/transformers_peers.py::ViTMAE"},
    "DINO": {"timm": f"{W}/test_facebook.py::dino", "transformers": "tests/transformers_peers.py::ViTModel"},
    "IJEPA": {"transformers": "tests/recognition_transformers.py::IJepaModel"},
    "DINOv2": {
        "timm": f"{W}/test_timm.py::vit_small_patch14_reg4_dinov2",
        "transformers": "tests/transformers_peers.py::Dinov2WithRegisters",
    },
    "CLIP": {
        "golden": f"{W}/test_open_clip.py::openai.embedding",
        "timm": f"{W}/test_timm.py::vit_base_patch16_clip_quickgelu_224",
        "transformers": "tests/transformers_peers.py::CLIPVisionModelWithProjection",
    },
    "SigLIP": {
        "timm": f"{W}/test_timm.py::vit_base_patch16_siglip_224",
        "transformers": "tests/transformers_peers.py::SiglipVisionModel",
    },
    "BiT": {
        "golden": f"{W}/test_google_bit.py::bigvision_bit_small",
        "timm": f"{W}/test_timm.py::resnetv2_50x1_bit",
        "transformers": "tests/transformers_peers.py::BitForImageClassification",
    },
    "TIPSv2": {
        "timm": f"{W}/test_tipsv2.py::vit_base_patch14_reg1_tipsv2",
        "transformers": f"{W}/test_tipsv2.py::Tipsv2VisionModel",
    },
    "DINOv3": {
        "golden": f"{W}/test_dinov3.py::golden_values",
        "timm": f"{W}/test_dinov3.py::vit_small_patch16_dinov3",
        "transformers": f"{W}/test_dinov3.py::DINOv3ViTModel",
    },
    **{
        family: {
            "golden": f"{W}/test_swin_files.py::golden_values",
            **{peer: f"tests/swin_peers.py::{peer} v{version}" for peer in ("timm", "torchvision", "transformers")},
        }
        for version, family in ((1, "Swin"), (2, "SwinV2"))
    },
}
"""Family, peer -> the test file that compares them and a string that occurs in the comparison."""


def test_every_verified_against_claim_has_a_test() -> None:
    assert {v.family for v in PUBLISHED_MODELS} | {"IJEPA", "TIPSv2"} == set(FAMILIES) == set(PARITY_TESTS), (
        "I-JEPA's and TIPSv2's files are read by path"
    )
    for name, family in FAMILIES.items():
        claims = {claim.split()[0] for claim in family.verified_against.split("; ")}
        assert claims == set(PARITY_TESTS[name]), name
        for parity_test in PARITY_TESTS[name].values():
            path, _, text = parity_test.partition("::")
            assert text in (ROOT / path).read_text(), parity_test


@pytest.mark.parametrize("name", ["ViT-Ti/16", "R26+ViT-S/32", "DeiT-Ti/16-distilled", "SigLIP-B/16", "BiT-R50x1"])
def test_a_published_model_runs(name: str) -> None:
    config = parse_name(name)
    net = build(config.replace(depth=1) if isinstance(config, ViTConfig) else config, seed=0).eval()
    size = (64, 64) if isinstance(config, BiTConfig) else pair(config.image_size)
    with torch.no_grad():
        assert net(torch.randn(1, 3, *size)).isfinite().all()

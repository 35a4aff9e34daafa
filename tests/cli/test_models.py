"""`vitrail models`: the list, narrow windows and JSON."""

from __future__ import annotations

import json

import pytest

from vitrail.cli.console import out
from vitrail.models.published_models import PUBLISHED_MODELS


def test_every_model_is_listed_with_parameters_and_flops(vitrail):
    result = vitrail("models")
    assert result.status == 0
    assert result.err == ""
    lines = result.out.splitlines()
    assert lines[0].split() == ["model", "parameters", "GFLOPs", "image", "weights"]
    assert [line.split()[0] for line in lines[1 : len(PUBLISHED_MODELS) + 1]] == [v.name for v in PUBLISHED_MODELS]
    assert "ViT-Ti/16                    5,717,416      2.5    224  timm/vit_tiny_patch16_224.augreg" in result.out
    assert "none public" in result.out


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("ViT-L/*@384", {"ViT-L/32@384", "ViT-L/16@384", "R50+ViT-L/32@384"}),
        ("dinov2-s", {"DINOv2-S/14", "DINOv2-S/14-reg"}),
        ("siglip-so400m", {"SigLIP-SO400M/14", "SigLIP-SO400M/14@384"}),
        ("resnetv2_152*", {"BiT-R152x2", "BiT-R152x4"}),
        ("ViT-B/16", {"ViT-B/16"}),  # an exact name selects only that model
        ("google/vit-base-patch16-384", {"ViT-B/16@384"}),
    ],
)
def test_pattern_selects_models(vitrail, pattern, names):
    listed = json.loads(vitrail("models", pattern, "--json").out)["models"]
    wild = "*" in pattern and pattern.startswith("ViT")
    assert {m["name"] for m in listed} == names - ({"R50+ViT-L/32@384"} if wild else set())


def test_families_name_the_code_they_were_verified_against(vitrail):
    result = vitrail("models", "DeiT-*")
    assert "verified against" in result.out
    assert "timm (the authors build on it); transformers" in result.out
    assert "SigLIP" not in result.out


def test_one_model_shows_its_settings_and_aliases(vitrail):
    result = vitrail("models", "dino_vits16")
    assert "also called  facebook/dino-vits16\n             dino_vits16\n" in result.out
    assert "  num_heads=6  " in result.out
    assert "timm/vit_small_patch16_224.dino" in result.out


def test_settings_of_a_hybrid_include_its_stem(vitrail):
    assert "stem.layers=(3,4,9)" in vitrail("models", "R50+ViT-B/16").out


@pytest.mark.parametrize("columns", [60, 80, 99, 100, 120])
def test_no_line_is_wider_than_the_window(vitrail, monkeypatch, columns):
    monkeypatch.setattr(out, "width", columns)
    result = vitrail("models", "*distilled*")
    assert max(map(len, result.out.splitlines())) <= columns
    row = next(line for line in result.out.splitlines() if line.startswith("DeiT-B/16-distilled@384"))
    assert row.endswith("timm" if columns < 100 else "timm/deit_base_distilled_patch16_384.fb_in1k")
    assert ("For the hub ids, widen the window" in result.out) == (columns < 100)


def test_lines_do_not_end_in_spaces(vitrail):
    assert not [line for line in vitrail("models", "ViT-*").out.splitlines() if line != line.rstrip()]


def test_json_is_complete_and_the_only_output(vitrail):
    result = vitrail("models", "ViT-B/16", "--json")
    assert result.err == ""
    report = json.loads(result.out)
    [row] = report["models"]
    assert (row["parameters"], row["image_size"], row["family"]) == (86_567_656, [224, 224], "ViT")
    assert row["checkpoint"] == "timm/vit_base_patch16_224.augreg_in21k_ft_in1k"
    assert "google/vit-base-patch16-224" in row["aliases"]
    assert report["families"]["ViT"]["verified_against"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("ViT-Q/16", "no model matches 'ViT-Q/16'; did you mean 'ViT-"),
        ("zebra", "no model matches 'zebra'; `vitrail models` lists all models."),
        ("Q*", "no model matches 'Q*'; `vitrail models` lists all models."),
    ],
)
def test_no_match_is_a_one_sentence_error(vitrail, pattern, message):
    result = vitrail("models", pattern)
    assert (result.status, result.out) == (1, "")
    assert len(result.errors) == len(result.err.splitlines()) == 1
    assert result.errors[0].startswith(message)

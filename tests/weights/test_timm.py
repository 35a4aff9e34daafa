"""timm's files and repositories, against timm's own code on the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compare import randomized, relative
from conftest import import_peer

from vitrail.config import BiTConfig, StemConfig, ViTConfig, pair
from vitrail.errors import FormatError, Inexpressible
from vitrail.models import BiT, ViT, build
from vitrail.weights import checkpoint, timm_config
from vitrail.weights.card import Card, usual_preprocess
from vitrail.weights.files import Archive, Tensors
from vitrail.weights.timm import TIMM_FORMAT

timm = import_peer("timm")
pytestmark = pytest.mark.peer

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4, "num_classes": 7}
TINY = {"image": 32, "patch": 8, "width": 64, "depth": 2, "heads": 4, "mlp": 96, "classes": 7, "activation": "gelu"}


def saved(model: torch.nn.Module, folder: Path, **args: object) -> Path:
    timm.models.save_for_hf(model, folder, model_args=args, safe_serialization=True)
    return folder


def architectures() -> list[str]:
    """Those with public weights, one tag of each."""
    modules = ("vision_transformer", "vision_transformer_hybrid", "deit")
    names = {n for m in modules for n in timm.list_models(module=m, pretrained=True)}
    names |= set(timm.list_models("resnetv2*_bit*", pretrained=True))
    return sorted({name.partition(".")[0]: name for name in sorted(names)}.values())


STRANGE = (
    "aimv2",
    "beit3",
    "test_vit3",
    "vit_dlittle",
    "vit_dpwee",
    "vit_dwee",
    "vit_pwee",
    "vit_base_mci",
    "vit_base_patch16_rpn_224",
)
"""Architectures that compute something else: refused by name."""


def test_every_pretrained_vit_of_timm_is_built_alike_or_refused() -> None:
    """All of timm's architectures with weights: names, shapes, conventions, on skeletons without storage."""
    refused, wrong = [], {}
    for name in architectures():
        with torch.device("meta"):
            model = timm.create_model(name)
        archive = repository(model, name)
        try:
            if TIMM_FORMAT.recognise(archive) != "":
                raise FormatError("not recognised")
            card = TIMM_FORMAT.describe(archive)
            net = build(card.config, skeleton=True)
            TIMM_FORMAT.table(card.config).read(archive.tensors, net, card.config)
        except FormatError:
            refused.append(name)
            continue
        if expected(model) != said(card.config):
            wrong[name] = set(expected(model).items()) ^ set(said(card.config).items())
    assert wrong == {}
    assert refused == [name for name in architectures() if name.startswith(STRANGE)]


def repository(model: torch.nn.Module, name: str) -> Archive:
    """What `save_for_hf` would write, without the data."""
    cfg = timm.models.filter_pretrained_cfg(model.pretrained_cfg, remove_source=True, remove_null=True)
    cfg["tag"] = name.partition(".")[2]
    config = {"architecture": cfg.pop("architecture"), "num_classes": model.num_classes, "pretrained_cfg": cfg}
    if isinstance(getattr(model, "global_pool", None), str):
        config["global_pool"] = model.global_pool
    return Archive(source=name, tensors=Tensors.of(model.state_dict()), sidecars={"config.json": config})


def expected(model: torch.nn.Module) -> dict[str, object]:
    """timm's conventions, read off its modules."""
    if not hasattr(model, "blocks"):
        return {"stages": tuple(len(s.blocks) for s in model.stages), "classes": model.num_classes}
    block, mlp = model.blocks[0], model.blocks[0].mlp
    act = type(mlp.act).__name__
    return {
        "activation": {"GELU": "gelu", "GELUTanh": "gelu-tanh", "QuickGELU": "gelu-quick", "SiLU": "swiglu"}[act],
        "eps": block.norm1.eps,
        "heads": block.attn.num_heads,
        "pool": {"token": "token", "avg": "gap", "map": "map"}[model.global_pool],
        "grid": tuple(model.patch_embed.grid_size),
        "on class": model.cls_token is not None and not model.no_embed_class and model.pos_embed is not None,
        "classes": model.num_classes,
    }


def said(config: ViTConfig | BiTConfig) -> dict[str, object]:
    if isinstance(config, BiTConfig):
        return {"stages": config.layers, "classes": config.classes}
    return {
        "activation": config.activation,
        "eps": config.norm_eps,
        "heads": config.heads,
        "pool": config.pool,
        "grid": config.grid,
        "on class": config.placed_prefix > 0,
        "classes": config.classes,
    }


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"img_size": [32, 48]},
        {"patch_size": [8, 4]},
        {"in_chans": 1},
        {"num_classes": 0},
        {"global_pool": "avg"},
        {"global_pool": "avg", "fc_norm": False},
        {"global_pool": "avg", "class_token": False},
        {"global_pool": "map", "class_token": False},
        {"no_embed_class": True},
        {"reg_tokens": 3},
        {"reg_tokens": 3, "no_embed_class": True},
        {"pos_embed": "none"},
        {"pre_norm": True},
        {"qkv_bias": False},
        {"proj_bias": False},
        {"qk_norm": True},
        {"init_values": 0.1},
        {"final_norm": False},
        {"act_layer": "gelu_tanh"},
        {"act_layer": "quick_gelu"},
        {"norm_layer": "rmsnorm"},
    ],
    ids=lambda args: " ".join(f"{k}={v}" for k, v in args.items()) or "plain",
)
def test_a_timm_repository_gives_the_same_logits_and_goes_back_unchanged(
    args: dict[str, object], tmp_path: Path
) -> None:
    args = SMALL | args
    theirs = randomized(timm.create_model("vit_base_patch16_224", **args))
    folder = saved(theirs, tmp_path / "timm", **args)
    net, card = checkpoint.read(folder)
    size = pair(tuple(args["img_size"]) if isinstance(args["img_size"], list) else args["img_size"])  # type: ignore[arg-type]
    images = torch.randn(2, int(args.get("in_chans", 3)), *size)  # type: ignore[call-overload]
    with torch.no_grad():
        assert relative(net(images), theirs(images)) <= 1e-5
    checkpoint.write(net, card, tmp_path / "back", to="timm")
    again = timm.create_model(f"local-dir:{tmp_path / 'back'}", pretrained=True).eval()
    with torch.no_grad():
        assert relative(again(images), theirs(images)) <= 1e-6
    if "reg_tokens" in args and "no_embed_class" not in args:
        return  # the registers' positions became part of the registers
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    ("arch", "args"),
    [
        ("deit_tiny_distilled_patch16_224", {"depth": 2}),
        ("deit3_small_patch16_224", {"depth": 2}),
        ("vit_small_patch14_dinov2", {"depth": 2, "img_size": 70}),
        ("vit_small_patch14_reg4_dinov2", {"depth": 2, "img_size": 70}),
        ("vit_giant_patch14_dinov2", {"depth": 1, "img_size": 42, "embed_dim": 96, "num_heads": 4}),
        ("vit_base_patch16_clip_quickgelu_224", {"depth": 2, "img_size": 64, "embed_dim": 128, "num_heads": 4}),
        ("vit_base_patch16_siglip_224", {"depth": 2, "img_size": 64, "embed_dim": 128, "num_heads": 4}),
        ("vit_tiny_r_s16_p8_224", {"depth": 2}),
        ("vit_small_r26_s32_224", {"depth": 1}),
        ("resnetv2_50x1_bit", {}),
    ],
)
def test_the_families_give_timms_logits(arch: str, args: dict[str, object], tmp_path: Path) -> None:
    theirs = randomized(timm.create_model(arch, num_classes=9, **args))
    net, card = checkpoint.read(saved(theirs, tmp_path / "timm", **args))
    size = 64 if arch.startswith("resnetv2") else pair(card.config.image)[0]
    images = torch.randn(1, 3, size, size)
    with torch.no_grad():
        assert relative(net(images), theirs(images)) <= 1e-5
    checkpoint.write(net, card, tmp_path / "back", to="timm", approximate=False)
    again = timm.create_model(f"local-dir:{tmp_path / 'back'}", pretrained=True).eval()
    with torch.no_grad():
        assert relative(again(images), theirs(images)) <= 1e-6


@pytest.mark.parametrize("arch", ["vit_tiny_patch16_224", "vit_small_patch16_224", "vit_base_patch16_224"])
def test_logits_tokens_and_attention_at_224(arch: str, tmp_path: Path) -> None:
    theirs = randomized(timm.create_model(arch))
    net, _ = checkpoint.read(saved(theirs, tmp_path / "timm"))
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        out = net.features(images, want=("logits", "tokens", "attention"))
        assert relative(net(images), theirs(images)) <= 1e-5
        assert relative(out.logits, theirs(images)) <= 1e-5
        _, layers = theirs.forward_intermediates(images, output_fmt="NLC", return_prefix_tokens=True)
        for ours, (patches, prefix) in zip(out.tokens[1:], layers, strict=True):
            assert relative(ours, torch.cat([prefix, patches], dim=1)) <= 1e-5
        theirs_maps = attention_of(theirs, images)
        for ours, wanted in zip(out.attention, theirs_maps, strict=True):
            assert relative(ours, wanted) <= 1e-5


def attention_of(model: torch.nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    """timm's unfused path leaves the weights at its attention dropout."""
    maps: list[torch.Tensor] = []
    hooks = []
    for block in model.blocks:
        block.attn.fused_attn = False
        hooks.append(block.attn.attn_drop.register_forward_hook(lambda _m, _i, out: maps.append(out)))
    model(images)
    for hook in hooks:
        hook.remove()
    return maps


@pytest.mark.parametrize("size", [(288, 192), (96, 160)])
def test_another_size_is_resampled_as_timm_does_it(size: tuple[int, int], tmp_path: Path) -> None:
    theirs = randomized(timm.create_model("vit_tiny_patch16_224", depth=2))
    folder = saved(theirs, tmp_path / "timm", depth=2)
    net, _ = checkpoint.read(folder)
    dynamic = timm.create_model("vit_tiny_patch16_224", depth=2, dynamic_img_size=True).eval()
    dynamic.load_state_dict(theirs.state_dict())
    rebuilt = timm.create_model(f"local-dir:{folder}", pretrained=True, img_size=size).eval()
    images = torch.randn(1, 3, *size)
    with torch.no_grad():
        assert relative(net(images), dynamic(images)) <= 1e-5
        assert relative(net.resized(size)(images), rebuilt(images)) <= 1e-5


@pytest.mark.parametrize(
    "arch", ["vit_small_patch16_rope_ape_224", "vit_pe_core_small_patch16_384", "eva02_tiny_patch14_224"]
)
def test_timms_other_classes_are_refused_by_name(arch: str) -> None:
    """Their tensors look like a ViT's: only the architecture's name tells."""
    with torch.device("meta"):
        model = timm.create_model(arch)
    archive = repository(model, arch)
    with pytest.raises(FormatError, match=r"another class|which vitrail does not build"):
        TIMM_FORMAT.describe(archive)


def test_every_class_of_timm_that_is_not_its_vit_is_refused() -> None:
    names = timm.list_models(module="eva") + timm.list_models("naflexvit*")
    vits = [n for n in names if not timm_config.OTHER_CLASS.search(n) and timm.models.model_entrypoint(n)]
    assert [n for n in vits if not n.startswith("eva_large")] == []


@pytest.mark.parametrize(
    "arch", ["vit_base_patch16_gap_224", "test_vit4", "vit_huge_patch14_224", "vit_so400m_patch14_siglip_224"]
)
@pytest.mark.parametrize("depth", [None, 2])
def test_heads_come_from_the_architecture_at_any_depth(arch: str, depth: int | None) -> None:
    args = {"depth": depth} if depth else {}
    with torch.device("meta"):
        model = timm.create_model(arch, **args)
    assert TIMM_FORMAT.describe(repository(model, arch)).config.heads == model.blocks[0].attn.num_heads


def test_npz_in_timm_is_resampled_by_the_convention_of_that_name() -> None:
    from timm.layers import resample_abs_pos_embed

    from vitrail.models.position import resample

    table = torch.randn(7, 7, 16)
    wanted = resample_abs_pos_embed(
        table.flatten(0, 1)[None], [12, 9], [7, 7], num_prefix_tokens=0, interpolation="bilinear", antialias=False
    )
    assert relative(resample(table, (12, 9), "timm-npz").flatten(0, 1), wanted[0]) <= 1e-6


def test_matching_counts_on_another_grid_are_still_resampled(tmp_path: Path) -> None:
    """16x16 and 8x32 have the same number of tokens; timm's loader lets them pass unresized."""
    net = randomized(ViT(ViTConfig(**TINY | {"image": 128, "resample": "timm"})))
    wide = net.resized((64, 256))
    assert wide.positions[0].table.shape == (8, 32, 64)
    assert not torch.equal(wide.positions[0].table.flatten(0, 1), net.positions[0].table.flatten(0, 1))


def test_registers_with_positions_are_folded_and_said() -> None:
    theirs = randomized(timm.create_model("vit_base_patch16_224", **SMALL, reg_tokens=2))
    assert theirs.pos_embed.shape[1] == 16 + 3
    assert theirs.pos_embed[0, 1:3].abs().sum() > 0
    card = TIMM_FORMAT.describe(
        Archive(
            "x", Tensors.of(theirs.state_dict()), sidecars={"config.json": {"architecture": "x", "model_args": SMALL}}
        )
    )
    assert card.config.registers == 2
    assert card.config.placed_prefix == 1


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"position": "relative"}, "relative positions"),
        ({"position": "learned-2d"}, "learned-2d positions"),
        ({"position_at": "layers"}, "positions added at the layers"),
        ({"pre_logits": 16}, "tanh layer"),
        ({"pool": "token+gap"}, "side by side"),
        ({"head_bias": False}, "head without bias"),
        ({"norm_eps": 1e-12}, "1e-12"),
        ({"stem": StemConfig(layers=(1, 1)), "patch": 2, "image": 64}, "stem"),
    ],
)
def test_what_timm_cannot_express_is_refused_by_name(changes: dict[str, object], named: str, tmp_path: Path) -> None:
    config = ViTConfig(**TINY | changes)
    net = ViT(config)
    card = Card(config=config, preprocess=usual_preprocess("ViT", config))
    with pytest.raises(Inexpressible, match=named):
        checkpoint.write(net, card, tmp_path / "out", to="timm")
    assert list(tmp_path.iterdir()) == []


def test_a_repository_says_its_preprocessing_and_labels(tmp_path: Path) -> None:
    theirs = timm.create_model("vit_tiny_patch16_224.augreg_in21k_ft_in1k", depth=1)
    folder = saved(theirs, tmp_path / "timm", depth=1)
    _, card = checkpoint.read(folder)
    assert (card.preprocess.resize_to, card.preprocess.interpolation, card.preprocess.mean) == (
        248,
        "bicubic",
        (0.5,) * 3,
    )
    assert card.labels is not None
    assert card.labels[281].startswith("tabby")
    config = json.loads((folder / "config.json").read_text())
    config["pretrained_cfg"]["tag"] = "something_else"
    (folder / "config.json").write_text(json.dumps(config))
    assert checkpoint.read(folder)[1].labels is None, "never guessed"


def test_bit_reads_into_our_bit(tmp_path: Path) -> None:
    theirs = timm.create_model("resnetv2_50x1_bit")
    net, _ = checkpoint.read(saved(theirs, tmp_path / "timm"))
    assert isinstance(net, BiT)

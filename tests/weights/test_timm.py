"""timm's files and repositories, compared with timm on the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import recognition_timm
import torch
from compare import randomized, relative
from recognition_timm import is_supported, timm

from vitrail.config import BiTConfig, StemConfig, ViTConfig, pair
from vitrail.errors import ConversionError, FormatError
from vitrail.models import BiT, ViT, build
from vitrail.weights import checkpoint
from vitrail.weights.archive import Archive, LazyTensors
from vitrail.weights.family_defaults import default_preprocess
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.timm import TIMM_FORMAT

pytestmark = pytest.mark.peer

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4, "num_classes": 7}
TINY = {
    "image_size": 32,
    "patch_size": 8,
    "width": 64,
    "depth": 2,
    "num_heads": 4,
    "mlp_dim": 96,
    "num_classes": 7,
    "activation": "gelu",
}


def save_repository(model: torch.nn.Module, folder: Path, **args: object) -> Path:
    timm.models.save_for_hf(model, folder, model_args=args, safe_serialization=True)
    return folder


def test_inferred_config_matches_every_timm_vit() -> None:
    """Names, shapes and config of every published size, with one block, on the meta device."""
    differences = {}
    for case in recognition_timm.cases():
        if not is_supported(case.name) or "swin" in case.group or "eva" in case.group:  # these have own tests
            continue
        depth = {} if "resnetv2" in case.group else {"depth": 1}
        with torch.device("meta"):
            model = timm.create_model(case.name, num_classes=7, **depth)
        options = recognition_timm.known_options(case.name, model)
        folder = meta_repository(model, case.name)
        for source, archive, family in (
            ("folder", folder, None),
            ("bare", strip_sidecars(folder, options), options["family"]),
        ):
            recognized, archive = checkpoint.detect_format(archive, family)
            config = recognized.infer_info(archive).config
            recognized.table(config).read(archive.tensors, build(config, meta=True), config)
            if timm_settings(model) != config_settings(config):
                differences[case.name, source] = set(timm_settings(model).items()) ^ set(
                    config_settings(config).items()
                )
    assert differences == {}


def strip_sidecars(folder: Archive, options: dict[str, Any]) -> Archive:
    """The archive without sidecars, with the options that reading it requires."""
    bare_archive = Archive(folder.source, folder.tensors)
    for option in ("activation", "num_heads"):
        if requires(bare_archive, option):
            bare_archive.hints[option] = options[option]
    return bare_archive


def requires(archive: Archive, option: str) -> bool:
    """Whether a bare file is rejected because this option is missing."""
    try:
        TIMM_FORMAT.infer_info(archive)
    except FormatError as error:
        return f"{option}=" in str(error)
    return False


def meta_repository(model: torch.nn.Module, name: str) -> Archive:
    """The archive that `save_for_hf` would write, without weights."""
    cfg = timm.models.filter_pretrained_cfg(model.pretrained_cfg, remove_source=True, remove_null=True)
    cfg["tag"] = name.partition(".")[2]
    config = {"architecture": cfg.pop("architecture"), "num_classes": model.num_classes, "pretrained_cfg": cfg}
    if isinstance(getattr(model, "global_pool", None), str):
        config["global_pool"] = model.global_pool
    return Archive(source=name, tensors=LazyTensors.from_tensors(model.state_dict()), sidecars={"config.json": config})


def timm_settings(model: torch.nn.Module) -> dict[str, object]:
    """The settings of a timm model, from its modules."""
    if not hasattr(model, "blocks"):
        return {"stages": tuple(len(s.blocks) for s in model.stages), "num_classes": model.num_classes}
    block, mlp = model.blocks[0], model.blocks[0].mlp
    act = type(mlp.act).__name__
    return {
        "activation": {"GELU": "gelu", "GELUTanh": "gelu-tanh", "QuickGELU": "gelu-quick", "SiLU": "swiglu"}[act],
        "eps": block.norm1.eps,
        "num_heads": block.attn.num_heads,
        "pool": {"token": "token", "avg": "gap", "map": "map"}[model.global_pool],
        "grid": tuple(model.patch_embed.grid_size),
        "on class": model.cls_token is not None and not model.no_embed_class and model.pos_embed is not None,
        "num_classes": model.num_classes,
    }


def config_settings(config: ViTConfig | BiTConfig) -> dict[str, object]:
    if isinstance(config, BiTConfig):
        return {"stages": config.layers, "num_classes": config.num_classes}
    return {
        "activation": config.activation,
        "eps": config.norm_eps,
        "num_heads": config.num_heads,
        "pool": config.pool,
        "grid": config.grid,
        "on class": config.num_positioned_prefix_tokens > 0,
        "num_classes": config.num_classes,
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
def test_timm_repository_gives_the_same_logits_and_round_trips(args: dict[str, object], tmp_path: Path) -> None:
    args = SMALL | args
    theirs = randomized(timm.create_model("vit_base_patch16_224", **args))
    folder = save_repository(theirs, tmp_path / "timm", **args)
    net, info = checkpoint.read(folder)
    size = pair(tuple(args["img_size"]) if isinstance(args["img_size"], list) else args["img_size"])  # type: ignore[arg-type]
    images = torch.randn(2, int(args.get("in_chans", 3)), *size)  # type: ignore[call-overload]
    with torch.no_grad():
        assert relative(net(images), theirs(images)) <= 1e-5
    checkpoint.write(net, info, tmp_path / "back", to="timm")
    reloaded = timm.create_model(f"local-dir:{tmp_path / 'back'}", pretrained=True).eval()
    with torch.no_grad():
        assert relative(reloaded(images), theirs(images)) <= 1e-6
    if "reg_tokens" in args and "no_embed_class" not in args:
        return  # the positions of the registers were added to the registers
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(reloaded.state_dict()[name], tensor), name


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
def test_logits_of_every_family_match_timm(arch: str, args: dict[str, object], tmp_path: Path) -> None:
    theirs = randomized(timm.create_model(arch, num_classes=9, **args))
    net, info = checkpoint.read(save_repository(theirs, tmp_path / "timm", **args))
    size = 64 if arch.startswith("resnetv2") else pair(info.config.image_size)[0]
    images = torch.randn(1, 3, size, size)
    with torch.no_grad():
        assert relative(net(images), theirs(images)) <= 1e-5
    checkpoint.write(net, info, tmp_path / "back", to="timm", approximate=False)
    reloaded = timm.create_model(f"local-dir:{tmp_path / 'back'}", pretrained=True).eval()
    with torch.no_grad():
        assert relative(reloaded(images), theirs(images)) <= 1e-6


@pytest.mark.parametrize("arch", ["vit_tiny_patch16_224", "vit_small_patch16_224", "vit_base_patch16_224"])
def test_logits_tokens_and_attention_match_timm_at_224(arch: str, tmp_path: Path) -> None:
    theirs = randomized(timm.create_model(arch))
    net, _ = checkpoint.read(save_repository(theirs, tmp_path / "timm"))
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        out = net.features(images, outputs=("logits", "tokens", "attention"))
        assert relative(net(images), theirs(images)) <= 1e-5
        assert relative(out.logits, theirs(images)) <= 1e-5
        _, layers = theirs.forward_intermediates(images, output_fmt="NLC", return_prefix_tokens=True)
        for ours, (patches, prefix) in zip(out.tokens[1:], layers, strict=True):
            assert relative(ours, torch.cat([prefix, patches], dim=1)) <= 1e-5
        timm_maps = attention_of(theirs, images)
        for ours, timm_map in zip(out.attention, timm_maps, strict=True):
            assert relative(ours, timm_map) <= 1e-5


def attention_of(model: torch.nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    """Attention weights of each layer, captured at the attention dropout of timm's unfused path."""
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
def test_resampling_to_another_size_matches_timm(size: tuple[int, int], tmp_path: Path) -> None:
    theirs = randomized(timm.create_model("vit_tiny_patch16_224", depth=2))
    folder = save_repository(theirs, tmp_path / "timm", depth=2)
    net, _ = checkpoint.read(folder)
    dynamic = timm.create_model("vit_tiny_patch16_224", depth=2, dynamic_img_size=True).eval()
    dynamic.load_state_dict(theirs.state_dict())
    rebuilt = timm.create_model(f"local-dir:{folder}", pretrained=True, img_size=size).eval()
    images = torch.randn(1, 3, *size)
    with torch.no_grad():
        assert relative(net(images), dynamic(images)) <= 1e-5
        assert relative(net.resized(size)(images), rebuilt(images)) <= 1e-5


def test_unknown_architecture_is_not_read_as_a_vit(tmp_path: Path) -> None:
    """Other networks, such as XCiT or custom models, may have the tensor names of a ViT."""
    theirs = randomized(timm.create_model("vit_base_patch16_224", **SMALL))
    folder = save_repository(theirs, tmp_path / "timm", **SMALL)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architecture": "my_own_vit"}))
    with pytest.raises(FormatError, match=r"my_own_vit is not a supported architecture.*pass family='ViT'"):
        checkpoint.read(folder)
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert relative(checkpoint.read(folder, family="ViT")[0](images), theirs(images)) <= 1e-5


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"pool_include_prefix": True}, "pool_include_prefix=True"),
        ({"norm_layer": "batchnorm2d"}, "norm_layer='batchnorm2d'"),
        ({"global_pool": "avgmax"}, "global_pool='avgmax'"),
        ({"act_layer": "relu"}, "act_layer='relu'"),
    ],
)
def test_unsupported_arguments_are_refused_by_name(args: dict[str, object], message: str) -> None:
    with torch.device("meta"):
        model = timm.create_model("vit_base_patch16_224", **SMALL)
    archive = meta_repository(model, "vit_base_patch16_224")
    archive.sidecars["config.json"]["model_args"] = SMALL | args
    with pytest.raises(FormatError, match=message):
        TIMM_FORMAT.infer_info(archive)


@pytest.mark.parametrize(
    "arch", ["vit_base_patch16_gap_224", "test_vit4", "vit_huge_patch14_224", "vit_so400m_patch14_siglip_224"]
)
@pytest.mark.parametrize("depth", [None, 2])
def test_num_heads_come_from_the_architecture_at_any_depth(arch: str, depth: int | None) -> None:
    args = {"depth": depth} if depth else {}
    with torch.device("meta"):
        model = timm.create_model(arch, **args)
    assert TIMM_FORMAT.infer_info(meta_repository(model, arch)).config.num_heads == model.blocks[0].attn.num_heads


def test_num_heads_come_from_the_architecture_at_another_width() -> None:
    """model_args may have only the width: timm then keeps the architecture's heads, which are no longer 64 wide."""
    with torch.device("meta"):
        model = timm.create_model("vit_base_patch16_224", depth=1, embed_dim=384)
    archive = meta_repository(model, "vit_base_patch16_224")
    archive.sidecars["config.json"]["model_args"] = {"depth": 1, "embed_dim": 384}
    assert TIMM_FORMAT.infer_info(archive).config.num_heads == model.blocks[0].attn.num_heads == 12


def test_timm_npz_resampling_matches_timm() -> None:
    from timm.layers import resample_abs_pos_embed

    from vitrail.models.position import resample

    table = torch.randn(7, 7, 16)
    expected = resample_abs_pos_embed(
        table.flatten(0, 1)[None], [12, 9], [7, 7], num_prefix_tokens=0, interpolation="bilinear", antialias=False
    )
    assert relative(resample(table, (12, 9), "timm-npz").flatten(0, 1), expected[0]) <= 1e-6


def test_another_grid_with_the_same_token_count_is_resampled(tmp_path: Path) -> None:
    """16x16 and 8x32 have the same number of tokens; timm's loader does not resample them."""
    net = randomized(ViT(ViTConfig(**TINY | {"image_size": 128, "resample": "timm"})))
    wide = net.resized((64, 256))
    assert wide.positions[0].table.shape == (8, 32, 64)
    assert not torch.equal(wide.positions[0].table.flatten(0, 1), net.positions[0].table.flatten(0, 1))


def test_register_positions_are_folded_into_the_registers() -> None:
    theirs = randomized(timm.create_model("vit_base_patch16_224", **SMALL, reg_tokens=2))
    assert theirs.pos_embed.shape[1] == 16 + 3
    assert theirs.pos_embed[0, 1:3].abs().sum() > 0
    archive = meta_repository(theirs, "vit_base_patch16_224")
    archive.sidecars["config.json"]["model_args"] = SMALL
    info = TIMM_FORMAT.infer_info(archive)
    assert info.config.num_registers == 2
    assert info.config.num_positioned_prefix_tokens == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position": "relative"}, "relative positions"),
        ({"position": "learned-2d"}, "learned-2d positions"),
        ({"position_at": "layers"}, "position embeddings added at every layer"),
        ({"pre_logits": 16}, "tanh layer"),
        ({"pool": "token+gap"}, "token.gap"),
        ({"head_bias": False}, "head without bias"),
        ({"norm_eps": 1e-12}, "1e-12"),
        ({"stem": StemConfig(layers=(1, 1)), "patch_size": 2, "image_size": 64}, "stem"),
    ],
)
def test_unsupported_part_is_refused_by_name(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    config = ViTConfig(**TINY | changes)
    net = ViT(config)
    info = ModelInfo(config=config, preprocess=default_preprocess("ViT", config))
    with pytest.raises(ConversionError, match=message):
        checkpoint.write(net, info, tmp_path / "out", to="timm")
    assert list(tmp_path.iterdir()) == []


def test_repository_gives_preprocessing_and_labels(tmp_path: Path) -> None:
    theirs = timm.create_model("vit_tiny_patch16_224.augreg_in21k_ft_in1k", depth=1)
    folder = save_repository(theirs, tmp_path / "timm", depth=1)
    _, info = checkpoint.read(folder)
    assert (info.preprocess.resize_to, info.preprocess.interpolation, info.preprocess.mean) == (
        248,
        "bicubic",
        (0.5,) * 3,
    )
    assert info.labels is not None
    assert info.labels[281].startswith("tabby")
    config = json.loads((folder / "config.json").read_text())
    config["pretrained_cfg"]["tag"] = "something_else"
    (folder / "config.json").write_text(json.dumps(config))
    assert checkpoint.read(folder)[1].labels is None, "labels are not guessed"


def test_timm_bit_is_read_as_bit(tmp_path: Path) -> None:
    theirs = timm.create_model("resnetv2_50x1_bit")
    net, _ = checkpoint.read(save_repository(theirs, tmp_path / "timm"))
    assert isinstance(net, BiT)


def test_a_bit_with_another_activation_is_refused() -> None:
    config = {"architecture": "resnetv2_50x1_bit", "model_args": {"act_layer": "gelu"}}
    archive = Archive("memory", LazyTensors.from_tensors({}), sidecars={"config.json": config})
    with pytest.raises(FormatError, match="act_layer='gelu' is not supported"):
        TIMM_FORMAT.infer_info(archive)

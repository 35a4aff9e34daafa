"""Files of DINOv3's Vision Transformers: outputs of the original's, timm's and transformers' code, round trips."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from clip_files import images
from compare import randomized, relative
from conftest import import_peer
from dinov3_files import AS_RELEASED, CASES, SIZES, golden_values, state_dict_of
from torch import nn

from vitrail.config import ViTConfig
from vitrail.errors import ConversionError, FormatError
from vitrail.models import ViT, build
from vitrail.models.families import FAMILIES
from vitrail.models.model_names import parse_name
from vitrail.models.position import rotary_periods
from vitrail.models.published_models import PUBLISHED_MODELS
from vitrail.weights import checkpoint, conversion, dinov3
from vitrail.weights.archive import Archive, LazyTensors
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.module_reader import read_module

TIMM_ARCHS = (
    "vit_small_patch16_dinov3",
    "vit_small_patch16_dinov3_qkvb",
    "vit_small_plus_patch16_dinov3_qkvb",
    "vit_7b_patch16_dinov3",
    "vit_tiny_patch16_dinov3_qkvb",
    "vit_base_patch16_lingbot",
)
TIMM_SIZES: dict[str, Any] = {"embed_dim": 128, "depth": 2, "num_heads": 2, "img_size": 64}
HF_SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_register_tokens": 4, "image_size": 64, "layerscale_value": 0.5,
}  # fmt: skip


def read(path: Path, **options: Any) -> tuple[ViT, ModelInfo]:
    net, info = checkpoint.read(path, **options)
    assert isinstance(net, ViT)
    return net, info


def save_case(case: str, path: Path, **changes: Any) -> Path:
    torch.save({n: t for n, t in (state_dict_of(case) | changes).items() if t is not None}, path)
    return path


# The original's own code


@pytest.mark.parametrize("case", CASES)
def test_outputs_equal_those_of_the_originals_code_at_any_size(case: str, tmp_path: Path) -> None:
    net, info = read(save_case(case, tmp_path / "dinov3.pth"))
    config, arguments = info.config, CASES[case]
    assert isinstance(config, ViTConfig)
    expected = arguments["num_heads"], arguments.get("pos_embed_rope_base", 100.0)
    assert (config.num_heads, config.rope_base) == expected
    assert config.rope_periods == ("bfloat16" if case == AS_RELEASED else "float32")
    assert (config.qkv_bias, config.key_bias) == ((True, False) if case != "7b" else (False, True))
    for height, width in SIZES:
        output = net.features(images(height, width), ("pooled", "patches"))
        found = f"{case}.{height}x{width}"
        assert relative(output.pooled, golden_values()[f"{found}.class"]) <= 1e-5
        assert relative(output.patches.mean(-1).flatten(1), golden_values()[f"{found}.patches"]) <= 1e-5


@pytest.mark.parametrize("case", CASES)
def test_the_originals_files_round_trip(case: str, tmp_path: Path) -> None:
    """Except for values that its code multiplies by zero or does not use: masked biases, parts for training."""
    net, info = read(save_case(case, tmp_path / "dinov3.pth"))
    conversion.convert(net, info, tmp_path / "again.pth", to="facebook")
    theirs, expected = torch.load(tmp_path / "again.pth", weights_only=True), state_dict_of(case)
    assert theirs.keys() == {n for n in expected if not n.startswith("local_cls_norm.")}
    for name, tensor in theirs.items():
        if name == "rope_embed.periods":
            torch.testing.assert_close(tensor, expected[name])
        elif name.endswith("qkv.bias"):
            assert torch.equal(tensor, expected[name] * expected[f"{name}_mask"])
        elif name.endswith("bias_mask") and case == AS_RELEASED:
            assert tensor.view(3, -1).all(1).tolist() == [True, False, True]
        elif name != "mask_token":
            assert torch.equal(tensor, expected[name]), name


def test_periods_as_in_released_files_are_kept_and_named_where_a_library_has_others(tmp_path: Path) -> None:
    """DINOv3's released files store periods rounded to bfloat16; timm and transformers compute them in float32."""
    net, info = read(save_case(AS_RELEASED, tmp_path / "dinov3.pth"))
    conversion.convert(net, info, tmp_path / "again.pth", to="facebook")
    stored = torch.load(tmp_path / "again.pth", weights_only=True)["rope_embed.periods"]
    assert torch.equal(stored, state_dict_of(AS_RELEASED)["rope_embed.periods"])
    for to in ("timm", "huggingface"):
        with pytest.raises(ConversionError, match=r"rope_periods='bfloat16' \(\w+ computes them in float32\)"):
            conversion.convert(net, info, tmp_path / to, to=to)
        conversion.convert(net, info, tmp_path / to, to=to, approximate=True)
        assert read(tmp_path / to)[1].config.rope_periods == "float32"


@pytest.mark.parametrize("prefix", ["", "backbone.", "teacher.backbone."])
def test_files_of_training_and_of_eupe_are_read_without_their_heads_and_projections(
    prefix: str, tmp_path: Path
) -> None:
    state = state_dict_of("mlp") | {"projectors.siglip.0.weight": torch.zeros(3, 64)}  # EUPE's, one for each teacher
    state = {f"{prefix}{name}": tensor for name, tensor in state.items()}
    heads = {"teacher.dino_head.mlp.0.weight": torch.zeros(3), "student.backbone.norm.weight": torch.zeros(64)}
    torch.save(state | (heads if prefix.startswith("teacher") else {}), tmp_path / "file.pth")
    net, _ = read(tmp_path / "file.pth")
    assert relative(net(images(64, 64)), golden_values()["mlp.64x64.class"]) <= 1e-5


@pytest.mark.parametrize("base", [100.0, 1000.0, 10000.0])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_periods_computed_in_bfloat16_are_recognized(base: float, head_dim: int) -> None:
    """As by the original's code with pos_embed_rope_dtype="bf16", with which the released networks were trained."""
    low = torch.arange(head_dim // 4, dtype=torch.bfloat16)
    periods = (base ** (2 * low / (head_dim // 2))).float()
    assert dinov3.rotary_fields(periods) == {"rope_base": base, "rope_periods": "bfloat16"}
    assert torch.equal(rotary_periods(head_dim, base, torch.empty(0), "bfloat16"), periods)


def test_other_periods_are_refused(tmp_path: Path) -> None:
    """As of networks that were trained with a smallest and a largest period."""
    periods = 2 * 25 ** torch.linspace(0, 1, 8)
    with pytest.raises(FormatError, match=r"rope_embed\.periods are not the powers of one base"):
        read(save_case("mlp", tmp_path / "dinov3.pth", **{"rope_embed.periods": periods}))


def test_masks_that_keep_biases_of_keys_are_refused(tmp_path: Path) -> None:
    name = "blocks.1.attn.qkv.bias_mask"
    mask = torch.ones_like(state_dict_of("mlp")[name])
    with pytest.raises(FormatError, match="bias_mask keeps biases of the keys"):
        read(save_case("mlp", tmp_path / "dinov3.pth", **{name: mask}))


def test_unmasked_biases_of_keys_are_kept(tmp_path: Path) -> None:
    """Files of networks that were trained with mask_k_bias=False have no mask."""
    state = {n: t for n, t in state_dict_of("mlp").items() if not n.endswith("bias_mask")}
    torch.save(state, tmp_path / "dinov3.pth")
    net, info = read(tmp_path / "dinov3.pth")
    assert info.config.key_bias
    assert torch.equal(net.blocks[0].attention.qkv.bias, state["blocks.0.attn.qkv.bias"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks.0.attn.extra": torch.zeros(2)}, "unexpected blocks.0.attn.extra"),
        ({"blocks.1.norm2.weight": None}, "missing blocks.1.norm2.weight"),
        ({"blocks.1.mlp.fc1.bias": torch.zeros(3)}, "wrong shapes: blocks.1.mlp.up.bias"),
        ({"cls_norm.weight": torch.zeros(64)}, "unexpected cls_norm.weight"),
    ],
)
def test_files_with_other_tensors_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=message):
        read(save_case("mlp", tmp_path / "dinov3.pth", **changes))


DINOV3 = [v for v in PUBLISHED_MODELS if v.family == "DINOv3"]


@pytest.mark.parametrize("model", DINOV3, ids=lambda v: v.name)
def test_every_released_size_is_recognized_from_the_originals_tensors(model: Any) -> None:
    expected = parse_name(model.name)
    assert isinstance(expected, ViTConfig)
    state = build(expected, meta=True).state_dict()
    tensors = dinov3.table("facebook", expected).write(state, expected)
    tensors["rope_embed.periods"] = rotary_periods(expected.width // expected.num_heads, 100.0, torch.empty(0))
    if expected.qkv_bias:
        tensors["blocks.0.attn.qkv.bias_mask"] = torch.empty(3 * expected.width, device="meta")
    form, archive = checkpoint.detect_format(Archive("dinov3.pth", LazyTensors.from_tensors(tensors)))
    assert form.name == "facebook"
    info = form.infer_info(archive)
    assert info.config == expected
    assert ("SAT-493M" in info.notes[0]) == (model.name in ("DINOv3-L/16", "DINOv3-7B/16"))


@pytest.mark.peer
@pytest.mark.parametrize("model", DINOV3, ids=lambda v: v.name)
def test_every_released_size_is_recognized_from_timms_repository(model: Any) -> None:
    with torch.device("meta"):
        theirs = import_peer("timm").create_model(model.aliases[0])
    sidecar = {"architecture": model.aliases[0], "global_pool": "token", "pretrained_cfg": theirs.pretrained_cfg}
    archive = Archive("folder", LazyTensors.from_tensors(theirs.state_dict()), sidecars={"config.json": sidecar})
    form, archive = checkpoint.detect_format(archive)
    found = form.infer_info(archive).config
    assert found == parse_name(model.name).replace(image_size=256)
    form.table(found).read(archive.tensors, build(found, meta=True), found)


# timm, transformers


def timm_model(arch: str, **args: Any) -> nn.Module:
    return randomized(import_peer("timm").create_model(arch, **TIMM_SIZES | args))


def transformers_model(**options: Any) -> Any:
    transformers = import_peer("transformers")
    return randomized(transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**HF_SIZES | options))).eval()


@torch.no_grad()
def logits(model: nn.Module, pictures: torch.Tensor) -> torch.Tensor:
    output = model(pictures)
    return output if isinstance(output, torch.Tensor) else output.pooler_output


@pytest.mark.peer
@pytest.mark.parametrize("args", [{}, {"num_classes": 5}, {"global_pool": "token"}])
@pytest.mark.parametrize("arch", TIMM_ARCHS)
def test_timms_models_are_read_from_folders_and_memory(arch: str, args: dict[str, Any], tmp_path: Path) -> None:
    model = timm_model(arch, **args)
    saved = TIMM_SIZES | args
    import_peer("timm").models.save_for_hf(model, tmp_path / "timm", model_args=saved, safe_serialization=True)
    for net in (read(tmp_path / "timm")[0], read_module(model, overrides={})[0]):
        for size in ((64, 64), (48, 112)):
            pictures = torch.randn(1, 3, *size)
            assert relative(net(pictures), logits(model, pictures)) <= 1e-5, size


@pytest.mark.peer
def test_bare_files_of_timm_need_the_pooling(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = timm_model(TIMM_ARCHS[0], num_classes=5)
    save_file(model.state_dict(), tmp_path / "bare.safetensors")
    with pytest.raises(
        FormatError, match=r"pass pool='gap' for the mean of the patches, timm's default, or pool='token'"
    ):
        read(tmp_path / "bare.safetensors")
    net, _ = read(tmp_path / "bare.safetensors", overrides={"pool": "gap"})
    pictures = torch.randn(1, 3, 64, 64)
    assert relative(net(pictures), logits(model, pictures)) <= 1e-5


@pytest.mark.peer
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_gated_mlp": True, "hidden_act": "silu"},
        {"query_bias": False, "value_bias": False},
        {"key_bias": True},
        {"rope_theta": 1000.0, "layer_norm_eps": 1e-6},
        {"num_register_tokens": 0},  # the default of transformers' config
    ],
)
def test_transformers_models_are_read_and_written(options: dict[str, Any], tmp_path: Path) -> None:
    model = transformers_model(**options)
    model.save_pretrained(tmp_path / "hf")
    net, info = read(tmp_path / "hf")
    for ours in (net, read_module(model, overrides={})[0]):
        for size in ((64, 64), (48, 112)):
            pictures = torch.randn(1, 3, *size)
            assert relative(ours(pictures), logits(model, pictures)) <= 1e-5
    conversion.convert(net, info, tmp_path / "again", to="huggingface")
    again, report = type(model).from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, tensor in model.state_dict().items():
        if not name.endswith("mask_token"):
            assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.peer
@pytest.mark.parametrize("case", ["mlp", "swiglu", "7b"])
def test_the_originals_weights_run_in_timm_and_transformers(case: str, tmp_path: Path) -> None:
    net, info = read(save_case(case, tmp_path / "dinov3.pth"))
    pictures, expected = images(64, 64), golden_values()[f"{case}.64x64.class"]
    conversion.convert(net, info, tmp_path / "timm", to="timm")
    timm = import_peer("timm").create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    assert relative(logits(timm, pictures), expected) <= 1e-5
    conversion.convert(net, info, tmp_path / "hf", to="huggingface")
    transformers = import_peer("transformers").DINOv3ViTModel.from_pretrained(tmp_path / "hf").eval()
    assert relative(logits(transformers, pictures), expected) <= 1e-5


@pytest.mark.parametrize(
    ("to", "changes", "message"),
    [
        ("facebook", {"pool": "gap"}, "pool='gap'"),
        ("huggingface", {"num_classes": 5}, "a head"),
        ("timm", {"key_bias": True}, "a bias of the keys"),
        ("google", {}, "registers, keys without bias"),
        ("torchvision", {}, "keys without bias"),
        ("timm", {"rope_base": 1000.0}, "rope_base=1000"),
    ],
)
def test_what_a_format_cannot_express_is_refused(
    to: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = parse_name("DINOv3-S/16@64").replace(width=64, depth=1, num_heads=2, mlp_dim=64, **changes)
    info = ModelInfo(config=config, preprocess=FAMILIES["DINOv3"].preprocess, family="DINOv3")
    with pytest.raises(ConversionError, match=message):
        conversion.convert(build(config), info, tmp_path / "written.pth", to=to)

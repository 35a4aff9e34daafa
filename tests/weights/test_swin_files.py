"""Files of Swin Transformers: outputs of the original's and other libraries' code, round trips, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import randomized, relative
from conftest import import_peer
from swin_files import BUFFERS, CASES, RESIZED_WINDOW, golden_values, images, state_dict_of
from swin_peers import PEERS, TRAINING_SIZE, peer_logits, peer_swin, save_peer, timm_swin, transformers_swin
from torch import nn

from vitrail.config import SwinConfig
from vitrail.errors import ConversionError, FormatError
from vitrail.models import Swin, build
from vitrail.models.families import FAMILIES
from vitrail.models.model_names import parse_name
from vitrail.models.published_models import PUBLISHED_MODELS
from vitrail.weights import checkpoint, conversion
from vitrail.weights.archive import Archive, LazyTensors
from vitrail.weights.microsoft import MICROSOFT
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.swin_buffers import swin_buffers
from vitrail.weights.swin_names import MICROSOFT_NAMES

SMALL: dict[str, Any] = {
    "image_size": 32, "width": 8, "depths": (2, 2), "num_heads": (1, 2), "window_size": 4, "num_classes": 5,
}  # fmt: skip
SUFFIXES = {"timm": "", "huggingface": "", "torchvision": ".pth", "microsoft": ".pth"}


def read(path: Path, **options: Any) -> tuple[Swin, ModelInfo]:
    net, info = checkpoint.read(path, **options)
    assert isinstance(net, Swin)
    return net, info


def small_model(**changes: Any) -> tuple[Swin, ModelInfo]:
    config = SwinConfig(**SMALL | changes)
    family = "Swin" if config.version == 1 else "SwinV2"
    return randomized(build(config)), ModelInfo(config=config, preprocess=FAMILIES[family].preprocess, family=family)


# Microsoft's own code


def save_case(case: str, path: Path, **changes: Any) -> Path:
    torch.save({"model": state_dict_of(case) | changes, "epoch": 3, "max_accuracy": 81.2}, path)
    return path


@pytest.mark.parametrize("case", CASES)
def test_outputs_equal_those_of_microsofts_code(case: str, tmp_path: Path) -> None:
    net, info = read(save_case(case, tmp_path / "swin.pth"))
    values, arguments, config = golden_values(), CASES[case], info.config
    assert isinstance(config, SwinConfig)
    side = arguments["img_size"]
    assert (config.image_size, config.window_size) == (
        (side, side),
        (arguments["window_size"],) * 2,
    ) or "clamped" in case
    assert config.pretrained_window_sizes == tuple(arguments.get("pretrained_window_sizes", ()))
    assert (config.window_rule, config.mask_value, config.norm_eps) == ("microsoft", -100, 1e-5)
    output = net.features(images(side), ("logits", "feature_maps"))
    assert relative(output.logits, values[f"{case}.logits"]) <= 1e-5
    for stage, maps in enumerate(output.feature_maps):
        expected = values[f"{case}.stage{stage}"]
        assert relative(maps.mean(1).flatten(1), expected) <= 1e-5, f"stage {stage + 1}"


def test_tables_are_resampled_as_by_microsofts_loader(tmp_path: Path) -> None:
    net, _ = read(save_case("v1", tmp_path / "swin.pth"))
    table = net.with_window(RESIZED_WINDOW).stages[0].blocks[0].attention.bias.table
    assert relative(table, golden_values()["v1.resized"]) <= 1e-6


@pytest.mark.parametrize("case", CASES)
def test_microsofts_files_round_trip(case: str, tmp_path: Path) -> None:
    """Also the buffers are written, so that the original's code can load the file with strict=True."""
    net, info = read(save_case(case, tmp_path / "swin.pth"))
    conversion.convert(net, info, tmp_path / "again.pth", to="microsoft")
    theirs = torch.load(tmp_path / "again.pth", weights_only=True)["model"]
    expected = state_dict_of(case)
    assert theirs.keys() == expected.keys()
    for name, tensor in expected.items():
        if name.endswith(BUFFERS):
            torch.testing.assert_close(theirs[name], tensor)
        else:
            assert torch.equal(theirs[name], tensor), name


@pytest.mark.parametrize("model", [v for v in PUBLISHED_MODELS if v.family.startswith("Swin")], ids=lambda v: v.name)
def test_every_released_size_is_recognized_from_microsofts_tensors(model: Any) -> None:
    config = parse_name(model.name).replace(num_classes=21841)
    assert isinstance(config, SwinConfig)
    expected = config.replace(window_rule="microsoft", uncovered="refuse")
    state = build(config, meta=True).state_dict()
    tensors = {**MICROSOFT_NAMES.table(config).write(state, config), **swin_buffers(expected, MICROSOFT_NAMES)}
    archive = Archive("swin.pth", LazyTensors.from_tensors(tensors))
    form, inside = checkpoint.detect_format(archive)
    assert form is MICROSOFT
    found = form.infer_info(inside).config
    assert isinstance(found, SwinConfig)
    stages = range(len(config.depths))
    assert [found.table_window(s) for s in stages] == [expected.table_window(s) for s in stages]
    windows = {
        "window_size": config.window_size,
        "stage_window_sizes": config.stage_window_sizes,
    }  # S3-S: also one of 14
    assert found.replace(**windows) == expected


@pytest.mark.peer
@pytest.mark.parametrize("model", [v for v in PUBLISHED_MODELS if v.family.startswith("Swin")], ids=lambda v: v.name)
def test_every_released_size_is_recognized_from_timms_repository(model: Any) -> None:
    with torch.device("meta"):
        theirs = import_peer("timm").create_model(model.aliases[0], num_classes=21841)
    state = LazyTensors.from_tensors(theirs.state_dict())
    sidecar = {"architecture": model.aliases[0], "num_classes": 21841, "pretrained_cfg": theirs.pretrained_cfg}
    form, archive = checkpoint.detect_format(Archive("folder", state, sidecars={"config.json": sidecar}))
    found = form.infer_info(archive).config
    expected = parse_name(model.name).replace(num_classes=21841, window_rule="timm", uncovered="refuse")
    windows = {"window_size": expected.window_size, "stage_window_sizes": expected.stage_window_sizes}
    assert found.replace(**windows) == expected
    form.table(found).read(archive.tensors, build(found, meta=True), found)


def test_simmims_encoder_is_read_without_its_decoder(tmp_path: Path) -> None:
    state = {n: t for n, t in state_dict_of("v1").items() if not n.startswith("head.")}
    state = {f"encoder.{n}": t for n, t in (state | {"mask_token": torch.zeros(1, 1, 8)}).items()}
    torch.save({"model": state | {"decoder.0.weight": torch.zeros(3, 16, 1, 1)}}, tmp_path / "simmim.pth")
    net, info = read(tmp_path / "simmim.pth")
    assert info.task == "embed"
    assert relative(net(images(64)), read(save_case("v1", tmp_path / "swin.pth"))[0].with_classes(0)(images(64))) == 0


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"layers.0.blocks.0.attn.extra": torch.zeros(2)}, "unexpected layers.0.blocks.0.attn.extra"),
        ({"absolute_pos_embed": torch.zeros(1, 256, 8)}, "absolute position embeddings"),
        ({"layers.1.blocks.1.norm2.weight": None}, "missing layers.1.blocks.1.norm2.weight"),
        ({"layers.1.blocks.1.mlp.fc1.weight": torch.zeros(3, 16)}, r"wrong shapes: .*mlp.up.weight \(3, 16\)"),
        ({"layers.0.downsample.norm.bias": None}, "missing layers.0.downsample.norm.bias"),
    ],
)
def test_files_with_other_tensors_are_refused(extra: dict[str, Any], message: str, tmp_path: Path) -> None:
    state = {n: t for n, t in (state_dict_of("v1") | extra).items() if t is not None}
    torch.save({"model": state}, tmp_path / "swin.pth")
    with pytest.raises(FormatError, match=message):
        read(tmp_path / "swin.pth")


# timm, torchvision, transformers

OTHER_SIZES = {
    "v1": [(200, 200), (112, 112), (256, 192), (448, 448)],
    "v2": [(200, 200), (288, 288), (448, 448), (256, 192)],
}


@pytest.mark.peer
@pytest.mark.parametrize("peer", PEERS)
def test_logits_match_the_peers_at_every_size_by_its_own_convention(peer: str, tmp_path: Path) -> None:
    version = peer.split()[1]
    net, info = read(save_peer(peer_swin(peer), tmp_path / "peer"))
    size = TRAINING_SIZE[version]
    assert info.config.image_size == (size, size)
    compared = 0
    for side in [(size, size), *OTHER_SIZES[version]]:
        model = peer_swin(peer)  # transformers' windows depend on the images before
        pictures = torch.randn(1, 3, *side)
        try:
            expected = peer_logits(model, pictures)
        except RuntimeError:
            assert peer == "transformers v1"  # it cannot use its tables on maps smaller than the window
            assert side in ((112, 112), (256, 192))
            assert net(pictures).isfinite().all()
            continue
        compared += 1
        assert relative(net(pictures), expected) <= 1e-5, side
    assert compared >= 3


@pytest.mark.peer
@pytest.mark.parametrize(("peer", "size"), [("torchvision v1", (202, 230)), ("transformers v2", (202, 230))])
def test_images_that_patches_do_not_cover_are_cut_or_padded_as_by_the_peer(
    peer: str, size: tuple[int, int], tmp_path: Path
) -> None:
    model = peer_swin(peer)
    net, _ = read(save_peer(model, tmp_path / "peer"))
    pictures = torch.randn(1, 3, *size)
    assert relative(net(pictures), peer_logits(model, pictures)) <= 1e-5


@pytest.mark.peer
@pytest.mark.parametrize("peer", PEERS)
def test_modules_in_memory_are_read(peer: str) -> None:
    from vitrail.weights.module_reader import read_module

    model = peer_swin(peer)
    net, info = read_module(model, overrides={})
    size = TRAINING_SIZE[peer.split()[1]]
    pictures = torch.randn(1, 3, size, size)
    assert info.config.image_size == (size, size)
    assert relative(net(pictures), peer_logits(model, pictures)) <= 1e-5


@pytest.mark.peer
@pytest.mark.parametrize("args", [{"img_size": 112}, {"img_size": (96, 160)}, {"window_size": 5}, {"img_size": 80}])
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_timms_networks_of_other_sizes_are_read_from_folders_and_memory(
    version: str, args: dict[str, Any], tmp_path: Path
) -> None:
    from vitrail.weights.module_reader import read_module

    model = randomized(timm_swin(version, **args))
    for net in (read(save_peer(model, tmp_path / "peer", **args))[0], read_module(model, overrides={})[0]):
        for size in (net.config.image_size, (128, 128)):
            pictures = torch.randn(1, 3, *size)
            assert relative(net(pictures), peer_logits(model, pictures)) <= 1e-5


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore:torch.searchsorted", "ignore:Using a non-tuple sequence")
@pytest.mark.parametrize(("image_size", "window"), [(112, 7), (336, 14), (448, 7), (200, 9)])
def test_tables_are_resampled_as_by_timm(image_size: int, window: int, tmp_path: Path) -> None:
    model = randomized(timm_swin("v1"))
    net, _ = read(save_peer(model, tmp_path / "peer"))
    larger = timm_swin("v1", img_size=image_size, window_size=window).eval()
    filtered = import_peer("timm").models.swin_transformer.checkpoint_filter_fn(model.state_dict(), larger)
    larger.load_state_dict(filtered)
    ours = net.with_window(window).resized(image_size) if window != 7 else net.resized(image_size)
    pictures = torch.randn(1, 3, image_size, image_size)
    if window == 9:  # timm resamples once, ours in two steps that are the same where windows are not clamped
        ours = net.resized(image_size).with_window(window)
    assert relative(ours(pictures), peer_logits(larger, pictures)) <= 1e-5


@pytest.mark.peer
def test_torchvisions_key_biases_are_ignored_as_by_torchvision(tmp_path: Path) -> None:
    model = peer_swin("torchvision v2")  # with random key biases
    assert model.state_dict()["features.1.0.attn.qkv.bias"][8:16].any()
    net, _ = read(save_peer(model, tmp_path / "peer"))
    pictures = torch.randn(1, 3, 256, 256)
    assert relative(net(pictures), peer_logits(model, pictures)) <= 1e-5


@pytest.mark.peer
def test_pretrained_windows_are_read_and_used(tmp_path: Path) -> None:
    args = {"image_size": 256, "window_size": 16, "pretrained_window_sizes": [12, 12, 12, 6]}
    model = randomized(transformers_swin("v2", **args))
    net, info = read(save_peer(model, tmp_path / "hf"))
    assert info.config.pretrained_window_sizes == (12, 12, 12, 6)
    pictures = torch.randn(1, 3, 256, 256)
    assert relative(net(pictures), peer_logits(model, pictures)) <= 1e-5
    assert relative(net(pictures), build(info.config.replace(pretrained_window_sizes=()))(pictures)) > 1e-3


@pytest.mark.peer
@pytest.mark.parametrize("peer", ["timm v2", "transformers v2"])
def test_bare_files_of_version_2_need_the_window_size(peer: str, tmp_path: Path) -> None:
    model = peer_swin(peer)
    (save_peer(model, tmp_path / "peer") / "model.safetensors").rename(tmp_path / "bare.safetensors")
    with pytest.raises(FormatError, match=r"pass window_size=8 and image_size=256"):
        read(tmp_path / "bare.safetensors")
    net, _ = read(tmp_path / "bare.safetensors", overrides={"window_size": 8})
    pictures = torch.randn(1, 3, 256, 256)
    assert relative(net(pictures), peer_logits(model, pictures)) <= 1e-5


# Writing


@pytest.mark.peer
@pytest.mark.parametrize("changes", [{}, {"image_size": 64, "window_size": 3}, {"channels": 1}, {"num_classes": 0}])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("to", SUFFIXES)
def test_written_files_load_in_the_library_with_the_same_outputs(
    to: str, version: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    rule = {"timm": "timm", "torchvision": "torchvision", "microsoft": "microsoft"}.get(to, "microsoft")
    rule = "huggingface" if to == "huggingface" and version == 2 else rule
    window = {"window_size": 2} if to == "huggingface" else {}  # transformers cannot clamp windows in version 1
    net, info = small_model(**{"version": version, "window_rule": rule} | changes | (window if not changes else {}))
    path = tmp_path / f"written{SUFFIXES[to]}"
    try:
        conversion.convert(net, info, path, to=to)
    except ConversionError as error:
        if changes.keys() & {"torchvision": {"channels", "num_classes"}, "timm": {"num_classes"}}.get(to, set()):
            return
        raise error
    back, _ = checkpoint.read(path, overrides={"image_size": info.config.image_size})
    for name, tensor in net.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    pictures = torch.randn(1, info.config.channels, *info.config.image_size)
    theirs = load_in_library(to, path, info.config)
    if theirs is not None:
        assert relative(net(pictures), first_output(theirs, pictures)) <= 1e-5


def load_in_library(to: str, path: Path, config: SwinConfig) -> nn.Module | None:
    if to == "timm":
        return import_peer("timm").create_model(f"local-dir:{path}", pretrained=True, strict_img_size=False).eval()
    if to == "huggingface":
        transformers = import_peer("transformers")
        loaded, report = (
            transformers.AutoModelForImageClassification.from_pretrained(path, output_loading_info=True)
            if (config.num_classes)
            else transformers.AutoModel.from_pretrained(path, output_loading_info=True)
        )
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        return loaded.eval()
    if to == "torchvision":
        module = import_peer("torchvision").models.swin_transformer
        parts = {"block": module.SwinTransformerBlockV2, "downsample_layer": module.PatchMergingV2}
        model = module.SwinTransformer(
            [4, 4], config.width, list(config.depths), list(config.num_heads), list(config.window_size),
            num_classes=config.num_classes, **(parts if config.version == 2 else {}),
        )  # fmt: skip
        model.load_state_dict(torch.load(path, weights_only=True))
        return model.eval()
    return None


@torch.no_grad()
def first_output(model: nn.Module, pictures: torch.Tensor) -> torch.Tensor:
    output = model(pictures)
    if isinstance(output, torch.Tensor):
        return output
    return output.logits if "logits" in output else output.pooler_output


@pytest.mark.peer
@pytest.mark.parametrize("source", PEERS)
@pytest.mark.parametrize("to", SUFFIXES)
def test_conversions_between_libraries_give_the_same_outputs(source: str, to: str, tmp_path: Path) -> None:
    net, info = read(save_peer(peer_swin(source), tmp_path / "peer"))
    result = conversion.convert(net, info, tmp_path / f"written{SUFFIXES[to]}", to=to)
    back, _ = read(tmp_path / f"written{SUFFIXES[to]}")
    pictures = torch.randn(1, 3, *info.config.image_size)
    assert relative(back(pictures), net(pictures)) <= 1e-6
    own = {"timm": "timm", "torchvision": "torchvision", "transformers": "huggingface"}[source.split()[0]]
    said = any("how windows are placed" in lost for lost in result.lost)
    assert said == (to != own and not (own == "huggingface" and to == "microsoft" and "v1" in source)) or (
        own == "microsoft"
    )


@pytest.mark.parametrize(
    ("to", "changes", "message"),
    [
        ("google", {}, "cannot represent a Swin Transformer"),
        ("facebook", {}, "cannot represent a Swin Transformer"),
        ("torchvision", {"version": 2, "pretrained_window_sizes": (3, 3)}, "cannot represent pretrained_window_sizes"),
        ("huggingface", {"stage_window_sizes": (4, 2)}, "windows whose size differs between stages"),
        ("timm", {"window_size": (4, 2), "image_size": 64}, "windows that are not square"),
        ("microsoft", {"image_size": (32, 64)}, "an image that is not square"),
        ("torchvision", {"mask_value": -200.0, "image_size": 64}, "cannot state mask_value=-200"),
        ("timm", {"image_size": 72, "window_size": 4}, "cannot state window_rule='torchvision' at image_size"),
        ("microsoft", {"image_size": 16, "window_size": 4}, "tables of position biases for these windows"),
        ("timm", {"norm_eps": 1e-6, "image_size": 64}, "a norm epsilon of 1e-06"),
    ],
)
def test_what_a_format_cannot_express_is_refused(
    to: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    net, info = small_model(**changes)
    with pytest.raises(ConversionError, match=message):
        conversion.convert(net, info, tmp_path / "written.pth", to=to)


@pytest.mark.parametrize("version", [1, 2])
def test_vitrails_own_files_round_trip(version: int, tmp_path: Path) -> None:
    net, info = small_model(version=version, window_rule="timm", mask_value=-200.0)
    conversion.convert(net, info, tmp_path / "model", to="vitrail")
    back, again = read(tmp_path / "model")
    assert again.config == info.config
    assert all(torch.equal(a, b) for a, b in zip(back.state_dict().values(), net.state_dict().values(), strict=True))


@pytest.mark.peer
def test_backbones_of_transformers_with_norms_for_each_stage_are_refused_by_name(tmp_path: Path) -> None:
    transformers = import_peer("transformers")
    sizes = {"image_size": 32, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}
    config = transformers.SwinConfig(**sizes, out_features=["stage1", "stage2"])
    transformers.SwinBackbone(config).save_pretrained(tmp_path / "backbone")
    with pytest.raises(FormatError, match="a norm for the map of each stage"):
        read(tmp_path / "backbone")


def test_other_windows_are_refused_where_tables_are_stored_for_the_windows(tmp_path: Path) -> None:
    for version in (1, 2):
        net, info = small_model(version=version)
        conversion.convert(net, info, tmp_path / str(version), to="vitrail")
    message = r"got windows of 3x3 tokens, but the file's tables of position biases are for 4x4; .* net\.with_window"
    with pytest.raises(FormatError, match=message):
        read(tmp_path / "1", overrides={"window_size": 3})
    assert read(tmp_path / "1", overrides={"window_size": (4, 4)})[1].config.window_size == (4, 4)
    assert read(tmp_path / "2", overrides={"window_size": 3})[1].config.window_size == (3, 3)


def test_preprocessing_of_a_transformers_folder_is_read(tmp_path: Path) -> None:
    net, info = small_model(window_size=2, window_rule="microsoft")
    conversion.convert(net, info, tmp_path / "hf", to="huggingface")
    path = tmp_path / "hf" / "preprocessor_config.json"
    stated = json.loads(path.read_text()) | {
        "size": {"height": 32, "width": 32},
        "image_processor_type": "ViTImageProcessor",
    }
    path.write_text(json.dumps(stated | {"do_center_crop": False, "resample": 3}))
    preprocess = read(tmp_path / "hf")[1].preprocess
    assert (preprocess.resize, preprocess.image_size, preprocess.interpolation) == ("squash", (32, 32), "bicubic")

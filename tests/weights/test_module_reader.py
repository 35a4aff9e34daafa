"""Loading in-memory networks of other libraries: equal outputs, preprocessing, labels, and errors."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import randomized, relative
from conftest import import_peer
from small_models import gradient, model, small
from torch import nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

import vitrail
from vitrail.config import pair
from vitrail.errors import CheckpointError, FormatError, NotFoundError, VitrailError

pytestmark = pytest.mark.peer

HF = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
MLP = {"intermediate_size": 64}


def load_and_compare(theirs: nn.Module, output_name: str = "") -> vitrail.Model:
    """Loads the network and checks that the outputs for two images agree up to rounding."""
    vit = vitrail.load(theirs)
    images = torch.randn(2, vit.config.channels, *pair(vit.config.image_size))
    with torch.no_grad():
        expected = theirs(images)
        assert relative(vit.net(images), getattr(expected, output_name) if output_name else expected) <= 1e-5
    assert vit.preprocess.config.image_size == pair(vit.config.image_size)
    return vit


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("test_vit", {}),
        ("test_vit2", {}),
        ("vit_tiny_patch16_224", {"img_size": (32, 48), "num_heads": 6, "act_layer": "gelu_tanh"}),
        ("vit_tiny_patch16_224", {"img_size": 32, "class_token": False, "global_pool": "avg", "num_classes": 0}),
        ("vit_tiny_patch16_224", {"img_size": 32, "norm_layer": partial(nn.LayerNorm, eps=1e-3), "in_chans": 1}),
        ("vit_small_patch16_224", {"img_size": 32, "reg_tokens": 2, "qk_norm": True, "norm_layer": "rmsnorm"}),
        ("deit_tiny_distilled_patch16_224", {"img_size": 32}),
        ("vit_small_patch14_reg4_dinov2", {"img_size": 56}),
        ("vit_tiny_r_s16_p8_224", {"img_size": 128}),
    ],
)
def test_timm_network_gives_the_same_outputs(architecture: str, options: dict[str, Any]) -> None:
    timm = import_peer("timm")
    theirs = randomized(timm.create_model(architecture, depth=1, **options))
    vit = load_and_compare(theirs)
    cfg = theirs.pretrained_cfg
    if vit.config.channels == 3:
        assert vit.preprocess.config.mean == tuple(cfg["mean"])
        assert vit.preprocess.config.std == tuple(cfg["std"])
    assert vit.info.origin == f"timm's {architecture}"


def test_timm_labels_come_from_the_tag() -> None:
    timm = import_peer("timm")
    assert vitrail.load(randomized(timm.create_model("test_vit"))).labels[0].startswith("tench")
    assert vitrail.load(randomized(timm.create_model("test_vit", num_classes=5))).labels is None


def test_timm_bit_network_is_loaded() -> None:
    from timm.models.resnetv2 import ResNetV2

    timm = import_peer("timm")
    cfg = timm.get_pretrained_cfg("resnetv2_50x1_bit").to_dict()
    theirs = ResNetV2([1, 1, 1, 1], num_classes=3, act_layer=nn.ReLU, **timm_bit_options())
    theirs.pretrained_cfg = cfg
    vit = vitrail.load(randomized(theirs))
    assert isinstance(vit.net, vitrail.BiT)
    assert vit.preprocess.config.mean == (0.5, 0.5, 0.5)


def timm_bit_options() -> dict[str, Any]:
    from timm.layers import StdConv2d
    from timm.models.resnetv2 import GroupNormAct

    return {
        "stem_type": "fixed",
        "conv_layer": partial(StdConv2d, eps=1e-8),
        "norm_layer": partial(GroupNormAct, num_groups=32),
    }


@pytest.mark.parametrize(
    ("name", "config", "output"),
    [
        ("ViTForImageClassification", ("ViTConfig", HF | MLP), "logits"),
        ("ViTModel", ("ViTConfig", HF | MLP | {"hidden_act": "quick_gelu"}), "pooler_output"),
        ("DeiTForImageClassificationWithTeacher", ("DeiTConfig", HF | MLP), "logits"),
        ("CLIPVisionModelWithProjection", ("CLIPVisionConfig", HF | MLP), "image_embeds"),
        ("SiglipVisionModel", ("SiglipVisionConfig", HF | MLP), "pooler_output"),
    ],
)
def test_transformers_network_gives_the_same_outputs(
    name: str, config: tuple[str, dict[str, Any]], output: str
) -> None:
    transformers = import_peer("transformers")
    load_and_compare(randomized(getattr(transformers, name)(getattr(transformers, config[0])(**config[1]))), output)


def test_transformers_labels_and_processor_are_used(tmp_path: Path) -> None:
    transformers = import_peer("transformers")
    names = {0: "cat", 1: "dog", 2: "bird"}
    config = transformers.ViTConfig(**HF, **MLP, id2label=names, problem_type="multi_label_classification")
    theirs = randomized(transformers.ViTForImageClassification(config))
    vit = load_and_compare(theirs, "logits")
    assert vit.labels == ("cat", "dog", "bird")
    assert vit.info.multi_label
    theirs.save_pretrained(tmp_path)
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=[0.1, 0.2, 0.3])
    processor.save_pretrained(tmp_path)
    loaded = transformers.ViTForImageClassification.from_pretrained(tmp_path)
    assert vitrail.load(loaded).preprocess.config.mean == (0.1, 0.2, 0.3)
    loaded.config.image_size, embeddings = 64, loaded.vit.embeddings  # as when fine-tuning at another size
    embeddings.patch_embeddings.image_size = (64, 64)
    embeddings.position_embeddings = nn.Parameter(torch.randn(1, 65, 32))
    larger = vitrail.load(loaded)
    assert larger.preprocess.config.image_size == larger.config.image_size == (64, 64)
    assert larger.preprocess.config.mean == (0.1, 0.2, 0.3)
    assert any("resized to 64x64" in note for note in larger.info.notes)


@pytest.mark.parametrize("eps", [1e-6, 1e-3])
def test_torchvision_network_gives_the_same_outputs(eps: float) -> None:
    models = import_peer("torchvision.models")
    make = models.vision_transformer.VisionTransformer
    load_and_compare(randomized(make(32, 8, 2, 4, 32, 64, num_classes=5, norm_layer=partial(nn.LayerNorm, eps=eps))))


def test_weights_are_copied() -> None:
    timm = import_peer("timm")
    theirs = randomized(timm.create_model("test_vit"))
    vit, images = vitrail.load(theirs), torch.randn(1, 3, 160, 160)
    with torch.no_grad():
        our_logits, their_logits = vit.net(images), theirs(images)
        for parameter in theirs.parameters():
            parameter.zero_()
        assert torch.equal(vit.net(images), our_logits)
        theirs.load_state_dict(randomized(timm.create_model("test_vit")).state_dict())
        for parameter in vit.net.parameters():
            parameter.zero_()
        assert torch.equal(theirs(images), their_logits)


def test_wrapped_networks_are_loaded_with_options() -> None:
    timm = import_peer("timm")
    theirs = randomized(timm.create_model("test_vit")).train()
    theirs.config = {"lr": 1e-3}  # attached by a training script
    for wrapped in (torch.compile(theirs), nn.DataParallel(theirs), AveragedModel(theirs)):
        vit = vitrail.load(wrapped, num_classes=3, image_size=80, labels=["a", "b", "c"])
        assert vit.predict(gradient(), top=1)[0].label in "abc"
        assert not vit.net.training
        assert theirs.training
    assert vitrail.load(theirs, activation="gelu-quick").config.activation == "gelu-quick"


def change_activation(theirs: Any) -> None:
    theirs.blocks[0].mlp.act = nn.ReLU()


def change_epsilon(theirs: Any) -> None:
    theirs.norm.eps = 1e-2  # changes the logits by 7e-4


def double_outputs(theirs: Any) -> None:
    theirs.register_forward_hook(lambda module, inputs, output: 2 * output)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("change", [change_activation, change_epsilon, double_outputs])
def test_modified_network_is_refused(change: Any, dtype: torch.dtype) -> None:
    timm = import_peer("timm")
    theirs = randomized(timm.create_model("test_vit")).to(dtype)
    change(theirs)
    with pytest.raises(FormatError, match=r"timm's test_vit computes other outputs .* a module was replaced"):
        vitrail.load(theirs)


def test_half_precision_and_single_class_networks_are_compared() -> None:
    timm = import_peer("timm")
    theirs = randomized(timm.create_model("test_vit", num_classes=1))
    with torch.autocast("cpu", torch.bfloat16):
        assert not vitrail.load(theirs).info.notes
    assert vitrail.load(theirs.half()).info.notes == ("stored as float16, loaded as float32.",)
    assert vitrail.load(theirs, dtype=None).dtype == torch.float16
    assert theirs.head.weight.dtype == torch.float16


def test_outputs_of_a_zero_head_are_noted_as_not_compared() -> None:
    models = import_peer("torchvision.models")
    untrained = models.vision_transformer.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=5)  # the head is zero
    assert any("could not be compared" in note for note in vitrail.load(untrained).info.notes)


@pytest.mark.parametrize(
    ("name", "config", "options"),
    [
        ("DeiTModel", "DeiTConfig", {}),  # its pooler is ignored
        ("ViTMSNModel", "ViTMSNConfig", {}),
        ("IJepaModel", "IJepaConfig", {}),
        ("ViTMAEModel", "ViTMAEConfig", {"mask_ratio": 0.0}),
    ],
)
def test_transformers_networks_without_logits_are_compared_by_tokens(
    name: str, config: str, options: dict[str, Any]
) -> None:
    transformers = import_peer("transformers")
    theirs = randomized(getattr(transformers, name)(getattr(transformers, config)(**HF, **MLP, **options)))
    assert not any("compared" in note for note in vitrail.load(theirs).info.notes)
    next(m for m in theirs.modules() if isinstance(m, nn.LayerNorm)).eps = 0.3
    with pytest.raises(FormatError, match="computes other outputs"):
        vitrail.load(theirs)


def test_a_model_whose_forward_pass_fails_is_noted() -> None:
    transformers = import_peer("transformers")
    config = transformers.ViTConfig(**HF, **MLP, return_dict=False)
    theirs = randomized(transformers.ViTForImageClassification(config))
    assert any("could not be compared" in note for note in vitrail.load(theirs).info.notes)


def test_image_size_of_a_wrapped_network_is_found() -> None:
    timm = import_peer("timm")

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = timm.create_model("test_vit", img_size=(128, 32))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.backbone(images)

    assert load_and_compare(randomized(Wrapped())).config.image_size == (128, 32)


def test_other_networks_are_refused_by_name() -> None:
    timm, transformers = import_peer("timm"), import_peer("transformers")
    pruned, adapted, with_activation_head = (timm.create_model("test_vit", depth=1) for _ in range(3))
    prune.l1_unstructured(pruned.blocks[0].mlp.fc1, "weight", 0.5)
    adapted.blocks[0].mlp.fc1.lora_A = nn.Linear(64, 2)
    with_activation_head.head = nn.Sequential(nn.Linear(64, 3), nn.ReLU())
    with warnings.catch_warnings(action="ignore"):
        quantized = torch.ao.quantization.quantize_dynamic(timm.create_model("test_vit", depth=1), {nn.Linear})
    unsupported = "is not a supported network; expected a Vision Transformer, Swin Transformer or BiT of timm"
    refused: list[tuple[Any, type[VitrailError], str]] = [
        (nn.Linear(3, 3), FormatError, f"torch's Linear {unsupported}"),
        (timm.create_model("test_resnet"), FormatError, f"timm's test_resnet {unsupported}"),
        (timm.create_model("eva02_tiny_patch14_224", depth=1), FormatError, "is EVA or EVA-02, which vitrail does not"),
        (
            transformers.ConvNextModel(transformers.ConvNextConfig(depths=[1] * 4, hidden_sizes=[8] * 4)),
            FormatError,
            unsupported,
        ),
        (
            vitrail.create("ViT-Ti/16", depth=1),
            FormatError,
            r"this is already a vitrail network; use vitrail\.Model\(net, info\)",
        ),
        (timm.create_model("test_vit").to("meta"), CheckpointError, "timm's test_vit has no weights"),
        (
            timm.create_model("xcit_nano_12_p8_224"),
            FormatError,
            "timm's xcit_nano_12_p8_224 is not a supported architecture",
        ),
        (pruned, FormatError, r"timm's test_vit has an adapter or a parametrization \(blocks.0.mlp.fc1.weight_orig\)"),
        (adapted, FormatError, "timm's test_vit has an adapter .*; merge it into the weights first"),
        (
            with_activation_head,
            FormatError,
            r"timm's test_vit: read as timm, the tensors do not fit: unexpected head.0.weight, [^;]*$",
        ),
        (quantized, FormatError, "timm's test_vit: .* is a dtype, not a plain tensor; .* before quantization"),
        (model(small()), NotFoundError, r"got a Model, expected a file, .* or an nn\.Module"),
    ]
    for network, error, message in refused:
        with pytest.raises(error, match=message):
            vitrail.load(network)

"""The recognition table's cases of transformers: small models with random weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from compare import randomized
from recognition_table import Case, Sample
from torch import Tensor
from transformers_peers import (
    BASE,
    PEERS,
    TEXT_CONFIG,
    VISION_CONFIG,
    VIT,
    Peer,
    class_token,
    logits,
    peer_output,
    pooled,
    transformers,
)

WIDE = {"hidden_size": 128}
"""Two heads of width 64, which reading a bare file assumes."""


def mean_token(out: Any) -> Tensor:
    return out.last_hidden_state.mean(1)


def mean_of_two_tokens(out: Any) -> Tensor:
    """Mean of the class and distillation tokens, as in timm and DeiT's own code."""
    return out.last_hidden_state[:, :2].mean(1)


SWIN: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [1, 1],
    "num_heads": [2, 4],
    "window_size": 4,
}
TIPSV2: dict[str, Any] = {
    "image_size": 28,
    "patch_size": 14,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "mlp_ratio": 2,
}
SUPPORTED = {name: peer for name, peer in PEERS.items() if name != "vit, tanh, no qkv bias"} | {
    "deit": Peer("DeiTForImageClassification", "DeiTConfig", VIT, logits),
    "deit, bare": Peer("DeiTModel", "DeiTConfig", VIT, mean_of_two_tokens),
    "msn, head": Peer("ViTMSNForImageClassification", "ViTMSNConfig", VIT, logits),
    "ijepa": Peer("IJepaModel", "IJepaConfig", VIT, mean_token),
    "ijepa, head": Peer("IJepaForImageClassification", "IJepaConfig", VIT, logits),
    "swin": Peer("SwinModel", "SwinConfig", SWIN, pooled),
    "swin, head": Peer("SwinForImageClassification", "SwinConfig", SWIN | {"num_labels": 5}, logits),
    "swin v2": Peer("Swinv2Model", "Swinv2Config", SWIN, pooled),
    "swin v2, head": Peer("Swinv2ForImageClassification", "Swinv2Config", SWIN | {"num_labels": 5}, logits),
    "dinov3": Peer("DINOv3ViTModel", "DINOv3ViTConfig", BASE | {"num_register_tokens": 4}, pooled),
    "tipsv2": Peer("Tipsv2VisionModel", "Tipsv2VisionConfig", TIPSV2, pooled),
    "tipsv2, swiglu": Peer("Tipsv2VisionModel", "Tipsv2VisionConfig", TIPSV2 | {"use_swiglu_ffn": True}, pooled),
    "dpt": Peer("DPTModel", "DPTConfig", VIT, pooled),
    "maskformer swin": Peer("MaskFormerSwinModel", "MaskFormerSwinConfig", SWIN, pooled),
    "flava": Peer("FlavaImageModel", "FlavaImageConfig", VIT, pooled),
    "metaclip 2": Peer("MetaClip2VisionModel", "MetaClip2VisionConfig", VISION_CONFIG, pooled),
    "chinese clip": Peer("ChineseCLIPVisionModel", "ChineseCLIPVisionConfig", VISION_CONFIG, pooled),
    "altclip": Peer("AltCLIPVisionModel", "AltCLIPVisionConfig", VISION_CONFIG, pooled),
    "clipseg": Peer("CLIPSegVisionModel", "CLIPSegVisionConfig", VISION_CONFIG, pooled),
    "git": Peer("GitVisionModel", "GitVisionConfig", VISION_CONFIG, class_token),
    "idefics 3": Peer("Idefics3VisionTransformer", "Idefics3VisionConfig", VISION_CONFIG, mean_token),
}
"""Classes whose architecture vitrail supports. From "dpt" on, the model_type is another, and is refused by name.

Each has its class's default activation, which reading a bare file assumes with a note.
"""

SMALL = BASE | WIDE | {"intermediate_size": 48}
UNSUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    # class: (pattern of the name in the refusal, options of the config)
    "BeitModel": ("BEiT", SMALL),
    "BeitForImageClassification": ("BEiT", SMALL | {"use_relative_position_bias": True}),
    "Data2VecVisionModel": ("Data2Vec", SMALL),
    "Data2VecVisionForImageClassification": ("Data2Vec", SMALL | {"use_shared_relative_position_bias": True}),
    "Siglip2VisionModel": ("SigLIP 2|siglip2", SMALL),
    "Siglip2Model": ("SigLIP 2|siglip2", {"vision_config": SMALL, "text_config": TEXT_CONFIG}),
    "Siglip2ForImageClassification": ("SigLIP 2|siglip2", {"vision_config": SMALL, "text_config": TEXT_CONFIG}),
    "Aimv2VisionModel": ("AIMv2", SMALL),
    "Aimv2Model": ("AIMv2", {"vision_config": SMALL, "text_config": TEXT_CONFIG}),
    "MLCDVisionModel": ("MLCD", SMALL),
    "PixioModel": ("pixio|Pixio", SMALL),
    "YolosModel": ("yolos|YOLOS", SMALL | {"image_size": [32, 32]}),
    "VitDetModel": ("vitdet|ViTDet", SMALL | {"use_relative_position_embeddings": True, "window_block_indices": []}),
    "VitPoseBackbone": ("vitpose|ViTPose", SMALL | {"image_size": [32, 32], "patch_size": [8, 8]}),
    "ViltModel": ("vilt|ViLT", SMALL | {"vocab_size": 9}),
    "OwlViTVisionModel": ("owlvit|OWL", SMALL),
    "Owlv2VisionModel": ("owlv2|OWL", SMALL),
    "GroupViTVisionModel": (
        "groupvit|GroupViT",
        SMALL | {"depths": [1, 1], "num_group_tokens": [2, 0], "num_output_groups": [2, 2]},
    ),
    "XCLIPVisionModel": (
        "xclip|X-CLIP",
        SMALL
        | {
            "num_frames": 2,
            "mit_hidden_size": 16,
            "mit_intermediate_size": 16,
            "mit_num_hidden_layers": 1,
            "mit_num_attention_heads": 2,
        },
    ),
    "BlipVisionModel": ("blip|BLIP", SMALL),
    "Blip2VisionModel": ("blip_2|BLIP", SMALL),
    "InternVLVisionModel": ("internvl|InternVL", SMALL | {"image_size": [32, 32], "patch_size": [8, 8]}),
    "JanusVisionModel": ("janus|Janus", SMALL),
    "VideoMAEModel": ("videomae|VideoMAE", SMALL | {"num_frames": 2}),
    "TimesformerModel": ("timesformer|TimeSformer", SMALL | {"num_frames": 2}),
    "VivitModel": ("vivit|ViViT", SMALL | {"num_frames": 2}),
    "SamVisionModel": ("SAM", SMALL | {"output_channels": 8, "mlp_dim": 48, "global_attn_indexes": [0]}),
    "Sapiens2Model": ("Sapiens", SMALL),
    "DonutSwinModel": ("donut-swin|missing layernorm", SWIN),
    "Swin2SRModel": ("swin2sr|Swin2SR", SWIN | {"image_size": 32}),
    "HieraModel": (
        "Hiera",
        {"image_size": [64, 64], "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2]},
    ),
}
NEEDS_CONFIG = r"put its config\.json beside it"
"""A bare file may also be refused because config.json, which names the model, is missing."""


def cases() -> list[Case]:
    supported = [
        Case(
            group="transformers",
            name=name,
            name_pattern=model_type_of_peer(peer)
            if list(SUPPORTED).index(name) >= list(SUPPORTED).index("dpt")
            else "never refused",
            make=partial(make_sample, peer),
        )
        for name, peer in SUPPORTED.items()
    ]
    unsupported = [
        Case(
            group="transformers",
            name=name,
            name_pattern=f"{name_pattern}|{NEEDS_CONFIG}|{model_type_message(name)}",
            make=partial(make_unsupported_sample, name, options),
        )
        for name, (name_pattern, options) in UNSUPPORTED.items()
    ]
    wrappers = {"vit_tiny_patch16_224": "never refused", "vit_pe_core_tiny_patch16_384": "Perception Encoder"}
    return [
        *supported,
        *unsupported,
        *(
            Case(
                group="transformers",
                name=f"timm_wrapper, {name}",
                name_pattern=name_pattern,
                make=partial(make_wrapped_sample, name),
            )
            for name, name_pattern in wrappers.items()
        ),
    ]


def model_type_of_peer(peer: Peer) -> str:
    return str(getattr(transformers, peer.config).model_type)


def model_type_message(name: str) -> str:
    return f"model_type='{getattr(transformers, name).config_class.model_type}'"


def make_wrapped_sample(architecture: str) -> Sample:
    """A timm model in transformers' TimmWrapper."""
    args = {"img_size": 32, "embed_dim": 128, "depth": 2, "num_heads": 2}
    config = transformers.TimmWrapperConfig(architecture=architecture, model_args=args)
    model = randomized(transformers.TimmWrapperForImageClassification(config))
    return Sample(
        model=model,
        forward=lambda images: model(images).logits,
        image_size=(32, 32),
        save=model.save_pretrained,
        options=None if "_pe_" in architecture else {},
    )


def make_sample(peer: Peer) -> Sample:
    model = replace(peer, options=with_wide_hidden_size(peer.options)).build()
    config = getattr(model.config, "vision_config", model.config)
    known_options = {
        "image_size": _pair(getattr(config, "image_size", 32)),
        "num_heads": getattr(config, "num_attention_heads", None),
        "activation": {"quick_gelu": "gelu-quick", "gelu": "gelu", "gelu_pytorch_tanh": "gelu-tanh"}.get(
            getattr(config, "hidden_act", "")
        ),
        "window_size": getattr(config, "window_size", None),
        "pretrained_window_sizes": (0,) * len(getattr(config, "depths", ())),
    }
    return Sample(
        model=model,
        forward=partial(flat_output, peer, model),
        image_size=_pair(getattr(config, "image_size", 32)),
        save=model.save_pretrained,
        options=known_options,
    )


def with_wide_hidden_size(options: dict[str, Any]) -> dict[str, Any]:
    if "vision_config" in options:
        return options | {"vision_config": options["vision_config"] | WIDE}
    return options | WIDE if "hidden_size" in options else options


def flat_output(peer: Peer, model: Any, images: Tensor) -> Tensor:
    return peer_output(peer, model, images).flatten(1)


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def make_unsupported_sample(name: str, options: dict[str, Any]) -> Sample:
    model_class = getattr(transformers, name)
    model = randomized(model_class(model_class.config_class(**options)))
    return Sample(
        model=model,
        forward=lambda images: model(images)[0],
        image_size=(32, 32),
        save=model.save_pretrained,
        options=None,
    )

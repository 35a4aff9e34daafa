"""transformers' ViT-shaped classes for the recognition table: small ones with random weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from compare import randomized
from recognition_table import Case, Sample
from torch import Tensor
from transformers_peers import BASE, PEERS, TOWER, VIT, WORDS, Peer, first, logits, pooled, theirs, transformers

WIDE = {"hidden_size": 128}
"""Two heads of 64, which a bare file need not be asked about."""


def mean(out: Any) -> Tensor:
    return out.last_hidden_state.mean(1)


def two(out: Any) -> Tensor:
    """Class and distillation token, as timm and DeiT's own code put them together."""
    return out.last_hidden_state[:, :2].mean(1)


READ = {name: peer for name, peer in PEERS.items() if name != "vit, tanh, no qkv bias"} | {
    "deit": Peer("DeiTForImageClassification", "DeiTConfig", VIT, logits),
    "deit, bare": Peer("DeiTModel", "DeiTConfig", VIT, two),
    "msn, head": Peer("ViTMSNForImageClassification", "ViTMSNConfig", VIT, logits),
    "ijepa": Peer("IJepaModel", "IJepaConfig", VIT, mean),
    "ijepa, head": Peer("IJepaForImageClassification", "IJepaConfig", VIT, logits),
    "dpt": Peer("DPTModel", "DPTConfig", VIT, pooled),
    "flava": Peer("FlavaImageModel", "FlavaImageConfig", VIT, pooled),
    "metaclip 2": Peer("MetaClip2VisionModel", "MetaClip2VisionConfig", TOWER, pooled),
    "chinese clip": Peer("ChineseCLIPVisionModel", "ChineseCLIPVisionConfig", TOWER, pooled),
    "altclip": Peer("AltCLIPVisionModel", "AltCLIPVisionConfig", TOWER, pooled),
    "clipseg": Peer("CLIPSegVisionModel", "CLIPSegVisionConfig", TOWER, pooled),
    "git": Peer("GitVisionModel", "GitVisionConfig", TOWER, first),
    "idefics 3": Peer("Idefics3VisionTransformer", "Idefics3VisionConfig", TOWER, mean),
}
"""Classes whose function vitrail computes; the last ones have another model_type, which is refused by its name.

Each has its class's own activation: a bare file shows no other, and a note says which one was assumed.
"""

SWIN: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [1, 1],
    "num_heads": [2, 4],
    "window_size": 4,
}
SMALL = BASE | WIDE | {"intermediate_size": 48}
FOREIGN: dict[str, tuple[str, dict[str, Any]]] = {
    # class: what a refusal must call it, options of its config
    "BeitModel": ("BEiT", SMALL),
    "BeitForImageClassification": ("BEiT", SMALL | {"use_relative_position_bias": True}),
    "Data2VecVisionModel": ("Data2Vec", SMALL),
    "Data2VecVisionForImageClassification": ("Data2Vec", SMALL | {"use_shared_relative_position_bias": True}),
    "DINOv3ViTModel": ("DINOv3", SMALL | {"num_register_tokens": 4}),
    "Siglip2VisionModel": ("SigLIP 2|siglip2", SMALL),
    "Siglip2Model": ("SigLIP 2|siglip2", {"vision_config": SMALL, "text_config": WORDS}),
    "Siglip2ForImageClassification": ("SigLIP 2|siglip2", {"vision_config": SMALL, "text_config": WORDS}),
    "Aimv2VisionModel": ("AIMv2", SMALL),
    "Aimv2Model": ("AIMv2", {"vision_config": SMALL, "text_config": WORDS}),
    "MLCDVisionModel": ("MLCD", SMALL),
    "PixioModel": ("pixio|Pixio", SMALL),
    "Tipsv2VisionModel": ("tipsv2|TIPSv2", SMALL),
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
    "SwinModel": ("Swin", SWIN),
    "SwinForImageClassification": ("Swin", SWIN),
    "Swinv2Model": ("Swin Transformer V2", SWIN),
    "Swinv2ForImageClassification": ("Swin Transformer V2", SWIN),
    "HieraModel": (
        "Hiera",
        {"image_size": [64, 64], "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2]},
    ),
}
BESIDE = r"put its config\.json beside it"
"""A bare file with transformers' names may also be refused for want of its config.json, which names the model."""


def cases() -> list[Case]:
    read = [
        Case(
            group="transformers",
            name=name,
            called=peer_type(peer) if list(READ).index(name) >= list(READ).index("dpt") else "never refused",
            make=partial(made, peer),
        )
        for name, peer in READ.items()
    ]
    foreign = [
        Case(
            group="transformers",
            name=name,
            called=f"{called}|{BESIDE}|{type_of(name)}",
            make=partial(strange, name, options),
        )
        for name, (called, options) in FOREIGN.items()
    ]
    wrappers = {"vit_tiny_patch16_224": "never refused", "vit_pe_core_tiny_patch16_384": "Perception Encoder"}
    return [
        *read,
        *foreign,
        *(
            Case(group="transformers", name=f"timm_wrapper, {name}", called=called, make=partial(wrapped, name))
            for name, called in wrappers.items()
        ),
    ]


def peer_type(peer: Peer) -> str:
    return str(getattr(transformers, peer.config).model_type)


def type_of(name: str) -> str:
    return f"model_type='{getattr(transformers, name).config_class.model_type}'"


def wrapped(architecture: str) -> Sample:
    """timm's model inside transformers' wrapper."""
    args = {"img_size": 32, "embed_dim": 128, "depth": 2, "num_heads": 2}
    config = transformers.TimmWrapperConfig(architecture=architecture, model_args=args)
    model = randomized(transformers.TimmWrapperForImageClassification(config))
    return Sample(
        model=model,
        answer=lambda images: model(images).logits,
        image_size=(32, 32),
        save=model.save_pretrained,
        truth=None if "_pe_" in architecture else {},
    )


def made(peer: Peer) -> Sample:
    model = replace(peer, options=widened(peer.options)).build()
    config = getattr(model.config, "vision_config", model.config)
    truth = {
        "image_size": _pair(getattr(config, "image_size", 32)),
        "num_heads": getattr(config, "num_attention_heads", None),
        "activation": {"quick_gelu": "gelu-quick", "gelu": "gelu", "gelu_pytorch_tanh": "gelu-tanh"}.get(
            getattr(config, "hidden_act", "")
        ),
    }
    return Sample(
        model=model,
        answer=partial(answer, peer, model),
        image_size=_pair(getattr(config, "image_size", 32)),
        save=model.save_pretrained,
        truth=truth,
    )


def widened(options: dict[str, Any]) -> dict[str, Any]:
    if "vision_config" in options:
        return options | {"vision_config": options["vision_config"] | WIDE}
    return options | WIDE if "hidden_size" in options else options


def answer(peer: Peer, model: Any, images: Tensor) -> Tensor:
    return theirs(peer, model, images).flatten(1)


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def strange(name: str, options: dict[str, Any]) -> Sample:
    kind = getattr(transformers, name)
    model = randomized(kind(kind.config_class(**options)))
    return Sample(
        model=model, answer=lambda images: model(images)[0], image_size=(32, 32), save=model.save_pretrained, truth=None
    )

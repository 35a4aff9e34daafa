"""Classes of transformers that vitrail reads, built small with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from compare import randomized
from conftest import import_peer
from torch import Tensor

transformers: Any = import_peer("transformers")
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

BASE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
VIT = BASE | {"intermediate_size": 48, "num_labels": 5}
DINOV2 = BASE | {"mlp_ratio": 2, "num_labels": 5}
TOWER = BASE | {"intermediate_size": 48}
WORDS = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 9,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
RESNET = {"embedding_size": 32, "hidden_sizes": [128, 256], "depths": [2, 1], "num_labels": 5}
MASKED = {
    "mask_ratio": 0.0,
    "decoder_hidden_size": 16,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 2,
}

Answer = Callable[[Any], Tensor]


def logits(out: Any) -> Tensor:
    return out.logits


def pooled(out: Any) -> Tensor:
    return out.pooler_output.flatten(1)


def embeds(out: Any) -> Tensor:
    return out.image_embeds


def first(out: Any) -> Tensor:
    return out.last_hidden_state[:, 0]


@dataclass(frozen=True)
class Peer:
    """A class of transformers, and which of its outputs is ours."""

    model: str
    config: str
    options: dict[str, Any]
    answer: Answer
    arguments: dict[str, Any] | None = None
    """What from_pretrained needs beside the folder."""
    reads_back: str = ""
    """The class of what we write, where it is another (a part of the first)."""

    def build(self, **more: Any) -> Any:
        config = getattr(transformers, self.config)(**self.options, **more)
        model = getattr(transformers, self.model)(config, **(self.arguments or {}))
        return randomized(model).eval()

    @property
    def again(self) -> Answer:
        """The answer of what we write."""
        return {"": self.answer, "CLIPVisionModelWithProjection": embeds, "SiglipVisionModel": pooled}.get(
            self.reads_back, first
        )

    @property
    def is_two(self) -> bool:
        """A model of images and words."""
        return self.config in ("CLIPConfig", "SiglipConfig") and "Classification" not in self.model


BARE = {"add_pooling_layer": False}
TWO = {"text_config": WORDS, "vision_config": TOWER}
PEERS = {
    "vit": Peer("ViTForImageClassification", "ViTConfig", VIT, logits),
    "vit, pooler": Peer("ViTModel", "ViTConfig", VIT, pooled),
    "vit, bare (DINO)": Peer("ViTModel", "ViTConfig", VIT, first, BARE),
    "vit, tanh, no qkv bias": Peer(
        "ViTForImageClassification", "ViTConfig", VIT | {"hidden_act": "gelu_new", "qkv_bias": False}, logits
    ),
    "vit, not square": Peer("ViTForImageClassification", "ViTConfig", VIT | {"image_size": [16, 40]}, logits),
    "vit, masked": Peer("ViTForMaskedImageModeling", "ViTConfig", VIT, first, reads_back="ViTModel"),
    "msn": Peer("ViTMSNModel", "ViTMSNConfig", VIT, first, reads_back="ViTModel"),
    "mae": Peer("ViTMAEModel", "ViTMAEConfig", VIT | MASKED, first),
    "mae, decoder": Peer("ViTMAEForPreTraining", "ViTMAEConfig", VIT | MASKED, first, reads_back="ViTMAEModel"),
    "deit, two heads": Peer("DeiTForImageClassificationWithTeacher", "DeiTConfig", VIT, logits),
    "dinov2": Peer("Dinov2Model", "Dinov2Config", DINOV2, pooled),
    "dinov2, head": Peer("Dinov2ForImageClassification", "Dinov2Config", DINOV2, logits),
    "dinov2, swiglu": Peer("Dinov2Model", "Dinov2Config", DINOV2 | {"use_swiglu_ffn": True}, pooled),
    "dinov2, registers": Peer("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", DINOV2, pooled),
    "dinov2, registers, head": Peer(
        "Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig", DINOV2, logits
    ),
    "clip": Peer("CLIPVisionModel", "CLIPVisionConfig", TOWER, pooled),
    "clip, projected": Peer(
        "CLIPVisionModelWithProjection", "CLIPVisionConfig", TOWER | {"projection_dim": 24}, embeds
    ),
    "clip, with words": Peer(
        "CLIPModel",
        "CLIPConfig",
        TWO | {"projection_dim": 24},
        embeds,
        reads_back="CLIPVisionModelWithProjection",
    ),
    "clip, head": Peer("CLIPForImageClassification", "CLIPConfig", TWO | {"num_labels": 5}, logits),
    "siglip": Peer("SiglipVisionModel", "SiglipVisionConfig", TOWER, pooled),
    "siglip, with words": Peer("SiglipModel", "SiglipConfig", TWO, pooled, reads_back="SiglipVisionModel"),
    "siglip, head": Peer("SiglipForImageClassification", "SiglipConfig", TWO | {"num_labels": 5}, logits),
    "bit": Peer("BitForImageClassification", "BitConfig", RESNET, logits),
    "bit, bare": Peer("BitModel", "BitConfig", RESNET, pooled),
}


@torch.no_grad()
def theirs(peer: Peer, model: Any, images: Tensor) -> Tensor:
    """The answer of a peer's network, by way of its image's part where it has others."""
    if peer.is_two:
        found = model.get_image_features(images)
        return pooled(found)
    inner: Any = model.vit if peer.model in ("ViTForMaskedImageModeling", "ViTMAEForPreTraining") else model
    return peer.answer(inner(images))

"""Small random models of the transformers classes that vitrail reads."""

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
VISION_CONFIG = BASE | {"intermediate_size": 48}
TEXT_CONFIG = {
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

OutputSelector = Callable[[Any], Tensor]


def logits(out: Any) -> Tensor:
    return out.logits


def pooled(out: Any) -> Tensor:
    return out.pooler_output.flatten(1)


def embeds(out: Any) -> Tensor:
    return out.image_embeds


def class_token(out: Any) -> Tensor:
    return out.last_hidden_state[:, 0]


@dataclass(frozen=True)
class Peer:
    """A transformers class, and the function that picks the output vitrail computes."""

    model: str
    config: str
    options: dict[str, Any]
    output: OutputSelector
    arguments: dict[str, Any] | None = None
    """Arguments of from_pretrained besides the folder."""
    written_class: str = ""
    """The class vitrail writes, if different (a part of the original)."""

    def build(self, **options: Any) -> Any:
        config = getattr(transformers, self.config)(**self.options, **options)
        model = getattr(transformers, self.model)(config, **(self.arguments or {}))
        return randomized(model).eval()

    @property
    def written_output(self) -> OutputSelector:
        """The output of the class vitrail writes."""
        return {"": self.output, "CLIPVisionModelWithProjection": embeds, "SiglipVisionModel": pooled}.get(
            self.written_class, class_token
        )

    @property
    def is_dual_encoder(self) -> bool:
        """Whether the model has an image and a text encoder."""
        return self.config in ("CLIPConfig", "SiglipConfig") and "Classification" not in self.model


NO_POOLER = {"add_pooling_layer": False}
DUAL_CONFIG = {"text_config": TEXT_CONFIG, "vision_config": VISION_CONFIG}
PEERS = {
    "vit": Peer("ViTForImageClassification", "ViTConfig", VIT, logits),
    "vit, pooler": Peer("ViTModel", "ViTConfig", VIT, pooled),
    "vit, bare (DINO)": Peer("ViTModel", "ViTConfig", VIT, class_token, NO_POOLER),
    "vit, tanh, no qkv bias": Peer(
        "ViTForImageClassification", "ViTConfig", VIT | {"hidden_act": "gelu_new", "qkv_bias": False}, logits
    ),
    "vit, not square": Peer("ViTForImageClassification", "ViTConfig", VIT | {"image_size": [16, 40]}, logits),
    "vit, masked": Peer("ViTForMaskedImageModeling", "ViTConfig", VIT, class_token, written_class="ViTModel"),
    "msn": Peer("ViTMSNModel", "ViTMSNConfig", VIT, class_token, written_class="ViTModel"),
    "mae": Peer("ViTMAEModel", "ViTMAEConfig", VIT | MASKED, class_token),
    "mae, decoder": Peer(
        "ViTMAEForPreTraining", "ViTMAEConfig", VIT | MASKED, class_token, written_class="ViTMAEModel"
    ),
    "deit, two heads": Peer("DeiTForImageClassificationWithTeacher", "DeiTConfig", VIT, logits),
    "dinov2": Peer("Dinov2Model", "Dinov2Config", DINOV2, pooled),
    "dinov2, head": Peer("Dinov2ForImageClassification", "Dinov2Config", DINOV2, logits),
    "dinov2, swiglu": Peer("Dinov2Model", "Dinov2Config", DINOV2 | {"use_swiglu_ffn": True}, pooled),
    "dinov2, registers": Peer("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", DINOV2, pooled),
    "dinov2, registers, head": Peer(
        "Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig", DINOV2, logits
    ),
    "clip": Peer("CLIPVisionModel", "CLIPVisionConfig", VISION_CONFIG, pooled),
    "clip, projected": Peer(
        "CLIPVisionModelWithProjection", "CLIPVisionConfig", VISION_CONFIG | {"projection_dim": 24}, embeds
    ),
    "clip, with text encoder": Peer(
        "CLIPModel",
        "CLIPConfig",
        DUAL_CONFIG | {"projection_dim": 24},
        embeds,
        written_class="CLIPVisionModelWithProjection",
    ),
    "clip, head": Peer("CLIPForImageClassification", "CLIPConfig", DUAL_CONFIG | {"num_labels": 5}, logits),
    "siglip": Peer("SiglipVisionModel", "SiglipVisionConfig", VISION_CONFIG, pooled),
    "siglip, with text encoder": Peer(
        "SiglipModel", "SiglipConfig", DUAL_CONFIG, pooled, written_class="SiglipVisionModel"
    ),
    "siglip, head": Peer("SiglipForImageClassification", "SiglipConfig", DUAL_CONFIG | {"num_labels": 5}, logits),
    "bit": Peer("BitForImageClassification", "BitConfig", RESNET, logits),
    "bit, bare": Peer("BitModel", "BitConfig", RESNET, pooled),
}


@torch.no_grad()
def peer_output(peer: Peer, model: Any, images: Tensor) -> Tensor:
    """The output of a peer's network; of its image encoder if it has others."""
    if peer.is_dual_encoder:
        features = model.get_image_features(images)
        return pooled(features)
    encoder: Any = model.vit if peer.model in ("ViTForMaskedImageModeling", "ViTMAEForPreTraining") else model
    return peer.output(encoder(images))

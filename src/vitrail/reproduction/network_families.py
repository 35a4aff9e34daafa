"""ViTs, hybrids and BiT ResNets of about equal FLOPs, for each scale.

All networks of a scale get images of the same size. A ResNet's root downsamples four times, so digits of 8 px are
enlarged to 16 px and CIFAR-10's images to 64 px; a patch of the ViT covers a quarter or an eighth of a side either way.
"""

from __future__ import annotations

from typing import Any

from vitrail.config import AugmentConfig, BiTConfig, DataConfig, NetConfig, StemConfig, TrainConfig, ViTConfig
from vitrail.models.model_names import config_from_name
from vitrail.recipes.digits import small_gray_vit
from vitrail.reproduction.arm import Scale
from vitrail.reproduction.scales import base_config

VIT, HYBRID, RESNET = "ViT", "hybrid", "ResNet"
FAMILIES = (VIT, HYBRID, RESNET)
IMAGE_SIZES: dict[Scale, int] = {"tiny": 16, "gpu": 64, "paper": 224}
PAPER_NAMES = {
    VIT: {"small": "ViT-B/32", "base": "ViT-B/16", "large": "ViT-L/16"},
    HYBRID: {"small": "R50+ViT-B/32", "base": "R50+ViT-B/16", "large": "R50+ViT-L/16"},
    RESNET: {"small": "BiT-R50x1", "base": "BiT-R50x2", "large": "BiT-R152x2"},
}
Network = NetConfig


def network(scale: Scale, family: str, size: str) -> Network:
    """A network of the family; `size`: small, base or large (tiny has no large)."""
    if scale == "paper":
        return _paper_network(PAPER_NAMES[family][size])
    return {"tiny": _tiny, "gpu": _gpu}[scale]()[family][size]


def sizes(scale: Scale) -> tuple[str, ...]:
    """The sizes of each family, ascending."""
    return ("small", "base") if scale == "tiny" else ("small", "base", "large")


def network_config(scale: Scale, data: DataConfig | None, model: Network, **changes: Any) -> TrainConfig:
    """The scale's settings with another network and its image size. `changes` replace fields of TrainConfig.

    Random crops enlarge the images, in place of the shifts that CIFAR-10 has elsewhere.
    """
    config = base_config(scale, data)
    if scale == "gpu":
        changes = {"augment": AugmentConfig(scale=(0.5, 1.0)).to_dict(), **changes}
    assert config.preprocess is not None
    preprocess = config.preprocess.replace(image_size=IMAGE_SIZES[scale]).to_dict()
    return config.replace(**{"model": model, "preprocess": preprocess, **changes})


def _tiny() -> dict[str, dict[str, Network]]:
    def vit(**fields: Any) -> ViTConfig:
        return small_gray_vit(image_size=16).replace(**fields)

    small, base = {"width": 32, "mlp_dim": 64, "depth": 2}, {"width": 64, "mlp_dim": 128, "depth": 4}
    resnet = BiTConfig(image_size=16, channels=1, num_classes=0, width_factor=0.5, layers=(1,))
    return {
        VIT: {"small": vit(patch_size=4, **small), "base": vit(patch_size=4, **base)},
        HYBRID: {
            "small": vit(patch_size=1, stem=StemConfig(layers=(), width_factor=0.5), **small),
            "base": vit(patch_size=1, stem=StemConfig(layers=(1,), width_factor=0.5), **base | {"depth": 3}),
        },
        RESNET: {"small": resnet, "base": resnet.replace(layers=(3, 4))},
    }


def _gpu() -> dict[str, dict[str, Network]]:
    def vit(**fields: Any) -> ViTConfig:
        return ViTConfig(**{"image_size": 64, "num_classes": 0, "activation": "gelu", **fields})

    small = {"width": 64, "mlp_dim": 256, "depth": 4, "num_heads": 2}
    base = {"width": 96, "mlp_dim": 384, "depth": 4, "num_heads": 3}
    large = {"width": 144, "mlp_dim": 576, "depth": 6, "num_heads": 3}
    resnet = BiTConfig(image_size=64, num_classes=0)
    return {
        VIT: {name: vit(patch_size=8, **f) for name, f in {"small": small, "base": base, "large": large}.items()},
        HYBRID: {
            "small": vit(patch_size=2, stem=StemConfig(layers=(1,), width_factor=0.5), **small | {"depth": 2}),
            "base": vit(patch_size=1, stem=StemConfig(layers=(1, 1), width_factor=0.5), **base | {"depth": 2}),
            "large": vit(patch_size=1, stem=StemConfig(layers=(1, 1)), **large | {"depth": 2}),
        },
        RESNET: {
            "small": resnet.replace(width_factor=0.5, layers=(1, 1)),
            "base": resnet.replace(width_factor=0.5, layers=(2, 2, 1)),
            "large": resnet.replace(layers=(2, 2)),
        },
    }


def _paper_network(name: str) -> Network:
    """A network of the paper with the settings of its ImageNet-21k recipe."""
    config = config_from_name(name, image_size=IMAGE_SIZES["paper"], num_classes=0)
    if isinstance(config, BiTConfig):
        return config
    return config.replace(dropout=0.1, pre_logits=config.width, head_bias_init=-10.0)

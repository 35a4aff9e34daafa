"""Published models: name, public checkpoint, and the names other libraries use."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class PublishedModel:
    """One published model."""

    name: str
    hub_id: str = ""
    """The hub id that `vitrail.load(name)` stands for; empty where no public weights exist."""
    aliases: tuple[str, ...] = ()
    """Names in timm and Hugging Face."""
    weights_url: str = ""
    """Address of public weights that are not on the hub; download the file and load it."""

    @property
    def family(self) -> str:
        return re.sub(r"^R\d*\+", "", self.name).split("-")[0]  # without the stem of a hybrid


def _timm(name: str, arch: str, tag: str, *aliases: str) -> PublishedModel:
    return PublishedModel(name, f"timm/{arch}.{tag}", (arch, *aliases))


_FT = "augreg_in21k_ft_in1k"

# fmt: off
PUBLISHED_MODELS: tuple[PublishedModel, ...] = (
    _timm("ViT-Ti/16", "vit_tiny_patch16_224", _FT, "WinKawaks/vit-tiny-patch16-224"),
    _timm("ViT-Ti/16@384", "vit_tiny_patch16_384", _FT),
    _timm("ViT-S/32", "vit_small_patch32_224", _FT),
    _timm("ViT-S/32@384", "vit_small_patch32_384", _FT),
    _timm("ViT-S/16", "vit_small_patch16_224", _FT, "WinKawaks/vit-small-patch16-224"),
    _timm("ViT-S/16@384", "vit_small_patch16_384", _FT),
    _timm("ViT-B/32", "vit_base_patch32_224", _FT, "google/vit-base-patch32-224-in21k", "vit_b_32"),
    _timm("ViT-B/32@384", "vit_base_patch32_384", _FT, "google/vit-base-patch32-384"),
    _timm("ViT-B/16", "vit_base_patch16_224", _FT, "google/vit-base-patch16-224", "vit_b_16"),
    _timm("ViT-B/16@384", "vit_base_patch16_384", _FT, "google/vit-base-patch16-384"),
    _timm("ViT-B/8", "vit_base_patch8_224", _FT),
    _timm("ViT-L/32@384", "vit_large_patch32_384", "orig_in21k_ft_in1k", "google/vit-large-patch32-384"),
    _timm("ViT-L/32", "vit_large_patch32_224", "orig_in21k", "google/vit-large-patch32-224-in21k", "vit_l_32"),
    _timm("ViT-L/16", "vit_large_patch16_224", _FT, "google/vit-large-patch16-224", "vit_l_16"),
    _timm("ViT-L/16@384", "vit_large_patch16_384", _FT, "google/vit-large-patch16-384"),
    _timm("ViT-H/14", "vit_huge_patch14_224", "orig_in21k", "google/vit-huge-patch14-224-in21k", "vit_h_14"),
    PublishedModel("ViT-g/14", aliases=("vit_giant_patch14_224",)),
    PublishedModel("ViT-G/14", aliases=("vit_gigantic_patch14_224",)),
    _timm("R+ViT-Ti/16", "vit_tiny_r_s16_p8_224", _FT),
    _timm("R26+ViT-S/32", "vit_small_r26_s32_224", _FT),
    _timm("R26+ViT-S/32@384", "vit_small_r26_s32_384", _FT),
    PublishedModel("R26+ViT-B/32", aliases=("vit_base_r26_s32_224",)),
    _timm("R50+ViT-B/16", "vit_base_r50_s16_224", "orig_in21k"),
    _timm("R50+ViT-B/16@384", "vit_base_r50_s16_384", "orig_in21k_ft_in1k", "google/vit-hybrid-base-bit-384"),
    _timm("R50+ViT-L/32", "vit_large_r50_s32_224", _FT),
    _timm("R50+ViT-L/32@384", "vit_large_r50_s32_384", _FT),
    PublishedModel("BV-S/16", weights_url="gs://big_vision/vit_s16_i1k_300ep.npz"),
    PublishedModel("BV-B/16"),
    _timm("DeiT-Ti/16", "deit_tiny_patch16_224", "fb_in1k", "facebook/deit-tiny-patch16-224"),
    _timm("DeiT-S/16", "deit_small_patch16_224", "fb_in1k", "facebook/deit-small-patch16-224"),
    _timm("DeiT-B/16", "deit_base_patch16_224", "fb_in1k", "facebook/deit-base-patch16-224"),
    _timm("DeiT-B/16@384", "deit_base_patch16_384", "fb_in1k", "facebook/deit-base-patch16-384"),
    _timm("DeiT-Ti/16-distilled", "deit_tiny_distilled_patch16_224", "fb_in1k", "facebook/deit-tiny-distilled-patch16-224"),
    _timm("DeiT-S/16-distilled", "deit_small_distilled_patch16_224", "fb_in1k", "facebook/deit-small-distilled-patch16-224"),
    _timm("DeiT-B/16-distilled", "deit_base_distilled_patch16_224", "fb_in1k", "facebook/deit-base-distilled-patch16-224"),
    _timm("DeiT-B/16-distilled@384", "deit_base_distilled_patch16_384", "fb_in1k", "facebook/deit-base-distilled-patch16-384"),
    _timm("DeiT3-S/16", "deit3_small_patch16_224", "fb_in22k_ft_in1k"),
    _timm("DeiT3-S/16@384", "deit3_small_patch16_384", "fb_in22k_ft_in1k"),
    _timm("DeiT3-B/16", "deit3_base_patch16_224", "fb_in22k_ft_in1k"),
    _timm("DeiT3-B/16@384", "deit3_base_patch16_384", "fb_in22k_ft_in1k"),
    _timm("DeiT3-L/16", "deit3_large_patch16_224", "fb_in22k_ft_in1k"),
    _timm("DeiT3-L/16@384", "deit3_large_patch16_384", "fb_in22k_ft_in1k"),
    _timm("DeiT3-H/14", "deit3_huge_patch14_224", "fb_in22k_ft_in1k"),
    PublishedModel("MAE-B/16", "timm/vit_base_patch16_224.mae", ("facebook/vit-mae-base",)),
    PublishedModel("MAE-L/16", "timm/vit_large_patch16_224.mae", ("facebook/vit-mae-large",)),
    PublishedModel("MAE-H/14", "timm/vit_huge_patch14_224.mae", ("facebook/vit-mae-huge",)),
    PublishedModel("DINO-S/16", "timm/vit_small_patch16_224.dino", ("facebook/dino-vits16", "dino_vits16")),
    PublishedModel("DINO-S/8", "timm/vit_small_patch8_224.dino", ("facebook/dino-vits8", "dino_vits8")),
    PublishedModel("DINO-B/16", "timm/vit_base_patch16_224.dino", ("facebook/dino-vitb16", "dino_vitb16")),
    PublishedModel("DINO-B/8", "timm/vit_base_patch8_224.dino", ("facebook/dino-vitb8", "dino_vitb8")),
    _timm("DINOv2-S/14", "vit_small_patch14_dinov2", "lvd142m", "facebook/dinov2-small", "dinov2_vits14"),
    _timm("DINOv2-B/14", "vit_base_patch14_dinov2", "lvd142m", "facebook/dinov2-base", "dinov2_vitb14"),
    _timm("DINOv2-L/14", "vit_large_patch14_dinov2", "lvd142m", "facebook/dinov2-large", "dinov2_vitl14"),
    _timm("DINOv2-g/14", "vit_giant_patch14_dinov2", "lvd142m", "facebook/dinov2-giant", "dinov2_vitg14"),
    _timm("DINOv2-S/14-reg", "vit_small_patch14_reg4_dinov2", "lvd142m", "facebook/dinov2-with-registers-small", "dinov2_vits14_reg"),
    _timm("DINOv2-B/14-reg", "vit_base_patch14_reg4_dinov2", "lvd142m", "facebook/dinov2-with-registers-base", "dinov2_vitb14_reg"),
    _timm("DINOv2-L/14-reg", "vit_large_patch14_reg4_dinov2", "lvd142m", "facebook/dinov2-with-registers-large", "dinov2_vitl14_reg"),
    _timm("DINOv2-g/14-reg", "vit_giant_patch14_reg4_dinov2", "lvd142m", "facebook/dinov2-with-registers-giant", "dinov2_vitg14_reg"),
    _timm("DINOv3-S/16", "vit_small_patch16_dinov3_qkvb", "lvd1689m", "facebook/dinov3-vits16-pretrain-lvd1689m", "dinov3_vits16"),
    _timm("DINOv3-S+/16", "vit_small_plus_patch16_dinov3_qkvb", "lvd1689m", "facebook/dinov3-vits16plus-pretrain-lvd1689m", "dinov3_vits16plus"),
    _timm("DINOv3-B/16", "vit_base_patch16_dinov3_qkvb", "lvd1689m", "facebook/dinov3-vitb16-pretrain-lvd1689m", "dinov3_vitb16"),
    _timm("DINOv3-L/16", "vit_large_patch16_dinov3_qkvb", "lvd1689m", "facebook/dinov3-vitl16-pretrain-lvd1689m", "dinov3_vitl16"),
    _timm("DINOv3-H+/16", "vit_huge_plus_patch16_dinov3_qkvb", "lvd1689m", "facebook/dinov3-vith16plus-pretrain-lvd1689m", "dinov3_vith16plus"),
    _timm("DINOv3-7B/16", "vit_7b_patch16_dinov3", "lvd1689m", "facebook/dinov3-vit7b16-pretrain-lvd1689m", "dinov3_vit7b16"),
    PublishedModel("CLIP-B/32", "openai/clip-vit-base-patch32", ("vit_base_patch32_clip_quickgelu_224", "timm/vit_base_patch32_clip_224.openai")),
    PublishedModel("CLIP-B/16", "openai/clip-vit-base-patch16", ("vit_base_patch16_clip_quickgelu_224", "timm/vit_base_patch16_clip_224.openai")),
    PublishedModel("CLIP-L/14", "openai/clip-vit-large-patch14", ("vit_large_patch14_clip_quickgelu_224", "timm/vit_large_patch14_clip_224.openai")),
    PublishedModel("CLIP-L/14@336", "openai/clip-vit-large-patch14-336", ("vit_large_patch14_clip_quickgelu_336", "timm/vit_large_patch14_clip_336.openai")),
    PublishedModel("SigLIP-B/16", "google/siglip-base-patch16-224", ("vit_base_patch16_siglip_224", "timm/vit_base_patch16_siglip_224.webli")),
    PublishedModel("SigLIP-B/16@256", "google/siglip-base-patch16-256", ("vit_base_patch16_siglip_256", "timm/vit_base_patch16_siglip_256.webli")),
    PublishedModel("SigLIP-B/16@384", "google/siglip-base-patch16-384", ("vit_base_patch16_siglip_384", "timm/vit_base_patch16_siglip_384.webli")),
    PublishedModel("SigLIP-B/16@512", "google/siglip-base-patch16-512", ("vit_base_patch16_siglip_512", "timm/vit_base_patch16_siglip_512.webli")),
    PublishedModel("SigLIP-L/16@256", "google/siglip-large-patch16-256", ("vit_large_patch16_siglip_256", "timm/vit_large_patch16_siglip_256.webli")),
    PublishedModel("SigLIP-L/16@384", "google/siglip-large-patch16-384", ("vit_large_patch16_siglip_384", "timm/vit_large_patch16_siglip_384.webli")),
    PublishedModel("SigLIP-SO400M/14@384", "google/siglip-so400m-patch14-384", ("vit_so400m_patch14_siglip_384", "timm/vit_so400m_patch14_siglip_384.webli")),
    PublishedModel("SigLIP-SO400M/14", "google/siglip-so400m-patch14-224", ("vit_so400m_patch14_siglip_224", "timm/vit_so400m_patch14_siglip_224.webli")),
    _timm("BiT-R50x1", "resnetv2_50x1_bit", "goog_in21k_ft_in1k", "google/bit-50"),
    _timm("BiT-R50x3", "resnetv2_50x3_bit", "goog_in21k_ft_in1k"),
    _timm("BiT-R101x1", "resnetv2_101x1_bit", "goog_in21k_ft_in1k"),
    _timm("BiT-R101x3", "resnetv2_101x3_bit", "goog_in21k_ft_in1k"),
    _timm("BiT-R152x2", "resnetv2_152x2_bit", "goog_in21k_ft_in1k"),
    _timm("BiT-R152x4", "resnetv2_152x4_bit", "goog_in21k_ft_in1k"),
    _timm("Swin-T", "swin_tiny_patch4_window7_224", "ms_in1k", "microsoft/swin-tiny-patch4-window7-224", "swin_t"),
    _timm("Swin-S", "swin_small_patch4_window7_224", "ms_in22k_ft_in1k", "microsoft/swin-small-patch4-window7-224", "swin_s"),
    _timm("Swin-B", "swin_base_patch4_window7_224", "ms_in22k_ft_in1k", "microsoft/swin-base-patch4-window7-224", "swin_b"),
    _timm("Swin-B@384", "swin_base_patch4_window12_384", "ms_in22k_ft_in1k", "microsoft/swin-base-patch4-window12-384"),
    _timm("Swin-L", "swin_large_patch4_window7_224", "ms_in22k_ft_in1k", "microsoft/swin-large-patch4-window7-224"),
    _timm("Swin-L@384", "swin_large_patch4_window12_384", "ms_in22k_ft_in1k", "microsoft/swin-large-patch4-window12-384"),
    _timm("Swin-S3-T", "swin_s3_tiny_224", "ms_in1k"),
    _timm("Swin-S3-S", "swin_s3_small_224", "ms_in1k"),
    _timm("Swin-S3-B", "swin_s3_base_224", "ms_in1k"),
    _timm("SwinV2-T", "swinv2_tiny_window8_256", "ms_in1k", "microsoft/swinv2-tiny-patch4-window8-256", "swin_v2_t"),
    _timm("SwinV2-T-w16", "swinv2_tiny_window16_256", "ms_in1k", "microsoft/swinv2-tiny-patch4-window16-256"),
    _timm("SwinV2-S", "swinv2_small_window8_256", "ms_in1k", "microsoft/swinv2-small-patch4-window8-256", "swin_v2_s"),
    _timm("SwinV2-S-w16", "swinv2_small_window16_256", "ms_in1k", "microsoft/swinv2-small-patch4-window16-256"),
    _timm("SwinV2-B", "swinv2_base_window8_256", "ms_in1k", "microsoft/swinv2-base-patch4-window8-256", "swin_v2_b"),
    _timm("SwinV2-B-w16", "swinv2_base_window16_256", "ms_in1k", "microsoft/swinv2-base-patch4-window16-256"),
    _timm("SwinV2-B-w12", "swinv2_base_window12_192", "ms_in22k", "microsoft/swinv2-base-patch4-window12-192-22k"),
    _timm("SwinV2-B-w12to16", "swinv2_base_window12to16_192to256", "ms_in22k_ft_in1k", "microsoft/swinv2-base-patch4-window12to16-192to256-22kto1k-ft"),
    _timm("SwinV2-B-w12to24", "swinv2_base_window12to24_192to384", "ms_in22k_ft_in1k", "microsoft/swinv2-base-patch4-window12to24-192to384-22kto1k-ft"),
    _timm("SwinV2-L-w12", "swinv2_large_window12_192", "ms_in22k", "microsoft/swinv2-large-patch4-window12-192-22k"),
    _timm("SwinV2-L-w12to16", "swinv2_large_window12to16_192to256", "ms_in22k_ft_in1k", "microsoft/swinv2-large-patch4-window12to16-192to256-22kto1k-ft"),
    _timm("SwinV2-L-w12to24", "swinv2_large_window12to24_192to384", "ms_in22k_ft_in1k", "microsoft/swinv2-large-patch4-window12to24-192to384-22kto1k-ft"),
)
# fmt: on

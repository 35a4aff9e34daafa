"""The pictures of the documentation, made by the package from a real checkpoint and open photographs.

    python docs/figures.py --model ViT-Ti/16 --out docs/images

The photographs are scikit-image's and scikit-learn's, all openly licensed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import skimage.data
import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_image

import vitrail


def photographs() -> dict[str, np.ndarray]:
    return {
        "cat": skimage.data.chelsea(),
        "coffee": skimage.data.coffee(),
        "rocket": skimage.data.rocket(),
        "flower": load_sample_image("flower.jpg"),
        "palace": load_sample_image("china.jpg"),
    }


def rollout(layers: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Attention of each layer, B H T T, in order -> B T T; every row sums to 1 (the paper's Fig. 6)."""
    joint = torch.eye(layers[0].shape[-1])
    for attention in layers:
        joint = (attention.mean(1) + torch.eye(attention.shape[-1])) / 2 @ joint
    return joint


def attention_figure(vit: vitrail.Model, path: Path) -> None:
    """Each photograph, and what the class token has gathered from it: attention rollout over all blocks."""
    pictures = photographs()
    figure, axes = plt.subplots(2, len(pictures), figsize=(2.4 * len(pictures), 5.4), layout="constrained")
    for column, picture in enumerate(pictures.values()):
        images = vit.preprocess([picture])
        with torch.no_grad():
            out = vit.net.features(images, want=("logits", "attention"))
        guess = vit.ranked(out.logits, 1)[0][0]
        grid, special = vit.config.grid, vit.config.prefix
        look = rollout(out.attention)[0, 0, special:].view(1, 1, *grid)
        look = F.interpolate(look, images.shape[-2:], mode="bilinear")[0, 0]
        mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (vit.card.preprocess.mean, vit.card.preprocess.std))
        shown = (images[0] * std + mean).clamp(0, 1).permute(1, 2, 0).numpy()
        low, high = look.quantile(0.15), look.quantile(0.98)
        light = ((look - low) / (high - low)).clamp(0, 1).numpy()[..., None]
        axes[0, column].imshow(shown)
        axes[0, column].set_title(f"{guess.label}\n{100 * guess.score:.0f} %", fontsize=11)
        axes[1, column].imshow(shown * (0.12 + 0.88 * light))
        for row in (0, 1):
            axes[row, column].axis("off")
    figure.savefig(path, dpi=110, pil_kwargs={"quality": 88})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-Ti/16")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    vit = vitrail.load(options.model, labels="imagenet-1k")
    attention_figure(vit, options.out / "attention.jpg")


if __name__ == "__main__":
    main()

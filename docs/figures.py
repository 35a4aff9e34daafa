"""Make the figures of the documentation from a public checkpoint and openly licensed photographs.

    python docs/figures.py --model ViT-Ti/16 --out docs/images

The photographs are scikit-image's, scikit-learn's and matplotlib's, all in the public domain or
openly licensed (scikit-learn's two: CC BY 2.0, by danielbuechele and vultilion).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import matplotlib.cbook
import numpy as np
import skimage.data
from PIL import Image
from sklearn.datasets import load_sample_image

import vitrail
from vitrail.cli import main as command
from vitrail.explain.canvas import new_figure, save
from vitrail.explain.overlays import mask_overlay

HERO = ("cat", "coffee", "rocket", "flower", "pagoda")


def photographs() -> dict[str, np.ndarray]:
    with matplotlib.cbook.get_sample_data("grace_hopper.jpg") as file:
        admiral = np.asarray(Image.open(file))
    return {
        "cat": skimage.data.chelsea(),
        "coffee": skimage.data.coffee(),
        "rocket": skimage.data.rocket(),
        "flower": load_sample_image("flower.jpg"),
        "pagoda": load_sample_image("china.jpg"),
        "astronaut": skimage.data.astronaut(),
        "camera": skimage.data.camera(),
        "admiral": admiral,
        "coins": skimage.data.coins(),
        "galaxies": skimage.data.hubble_deep_field(),
    }


def hero(vit: vitrail.Model, folder: Path, path: Path) -> None:
    """Five photographs with the top prediction, and the attention rollout of the class token below each."""
    figure = new_figure(2.4 * len(HERO), 5.4)
    axes = figure.subplots(2, len(HERO))
    for column, name in enumerate(HERO):
        explanation = vit.explain(folder / f"{name}.png", methods=["rollout"])
        axes[0, column].imshow(explanation.pixels)
        axes[0, column].set_title(f"{explanation.target.label}\n{100 * explanation.target.score:.0f} %", fontsize=11)
        axes[1, column].imshow(mask_overlay(explanation.pixels, explanation.rollout))
        for row in (0, 1):
            axes[row, column].axis("off")
    save(figure, path)


def run(*arguments: object) -> None:
    print("vitrail", *arguments, flush=True)
    if command([str(a) for a in arguments]):
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-Ti/16")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "photographs"
        folder.mkdir()
        for stem, pixels in photographs().items():
            Image.fromarray(pixels).convert("RGB").save(folder / f"{stem}.png")
        model = ("--model", options.model)
        run("figures", *model, "--data", folder, "--out", options.out, "--what", "filters,positions")
        run("figures", *model, "--data", folder, "--out", options.out, "--what", "rollout,colors", "--format", "jpg")
        run("figures", *model, "--data", folder, "--out", options.out, "--what", "distances", "--format", "png")
        explain = ("explain", folder / "pagoda.png", *model, "--labels", "imagenet-1k")
        run(*explain, "--out", options.out, "--format", "jpg", "--faithfulness", "--layer", "11")
        hero(vitrail.load(options.model, labels="imagenet-1k"), folder, options.out / "attention.jpg")


if __name__ == "__main__":
    main()

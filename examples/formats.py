"""What vitrail does, in a minute, without a network: patches, a ViT, and every format it can be kept in.

python examples/formats.py [--out runs/formats]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_sample_image

import vitrail
from vitrail.errors import ConversionError
from vitrail.weights import checkpoint

console = Console(highlight=False)
FORMATS = ("vitrail", "timm", "huggingface", "torchvision", "google", "big_vision", "facebook")


def patches_image(vit: vitrail.Model, path: Path) -> None:
    """A photograph as the network sees it: 14 x 14 panes, leaded like a window."""
    images = vit.preprocess([load_sample_image("china.jpg")])
    pixels = ((images[0] + 1) / 2).clamp(0, 1)  # C H W
    patch, lead = vit.config.patch_size[0], 3
    rows, columns = vit.config.grid
    panes = pixels.unflatten(2, (columns, patch)).unflatten(1, (rows, patch)).permute(1, 3, 2, 4, 0)  # h w p p C
    window = torch.full((rows, columns, patch + lead, patch + lead, 3), 0.08)
    window[:, :, :patch, :patch] = panes
    window = window.permute(0, 2, 1, 3, 4).flatten(2, 3).flatten(0, 1)
    figure, axes = plt.subplots(1, 2, figsize=(10, 5), layout="constrained")
    for ax, image, title in (
        (axes[0], pixels.permute(1, 2, 0), "a photograph"),
        (axes[1], window, f"{rows * columns} patches of {patch} x {patch} pixels: one token each"),
    ):
        ax.imshow(image.numpy())
        ax.set_title(title)
        ax.axis("off")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def formats_table(vit: vitrail.Model, out: Path) -> Table:
    """The same network written in each format and read back."""
    table = Table("format", "tensors read back", "largest difference of logits", box=None, pad_edge=False)
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        expected = vit.net(images)
    suffix = {"google": ".npz", "big_vision": ".npz", "torchvision": ".pth", "facebook": ".pth"}
    for name in FORMATS:
        path = out / f"{name}{suffix.get(name, '')}"
        try:
            vit.save(path, to=name, overwrite=True)
        except ConversionError as error:
            table.add_row(name, "refused", str(error).split(";")[0])
            continue
        net, _ = checkpoint.read(path)
        same = all(torch.equal(a, net.state_dict()[k]) for k, a in vit.net.state_dict().items())
        with torch.no_grad():
            difference = (net(images) - expected).abs().max()
        table.add_row(name, "identical" if same else "DIFFERENT", f"{difference:.1e}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/formats"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)

    vit = vitrail.create_model("ViT-Ti/16", seed=0)
    console.print(f"[bold]1. A network[/]      {vit!r}", soft_wrap=True)
    patches_image(vit, out / "patches.png")
    console.print(f"[bold]2. Its patches[/]    {out / 'patches.png'}")
    with torch.no_grad():
        for parameter in vit.net.parameters():  # fresh heads are zeros, which would compare too well
            parameter.add_(torch.randn_like(parameter) * 0.02)
    console.print("[bold]3. Every format[/]   written, read back, compared")
    console.print(formats_table(vit, out))

    start = time.perf_counter()
    with torch.inference_mode():
        for size in ((224, 224), (384, 288), (160, 320)):
            out_ = vit.net.features(torch.randn(1, 3, *size), outputs=("logits", "attention"))
            console.print(f"[bold]4. Any size[/]       {size[0]}x{size[1]}: attention {tuple(out_.attention[0].shape)}")
    console.print(f"                   {time.perf_counter() - start:.2f} s for the three, with every attention map")


if __name__ == "__main__":
    main()

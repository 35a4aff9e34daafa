"""Run folders as training writes them, a source of small images, and a parser of pages."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail.config import PreprocessConfig, TrainConfig, ViTConfig, epochs
from vitrail.data.batch import Batch
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.arrays import ArraySource
from vitrail.evaluation import Scores, measure

LABELS = ("cat", "dog & co", "<script>alert(1)</script>", "sea_horse")
PREPROCESS = Preprocess(PreprocessConfig(image_size=8, mean=(0.5,), std=(0.5,)))
MODEL = ViTConfig(image_size=8, patch_size=2, channels=1, num_classes=4, width=16, depth=2, num_heads=2, mlp_dim=32)


class Images(ArraySource):
    """Gray noise, 8 x 8, with labels."""

    def __init__(self, count: int = 40, labels: tuple[str, ...] = LABELS, channels: int = 1) -> None:
        rng = np.random.default_rng(0)
        pixels = rng.integers(0, 256, (count, 8, 8, channels), dtype=np.uint8)
        super().__init__("noise", "test", pixels, rng.integers(0, max(len(labels), 1), count), labels)

    def key(self, index: int) -> str:
        return f"noise/{index:03d}.png"


def compute_scores(net: torch.nn.Module, source: Images, targets: torch.Tensor | None = None) -> Scores:
    """Scores of the network on all images of the source."""
    images = torch.from_numpy(source.pixels).permute(0, 3, 1, 2)
    multi_label = targets is not None
    targets = torch.from_numpy(source.targets) if targets is None else targets
    indices = torch.arange(len(source))
    batch = Batch(0, images, targets, torch.ones(len(source)), indices, indices)
    return measure(net, [batch], preprocess=PREPROCESS, num_classes=net.config.num_classes, multi_label=multi_label)


def train_line(step: int, per_epoch: int = 10, **values: Any) -> dict[str, Any]:
    """A line of metrics.jsonl about a training step."""
    metrics = {"loss": 2 * math.exp(-step / 100), "accuracy": 1 - math.exp(-step / 80), "lr": 1e-3, "grad_norm": 1.0}
    progress = {"step": step, "epoch": step / per_epoch, "images": 32 * step, "images_per_s": 900.0, "time": 0.1 * step}
    return progress | metrics | values


def evaluation_line(step: int, top1: float | None, per_epoch: int = 10, **values: Any) -> dict[str, Any]:
    metrics = {"top1": top1, "top5": 1.0, "loss": 0.5, "low": 0.4, "high": 0.6, "count": 40} | values
    return {"step": step, "epoch": step / per_epoch, "evaluation": metrics, "ema": False}


def write_run(path: Path, lines: list[dict[str, Any]], **changes: Any) -> Path:
    """Write a run folder with these lines of metrics; keywords are settings."""
    path.mkdir(parents=True, exist_ok=True)
    config = TrainConfig(model=MODEL, duration=epochs(20), name=path.name).replace(**changes)
    (path / "config.json").write_text(json.dumps(config.to_dict()))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_finished(path: Path) -> Path:
    """Write a run of 200 steps, logged every 10 and evaluated every 50."""
    lines = [train_line(step) for step in range(10, 201, 10)]
    return write_run(path, lines + [evaluation_line(step, step / 400) for step in range(50, 201, 50)])


class Page(HTMLParser):
    """A parsed page: its text and its tags, each of which must be closed."""

    VOID = frozenset({"img", "meta", "br"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.open_tags: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text_chunks: list[str] = []
        self.feed(html)
        self.close()
        assert self.open_tags == [], f"unclosed tags: {self.open_tags}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open_tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags, f"</{tag}> closes nothing"
        assert self.open_tags[-1] == tag, f"</{tag}> closes <{self.open_tags[-1]}>"
        self.open_tags.pop()

    def handle_data(self, data: str) -> None:
        if "style" not in self.open_tags:
            self.text_chunks.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.text_chunks).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def ids(self) -> set[str | None]:
        return {attributes.get("id") for attributes in self.all("section")}

"""Time, size and flicker of a timeline's GIF, compared with matplotlib's FuncAnimation and PillowWriter.

    python benchmarks/animation.py [--rounds 3]

Both draw the same 30 frames of an attention rollout. Flicker: the fraction of the pixels of the image beside the
rollout, which is the same in every frame, whose color changes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from matplotlib.animation import FuncAnimation, PillowWriter
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from vitrail.explain.animation import FRAME_MS, TITLES, Timeline, _draw_panel, _progress, draw_animation
from vitrail.explain.canvas import DPI, new_figure, set_title
from vitrail.explain.timeline import Snapshot

FRAMES = 30


def make_timeline() -> Timeline:
    rng, image = np.random.default_rng(0), np.linspace(0, 255, 224)
    distance = np.hypot(*np.meshgrid(np.arange(14) - 7, np.arange(14) - 7))
    values = np.stack([np.exp(-(distance**2) / (60 - 1.5 * i)) + 0.02 * rng.random((14, 14)) for i in range(FRAMES)])
    values /= values.sum((1, 2), keepdims=True)
    pixels = np.stack([np.add.outer(image, image) / 2, np.tile(image, (224, 1)), np.tile(image, (224, 1)).T], -1)
    snapshots = [Snapshot(10 * i, i / 2, None) for i in range(FRAMES)]
    measured = [(i / 2, 1 - 0.9 * np.exp(-i / 8)) for i in range(1, FRAMES)]
    return Timeline("rollout", {"rollout": values}, snapshots, "digits: ViT", measured, pixels.astype(np.uint8))


def draw_with_matplotlib(timeline: Timeline, path: Path) -> None:
    figure = new_figure(5.0, 4.0)
    set_title(figure, TITLES[timeline.subject], timeline.about)
    panel, bar = figure.subfigures(2, 1, height_ratios=(4, 1))
    setters = [_draw_panel(panel, timeline), _progress(bar.subplots(), timeline)]
    FigureCanvasAgg(figure).draw()
    figure.set_layout_engine("none")

    def set_frame(frame: int) -> list[Artist]:
        for draw in setters:
            draw(frame)
        return []

    animation = FuncAnimation(figure, set_frame, frames=FRAMES, init_func=lambda: [])
    animation.save(path, writer=PillowWriter(fps=1000 / FRAME_MS), dpi=DPI)


def flicker(path: Path) -> float:
    """The left third of the middle of the frame shows the image."""
    frames = []
    with Image.open(path) as gif:
        for number in range(gif.n_frames):
            gif.seek(number)
            frames.append(np.asarray(gif.convert("RGB"))[200:400, 50:300])
    return float((np.ptp(np.stack(frames), axis=0).max(-1) > 0).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds, timeline = parser.parse_args().rounds, make_timeline()
    drawers = {"vitrail": draw_animation, "matplotlib": draw_with_matplotlib}
    times: dict[str, list[float]] = {name: [] for name in drawers}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for name, draw in drawers.items():
                start = time.perf_counter()
                draw(timeline, Path(folder) / f"{name}.gif")
                times[name].append(time.perf_counter() - start)
        for name, taken in times.items():
            path = Path(folder) / f"{name}.gif"
            size, changed = path.stat().st_size, 100 * flicker(path)
            print(f"{name:10} {statistics.median(taken):.2f} s, {size:,} bytes, {changed:.0f} % of the image flickers")


if __name__ == "__main__":
    main()

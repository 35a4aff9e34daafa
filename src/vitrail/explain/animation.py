"""Timelines as an animated GIF with the progress of the run, and as a strip of frames.

matplotlib's PillowWriter gives each frame its own palette, so that static images flicker and the color bar loses its
colors; a rollout of 30 frames is 2.6 times as large and takes 3.8 times as long (`python benchmarks/animation.py`),
and all frames have the same duration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, to_rgb
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from vitrail.explain.canvas import COLORS, FAINT, HEAT, INK, QUIET, new_figure, set_title
from vitrail.explain.overlays import SMOOTH, Pixels, as_rgb, mosaic, tile_images, upscale
from vitrail.explain.timeline import Floats, Snapshot

# T frames; h rows and w columns of patches; n patterns of p x q pixels and C channels; L layers of H heads

FrameSetter = Callable[[int], None]
"""Draws the frame with this index."""

TITLES = {
    "positions": "Similarity of position embeddings",
    "filters": "Patch embedding filters",
    "distances": "Attention distance",
    "rollout": "Attention rollout",
}
SCALES = {"positions": "cosine similarity", "rollout": "% of the rollout"}
"""Labels of the color scales."""
SHADES = 64
"""Number of colors of the scale; more are not distinguishable and double the file size."""
FRAME_MS, FIRST_FRAME_MS, LAST_FRAME_MS = 180, 700, 2000
"""Duration of a frame, of the first and of the last one."""
MATCH_TOLERANCE = 0.005
"""An evaluation is matched to a snapshot within this fraction of the run, since both are rounded to steps."""
STRIP_FRAMES = 6
"""Number of frames of a strip."""


@dataclass(frozen=True)
class Timeline:
    """The data of one animation."""

    subject: str
    arrays: Mapping[str, Floats]
    snapshots: Sequence[Snapshot]
    about: str
    """The run and its model, for the subtitle."""
    measured: Sequence[tuple[float, float]] = ()
    """(epoch or step, accuracy) of each evaluation."""
    image: Pixels | None = None
    """H W 3: the image of the rollout."""

    @property
    def values(self) -> Floats:
        return self.arrays[self.subject]

    @property
    def value_range(self) -> tuple[float, float]:
        """Range of the color scale, common to all frames."""
        if self.subject == "positions":
            return float(self.values.min()), 1.0
        return 0.0, 100 * float(self.values.max())

    @property
    def in_epochs(self) -> bool:
        return self.snapshots[-1].epoch is not None

    @property
    def last(self) -> float:
        return self.position(-1)

    def position(self, frame: int) -> float:
        """Epoch or step of a frame."""
        snapshot = self.snapshots[frame]
        return float(snapshot.step if snapshot.epoch is None else snapshot.epoch)

    def time_text(self, frame: int) -> str:
        if not self.in_epochs:
            return f"step {self.snapshots[frame].step:,}"
        decimals = 0 if self.last >= 20 else 1 if self.last >= 5 else 2
        return f"epoch {round(self.position(frame), decimals):g}"


def draw_animation(timeline: Timeline, path: str | Path) -> Path:
    """Write a looping GIF, 800 pixels wide, with one palette, layout and scale for all frames."""
    square = timeline.subject == "positions"
    figure = new_figure(5.0, 5.6 if square else 4.0)
    set_title(figure, TITLES[timeline.subject], f"{timeline.about} · {timeline.time_text(-1)}")
    subtitle = figure.texts[-1]
    panel, progress_bar = figure.subfigures(2, 1, height_ratios=(6.5, 1) if square else (4, 1), squeeze=False)[:, 0]
    setters = [_draw_panel(panel, timeline), _progress(progress_bar.subplots(), timeline)]
    canvas, images = FigureCanvasAgg(figure), []
    for frame in range(len(timeline.snapshots)):
        subtitle.set_text(f"{timeline.about} · {timeline.time_text(frame)}")
        for set_frame in setters:
            set_frame(frame)
        canvas.draw()
        figure.set_layout_engine("none")  # keep the layout of the first frame
        images.append(np.asarray(canvas.buffer_rgba())[..., :3].copy())
    return save_gif(images, path)


def save_gif(images: Sequence[Pixels], path: str | Path) -> Path:
    """Write frames H W 3 with one common palette and no dithering, so that static parts do not flicker."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    packed = [image.astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], dtype=np.uint32) for image in images]
    palette, numbers = _palette(packed)
    frames = [Image.fromarray(numbers[pixels]) for pixels in packed]
    for image in frames:
        image.putpalette(palette.tobytes())
    first, *rest = frames
    times = [FIRST_FRAME_MS, *[FRAME_MS] * (len(images) - 2), LAST_FRAME_MS]
    first.save(path, save_all=True, append_images=rest, duration=times, loop=0, optimize=True)
    return path


def _palette(images: Sequence[npt.NDArray[np.uint32]]) -> tuple[Pixels, Pixels]:
    """The palette, 256 3, and the palette index of every packed color.

    The palette holds white, the drawing colors, the color scale, and the most frequent other colors. Pillow's own
    search for the nearest color is not used: it is inexact enough to turn a white background gray.
    """
    from scipy.spatial import KDTree  # type: ignore[import-untyped]

    colors, counts = np.unique(np.concatenate([image[::2, ::2].ravel() for image in images]), return_counts=True)
    # Weighted by the square root of the count, so that the background does not take most of the palette.
    sample = _unpacked(np.repeat(colors, np.ceil(np.sqrt(counts)).astype(int)))
    drawing = [to_rgb(color) for color in ("white", INK, QUIET, FAINT, COLORS[0])]
    fixed = np.array([*drawing, *colormaps[HEAT](np.linspace(0, 1, SHADES + 1))[:, :3]])
    rest = Image.fromarray(sample[None]).quantize(256 - len(fixed), dither=Image.Dither.NONE).getpalette() or []
    palette = np.concatenate([np.rint(255 * fixed).astype(np.uint8), np.array(rest, np.uint8).reshape(-1, 3)])
    all_colors = np.unique(np.concatenate([np.unique(image) for image in images]))
    numbers = np.zeros(1 << 24, np.uint8)
    numbers[all_colors] = KDTree(palette.astype(float)).query(_unpacked(all_colors).astype(float))[1]
    return palette, numbers


def _unpacked(colors: npt.NDArray[np.uint32]) -> Pixels:
    return np.stack([colors >> 16, colors >> 8 & 255, colors & 255], -1).astype(np.uint8)


def draw_strip(timeline: Timeline) -> Figure:
    """Some frames side by side, denser at the beginning of the run."""
    frames = strip_frame_indices(len(timeline.snapshots))
    has_image = timeline.subject == "rollout"
    figure = new_figure(1.9 * (len(frames) + has_image) + 0.6 * (timeline.subject in SCALES), 2.9)
    set_title(figure, TITLES[timeline.subject], timeline.about)
    axes = list(figure.subplots(1, len(frames) + has_image, squeeze=False, sharey=timeline.subject == "distances")[0])
    _add_colorbar(axes, timeline)
    if has_image:
        _image(axes.pop(0), timeline)
    scored = any(timeline.snapshots[frame].score is not None for frame in frames)
    for ax, frame in zip(axes, frames, strict=True):
        PANELS[timeline.subject](ax, timeline)(frame)
        score = timeline.snapshots[frame].score
        accuracy = "" if score is None else f"top-1 {100 * score:.1f} %"
        ax.set_title(
            f"{timeline.time_text(frame)}\n{accuracy}" if scored else timeline.time_text(frame),
            fontsize=8.5,
            color=QUIET,
        )
        if ax is not axes[0]:
            ax.set_ylabel("")
    return figure


def strip_frame_indices(count: int, max_frames: int = STRIP_FRAMES) -> list[int]:
    """Indices of the first and the last frame, with growing steps between them."""
    if count <= max_frames:
        return list(range(count))
    between = np.rint(np.geomspace(1, count - 1, max_frames - 1)).astype(int)
    for i in range(1, len(between)):  # make rounded steps distinct
        between[i] = max(between[i], between[i - 1] + 1)
    return [0, *between.tolist()]


def _draw_panel(subfigure: SubFigure, timeline: Timeline) -> FrameSetter:
    """Draw the panel and its legend."""
    if timeline.subject in ("positions", "distances"):
        ax = subfigure.subplots()
        _add_colorbar([ax], timeline)
        return PANELS[timeline.subject](ax, timeline, full=True)
    left, right = subfigure.subplots(1, 2)
    if timeline.subject == "filters":
        return _set_both(_filters(left, timeline), _explained_variance(right, timeline))
    _image(left, timeline)
    _add_colorbar([left, right], timeline)
    return _rollout(right, timeline)


def _set_both(first: FrameSetter, second: FrameSetter) -> FrameSetter:
    def set_frame(frame: int) -> None:
        first(frame)
        second(frame)

    return set_frame


def _positions(ax: Axes, timeline: Timeline, full: bool = False) -> FrameSetter:
    low, _ = timeline.value_range
    artist = ax.imshow(similarity_grid(timeline.values[0], low), interpolation="nearest")
    _hide_axes(ax)
    if full:
        ax.set_xlabel("patch column", fontsize=9, color=INK)
        ax.set_ylabel("patch row", fontsize=9, color=INK)
    return lambda frame: artist.set_data(similarity_grid(timeline.values[frame], low))


def _filters(ax: Axes, timeline: Timeline, full: bool = False) -> FrameSetter:
    max_abs = float(np.abs(timeline.values).max())
    artist = ax.imshow(filter_grid(timeline.values[0], max_abs), interpolation="nearest")
    _hide_axes(ax)
    return lambda frame: artist.set_data(filter_grid(timeline.values[frame], max_abs))


def _explained_variance(ax: Axes, timeline: Timeline) -> FrameSetter:
    """Bars with the fraction of the variance of each filter component."""
    shares = 100 * timeline.arrays["shares"]
    bars = ax.bar(np.arange(1, shares.shape[1] + 1), shares[0], color=COLORS[0])
    ax.set_ylim(0, 1.05 * float(shares.max()))
    ax.set_xlabel("principal component", fontsize=9, color=INK)
    ax.set_title("% of the variance", loc="left", fontsize=9, color=INK)
    _style_axes(ax)

    def set_frame(frame: int) -> None:
        for bar, share in zip(bars, shares[frame], strict=True):
            bar.set_height(share)

    return set_frame


def _distance(ax: Axes, timeline: Timeline, full: bool = False) -> FrameSetter:
    _, layers, heads = timeline.values.shape
    across = np.repeat(np.arange(1, layers + 1), heads)
    uniform = float(timeline.arrays["uniform"][0])
    ax.axhline(uniform, color=QUIET, linewidth=1, linestyle="--")
    artist = ax.plot(across, timeline.values[0].ravel(), "o", color=COLORS[0], alpha=0.7, markersize=6 if full else 4)[
        0
    ]
    ax.set_xlim(0.5, layers + 0.5)
    ax.set_ylim(0, 1.12 * max(float(timeline.values.max()), uniform))
    ax.set_xticks(range(1, layers + 1, -(-layers // 12)))
    ax.set_xlabel("layer", fontsize=9, color=INK)
    ax.set_ylabel("mean attention distance (pixels)", fontsize=9, color=INK)
    if full:
        ax.set_title("dashed: uniform attention", loc="right", fontsize=8, color=QUIET)
    _style_axes(ax)
    return lambda frame: artist.set_ydata(timeline.values[frame].ravel())


def _rollout(ax: Axes, timeline: Timeline, full: bool = False) -> FrameSetter:
    (low, high), values = timeline.value_range, 100 * timeline.values
    how = "bilinear" if min(values.shape[1:]) >= SMOOTH else "nearest"
    artist = ax.imshow(values[0], cmap=HEAT, vmin=low, vmax=high, interpolation=how)
    _hide_axes(ax)
    return lambda frame: artist.set_data(values[frame])


PANELS: dict[str, Callable[..., FrameSetter]] = {
    "positions": _positions,
    "filters": _filters,
    "distances": _distance,
    "rollout": _rollout,
}


def _image(ax: Axes, timeline: Timeline) -> None:
    assert timeline.image is not None
    ax.imshow(timeline.image, interpolation="nearest")
    _hide_axes(ax)


def _progress(ax: Axes, timeline: Timeline) -> FrameSetter:
    """Progress of the run and the accuracy so far."""
    last = max(timeline.last, 1e-9)
    table = np.array(timeline.measured, dtype=float).reshape(-1, 2)
    ax.set_xlim(-0.02 * last, 1.2 * last)
    ax.set_ylim(0, 1)
    ax.set_xticks([tick for tick in MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(0, last) if tick <= last])
    ax.plot([0, last], [0, 0], color=FAINT, linewidth=2, clip_on=False)
    elapsed = ax.plot([], [], color=INK, linewidth=2, clip_on=False)[0]
    curve = ax.plot([], [], color=COLORS[0], linewidth=1.3, marker="o", markersize=2.5, clip_on=False)[0]
    marker = ax.plot([], [], "o", color=INK, markersize=6, clip_on=False)[0]
    label = ax.text(0, 0, "", fontsize=8.5, color=COLORS[0], va="center")
    ax.set_yticks([])
    ax.tick_params(length=0, labelsize=8, labelcolor=QUIET, pad=6)
    ax.set_xlabel("epoch" if timeline.in_epochs else "step", fontsize=8.5, color=QUIET)
    ax.spines[:].set_visible(False)
    for part in (elapsed, curve, marker, label):
        part.set_in_layout(False)  # moving parts must not change the layout

    def set_frame(frame: int) -> None:
        position = timeline.position(frame)
        elapsed.set_data([0, position], [0, 0])
        marker.set_data([position], [0])
        until = table[table[:, 0] <= position + MATCH_TOLERANCE * last]
        curve.set_data(until[:, 0], until[:, 1])
        if len(until):
            label.set_text(f" top-1 {100 * until[-1, 1]:.1f} %")
            label.set_position((until[-1, 0], until[-1, 1]))

    return set_frame


def similarity_grid(similarity: Floats, low: float, max_per_side: int = 7) -> Pixels:
    """h w h w -> a grid of small maps, one per patch; evenly spaced patches if there are more than `max_per_side`."""
    rows, columns = (
        np.unique(np.linspace(0, n - 1, min(n, max_per_side)).round().astype(int)) for n in similarity.shape[:2]
    )
    shades = np.rint((similarity[np.ix_(rows, columns)] - low) / max(1 - low, 1e-12) * SHADES) / SHADES
    side = max(48 // similarity.shape[3], 1)
    return mosaic(shades, side=side, gap=max(side * similarity.shape[3] // 12, 1), low=0.0, high=1.0, colors=HEAT)


def filter_grid(patterns: Floats, max_abs: float) -> Pixels:
    """n p q C -> the filters side by side; gray is zero, black and white are -`max_abs` and `max_abs`."""
    if patterns.shape[3] != 3:
        patterns = patterns.mean(3, keepdims=True)
    levels = [as_rgb(127.5 + 127.5 * pattern / max(max_abs, 1e-12)) for pattern in patterns]
    columns = next(n for n in (2, 4, 7, len(levels)) if len(levels) <= n * n)
    return tile_images([upscale(level, 48) for level in levels], columns, gap=5)


def _hide_axes(ax: Axes) -> None:
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)


def _style_axes(ax: Axes) -> None:
    ax.grid(axis="y", color=FAINT, linewidth=0.7)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(length=0, labelsize=8, labelcolor=QUIET)


def _add_colorbar(axes: list[Axes], timeline: Timeline) -> None:
    """Color bar, the same for all frames."""
    if timeline.subject not in SCALES:
        return
    colors = ScalarMappable(Normalize(*timeline.value_range), HEAT)
    bar = axes[0].figure.colorbar(colors, ax=axes, shrink=0.8, aspect=28, pad=0.03 / len(axes))
    bar.set_label(SCALES[timeline.subject], fontsize=9, color=INK)
    bar.ax.tick_params(length=0, labelsize=8, labelcolor=QUIET)
    bar.outline.set_visible(False)

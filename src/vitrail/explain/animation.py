"""A timeline as images: an animation (GIF) with a line that shows how far the run is, and a strip for papers."""

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

from vitrail.explain.canvas import COLORS, FAINT, HEAT, INK, QUIET, blank, title
from vitrail.explain.panes import SMOOTH, Pixels, enlarged, mosaic, shown, tiles
from vitrail.explain.timeline import Floats, Moment

# T moments; h rows and w columns of patches; n patterns of p x q pixels and C channels; L layers of H heads

Show = Callable[[int], None]
"""Puts the moment of this number into a figure."""

TITLES = {
    "positions": "How alike the positions are",
    "filters": "What the patch filters look for",
    "distances": "How far each attention head looks",
    "rollout": "Where the answer comes from (attention rollout)",
}
SCALES = {"positions": "cosine with each patch", "rollout": "% of the answer"}
"""What colors stand for, where they do."""
SHADES = 64
"""Steps of the scale: more are not told apart, and would double what a file needs."""
PACE, FIRST, LAST = 180, 700, 2000
"""Milliseconds that a moment is shown, and the first and the last one."""
NEAR = 0.005
"""A measurement belongs to a moment so near to it, as a share of the run: each is rounded to steps by itself."""
STRIP = 6
"""Moments side by side on paper."""


@dataclass(frozen=True)
class Film:
    """What is shown, when it was so, and of what."""

    subject: str
    arrays: Mapping[str, Floats]
    moments: Sequence[Moment]
    about: str
    """The run and its model, for the line under the title."""
    measured: Sequence[tuple[float, float]] = ()
    """Where on the run's axis (epochs, or steps) which share was right."""
    image: Pixels | None = None
    """H W 3: what a rollout is of."""

    @property
    def values(self) -> Floats:
        return self.arrays[self.subject]

    @property
    def reach(self) -> tuple[float, float]:
        """From which value to which the colors go, in all moments."""
        if self.subject == "positions":
            return float(self.values.min()), 1.0
        return 0.0, 100 * float(self.values.max())

    @property
    def in_epochs(self) -> bool:
        return self.moments[-1].epoch is not None

    @property
    def last(self) -> float:
        return self.place(-1)

    def place(self, now: int) -> float:
        """Of a moment on the run's axis."""
        moment = self.moments[now]
        return float(moment.step if moment.epoch is None else moment.epoch)

    def when(self, now: int) -> str:
        if not self.in_epochs:
            return f"step {self.moments[now].step:,}"
        decimals = 0 if self.last >= 20 else 1 if self.last >= 5 else 2
        return f"epoch {round(self.place(now), decimals):g}"


def draw_animation(film: Film, path: str | Path) -> Path:
    """800 pixels wide, over and over; one palette, layout and scale for all moments, so that nothing flickers."""
    square = film.subject == "positions"
    figure = blank(5.0, 5.6 if square else 4.0)
    title(figure, TITLES[film.subject], f"{film.about} · {film.when(-1)}")
    under = figure.texts[-1]
    above, beneath = figure.subfigures(2, 1, height_ratios=(6.5, 1) if square else (4, 1), squeeze=False)[:, 0]
    shows = [_scene(above, film), _progress(beneath.subplots(), film)]
    canvas, seen = FigureCanvasAgg(figure), []
    for now in range(len(film.moments)):
        under.set_text(f"{film.about} · {film.when(now)}")
        for show in shows:
            show(now)
        canvas.draw()
        figure.set_layout_engine("none")  # it stays as it was found for the first
        seen.append(np.asarray(canvas.buffer_rgba())[..., :3].copy())
    return save_gif(seen, path)


def save_gif(images: Sequence[Pixels], path: str | Path) -> Path:
    """H W 3 each, in one palette without dither: what stands still has the same colors in all of them."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    packed = [image.astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], dtype=np.uint32) for image in images]
    palette, numbers = _palette(packed)
    drawn = [Image.fromarray(numbers[pixels]) for pixels in packed]
    for image in drawn:
        image.putpalette(palette.tobytes())
    first, *rest = drawn
    times = [FIRST, *[PACE] * (len(images) - 2), LAST]
    first.save(path, save_all=True, append_images=rest, duration=times, loop=0, optimize=True)
    return path


def _palette(images: Sequence[npt.NDArray[np.uint32]]) -> tuple[Pixels, Pixels]:
    """256 3: paper, ink, the scale of amounts, and what else there is most of; and which of them each packed color is.

    Not Pillow's own search for the nearest one, which is rough enough to turn white paper gray.
    """
    from scipy.spatial import KDTree  # type: ignore[import-untyped]

    colors, counts = np.unique(np.concatenate([image[::2, ::2].ravel() for image in images]), return_counts=True)
    # Each by the root of how often it is there: paper must not take the room of what is drawn on it.
    sample = _unpacked(np.repeat(colors, np.ceil(np.sqrt(counts)).astype(int)))
    fixed = np.array([(1, 1, 1), to_rgb(INK), *colormaps[HEAT](np.linspace(0, 1, SHADES + 1))[:, :3]])
    rest = Image.fromarray(sample[None]).quantize(256 - len(fixed), dither=Image.Dither.NONE).getpalette() or []
    palette = np.concatenate([np.rint(255 * fixed).astype(np.uint8), np.array(rest, np.uint8).reshape(-1, 3)])
    every = np.unique(np.concatenate([np.unique(image) for image in images]))
    numbers = np.zeros(1 << 24, np.uint8)
    numbers[every] = KDTree(palette.astype(float)).query(_unpacked(every).astype(float))[1]
    return palette, numbers


def _unpacked(colors: npt.NDArray[np.uint32]) -> Pixels:
    return np.stack([colors >> 16, colors >> 8 & 255, colors & 255], -1).astype(np.uint8)


def draw_strip(film: Film) -> Figure:
    """Some moments side by side, close together at the beginning, where the most happens."""
    chosen = chosen_moments(len(film.moments))
    imaged = film.subject == "rollout"
    figure = blank(1.9 * (len(chosen) + imaged) + 0.6 * (film.subject in SCALES), 2.9)
    title(figure, TITLES[film.subject], film.about)
    axes = list(figure.subplots(1, len(chosen) + imaged, squeeze=False, sharey=film.subject == "distances")[0])
    _scale(axes, film)
    if imaged:
        _image(axes.pop(0), film)
    scored = any(film.moments[now].score is not None for now in chosen)
    for ax, now in zip(axes, chosen, strict=True):
        PANELS[film.subject](ax, film)(now)
        score = film.moments[now].score
        right = "" if score is None else f"{100 * score:.1f} % right"
        ax.set_title(f"{film.when(now)}\n{right}" if scored else film.when(now), fontsize=8.5, color=QUIET)
        if ax is not axes[0]:
            ax.set_ylabel("")
    return figure


def chosen_moments(count: int, most: int = STRIP) -> list[int]:
    """The first, the last, and between them ever longer steps."""
    if count <= most:
        return list(range(count))
    between = np.rint(np.geomspace(1, count - 1, most - 1)).astype(int)
    for i in range(1, len(between)):  # where steps of less than one came together
        between[i] = max(between[i], between[i - 1] + 1)
    return [0, *between.tolist()]


def _scene(where: SubFigure, film: Film) -> Show:
    """The panel itself, with what explains it at its side."""
    if film.subject in ("positions", "distances"):
        ax = where.subplots()
        _scale([ax], film)
        return PANELS[film.subject](ax, film, full=True)
    left, right = where.subplots(1, 2)
    if film.subject == "filters":
        return _both(_filters(left, film), _shares(right, film))
    _image(left, film)
    _scale([left, right], film)
    return _rollout(right, film)


def _both(one: Show, other: Show) -> Show:
    def show(now: int) -> None:
        one(now)
        other(now)

    return show


def _positions(ax: Axes, film: Film, full: bool = False) -> Show:
    low, _ = film.reach
    drawn = ax.imshow(maps(film.values[0], low), interpolation="nearest")
    _bare(ax)
    if full:
        ax.set_xlabel("column of the patch", fontsize=9, color=INK)
        ax.set_ylabel("row of the patch", fontsize=9, color=INK)
    return lambda now: drawn.set_data(maps(film.values[now], low))


def _filters(ax: Axes, film: Film, full: bool = False) -> Show:
    reach = float(np.abs(film.values).max())
    drawn = ax.imshow(sheet(film.values[0], reach), interpolation="nearest")
    _bare(ax)
    return lambda now: drawn.set_data(sheet(film.values[now], reach))


def _shares(ax: Axes, film: Film) -> Show:
    """How much of the projection each pattern is."""
    shares = 100 * film.arrays["shares"]
    bars = ax.bar(np.arange(1, shares.shape[1] + 1), shares[0], color=COLORS[0])
    ax.set_ylim(0, 1.05 * float(shares.max()))
    ax.set_xlabel("pattern", fontsize=9, color=INK)
    ax.set_title("% of all filters", loc="left", fontsize=9, color=INK)
    _light(ax)

    def show(now: int) -> None:
        for bar, share in zip(bars, shares[now], strict=True):
            bar.set_height(share)

    return show


def _distance(ax: Axes, film: Film, full: bool = False) -> Show:
    _, layers, heads = film.values.shape
    across = np.repeat(np.arange(1, layers + 1), heads)
    alike = float(film.arrays["uniform"][0])
    ax.axhline(alike, color=QUIET, linewidth=1, linestyle="--")
    drawn = ax.plot(across, film.values[0].ravel(), "o", color=COLORS[0], alpha=0.7, markersize=6 if full else 4)[0]
    ax.set_xlim(0.5, layers + 0.5)
    ax.set_ylim(0, 1.12 * max(float(film.values.max()), alike))
    ax.set_xticks(range(1, layers + 1, -(-layers // 12)))
    ax.set_xlabel("layer", fontsize=9, color=INK)
    ax.set_ylabel("mean distance, pixels", fontsize=9, color=INK)
    if full:
        ax.set_title("dashed: a head that looks everywhere alike", loc="right", fontsize=8, color=QUIET)
    _light(ax)
    return lambda now: drawn.set_ydata(film.values[now].ravel())


def _rollout(ax: Axes, film: Film, full: bool = False) -> Show:
    (low, high), values = film.reach, 100 * film.values
    how = "bilinear" if min(values.shape[1:]) >= SMOOTH else "nearest"
    drawn = ax.imshow(values[0], cmap=HEAT, vmin=low, vmax=high, interpolation=how)
    _bare(ax)
    return lambda now: drawn.set_data(values[now])


PANELS: dict[str, Callable[..., Show]] = {
    "positions": _positions,
    "filters": _filters,
    "distances": _distance,
    "rollout": _rollout,
}


def _image(ax: Axes, film: Film) -> None:
    assert film.image is not None
    ax.imshow(film.image, interpolation="nearest")
    _bare(ax)


def _progress(ax: Axes, film: Film) -> Show:
    """A thin line: how far the run is, and what was right until now."""
    last = max(film.last, 1e-9)
    table = np.array(film.measured, dtype=float).reshape(-1, 2)
    ax.set_xlim(-0.02 * last, 1.2 * last)
    ax.set_ylim(0, 1)
    ax.set_xticks([tick for tick in MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(0, last) if tick <= last])
    ax.plot([0, last], [0, 0], color=FAINT, linewidth=2, clip_on=False)
    passed = ax.plot([], [], color=INK, linewidth=2, clip_on=False)[0]
    curve = ax.plot([], [], color=COLORS[0], linewidth=1.3, marker="o", markersize=2.5, clip_on=False)[0]
    here = ax.plot([], [], "o", color=INK, markersize=6, clip_on=False)[0]
    words = ax.text(0, 0, "", fontsize=8.5, color=COLORS[0], va="center")
    ax.set_yticks([])
    ax.tick_params(length=0, labelsize=8, labelcolor=QUIET, pad=6)
    ax.set_xlabel("epoch" if film.in_epochs else "step", fontsize=8.5, color=QUIET)
    ax.spines[:].set_visible(False)
    for part in (passed, curve, here, words):
        part.set_in_layout(False)  # they move, and the rest must not

    def show(now: int) -> None:
        place = film.place(now)
        passed.set_data([0, place], [0, 0])
        here.set_data([place], [0])
        until = table[table[:, 0] <= place + NEAR * last]
        curve.set_data(until[:, 0], until[:, 1])
        if len(until):
            words.set_text(f" {100 * until[-1, 1]:.1f} % right")
            words.set_position((until[-1, 0], until[-1, 1]))

    return show


def maps(alike: Floats, low: float, most: int = 7) -> Pixels:
    """h w h w -> a small map for each patch; of more than `most` a side, for some at equal distances."""
    rows, columns = (np.unique(np.linspace(0, n - 1, min(n, most)).round().astype(int)) for n in alike.shape[:2])
    shades = np.rint((alike[np.ix_(rows, columns)] - low) / max(1 - low, 1e-12) * SHADES) / SHADES
    side = max(48 // alike.shape[3], 1)
    return mosaic(shades, side=side, gap=max(side * alike.shape[3] // 12, 1), low=0.0, high=1.0, colors=HEAT)


def sheet(patterns: Floats, reach: float) -> Pixels:
    """n p q C -> the patterns side by side, gray where one is nought, black or white at `reach`."""
    if patterns.shape[3] != 3:
        patterns = patterns.mean(3, keepdims=True)
    levels = [shown(127.5 + 127.5 * pattern / max(reach, 1e-12)) for pattern in patterns]
    columns = next(n for n in (2, 4, 7, len(levels)) if len(levels) <= n * n)
    return tiles([enlarged(level, 48) for level in levels], columns, gap=5)


def _bare(ax: Axes) -> None:
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)


def _light(ax: Axes) -> None:
    ax.grid(axis="y", color=FAINT, linewidth=0.7)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(length=0, labelsize=8, labelcolor=QUIET)


def _scale(axes: list[Axes], film: Film) -> None:
    """What the colors mean, in all moments alike."""
    if film.subject not in SCALES:
        return
    colors = ScalarMappable(Normalize(*film.reach), HEAT)
    bar = axes[0].figure.colorbar(colors, ax=axes, shrink=0.8, aspect=28, pad=0.03 / len(axes))
    bar.set_label(SCALES[film.subject], fontsize=9, color=INK)
    bar.ax.tick_params(length=0, labelsize=8, labelcolor=QUIET)
    bar.outline.set_visible(False)

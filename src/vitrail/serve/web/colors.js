// Color scales for values from 0 to 1. Both are readable in grayscale and with color blindness.

const VIRIDIS = [
  [68, 1, 84], [72, 24, 106], [71, 45, 123], [66, 64, 134], [59, 82, 139], [51, 99, 141], [44, 114, 142], [38, 130, 142],
  [33, 145, 140], [31, 160, 136], [40, 174, 128], [63, 188, 115], [94, 201, 98], [132, 212, 75], [173, 220, 48],
  [216, 226, 25], [253, 231, 37],
];

export function viridis(value) {
  const position = Math.min(Math.max(value, 0), 1) * (VIRIDIS.length - 1), index = Math.min(Math.floor(position), VIRIDIS.length - 2);
  const fraction = position - index, [a, b] = [VIRIDIS[index], VIRIDIS[index + 1]];
  return `rgb(${a.map((start, i) => Math.round(start + (b[i] - start) * fraction)).join(" ")})`;
}

/** Opacity of the dark overlay on a patch: 0 at value 1, at most 0.74, so that the image stays visible. */
export const shade = (value) => 0.74 * (1 - Math.min(Math.max(value, 0), 1) ** 0.7);

export const SHADE_COLOR = "14 12 24";
export const GRID_COLOR = "rgb(14 12 24 / .5)";

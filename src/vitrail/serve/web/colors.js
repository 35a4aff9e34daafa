// How values between 0 and 1 become colors. Both ways read in gray and for every eye.

const VIRIDIS = [
  [68, 1, 84], [72, 24, 106], [71, 45, 123], [66, 64, 134], [59, 82, 139], [51, 99, 141], [44, 114, 142], [38, 130, 142],
  [33, 145, 140], [31, 160, 136], [40, 174, 128], [63, 188, 115], [94, 201, 98], [132, 212, 75], [173, 220, 48],
  [216, 226, 25], [253, 231, 37],
];

export function viridis(value) {
  const place = Math.min(Math.max(value, 0), 1) * (VIRIDIS.length - 1), first = Math.min(Math.floor(place), VIRIDIS.length - 2);
  const part = place - first, [a, b] = [VIRIDIS[first], VIRIDIS[first + 1]];
  return `rgb(${a.map((from, i) => Math.round(from + (b[i] - from) * part)).join(" ")})`;
}

/** How dark a patch of glass is: dusk where there is nothing, so that the image is still seen, and clear where there is most. */
export const night = (value) => 0.74 * (1 - Math.min(Math.max(value, 0), 1) ** 0.7);

export const NIGHT = "14 12 24";
export const LEAD = "rgb(14 12 24 / .5)";

// What the server's bytes mean: rows of attention, maps over the patches, similarity of places. Nothing here draws.
// T tokens, P special ones first, N = T - P patches in rows and columns.

export function bytes(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);  // many times faster, where the browser has it
  const raw = atob(text), out = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
  return out;
}

/** One layer: H T T bytes, each a fraction of the maximum of its row. */
export function layerOf({ num_heads: heads, num_tokens: tokens, values, row_max }) {
  const raw = bytes(row_max);
  return { heads, tokens, values: bytes(values), peaks: new Float32Array(raw.buffer, 0, raw.byteLength / 4) };
}

/** How the head mixes the tokens, T numbers that sum to 1; attention pools are shown as the mean of the patches. */
export function reading(pool, special, tokens) {
  const weights = new Float32Array(tokens), patches = tokens - special.length;
  const named = special.filter((name) => name === "class" || name === "distill").length;
  const shares = { token: [1, 0], "token+gap": [0.5, 0.5] }[pool] ?? [0, 1];
  const [token, gap] = named ? shares : [0, 1];
  for (let i = 0; i < tokens; i++) weights[i] = i < special.length ? 0 : gap / patches;
  special.forEach((name, i) => { if (name === "class" || name === "distill") weights[i] = token / named; });
  return weights;
}

/** T numbers that sum to 1: what a token (or a mix of them) attends to, in one head (from 1) or the mean of all (0). */
export function attended(layer, head, asker) {
  const { heads, tokens, values, peaks } = layer, out = new Float32Array(tokens);
  const chosen = head ? [head - 1] : [...Array(heads).keys()];
  const askers = typeof asker === "number" ? [[asker, 1]] : [...asker.entries()].filter(([, weight]) => weight > 0);
  for (const h of chosen) {
    for (const [query, weight] of askers) {
      const row = h * tokens + query, scale = (weight * peaks[row]) / 255 / chosen.length, start = row * tokens;
      for (let i = 0; i < tokens; i++) out[i] += scale * values[start + i];
    }
  }
  return out;
}

/** A map over the patches, in the units it was computed in. */
export function mapOf({ values, min, max }) {
  return Float32Array.from(bytes(values), (byte) => min + (byte / 255) * (max - min));
}

/** A map that is still being computed: NaN for patches without a value. */
export function partialOf(map) {
  const final = bytes(map.final);
  return mapOf(map).map((value, i) => (final[i] ? value : NaN));
}
export const isPartial = (values) => values.some(Number.isNaN);

/** N N numbers from -1 to 1. */
export function placesOf({ grid, values, description }) {
  const signed = new Int8Array(bytes(values).buffer), alike = Float32Array.from(signed, (byte) => byte / 127);
  let low = 1;
  for (const value of alike) low = Math.min(low, value);
  return { grid, alike, low, description };
}

/** The values drawn darkest and brightest. A few very large values do not darken the others. */
export function scale(values) {
  const sorted = Float32Array.from(values.filter((value) => !Number.isNaN(value))).sort(), at = (share) => sorted[Math.floor(share * (sorted.length - 1))];
  const least = Math.min(at(0), 0), high = Math.max(at(0.965), least + 0.3 * (at(1) - least));
  return { low: Math.min(at(0.2), least + 0.4 * (high - least)), high, most: at(1) };  // an even map is even light, not its own noise
}

/** The values scaled to 0 (dark) to 1 (bright); NaN stays NaN. */
export function scaled(values) {
  const { low, high } = scale(values);
  return values.map((value) => Math.min(1, Math.max(0, (value - low) / (high - low || 1))));
}

/** Occlusion values with negative ones, where the probability rises, set to 0. */
export const positivePart = (values) => values.map((value) => Math.max(value, 0));

export function largest(values) {
  let best = 0;
  for (let i = 1; i < values.length; i++) if (values[i] > values[best] || Number.isNaN(values[best])) best = i;
  return best;
}

const SQUARE = 2;  // occlusion covers so many patches along a side
export const sideOf = ({ rows, columns }) => Math.min(SQUARE, rows, columns);

/** The rows and columns, each first and last, that occlusion covers together with a patch: those of one square, or of `count` where some overlap at the edge. */
export function covered(patch, { rows, columns }) {
  const side = sideOf({ rows, columns });
  const along = (at, size) => {
    const last = size - side, starts = at >= last ? [last] : [];  // the last square ends at the edge
    const even = at - (at % side);
    if (even < last) starts.unshift(even);
    return { span: [starts[0], starts.at(-1) + side - 1], count: starts.length };
  };
  const down = along(Math.floor(patch / columns), rows), right = along(patch % columns, columns);
  return { down: down.span, right: right.span, count: down.count * right.count };
}

export function cosine(a, b) {
  let dot = 0, aa = 0, bb = 0;
  for (let i = 0; i < a.length; i++) { dot += a[i] * b[i]; aa += a[i] * a[i]; bb += b[i] * b[i]; }
  return dot / (Math.sqrt(aa * bb) || 1);
}

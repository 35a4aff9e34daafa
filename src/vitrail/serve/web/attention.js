// Decodes the server's responses: attention, maps over the patches, similarity of position embeddings.
// H heads, T tokens: P prefix tokens (class, registers), then N = T - P patches, row by row.

export function decodeBytes(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);  // many times faster, in browsers that have it
  const binary = atob(text), out = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) out[i] = binary.charCodeAt(i);
  return out;
}

/** The attention of one layer: H T T bytes, each relative to the maximum of its row. */
export function parseLayer({ num_heads: heads, num_tokens: tokens, values, row_max }) {
  const peakBytes = decodeBytes(row_max);
  return { heads, tokens, values: decodeBytes(values), rowMax: new Float32Array(peakBytes.buffer, 0, peakBytes.byteLength / 4) };
}

/** The weights with which the head pools the T tokens; they sum to 1. Attention pooling is approximated by the mean of the patches. */
export function poolingWeights(pool, prefixTokens, tokens) {
  const weights = new Float32Array(tokens), patches = tokens - prefixTokens.length;
  const readerCount = prefixTokens.filter((name) => name === "class" || name === "distill").length;
  const poolShares = { token: [1, 0], "token+gap": [0.5, 0.5] }[pool] ?? [0, 1];
  const [tokenShare, patchShare] = readerCount ? poolShares : [0, 1];
  for (let i = 0; i < tokens; i++) weights[i] = i < prefixTokens.length ? 0 : patchShare / patches;
  prefixTokens.forEach((name, i) => { if (name === "class" || name === "distill") weights[i] = tokenShare / readerCount; });
  return weights;
}

/** The attention of a query over all T tokens; sums to 1. `query` is a token's index or a weight per token; `head` counts from 1, 0 is the mean of all heads. */
export function attentionRow(layer, head, query) {
  const { heads, tokens, values, rowMax } = layer, attention = new Float32Array(tokens);
  const selectedHeads = head ? [head - 1] : [...Array(heads).keys()];
  const queries = typeof query === "number" ? [[query, 1]] : [...query.entries()].filter(([, weight]) => weight > 0);
  for (const h of selectedHeads) {
    for (const [token, weight] of queries) {
      const row = h * tokens + token, scale = (weight * rowMax[row]) / 255 / selectedHeads.length, start = row * tokens;
      for (let i = 0; i < tokens; i++) attention[i] += scale * values[start + i];
    }
  }
  return attention;
}

/** The values of a map, one per patch, in their original units. */
export function parseMap({ values, min, max }) {
  return Float32Array.from(decodeBytes(values), (byte) => min + (byte / 255) * (max - min));
}

/** The values of a map that is still being computed: NaN for patches without a value. */
export function parsePartialMap(map) {
  const final = decodeBytes(map.final);
  return parseMap(map).map((value, i) => (final[i] ? value : NaN));
}
export const isPartial = (values) => values.some(Number.isNaN);

/** Similarity of position embeddings: N N numbers from -1 to 1. */
export function parsePositions({ grid, values, description }) {
  const signed = new Int8Array(decodeBytes(values).buffer), similarity = Float32Array.from(signed, (byte) => byte / 127);
  let min = 1;
  for (const value of similarity) min = Math.min(min, value);
  return { grid, similarity, min, description };
}

/** The values drawn darkest (`low`) and brightest (`high`). `high` is a quantile, so that a few very large values do not darken the others. */
export function colorRange(values) {
  const sorted = Float32Array.from(values.filter((value) => !Number.isNaN(value))).sort(), quantile = (share) => sorted[Math.floor(share * (sorted.length - 1))];
  const min = Math.min(quantile(0), 0), high = Math.max(quantile(0.965), min + 0.3 * (quantile(1) - min));
  return { low: Math.min(quantile(0.2), min + 0.4 * (high - min)), high, max: quantile(1) };  // noise in a uniform map is not amplified
}

/** The values scaled to 0 (dark) to 1 (bright); NaN stays NaN. */
export function normalize(values) {
  const { low, high } = colorRange(values);
  return values.map((value) => Math.min(1, Math.max(0, (value - low) / (high - low || 1))));
}

/** Replaces negative values by 0: in occlusion, patches where the probability rises. */
export const positivePart = (values) => values.map((value) => Math.max(value, 0));

/** The index of the largest value; NaN is ignored. */
export function argmax(values) {
  let best = 0;
  for (let i = 1; i < values.length; i++) if (values[i] > values[best] || Number.isNaN(values[best])) best = i;
  return best;
}

const SQUARE_SIDE = 2;  // patches along each side of an occluded square
export const squareSide = ({ rows, columns }) => Math.min(SQUARE_SIDE, rows, columns);

/** The rows and columns (first and last of each) of the occluded squares that contain a patch. `count` squares contain it: more than one where squares overlap at the edge. */
export function coveringSquares(patch, { rows, columns }) {
  const side = squareSide({ rows, columns });
  const along = (position, size) => {
    const last = size - side, starts = position >= last ? [last] : [];  // the last square ends at the edge
    const regularStart = position - (position % side);
    if (regularStart < last) starts.unshift(regularStart);
    return { span: [starts[0], starts.at(-1) + side - 1], count: starts.length };
  };
  const vertical = along(Math.floor(patch / columns), rows), horizontal = along(patch % columns, columns);
  return { rowSpan: vertical.span, columnSpan: horizontal.span, count: vertical.count * horizontal.count };
}

/** Cosine similarity of two vectors. */
export function cosine(a, b) {
  let dot = 0, aa = 0, bb = 0;
  for (let i = 0; i < a.length; i++) { dot += a[i] * b[i]; aa += a[i] * a[i]; bb += b[i] * b[i]; }
  return dot / (Math.sqrt(aa * bb) || 1);
}

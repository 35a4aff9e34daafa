// The view as a URL fragment: #image=cat&show=attention&layer=12&head=2&ask=5.7&hide=3-7.12
// Names of the second pane's values end in 2; without image2 it shows the first image.

export const userImage = (key) => `own:${key}`;
export const isUserImage = (source) => source.startsWith("own:");

/** 3,4,5,9 -> "3-5.9" */
export function writeRanges(numbers) {
  const sorted = [...numbers].sort((a, b) => a - b), parts = [];
  for (let i = 0; i < sorted.length; i++) {
    const first = sorted[i];
    while (sorted[i + 1] === sorted[i] + 1) i++;
    parts.push(first === sorted[i] ? `${first}` : `${first}-${sorted[i]}`);
  }
  return parts.join(".");
}

/** The inverse of writeRanges for numbers below `count`; anything else is ignored. */
export function readRanges(text, count) {
  const numbers = new Set();
  for (const part of (text ?? "").split(".")) {
    const match = /^(\d+)(?:-(\d+))?$/.exec(part);
    if (!match) continue;
    const last = Math.min(Number(match[2] ?? match[1]), count - 1);
    for (let i = Number(match[1]); i <= last; i++) numbers.add(i);
  }
  return numbers;
}

/** A token's index -> "class", "register-2", or row.column, counted from 1; null without a query. */
export function writeQuery(token, prefixTokens, columns) {
  if (token === null) return null;
  if (token < prefixTokens.length) return prefixTokens[token].replaceAll(" ", "-");
  const patch = token - prefixTokens.length;
  return `${Math.floor(patch / columns) + 1}.${(patch % columns) + 1}`;
}

export function readQuery(text, prefixTokens, rows, columns) {
  if (!text) return null;
  const index = prefixTokens.indexOf(text.replaceAll("-", " "));
  if (index >= 0) return index;
  const match = /^(\d+)\.(\d+)$/.exec(text);
  if (!match) return null;
  const [row, column] = [Number(match[1]) - 1, Number(match[2]) - 1];
  return row >= 0 && column >= 0 && row < rows && column < columns ? prefixTokens.length + row * columns + column : null;
}

/** The view -> the URL fragment, without #. */
export function writePermalink({ panes, states, query, colorScale, fill }, model) {
  const parameters = new URLSearchParams();
  panes.forEach((pane, i) => {
    const suffix = i ? String(i + 1) : "", state = states[pane.stateIndex];
    const source = pane.pendingSource ?? state?.source;  // an image that is still loading is included
    if ((!i || pane.pendingSource || pane.stateIndex !== panes[0].stateIndex) && source) {
      parameters.set(`image${suffix}`, source);
      if (state.hiddenPatches.size && !pane.pendingSource) parameters.set(`hide${suffix}`, writeRanges(state.hiddenPatches));
    }
    parameters.set(`show${suffix}`, pane.mapName);
    if (pane.mapName === "attention") {
      parameters.set(`layer${suffix}`, pane.layer);
      if (pane.head) parameters.set(`head${suffix}`, pane.head);
    }
  });
  const queryText = writeQuery(query, model.prefix_tokens, model.grid?.columns ?? 1);
  if (queryText !== null) parameters.set("ask", queryText);
  if (colorScale !== "light") parameters.set("paint", colorScale);
  if (fill !== "mean") parameters.set("fill", fill);
  return parameters.toString().replaceAll("%3A", ":");
}

const oneOf = (value, allowed) => (allowed.includes(value) ? value : allowed[0]);
const intWithin = (text, low, high, fallback) => (/^\d+$/.test(text ?? "") ? Math.min(Math.max(Number(text), low), high) : fallback);

/** The URL fragment -> the view. Values that this model does not support are replaced by defaults. */
export function readPermalink(text, model, mapNames) {
  const parameters = new URLSearchParams(text.replace(/^#/, ""));
  const { rows, columns } = model.grid ?? { rows: 0, columns: 0 };
  const suffixes = parameters.has("show2") || parameters.has("image2") ? ["", "2"] : [""];
  const sources = [], panes = [];
  for (const suffix of suffixes) {
    const source = parameters.get(`image${suffix}`);
    if (source || !suffix) sources.push({ source, hiddenPatches: readRanges(parameters.get(`hide${suffix}`), rows * columns) });
    panes.push({
      stateIndex: sources.length - 1,
      mapName: oneOf(parameters.get(`show${suffix}`), mapNames),
      layer: intWithin(parameters.get(`layer${suffix}`), 1, model.depth ?? 1, Math.max(1, Math.round((5 / 12) * (model.depth ?? 1)))),
      head: intWithin(parameters.get(`head${suffix}`), 0, model.num_heads ?? 0, 0),
    });
  }
  return {
    sources,
    panes,
    query: readQuery(parameters.get("ask"), model.prefix_tokens, rows, columns),
    colorScale: oneOf(parameters.get("paint"), ["light", "heat"]),
    fill: oneOf(parameters.get("fill"), ["mean", "blur", "zero"]),
  };
}

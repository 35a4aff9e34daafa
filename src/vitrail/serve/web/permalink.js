// The view as a URL fragment: #image=cat&show=attention&layer=12&head=2&ask=5.7&hide=3-7.12
// Names of the second pane's values end in 2; without image2 it shows the first image.

export const own = (key) => `own:${key}`;
export const isOwn = (source) => source.startsWith("own:");

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

/** A token's number -> "class", "register-2", or row.column from 1; null is nobody. */
export function writeAsk(token, special, columns) {
  if (token === null) return null;
  if (token < special.length) return special[token].replaceAll(" ", "-");
  const patch = token - special.length;
  return `${Math.floor(patch / columns) + 1}.${(patch % columns) + 1}`;
}

export function readAsk(text, special, rows, columns) {
  if (!text) return null;
  const place = special.indexOf(text.replaceAll("-", " "));
  if (place >= 0) return place;
  const match = /^(\d+)\.(\d+)$/.exec(text);
  if (!match) return null;
  const [row, column] = [Number(match[1]) - 1, Number(match[2]) - 1];
  return row >= 0 && column >= 0 && row < rows && column < columns ? special.length + row * columns + column : null;
}

/** {panes, sheets, ask, paint, fill} -> what stands behind the #. */
export function writeLink({ panes, sheets, ask, paint, fill }, model) {
  const words = new URLSearchParams();
  panes.forEach((pane, i) => {
    const end = i ? String(i + 1) : "", sheet = sheets[pane.sheet];
    const source = pane.wanted ?? sheet?.source;  // what is on its way already counts
    if ((!i || pane.wanted || pane.sheet !== panes[0].sheet) && source) {
      words.set(`image${end}`, source);
      if (sheet.hide.size && !pane.wanted) words.set(`hide${end}`, writeRanges(sheet.hide));
    }
    words.set(`show${end}`, pane.show);
    if (pane.show === "attention") {
      words.set(`layer${end}`, pane.layer);
      if (pane.head) words.set(`head${end}`, pane.head);
    }
  });
  const asked = writeAsk(ask, model.prefix_tokens, model.grid?.columns ?? 1);
  if (asked !== null) words.set("ask", asked);
  if (paint !== "light") words.set("paint", paint);
  if (fill !== "mean") words.set("fill", fill);
  return words.toString().replaceAll("%3A", ":");
}

const among = (value, allowed) => (allowed.includes(value) ? value : allowed[0]);
const within = (text, low, high, usual) => (/^\d+$/.test(text ?? "") ? Math.min(Math.max(Number(text), low), high) : usual);

/** What stands behind the # -> the view; whatever this model does not have becomes the usual. */
export function readLink(text, model, shows) {
  const words = new URLSearchParams(text.replace(/^#/, ""));
  const { rows, columns } = model.grid ?? { rows: 0, columns: 0 };
  const ends = words.has("show2") || words.has("image2") ? ["", "2"] : [""];
  const sources = [], panes = [];
  for (const end of ends) {
    const source = words.get(`image${end}`);
    if (source || !end) sources.push({ source, hide: readRanges(words.get(`hide${end}`), rows * columns) });
    panes.push({
      sheet: sources.length - 1,
      show: among(words.get(`show${end}`), shows),
      layer: within(words.get(`layer${end}`), 1, model.depth ?? 1, Math.max(1, Math.round((5 / 12) * (model.depth ?? 1)))),
      head: within(words.get(`head${end}`), 0, model.num_heads ?? 0, 0),
    });
  }
  return {
    sources,
    panes,
    ask: readAsk(words.get("ask"), model.prefix_tokens, rows, columns),
    paint: among(words.get("paint"), ["light", "heat"]),
    fill: among(words.get("fill"), ["mean", "blur", "zero"]),
  };
}

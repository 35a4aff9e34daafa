// A pane: an image and its patch values on a canvas, with mouse, touch and keyboard input.

import { covered, isPartial, largest, positivePart, scaled } from "./attention.js";
import { LEAD, NIGHT, night, viridis } from "./colors.js";
import { place, squareAt } from "./captions.js";

const LONG_PRESS = 450, FAR = 10;  // milliseconds; pixels a finger may tremble
const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Pane {
  /** `wants`: what this pane tells: ask(patch or null), pin(patch), toggle(patches), active(), mode() */
  constructor(wants) {
    Object.assign(this, { wants, sheet: null, values: null, shown: null, cursor: null, box: null, paint: "light", frame: 0, cell: 0, motion: true });
    this.root = document.createElement("figure");
    this.root.className = "pane";
    this.caption = document.createElement("figcaption");
    this.grid = document.createElement("div");
    this.grid.className = "glass";
    this.grid.tabIndex = 0;
    this.grid.setAttribute("role", "grid");
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("aria-hidden", "true");
    this.row = document.createElement("div");
    this.row.setAttribute("role", "row");
    this.row.className = "unseen";
    this.cells = [0, 1].map(() => {
      const cell = document.createElement("div");
      cell.setAttribute("role", "gridcell");
      cell.id = `cell-${Math.random().toString(36).slice(2)}`;
      return cell;
    });
    this.row.append(...this.cells);
    this.empty = document.createElement("p");
    this.empty.className = "empty";
    this.empty.setAttribute("aria-hidden", "true");  // it is in the label
    this.tags = ["row", "column"].map((kind) => Object.assign(document.createElement("span"), { className: `tag ${kind}`, hidden: true }));
    this.tags.forEach((tag) => tag.setAttribute("aria-hidden", "true"));
    this.grid.append(this.canvas, this.row, this.empty, ...this.tags);
    this.root.append(this.grid, this.caption);
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    this.listen();
  }

  /** What to show: a sheet, a value for each patch (or null: the image alone) or for squares of them, who asks, what is told. */
  show({ sheet, values, squares, asker, pointed, paint, caption, label, pending, empty }) {
    const target = values ? scaled(squares ? positivePart(values) : values) : null;
    const glide = this.motion && !still.matches && this.shown && target && this.sheet === sheet && this.shown.length === target.length;
    Object.assign(this, { sheet, target, raw: values, squares, asker, paint });
    if (!glide) this.shown = target;
    this.caption.replaceChildren(...caption);
    this.grid.setAttribute("aria-label", empty || label);
    this.empty.textContent = empty ?? "";
    const { rows, columns } = sheet?.grid ?? { rows: 1, columns: 1 };
    this.grid.setAttribute("aria-rowcount", rows);
    this.grid.setAttribute("aria-colcount", columns);
    const image = sheet?.image;
    this.root.style.setProperty("--ratio", image ? image.width / image.height : 1);
    this.grid.classList.toggle("waiting", Boolean(sheet?.blob && (!image || pending)));
    if (this.unsaid || (this.cursor !== null && this.cursor === this.said?.patch && sheet.hide.has(this.cursor) !== this.said.hidden)) this.say();
    this.number(image ? pointed ?? (asker === null ? null : asker - sheet.model.prefix_tokens.length) : null);
    this.request();
  }

  /** The row and the column of a patch, or those of its square, at the edge of the image. */
  number(patch) {
    const { rows, columns } = this.sheet?.grid ?? { rows: 1, columns: 1 }, [row, column] = this.tags, known = patch !== null && patch >= 0;
    row.hidden = column.hidden = !known;
    if (!known) return;
    const { down, right } = spans(patch, this.sheet.grid, this.squares), name = ([first, last]) => (first === last ? first + 1 : `${first + 1}–${last + 1}`);
    [row.textContent, column.textContent] = [name(down), name(right)];
    row.style.top = `${(50 * (down[0] + down[1] + 1)) / rows}%`;
    column.style.left = `${(50 * (right[0] + right[1] + 1)) / columns}%`;
  }

  request() { this.frame ||= requestAnimationFrame(() => this.draw()); }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const image = this.sheet?.image, ratio = Math.min(devicePixelRatio || 1, 2);
    const width = Math.round(this.canvas.clientWidth * ratio), height = Math.round(this.canvas.clientHeight * ratio);
    if (!width || !height) return;
    if (this.canvas.width !== width || this.canvas.height !== height) Object.assign(this.canvas, { width, height });
    const context = this.canvas.getContext("2d");
    context.clearRect(0, 0, width, height);
    if (!image) return;
    if (this.target && this.shown && this.target !== this.shown) this.glide();
    paint(context, width, height, { ...this, focus: this.grid.matches(":focus-visible"), ratio });
  }

  /** Animates the values towards their targets. */
  glide() {
    let far = 0;
    const next = this.shown.map((value, i) => {
      if (Number.isNaN(value) || Number.isNaN(this.target[i])) return this.target[i];
      const step = (this.target[i] - value) * 0.28;
      far = Math.max(far, Math.abs(step));
      return value + step;
    });
    this.shown = far < 0.002 ? this.target : next;
    if (this.shown !== this.target) this.request();
  }

  patchAt(event) {
    const { rows, columns } = this.sheet?.grid ?? { rows: 0, columns: 0 };
    const area = this.canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - area.left) / area.width) * columns);
    const row = Math.floor(((event.clientY - area.top) / area.height) * rows);
    return row >= 0 && column >= 0 && row < rows && column < columns ? row * columns + column : null;
  }

  /** All patches of the rectangle between two of them. */
  between(a, b) {
    const { columns } = this.sheet.grid, out = [];
    const [top, bottom] = [Math.floor(a / columns), Math.floor(b / columns)].sort((x, y) => x - y);
    const [left, right] = [a % columns, b % columns].sort((x, y) => x - y);
    for (let row = top; row <= bottom; row++) for (let column = left; column <= right; column++) out.push(row * columns + column);
    return out;
  }

  listen() {
    const { grid } = this;
    let start = null, from = null, timer = 0, pressed = false;
    const end = () => { clearTimeout(timer); start = from = this.box = null; pressed = false; this.request(); };
    grid.addEventListener("pointerdown", (event) => {
      if (event.button || !this.sheet?.image) return;
      this.wants.active();
      from = this.patchAt(event);
      start = { x: event.clientX, y: event.clientY };
      if (from === null) return;
      this.grid.setPointerCapture?.(event.pointerId);
      if (event.pointerType !== "mouse" && this.wants.mode() === "ask") {
        timer = setTimeout(() => { pressed = true; navigator.vibrate?.(12); this.wants.toggle(this.sheet, [from]); }, LONG_PRESS);
      }
    });
    grid.addEventListener("pointermove", (event) => {
      const here = this.patchAt(event);
      const dragging = from !== null && this.hides(event);  // the query stays while an area is drawn
      if (event.pointerType === "mouse" ? !dragging : start && this.wants.mode() === "ask") this.wants.ask(here);
      if (start && Math.hypot(event.clientX - start.x, event.clientY - start.y) > FAR) clearTimeout(timer);
      if (from !== null && here !== null && here !== from && this.hides(event)) this.box = this.between(from, here);
      else if (here === from) this.box = null;
      this.request();
    });
    grid.addEventListener("pointerup", (event) => {
      const here = this.patchAt(event), drawn = this.box, first = from, long = pressed;
      end();
      if (first === null || long) return;
      this.cursor = here ?? first;
      if (event.pointerType === "mouse") this.wants.ask(here);
      if (drawn) this.wants.toggle(this.sheet, drawn, first);
      else if (this.hides(event)) this.wants.toggle(this.sheet, [first]);
      else this.wants.pin(first);
    });
    grid.addEventListener("pointercancel", end);
    grid.addEventListener("pointerenter", (event) => { if (event.pointerType === "mouse") this.wants.ask(this.patchAt(event)); });  // WebKit leaves and comes back with every click
    grid.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse" && from === null) this.wants.ask(null); });
    grid.addEventListener("contextmenu", (event) => { if (pressed) event.preventDefault(); });
    grid.addEventListener("focus", () => { if (this.sheet?.image && grid.matches(":focus-visible")) { this.wants.active(); this.move(0, 0); } });
    grid.addEventListener("blur", () => { this.wants.ask(null); this.request(); });
    grid.addEventListener("keydown", (event) => this.key(event));
  }

  /** Whether a click or drag hides; Shift turns it round. */
  hides(event) { return (this.wants.mode() === "hide") !== event.shiftKey; }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.sheet?.image) return;
    const { rows, columns } = this.sheet.grid;
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -columns], End: [0, columns], PageUp: [-rows, 0], PageDown: [rows, 0] };
    if (event.key in steps) this.move(...steps[event.key]);
    else if (event.key === " ") { this.unsaid = true; this.wants.toggle(this.sheet, [this.cursor]); }
    else if (event.key === "Enter") this.wants.pin(this.cursor);
    else return;
    event.preventDefault();
  }

  move(down, right) {
    const { rows, columns } = this.sheet.grid, clamp = (value, high) => Math.min(Math.max(value, 0), high - 1);
    const now = this.cursor ?? Math.floor(rows / 2) * columns + Math.floor(columns / 2);
    this.cursor = clamp(Math.floor(now / columns) + down, rows) * columns + clamp((now % columns) + right, columns);
    this.unsaid = true;  // announced when the attention of this patch is known
    this.wants.ask(this.cursor);
  }

  /** For a screen reader: the patch under the cursor. The two cells take turns, so that each move is heard. */
  say() {
    this.unsaid = false;
    this.said = { patch: this.cursor, hidden: this.sheet.hide.has(this.cursor) };
    const { grid } = this.sheet, { columns } = grid, cell = this.cells.reverse()[0];
    const best = this.raw && !this.said.hidden ? largest(this.raw) : null, most = best === null ? "" : `; maximum at ${this.squares ? squareAt(best, grid) : best === this.cursor ? "itself" : place(best, grid)}`;
    cell.setAttribute("aria-rowindex", Math.floor(this.cursor / columns) + 1);
    cell.setAttribute("aria-colindex", (this.cursor % columns) + 1);
    cell.textContent = `${place(this.cursor, grid)}${this.said.hidden ? ", hidden" : ""}${most}`;
    this.grid.setAttribute("aria-activedescendant", cell.id);
  }
}

/** The first and last row and column of a patch, or of what is covered with it. */
function spans(patch, grid, squares) {
  if (squares) return covered(patch, grid);
  const [row, column] = [Math.floor(patch / grid.columns), patch % grid.columns];
  return { down: [row, row], right: [column, column] };
}

/** Everything on the canvas, so that the same can be painted larger for a file. */
export function paint(context, width, height, { sheet, shown, raw, squares, asker, box, cursor, paint: way, focus, ratio }) {
  const { rows, columns } = sheet.grid, special = sheet.model.prefix_tokens.length;
  const x = (column) => Math.round((column * width) / columns), y = (row) => Math.round((row * height) / rows);
  const area = (patch, wide) => {
    const { down: [top, bottom], right: [left, right] } = spans(patch, sheet.grid, wide);
    return [x(left), y(top), x(right + 1) - x(left), y(bottom + 1) - y(top)];
  };
  const cell = (patch) => area(patch, false);
  context.imageSmoothingEnabled = sheet.model.image_size.width >= 96;  // small images show their pixels
  context.imageSmoothingQuality = "high";
  context.drawImage(shown && way === "heat" ? gray(sheet.image) : sheet.image, 0, 0, width, height);
  if (shown) {
    for (let patch = 0; patch < shown.length; patch++) {
      if (Number.isNaN(shown[patch])) { unknown(context, cell(patch), ratio); continue; }
      context.globalAlpha = way === "heat" ? 0.74 : 1;
      context.fillStyle = way === "heat" ? viridis(shown[patch]) : `rgb(${NIGHT} / ${night(shown[patch])})`;
      context.fillRect(...cell(patch));
    }
    context.globalAlpha = 1;
    if (way === "light") glow(context, shown, cell);
  }
  if (sheet.hide.size) covers(context, width, height, sheet, cell, ratio);
  lines(context, width, height, { rows, columns, x, y, ratio });
  for (const patch of box ?? []) ring(context, cell(patch), ratio, "rgb(255 255 255 / .75)", 1.25);
  const most = raw && !isPartial(raw) ? largest(raw) : null, asks = typeof asker === "number" && asker >= special ? asker - special : null;
  const same = most !== null && asks !== null && String(area(most, squares)) === String(area(asks, squares));
  if (most !== null && !same && !sheet.hide.has(most)) best(context, area(most, squares), ratio);
  if (asks !== null) mark(context, area(asks, squares), ratio);
  if (asks !== null && squares) ring(context, cell(asks), ratio, "rgb(255 255 255 / .75)", 1.25);  // the one that a click hides
  if (focus && cursor !== null) {
    context.setLineDash([4 * ratio, 3 * ratio]);
    ring(context, cell(cursor), ratio, "#fff", 2, -4);
    context.setLineDash([]);
  }
}

/** A patch whose value is not computed yet: pale, with a dot. */
function unknown(context, [left, top, width, height], ratio) {
  context.globalAlpha = 1;
  context.fillStyle = "rgb(214 212 222 / .62)";
  context.fillRect(left, top, width, height);
  context.fillStyle = "rgb(14 12 24 / .4)";
  context.beginPath();
  context.arc(left + width / 2, top + height / 2, Math.min(1.5 * ratio, width / 6), 0, 2 * Math.PI);
  context.fill();
}

/** Brightens the patches above 0.5. */
function glow(context, shown, cell) {
  context.globalCompositeOperation = "overlay";
  context.fillStyle = "#fff6e0";
  for (let patch = 0; patch < shown.length; patch++) {
    if (!(shown[patch] >= 0.5)) continue;
    context.globalAlpha = 0.32 * (2 * shown[patch] - 1) ** 2;
    context.fillRect(...cell(patch));
  }
  context.globalAlpha = 1;
  context.globalCompositeOperation = "source-over";
}

function lines(context, width, height, { rows, columns, x, y, ratio }) {
  const cell = Math.min(width / columns, height / rows);
  context.lineWidth = Math.max(ratio * 0.75, cell * 0.035);
  context.strokeStyle = LEAD;
  context.beginPath();
  for (let row = 1; row < rows; row++) { context.moveTo(0, y(row)); context.lineTo(width, y(row)); }
  for (let column = 1; column < columns; column++) { context.moveTo(x(column), 0); context.lineTo(x(column), height); }
  context.stroke();
}

/** Hidden patches: what the model gets instead, under a hatching. */
function covers(context, width, height, sheet, cell, ratio) {
  context.save();
  context.beginPath();
  for (const patch of sheet.hide) context.rect(...cell(patch));
  context.clip();
  if (sheet.fill === "zero") { context.fillStyle = "#808080"; context.fillRect(0, 0, width, height); }
  else context.drawImage(small(sheet.image, sheet.fill === "mean" ? 1 : 9), 0, 0, width, height);
  context.strokeStyle = "rgb(255 255 255 / .34)";
  context.lineWidth = ratio;
  context.beginPath();
  for (let at = -height; at < width; at += 7 * ratio) { context.moveTo(at, height); context.lineTo(at + height, 0); }
  context.stroke();
  context.restore();
}

function mark(context, area, ratio) {
  ring(context, area, ratio, "rgb(14 12 24 / .85)", 5, 1);
  ring(context, area, ratio, "#ffd479", 2.5, 1);
}

/** Marks the maximum with a ring. */
function best(context, [left, top, width, height], ratio) {
  const radius = 0.36 * Math.min(width, height);
  for (const [color, thick] of [["rgb(14 12 24 / .7)", 3.5], ["#fff", 1.75]]) {
    context.strokeStyle = color;
    context.lineWidth = Math.min(thick * ratio, radius / 2);
    context.beginPath();
    context.arc(left + width / 2, top + height / 2, radius, 0, 2 * Math.PI);
    context.stroke();
  }
}

function ring(context, [left, top, width, height], ratio, color, thick, grow = 0) {
  const out = grow * ratio;
  context.lineWidth = thick * ratio;
  context.strokeStyle = color;
  context.beginPath();
  context.roundRect(left - out, top - out, width + 2 * out, height + 2 * out, 2 * ratio);
  context.stroke();
}

const grays = new WeakMap(), smalls = new WeakMap();

function gray(image) {
  if (!grays.has(image)) {
    const canvas = new OffscreenCanvas(image.width, image.height), context = canvas.getContext("2d");
    context.drawImage(image, 0, 0);
    const pixels = context.getImageData(0, 0, image.width, image.height), { data } = pixels;
    for (let i = 0; i < data.length; i += 4) data[i] = data[i + 1] = data[i + 2] = 0.3 * data[i] + 0.59 * data[i + 1] + 0.11 * data[i + 2];
    context.putImageData(pixels, 0, 0);
    grays.set(image, canvas);
  }
  return grays.get(image);
}

/** The image in so few pixels that it is a blur, or one color. */
function small(image, side) {
  if (!smalls.has(image)) smalls.set(image, new Map());
  const made = smalls.get(image);
  if (!made.has(side)) {
    let canvas = new OffscreenCanvas(image.width, image.height);
    canvas.getContext("2d").drawImage(image, 0, 0);
    while (canvas.width > side || canvas.height > side) {  // halved again and again: each pixel is a true mean
      const next = new OffscreenCanvas(Math.max(side, canvas.width >> 1), Math.max(side, canvas.height >> 1));
      Object.assign(next.getContext("2d"), { imageSmoothingQuality: "high" }).drawImage(canvas, 0, 0, next.width, next.height);
      canvas = next;
    }
    made.set(side, canvas);
  }
  return made.get(side);
}

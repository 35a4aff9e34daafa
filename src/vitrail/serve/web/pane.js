// A pane: an image and its patch values on a canvas, with mouse, touch and keyboard input.

import { argmax, coveringSquares, isPartial, normalize, positivePart } from "./attention.js";
import { GRID_COLOR, SHADE_COLOR, shade, viridis } from "./colors.js";
import { patchName, squareName } from "./captions.js";

const LONG_PRESS = 450, MOVE_TOLERANCE = 10;  // milliseconds; pixels a finger may move during a long press
const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");

export class Pane {
  /** `callbacks`: onHover(patch or null), onSelect(patch), onToggle(state, patches, first), onActivate(), getMode() */
  constructor(callbacks) {
    Object.assign(this, { callbacks, state: null, values: null, shown: null, cursor: null, selection: null, colorScale: "light", frameRequest: 0, cell: 0, animated: true });
    this.root = document.createElement("figure");
    this.root.className = "pane";
    this.caption = document.createElement("figcaption");
    this.grid = document.createElement("div");
    this.grid.className = "patch-grid";
    this.grid.tabIndex = 0;
    this.grid.setAttribute("role", "grid");
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("aria-hidden", "true");
    this.row = document.createElement("div");
    this.row.setAttribute("role", "row");
    this.row.className = "visually-hidden";
    this.cells = [0, 1].map(() => {
      const cell = document.createElement("div");
      cell.setAttribute("role", "gridcell");
      cell.id = `cell-${Math.random().toString(36).slice(2)}`;
      return cell;
    });
    this.row.append(...this.cells);
    this.emptyMessage = document.createElement("p");
    this.emptyMessage.className = "empty-message";
    this.emptyMessage.setAttribute("aria-hidden", "true");  // the label has this text
    this.tags = ["row", "column"].map((kind) => Object.assign(document.createElement("span"), { className: `tag ${kind}`, hidden: true }));
    this.tags.forEach((tag) => tag.setAttribute("aria-hidden", "true"));
    this.grid.append(this.canvas, this.row, this.emptyMessage, ...this.tags);
    this.root.append(this.grid, this.caption);
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    this.addListeners();
  }

  /** Shows an image state. `values`: one per patch, or null for the image alone; `bySquares`: values of occluded squares; `queryToken`: the framed token; `pointed`: the hovered patch. */
  update({ state, values, bySquares, queryToken, pointed, colorScale, caption, label, pending, emptyMessage }) {
    const target = values ? normalize(bySquares ? positivePart(values) : values) : null;
    const animate = this.animated && !reducedMotion.matches && this.shown && target && this.state === state && this.shown.length === target.length;
    Object.assign(this, { state, target, raw: values, bySquares, queryToken, colorScale });
    if (!animate) this.shown = target;
    this.caption.replaceChildren(...caption);
    this.grid.setAttribute("aria-label", emptyMessage || label);
    this.emptyMessage.textContent = emptyMessage ?? "";
    const { rows, columns } = state?.grid ?? { rows: 1, columns: 1 };
    this.grid.setAttribute("aria-rowcount", rows);
    this.grid.setAttribute("aria-colcount", columns);
    const image = state?.image;
    this.root.style.setProperty("--aspect-ratio", image ? image.width / image.height : 1);
    this.grid.classList.toggle("loading", Boolean(state?.blob && (!image || pending)));
    if (this.needsAnnouncement || (this.cursor !== null && this.cursor === this.announced?.patch && state.hiddenPatches.has(this.cursor) !== this.announced.hidden)) this.announce();
    this.drawTags(image ? pointed ?? (queryToken === null ? null : queryToken - state.model.prefix_tokens.length) : null);
    this.scheduleDraw();
  }

  /** Shows the row and column of a patch, or of its square, at the edge of the image. */
  drawTags(patch) {
    const { rows, columns } = this.state?.grid ?? { rows: 1, columns: 1 }, [row, column] = this.tags, isPatch = patch !== null && patch >= 0;
    row.hidden = column.hidden = !isPatch;
    if (!isPatch) return;
    const { rowSpan, columnSpan } = spans(patch, this.state.grid, this.bySquares), name = ([first, last]) => (first === last ? first + 1 : `${first + 1}–${last + 1}`);
    [row.textContent, column.textContent] = [name(rowSpan), name(columnSpan)];
    row.style.top = `${(50 * (rowSpan[0] + rowSpan[1] + 1)) / rows}%`;
    column.style.left = `${(50 * (columnSpan[0] + columnSpan[1] + 1)) / columns}%`;
  }

  scheduleDraw() { this.frameRequest ||= requestAnimationFrame(() => this.draw()); }

  draw() {
    cancelAnimationFrame(this.frameRequest);
    this.frameRequest = 0;
    const image = this.state?.image, ratio = Math.min(devicePixelRatio || 1, 2);
    const width = Math.round(this.canvas.clientWidth * ratio), height = Math.round(this.canvas.clientHeight * ratio);
    if (!width || !height) return;
    if (this.canvas.width !== width || this.canvas.height !== height) Object.assign(this.canvas, { width, height });
    const context = this.canvas.getContext("2d");
    context.clearRect(0, 0, width, height);
    if (!image) return;
    if (this.target && this.shown && this.target !== this.shown) this.animate();
    drawPane(context, width, height, { ...this, focused: this.grid.matches(":focus-visible"), ratio });
  }

  /** Animates the values towards their targets. */
  animate() {
    let maxStep = 0;
    const next = this.shown.map((value, i) => {
      if (Number.isNaN(value) || Number.isNaN(this.target[i])) return this.target[i];
      const step = (this.target[i] - value) * 0.28;
      maxStep = Math.max(maxStep, Math.abs(step));
      return value + step;
    });
    this.shown = maxStep < 0.002 ? this.target : next;
    if (this.shown !== this.target) this.scheduleDraw();
  }

  patchAt(event) {
    const { rows, columns } = this.state?.grid ?? { rows: 0, columns: 0 };
    const area = this.canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - area.left) / area.width) * columns);
    const row = Math.floor(((event.clientY - area.top) / area.height) * rows);
    return row >= 0 && column >= 0 && row < rows && column < columns ? row * columns + column : null;
  }

  /** All patches of the rectangle between two of them. */
  patchesBetween(a, b) {
    const { columns } = this.state.grid, patches = [];
    const [top, bottom] = [Math.floor(a / columns), Math.floor(b / columns)].sort((x, y) => x - y);
    const [left, right] = [a % columns, b % columns].sort((x, y) => x - y);
    for (let row = top; row <= bottom; row++) for (let column = left; column <= right; column++) patches.push(row * columns + column);
    return patches;
  }

  addListeners() {
    const { grid } = this;
    let start = null, startPatch = null, longPressTimer = 0, longPressed = false;
    const endGesture = () => { clearTimeout(longPressTimer); start = startPatch = this.selection = null; longPressed = false; this.scheduleDraw(); };
    grid.addEventListener("pointerdown", (event) => {
      if (event.button || !this.state?.image) return;
      this.callbacks.onActivate();
      startPatch = this.patchAt(event);
      start = { x: event.clientX, y: event.clientY };
      if (startPatch === null) return;
      this.grid.setPointerCapture?.(event.pointerId);
      if (event.pointerType !== "mouse" && this.callbacks.getMode() === "query") {
        longPressTimer = setTimeout(() => { longPressed = true; navigator.vibrate?.(12); this.callbacks.onToggle(this.state, [startPatch]); }, LONG_PRESS);
      }
    });
    grid.addEventListener("pointermove", (event) => {
      const patch = this.patchAt(event);
      const dragging = startPatch !== null && this.isHideAction(event);  // the query does not change while an area is drawn
      if (event.pointerType === "mouse" ? !dragging : start && this.callbacks.getMode() === "query") this.callbacks.onHover(patch);
      if (start && Math.hypot(event.clientX - start.x, event.clientY - start.y) > MOVE_TOLERANCE) clearTimeout(longPressTimer);
      if (startPatch !== null && patch !== null && patch !== startPatch && this.isHideAction(event)) this.selection = this.patchesBetween(startPatch, patch);
      else if (patch === startPatch) this.selection = null;
      this.scheduleDraw();
    });
    grid.addEventListener("pointerup", (event) => {
      const patch = this.patchAt(event), selection = this.selection, first = startPatch, wasLongPress = longPressed;
      endGesture();
      if (first === null || wasLongPress) return;
      this.cursor = patch ?? first;
      if (event.pointerType === "mouse") this.callbacks.onHover(patch);
      if (selection) this.callbacks.onToggle(this.state, selection, first);
      else if (this.isHideAction(event)) this.callbacks.onToggle(this.state, [first]);
      else this.callbacks.onSelect(first);
    });
    grid.addEventListener("pointercancel", endGesture);
    grid.addEventListener("pointerenter", (event) => { if (event.pointerType === "mouse") this.callbacks.onHover(this.patchAt(event)); });  // WebKit sends pointerleave and pointerenter with every click
    grid.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse" && startPatch === null) this.callbacks.onHover(null); });
    grid.addEventListener("contextmenu", (event) => { if (longPressed) event.preventDefault(); });
    grid.addEventListener("focus", () => { if (this.state?.image && grid.matches(":focus-visible")) { this.callbacks.onActivate(); this.moveCursor(0, 0); } });
    grid.addEventListener("blur", () => { this.callbacks.onHover(null); this.scheduleDraw(); });
    grid.addEventListener("keydown", (event) => this.onKeyDown(event));
  }

  /** Whether a click or drag hides patches; Shift inverts the mode. */
  isHideAction(event) { return (this.callbacks.getMode() === "hide") !== event.shiftKey; }

  onKeyDown(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.state?.image) return;
    const { rows, columns } = this.state.grid;
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -columns], End: [0, columns], PageUp: [-rows, 0], PageDown: [rows, 0] };
    if (event.key in steps) this.moveCursor(...steps[event.key]);
    else if (event.key === " ") { this.needsAnnouncement = true; this.callbacks.onToggle(this.state, [this.cursor]); }
    else if (event.key === "Enter") this.callbacks.onSelect(this.cursor);
    else return;
    event.preventDefault();
  }

  moveCursor(rowSpan, columnSpan) {
    const { rows, columns } = this.state.grid, clamp = (value, high) => Math.min(Math.max(value, 0), high - 1);
    const current = this.cursor ?? Math.floor(rows / 2) * columns + Math.floor(columns / 2);
    this.cursor = clamp(Math.floor(current / columns) + rowSpan, rows) * columns + clamp((current % columns) + columnSpan, columns);
    this.needsAnnouncement = true;  // after the attention of this patch has arrived
    this.callbacks.onHover(this.cursor);
  }

  /** Announces the patch under the cursor to screen readers. Two cells alternate, so that each move is announced. */
  announce() {
    this.needsAnnouncement = false;
    this.announced = { patch: this.cursor, hidden: this.state.hiddenPatches.has(this.cursor) };
    const { grid } = this.state, { columns } = grid, cell = this.cells.reverse()[0];
    const maxPatch = this.raw && !this.announced.hidden ? argmax(this.raw) : null, maximumText = maxPatch === null ? "" : `; maximum at ${this.bySquares ? squareName(maxPatch, grid) : maxPatch === this.cursor ? "itself" : patchName(maxPatch, grid)}`;
    cell.setAttribute("aria-rowindex", Math.floor(this.cursor / columns) + 1);
    cell.setAttribute("aria-colindex", (this.cursor % columns) + 1);
    cell.textContent = `${patchName(this.cursor, grid)}${this.announced.hidden ? ", hidden" : ""}${maximumText}`;
    this.grid.setAttribute("aria-activedescendant", cell.id);
  }
}

/** The first and last row and column of a patch, or of the occluded squares that contain it. */
function spans(patch, grid, bySquares) {
  if (bySquares) return coveringSquares(patch, grid);
  const [row, column] = [Math.floor(patch / grid.columns), patch % grid.columns];
  return { rowSpan: [row, row], columnSpan: [column, column] };
}

/** Draws a pane on a canvas: on the page, or larger for the download. */
export function drawPane(context, width, height, { state, shown, raw, bySquares, queryToken, selection, cursor, colorScale, focused, ratio }) {
  const { rows, columns } = state.grid, numPrefix = state.model.prefix_tokens.length;
  const x = (column) => Math.round((column * width) / columns), y = (row) => Math.round((row * height) / rows);
  const area = (patch, asSquare) => {
    const { rowSpan: [top, bottom], columnSpan: [left, right] } = spans(patch, state.grid, asSquare);
    return [x(left), y(top), x(right + 1) - x(left), y(bottom + 1) - y(top)];
  };
  const cell = (patch) => area(patch, false);
  context.imageSmoothingEnabled = state.model.image_size.width >= 96;  // small images keep visible pixels
  context.imageSmoothingQuality = "high";
  context.drawImage(shown && colorScale === "heat" ? grayscale(state.image) : state.image, 0, 0, width, height);
  if (shown) {
    for (let patch = 0; patch < shown.length; patch++) {
      if (Number.isNaN(shown[patch])) { drawUnknown(context, cell(patch), ratio); continue; }
      context.globalAlpha = colorScale === "heat" ? 0.74 : 1;
      context.fillStyle = colorScale === "heat" ? viridis(shown[patch]) : `rgb(${SHADE_COLOR} / ${shade(shown[patch])})`;
      context.fillRect(...cell(patch));
    }
    context.globalAlpha = 1;
    if (colorScale === "light") drawGlow(context, shown, cell);
  }
  if (state.hiddenPatches.size) drawHiddenPatches(context, width, height, state, cell, ratio);
  drawGridLines(context, width, height, { rows, columns, x, y, ratio });
  for (const patch of selection ?? []) drawFrame(context, cell(patch), ratio, "rgb(255 255 255 / .75)", 1.25);
  const maxPatch = raw && !isPartial(raw) ? argmax(raw) : null, queryPatch = typeof queryToken === "number" && queryToken >= numPrefix ? queryToken - numPrefix : null;
  const sameArea = maxPatch !== null && queryPatch !== null && String(area(maxPatch, bySquares)) === String(area(queryPatch, bySquares));
  if (maxPatch !== null && !sameArea && !state.hiddenPatches.has(maxPatch)) drawMaximum(context, area(maxPatch, bySquares), ratio);
  if (queryPatch !== null) drawQueryFrame(context, area(queryPatch, bySquares), ratio);
  if (queryPatch !== null && bySquares) drawFrame(context, cell(queryPatch), ratio, "rgb(255 255 255 / .75)", 1.25);  // the patch that a click hides
  if (focused && cursor !== null) {
    context.setLineDash([4 * ratio, 3 * ratio]);
    drawFrame(context, cell(cursor), ratio, "#fff", 2, -4);
    context.setLineDash([]);
  }
}

/** Draws a patch whose value is not computed yet: pale, with a dot. */
function drawUnknown(context, [left, top, width, height], ratio) {
  context.globalAlpha = 1;
  context.fillStyle = "rgb(214 212 222 / .62)";
  context.fillRect(left, top, width, height);
  context.fillStyle = "rgb(14 12 24 / .4)";
  context.beginPath();
  context.arc(left + width / 2, top + height / 2, Math.min(1.5 * ratio, width / 6), 0, 2 * Math.PI);
  context.fill();
}

/** Brightens the patches above 0.5. */
function drawGlow(context, shown, cell) {
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

function drawGridLines(context, width, height, { rows, columns, x, y, ratio }) {
  const cell = Math.min(width / columns, height / rows);
  context.lineWidth = Math.max(ratio * 0.75, cell * 0.035);
  context.strokeStyle = GRID_COLOR;
  context.beginPath();
  for (let row = 1; row < rows; row++) { context.moveTo(0, y(row)); context.lineTo(width, y(row)); }
  for (let column = 1; column < columns; column++) { context.moveTo(x(column), 0); context.lineTo(x(column), height); }
  context.stroke();
}

/** Draws the fill of the hidden patches, hatched. */
function drawHiddenPatches(context, width, height, state, cell, ratio) {
  context.save();
  context.beginPath();
  for (const patch of state.hiddenPatches) context.rect(...cell(patch));
  context.clip();
  if (state.fill === "zero") { context.fillStyle = "#808080"; context.fillRect(0, 0, width, height); }
  else context.drawImage(downscale(state.image, state.fill === "mean" ? 1 : 9), 0, 0, width, height);
  context.strokeStyle = "rgb(255 255 255 / .34)";
  context.lineWidth = ratio;
  context.beginPath();
  for (let x = -height; x < width; x += 7 * ratio) { context.moveTo(x, height); context.lineTo(x + height, 0); }
  context.stroke();
  context.restore();
}

function drawQueryFrame(context, area, ratio) {
  drawFrame(context, area, ratio, "rgb(14 12 24 / .85)", 5, 1);
  drawFrame(context, area, ratio, "#ffd479", 2.5, 1);
}

/** Marks the maximum with a ring. */
function drawMaximum(context, [left, top, width, height], ratio) {
  const radius = 0.36 * Math.min(width, height);
  for (const [color, lineWidth] of [["rgb(14 12 24 / .7)", 3.5], ["#fff", 1.75]]) {
    context.strokeStyle = color;
    context.lineWidth = Math.min(lineWidth * ratio, radius / 2);
    context.beginPath();
    context.arc(left + width / 2, top + height / 2, radius, 0, 2 * Math.PI);
    context.stroke();
  }
}

function drawFrame(context, [left, top, width, height], ratio, color, lineWidth, outset = 0) {
  const margin = outset * ratio;
  context.lineWidth = lineWidth * ratio;
  context.strokeStyle = color;
  context.beginPath();
  context.roundRect(left - margin, top - margin, width + 2 * margin, height + 2 * margin, 2 * ratio);
  context.stroke();
}

const grayscaleCache = new WeakMap(), downscaleCache = new WeakMap();

function grayscale(image) {
  if (!grayscaleCache.has(image)) {
    const canvas = new OffscreenCanvas(image.width, image.height), context = canvas.getContext("2d");
    context.drawImage(image, 0, 0);
    const pixels = context.getImageData(0, 0, image.width, image.height), { data } = pixels;
    for (let i = 0; i < data.length; i += 4) data[i] = data[i + 1] = data[i + 2] = 0.3 * data[i] + 0.59 * data[i + 1] + 0.11 * data[i + 2];
    context.putImageData(pixels, 0, 0);
    grayscaleCache.set(image, canvas);
  }
  return grayscaleCache.get(image);
}

/** The image in `side` x `side` pixels: a blur, or one color. */
function downscale(image, side) {
  if (!downscaleCache.has(image)) downscaleCache.set(image, new Map());
  const sizes = downscaleCache.get(image);
  if (!sizes.has(side)) {
    let canvas = new OffscreenCanvas(image.width, image.height);
    canvas.getContext("2d").drawImage(image, 0, 0);
    while (canvas.width > side || canvas.height > side) {  // by halves, so that each pixel is a mean
      const next = new OffscreenCanvas(Math.max(side, canvas.width >> 1), Math.max(side, canvas.height >> 1));
      Object.assign(next.getContext("2d"), { imageSmoothingQuality: "high" }).drawImage(canvas, 0, 0, next.width, next.height);
      canvas = next;
    }
    sizes.set(side, canvas);
  }
  return sizes.get(side);
}

// The two charts: mean attention distance per head, and similarity of position embeddings.

import { viridis } from "./colors.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDE = 340, HIGH = 150, LEFT = 30, RIGHT = 6, TOP = 10, BOTTOM = 24;

function svg(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

/** Layers across, pixels upwards, a dot for each head; the current layer is a band. `choose(layer, head)` on a click. */
export function distancePlot(root, note, { distance, uniform, layer, head }, choose) {
  const depth = distance.length, high = Math.max(uniform ?? 0, ...distance.flat()) * 1.08;
  const x = (number) => LEFT + ((number - 0.5) / depth) * (WIDE - LEFT - RIGHT), y = (px) => HIGH - BOTTOM - (px / high) * (HIGH - TOP - BOTTOM);
  const step = (WIDE - LEFT - RIGHT) / depth, parts = [];
  if (layer) parts.push(svg("rect", { class: "band", x: x(layer) - step / 2, y: TOP - 6, width: step, height: HIGH - TOP - BOTTOM + 6, rx: 4 }));
  for (const px of ticks(high)) {
    parts.push(svg("line", { class: "rule", x1: LEFT, x2: WIDE - RIGHT, y1: y(px), y2: y(px) }), svg("text", { class: "end", x: LEFT - 7, y: y(px) + 3.5 }, px));
  }
  if (uniform) parts.push(svg("line", { class: "uniform", x1: LEFT, x2: WIDE - RIGHT, y1: y(uniform), y2: y(uniform) }));
  const every = Math.ceil(depth / 12), dots = [];
  for (let i = 1; i <= depth; i++) if ((i - 1) % every === 0 || i === depth) parts.push(svg("text", { class: i === layer ? "middle now" : "middle", x: x(i), y: HIGH - 7 }, i));
  distance.forEach((heads, i) => heads.forEach((px, h) => {
    const mine = i + 1 === layer && (!head || head === h + 1);
    const dot = svg("circle", { class: mine ? "dot now" : "dot", cx: x(i + 1), cy: y(px), r: mine ? 4 : 3 });
    dots.push({ dot, layer: i + 1, head: h + 1, px });
    parts.push(dot);
  }));
  root.setAttribute("viewBox", `0 0 ${WIDE} ${HIGH}`);
  const said = layer ? `Layer ${layer}: ${distance[layer - 1].map((px) => Math.round(px)).join(", ")} pixels` : "";
  root.setAttribute("aria-label", `Mean attention distance of each head in each layer, in pixels. ${said}`);
  root.replaceChildren(...parts);
  const rest = uniform ? `Pixels, one dot per head. Dashed: ${Math.round(uniform)}, uniform attention.` : "Pixels, one dot per head.";
  note.textContent = rest;
  const nearest = (event) => {
    const area = root.getBoundingClientRect(), at = { x: ((event.clientX - area.left) / area.width) * WIDE, y: ((event.clientY - area.top) / area.height) * HIGH };
    const far = (d) => Math.hypot(Number(d.dot.getAttribute("cx")) - at.x, Number(d.dot.getAttribute("cy")) - at.y);
    const best = dots.reduce((a, b) => (far(a) <= far(b) ? a : b));
    return far(best) < 16 ? best : null;
  };
  root.onpointermove = (event) => {
    const found = nearest(event);
    for (const { dot } of dots) dot.classList.toggle("near", dot === found?.dot);
    note.textContent = found ? `Layer ${found.layer}, head ${found.head}: ${found.px.toFixed(1)} pixels on average.` : rest;
  };
  root.onpointerleave = () => { for (const { dot } of dots) dot.classList.remove("near"); note.textContent = rest; };
  root.onclick = (event) => { const found = nearest(event); if (found) choose(found.layer, found.head); };
}

function ticks(high) {
  const step = [1, 2, 5, 10, 20, 25, 50, 100, 200, 500].find((size) => high / size <= 4.5) ?? 1000;
  return Array.from({ length: Math.floor(high / step) + 1 }, (_, i) => i * step);
}

/** Similarity of one patch's position embedding to all others. */
export function placesMap(canvas, { grid: { rows, columns }, alike, low }, patch) {
  const count = rows * columns, context = canvas.getContext("2d"), side = 168 / Math.max(rows, columns);
  Object.assign(canvas, { width: Math.round(side * columns), height: Math.round(side * rows) });
  for (let i = 0; i < count; i++) {
    const row = Math.floor(i / columns), column = i % columns;
    context.fillStyle = viridis((alike[patch * count + i] - low) / (1 - low || 1));
    context.fillRect(Math.floor(column * side), Math.floor(row * side), Math.ceil(side), Math.ceil(side));
  }
  for (const [color, thick] of [["#17151f", 5], ["#fff", 2]]) {  // the place itself is bright: white alone is not seen on it
    Object.assign(context, { lineWidth: thick, strokeStyle: color });
    context.strokeRect((patch % columns) * side, Math.floor(patch / columns) * side, side, side);
  }
}

// The two charts: mean attention distance per head, and similarity of position embeddings.

import { viridis } from "./colors.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 340, HEIGHT = 150, LEFT = 30, RIGHT = 6, TOP = 10, BOTTOM = 24;

function svgElement(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

/** Mean attention distance in pixels by layer: one dot per head, the current layer highlighted. Clicking a dot calls `onSelect(layer, head)`. */
export function drawDistancePlot(root, note, { distance, uniformDistance, layer, head }, onSelect) {
  const depth = distance.length, yMax = Math.max(uniformDistance ?? 0, ...distance.flat()) * 1.08;
  const x = (number) => LEFT + ((number - 0.5) / depth) * (WIDTH - LEFT - RIGHT), y = (px) => HEIGHT - BOTTOM - (px / yMax) * (HEIGHT - TOP - BOTTOM);
  const step = (WIDTH - LEFT - RIGHT) / depth, parts = [];
  if (layer) parts.push(svgElement("rect", { class: "current-layer", x: x(layer) - step / 2, y: TOP - 6, width: step, height: HEIGHT - TOP - BOTTOM + 6, rx: 4 }));
  for (const px of ticks(yMax)) {
    parts.push(svgElement("line", { class: "grid-line", x1: LEFT, x2: WIDTH - RIGHT, y1: y(px), y2: y(px) }), svgElement("text", { class: "y-label", x: LEFT - 7, y: y(px) + 3.5 }, px));
  }
  if (uniformDistance) parts.push(svgElement("line", { class: "uniform", x1: LEFT, x2: WIDTH - RIGHT, y1: y(uniformDistance), y2: y(uniformDistance) }));
  const labelStep = Math.ceil(depth / 12), dots = [];
  for (let i = 1; i <= depth; i++) if ((i - 1) % labelStep === 0 || i === depth) parts.push(svgElement("text", { class: i === layer ? "x-label current" : "x-label", x: x(i), y: HEIGHT - 7 }, i));
  distance.forEach((heads, i) => heads.forEach((px, h) => {
    const isCurrent = i + 1 === layer && (!head || head === h + 1);
    const dot = svgElement("circle", { class: isCurrent ? "dot current" : "dot", cx: x(i + 1), cy: y(px), r: isCurrent ? 4 : 3 });
    dots.push({ dot, layer: i + 1, head: h + 1, px });
    parts.push(dot);
  }));
  root.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  const currentText = layer ? `Layer ${layer}: ${distance[layer - 1].map((px) => Math.round(px)).join(", ")} pixels` : "";
  root.setAttribute("aria-label", `Mean attention distance of each head in each layer, in pixels. ${currentText}`);
  root.replaceChildren(...parts);
  const defaultNote = uniformDistance ? `Pixels, one dot per head. Dashed: ${Math.round(uniformDistance)}, uniform attention.` : "Pixels, one dot per head.";
  note.textContent = defaultNote;
  const dotAt = (event) => {
    const area = root.getBoundingClientRect(), pointer = { x: ((event.clientX - area.left) / area.width) * WIDTH, y: ((event.clientY - area.top) / area.height) * HEIGHT };
    const distanceTo = (d) => Math.hypot(Number(d.dot.getAttribute("cx")) - pointer.x, Number(d.dot.getAttribute("cy")) - pointer.y);
    const closest = dots.reduce((a, b) => (distanceTo(a) <= distanceTo(b) ? a : b));
    return distanceTo(closest) < 16 ? closest : null;
  };
  root.onpointermove = (event) => {
    const hit = dotAt(event);
    for (const { dot } of dots) dot.classList.toggle("hovered", dot === hit?.dot);
    note.textContent = hit ? `Layer ${hit.layer}, head ${hit.head}: ${hit.px.toFixed(1)} pixels on average.` : defaultNote;
  };
  root.onpointerleave = () => { for (const { dot } of dots) dot.classList.remove("hovered"); note.textContent = defaultNote; };
  root.onclick = (event) => { const hit = dotAt(event); if (hit) onSelect(hit.layer, hit.head); };
}

function ticks(yMax) {
  const step = [1, 2, 5, 10, 20, 25, 50, 100, 200, 500].find((size) => yMax / size <= 4.5) ?? 1000;
  return Array.from({ length: Math.floor(yMax / step) + 1 }, (_, i) => i * step);
}

/** Similarity of one patch's position embedding to all others. */
export function drawPositionMap(canvas, { grid: { rows, columns }, similarity, min }, patch) {
  const count = rows * columns, context = canvas.getContext("2d"), side = 168 / Math.max(rows, columns);
  Object.assign(canvas, { width: Math.round(side * columns), height: Math.round(side * rows) });
  for (let i = 0; i < count; i++) {
    const row = Math.floor(i / columns), column = i % columns;
    context.fillStyle = viridis((similarity[patch * count + i] - min) / (1 - min || 1));
    context.fillRect(Math.floor(column * side), Math.floor(row * side), Math.ceil(side), Math.ceil(side));
  }
  for (const [color, lineWidth] of [["#17151f", 5], ["#fff", 2]]) {  // dark under white, because the cell itself is bright
    Object.assign(context, { lineWidth, strokeStyle: color });
    context.strokeRect((patch % columns) * side, Math.floor(patch / columns) * side, side, side);
  }
}

// Saves the view as one PNG: the panes, their captions and the predictions.

import { viridis } from "./colors.js";
import { drawPane } from "./pane.js";
import { change, displayLabel, percent, truncate } from "./formatting.js";

const IMAGE_SIDE = 720, GAP = 36, PREDICTIONS_WIDTH = 380, COLOR_SCALE_WIDTH = 96, SANS = "system-ui, sans-serif", SERIF = "Georgia, serif";
const FILL_NAMES = { mean: "mean color", blur: "blurred", zero: "gray" };

/** Wraps a text into lines of at most `maxWidth` pixels; a single word may be wider. */
function wrapText(context, text, font, maxWidth) {
  context.font = font;
  return text.split(" ").reduce((lines, word) => {
    const longer = lines.length ? `${lines.at(-1)} ${word}` : word;
    if (lines.length && context.measureText(longer).width > maxWidth) return [...lines, word];
    return [...lines.slice(0, -1), longer];
  }, []);
}

/** Draws the color scale with its right end at `right`. */
function drawColorScale(write, context, colorScale, [low, high], right, y) {
  const font = `15px ${SANS}`, left = right - textWidth(context, high, font) - 10 - COLOR_SCALE_WIDTH, steps = 16;
  write(high, right, y, font, "--text-secondary", "right");
  write(low, left - 10, y, font, "--text-secondary", "right");
  for (let i = 0; i < steps; i++) {
    const value = i / (steps - 1), [darkest, brightest] = [[43, 40, 51], [243, 227, 195]];
    context.fillStyle = colorScale === "heat" ? viridis(value) : `rgb(${darkest.map((start, j) => Math.round(start + (brightest[j] - start) * value)).join(" ")})`;
    context.fillRect(left + (i * COLOR_SCALE_WIDTH) / steps, y - 10, COLOR_SCALE_WIDTH / steps, 9);
  }
}

const textWidth = (context, text, font) => Object.assign(context, { font }).measureText(text).width;

/** A text truncated to `maxWidth` pixels. */
function fitText(context, text, font, maxWidth) {
  context.font = font;
  let length = Math.min([...text.slice(0, 400)].length, 200);
  while (length > 2 && context.measureText(truncate(text, length)).width > maxWidth) length--;
  return truncate(text, length);
}

export async function savePng({ panes, states, model, queryCaption, credit }) {
  const style = getComputedStyle(document.documentElement), color = (name) => style.getPropertyValue(name).trim();
  const sizes = panes.map(({ widget }) => {
    const { width, height } = widget.state.image, scale = IMAGE_SIDE / Math.max(width, height);
    return [Math.round(width * scale), Math.round(height * scale)];
  });
  const imageHeight = Math.max(...sizes.map(([, height]) => height)), predicted = model.num_classes ? states : [];
  const canvas = document.createElement("canvas"), context = canvas.getContext("2d");
  canvas.width = GAP + sizes.reduce((sum, [width]) => sum + width + GAP, 0) + (predicted.length ? PREDICTIONS_WIDTH + GAP : 0);
  const bodyFont = `16px ${SANS}`, captionLines = panes.map(({ caption }, i) => wrapText(context, caption, bodyFont, sizes[i][0]));
  const name = `vitrail · ${truncate(model.name, 60)}`, maxWidth = canvas.width - 3 * GAP - textWidth(context, name, `16px ${SERIF}`);
  const footerLines = [queryCaption, credit].filter(Boolean).flatMap((text) => wrapText(context, text, bodyFont, maxWidth));
  const textHeight = 22 * (Math.max(...captionLines.map((lines) => lines.length)) + footerLines.length - 2);
  canvas.height = Math.max(imageHeight + 2 * GAP + 96 + textHeight, predicted.length * 360 + 2 * GAP + 22 * footerLines.length);
  context.fillStyle = color("--background");
  context.fillRect(0, 0, canvas.width, canvas.height);
  const write = (text, x, y, font, colorName, align = "left") => Object.assign(context, { font, fillStyle: color(colorName), textAlign: align }).fillText(text, x, y);
  let left = GAP;
  panes.forEach(({ widget, title, labels }, i) => {
    const [width, height] = sizes[i];
    context.save();
    context.translate(left, GAP);
    context.beginPath();
    context.roundRect(0, 0, width, height, 10);
    context.clip();
    drawPane(context, width, height, { ...widget, selection: null, focused: false, ratio: 1.5 });
    context.restore();
    write(title, left, GAP + height + 32, `600 19px ${SANS}`, "--text");
    if (labels) drawColorScale(write, context, widget.colorScale, labels, left + width, GAP + height + 32);
    captionLines[i].forEach((line, j) => write(line, left, GAP + height + 58 + 22 * j, bodyFont, "--text-secondary"));
    left += width + GAP;
  });
  const footerY = canvas.height - GAP + 6;
  footerLines.forEach((line, i) => write(line, GAP, footerY - 22 * (footerLines.length - 1 - i), bodyFont, "--text-secondary"));
  write(name, canvas.width - GAP, footerY, `16px ${SERIF}`, "--text-secondary", "right");
  predicted.forEach((state, i) => drawPredictions(write, context, color, state, left, GAP + i * 360, predicted.length > 1 ? `${"AB"[i]}: ` : ""));
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: `vitrail-${states[0].name.slice(0, 80) || "image"}.png` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/** The predictions panel: the top classes, their scores without hidden patches, and the number of hidden patches. */
function drawPredictions(write, context, color, state, left, top, letter) {
  const [topClass] = state.predictions ?? [], hiddenCount = state.hiddenPatches.size;
  if (!topClass) return;
  const name = `${letter}${displayLabel(topClass.label)}`, size = Math.max(22, Math.min(34, Math.floor((34 * (PREDICTIONS_WIDTH - 100)) / textWidth(context, name.slice(0, 200), `500 34px ${SERIF}`)))), nameFont = `500 ${size}px ${SERIF}`;
  write(fitText(context, name, nameFont, PREDICTIONS_WIDTH - 100), left, top + 30, nameFont, "--text");
  write(percent(topClass.score), left + PREDICTIONS_WIDTH, top + 30, `500 28px ${SERIF}`, "--accent", "right");
  state.predictions.forEach((prediction, i) => {
    const y = top + 78 + i * 46, baseline = hiddenCount ? state.baselineScores?.get(prediction.index) : undefined;
    const font = `${i ? 400 : 600} 17px ${SANS}`;
    write(fitText(context, displayLabel(prediction.label), font, PREDICTIONS_WIDTH - (baseline === undefined ? 80 : 140)), left, y, font, i ? "--text-secondary" : "--text");
    write(percent(prediction.score), left + PREDICTIONS_WIDTH, y, `600 17px ${SANS}`, "--text", "right");
    if (baseline !== undefined) write(change(prediction.score, baseline), left + PREDICTIONS_WIDTH - 66, y, `500 15px ${SANS}`, "--text-muted", "right");
    context.fillStyle = color("--surface-muted");
    context.fillRect(left, y + 9, PREDICTIONS_WIDTH, 8);
    context.globalAlpha = i ? 0.5 : 1;
    context.fillStyle = color("--accent");
    context.fillRect(left, y + 9, PREDICTIONS_WIDTH * prediction.score, 8);
    context.globalAlpha = 1;
    context.fillStyle = color("--text");
    if (baseline !== undefined) context.fillRect(left + PREDICTIONS_WIDTH * baseline - 1, y + 6, 2, 14);
  });
  const notes = hiddenCount ? [`${hiddenCount} of ${state.patches} patches hidden, ${FILL_NAMES[state.fill]}.`, "Ticks: scores with no patch hidden."] : [];
  notes.forEach((text, i) => write(text, left, top + 78 + state.predictions.length * 46 + i * 22, `15px ${SANS}`, "--text-secondary"));
}

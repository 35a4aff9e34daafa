// Saves the view as one PNG: the panes, their captions and the predictions.

import { viridis } from "./colors.js";
import { paint } from "./pane.js";
import { change, percent, short, tidy } from "./formatting.js";

const SIDE = 720, GAP = 36, BARS = 380, RAMP = 96, SANS = "system-ui, sans-serif", SERIF = "Georgia, serif";
const FILLS = { mean: "mean color", blur: "blurred", zero: "gray" };

/** Wraps a text into lines of at most `room` pixels; a single word may be wider. */
function inLines(context, text, font, room) {
  context.font = font;
  return text.split(" ").reduce((lines, word) => {
    const longer = lines.length ? `${lines.at(-1)} ${word}` : word;
    if (lines.length && context.measureText(longer).width > room) return [...lines, word];
    return [...lines.slice(0, -1), longer];
  }, []);
}

/** The color scale, ending at `right`. */
function ramp(write, context, way, [low, high], right, y) {
  const font = `15px ${SANS}`, start = right - inked(context, high, font) - 10 - RAMP, steps = 16;
  write(high, right, y, font, "--soft", "right");
  write(low, start - 10, y, font, "--soft", "right");
  for (let i = 0; i < steps; i++) {
    const value = i / (steps - 1), [gray, clear] = [[43, 40, 51], [243, 227, 195]];
    context.fillStyle = way === "heat" ? viridis(value) : `rgb(${gray.map((from, j) => Math.round(from + (clear[j] - from) * value)).join(" ")})`;
    context.fillRect(start + (i * RAMP) / steps, y - 10, RAMP / steps, 9);
  }
}

const inked = (context, text, font) => Object.assign(context, { font }).measureText(text).width;

/** A text cut to `room` pixels. */
function cut(context, text, font, room) {
  context.font = font;
  let most = Math.min([...text.slice(0, 400)].length, 200);
  while (most > 2 && context.measureText(short(text, most)).width > room) most--;
  return short(text, most);
}

export async function savePng({ panes, sheets, model, words, credit }) {
  const style = getComputedStyle(document.documentElement), color = (name) => style.getPropertyValue(name).trim();
  const sizes = panes.map(({ view }) => {
    const { width, height } = view.sheet.image, scale = SIDE / Math.max(width, height);
    return [Math.round(width * scale), Math.round(height * scale)];
  });
  const tall = Math.max(...sizes.map(([, height]) => height)), told = model.num_classes ? sheets : [];
  const canvas = document.createElement("canvas"), context = canvas.getContext("2d");
  canvas.width = GAP + sizes.reduce((sum, [width]) => sum + width + GAP, 0) + (told.length ? BARS + GAP : 0);
  const plain = `16px ${SANS}`, meant = panes.map(({ means }, i) => inLines(context, means, plain, sizes[i][0]));
  const name = `vitrail · ${short(model.name, 60)}`, room = canvas.width - 3 * GAP - inked(context, name, `16px ${SERIF}`);
  const foots = [words, credit].filter(Boolean).flatMap((text) => inLines(context, text, plain, room));
  const under = 22 * (Math.max(...meant.map((lines) => lines.length)) + foots.length - 2);
  canvas.height = Math.max(tall + 2 * GAP + 96 + under, told.length * 360 + 2 * GAP + 22 * foots.length);
  context.fillStyle = color("--paper");
  context.fillRect(0, 0, canvas.width, canvas.height);
  const write = (text, x, y, font, ink, align = "left") => Object.assign(context, { font, fillStyle: color(ink), textAlign: align }).fillText(text, x, y);
  let left = GAP;
  panes.forEach(({ view, title, ends }, i) => {
    const [width, height] = sizes[i];
    context.save();
    context.translate(left, GAP);
    context.beginPath();
    context.roundRect(0, 0, width, height, 10);
    context.clip();
    paint(context, width, height, { ...view, box: null, focus: false, ratio: 1.5 });
    context.restore();
    write(title, left, GAP + height + 32, `600 19px ${SANS}`, "--ink");
    if (ends) ramp(write, context, view.paint, ends, left + width, GAP + height + 32);
    meant[i].forEach((line, j) => write(line, left, GAP + height + 58 + 22 * j, plain, "--soft"));
    left += width + GAP;
  });
  const foot = canvas.height - GAP + 6;
  foots.forEach((line, i) => write(line, GAP, foot - 22 * (foots.length - 1 - i), plain, "--soft"));
  write(name, canvas.width - GAP, foot, `16px ${SERIF}`, "--soft", "right");
  told.forEach((sheet, i) => bars(write, context, color, sheet, left, GAP + i * 360, told.length > 1 ? `${"AB"[i]}: ` : ""));
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: `vitrail-${sheets[0].name.slice(0, 80) || "image"}.png` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/** The predictions panel: the top classes, their scores without hidden patches, and the number of hidden patches. */
function bars(write, context, color, sheet, left, top, letter) {
  const [best] = sheet.now ?? [], count = sheet.hide.size;
  if (!best) return;
  const name = `${letter}${tidy(best.label)}`, size = Math.max(22, Math.min(34, Math.floor((34 * (BARS - 100)) / inked(context, name.slice(0, 200), `500 34px ${SERIF}`)))), large = `500 ${size}px ${SERIF}`;
  write(cut(context, name, large, BARS - 100), left, top + 30, large, "--ink");
  write(percent(best.score), left + BARS, top + 30, `500 28px ${SERIF}`, "--accent", "right");
  sheet.now.forEach((prediction, i) => {
    const y = top + 78 + i * 46, before = count ? sheet.before?.get(prediction.index) : undefined;
    const font = `${i ? 400 : 600} 17px ${SANS}`;
    write(cut(context, tidy(prediction.label), font, BARS - (before === undefined ? 80 : 140)), left, y, font, i ? "--soft" : "--ink");
    write(percent(prediction.score), left + BARS, y, `600 17px ${SANS}`, "--ink", "right");
    if (before !== undefined) write(change(prediction.score, before), left + BARS - 66, y, `500 15px ${SANS}`, "--faint", "right");
    context.fillStyle = color("--wash");
    context.fillRect(left, y + 9, BARS, 8);
    context.globalAlpha = i ? 0.5 : 1;
    context.fillStyle = color("--accent");
    context.fillRect(left, y + 9, BARS * prediction.score, 8);
    context.globalAlpha = 1;
    context.fillStyle = color("--ink");
    if (before !== undefined) context.fillRect(left + BARS * before - 1, y + 6, 2, 14);
  });
  const told = count ? [`${count} of ${sheet.patches} patches hidden, ${FILLS[sheet.fill]}.`, "Ticks: scores with no patch hidden."] : [];
  told.forEach((text, i) => write(text, left, top + 78 + sheet.now.length * 46 + i * 22, `15px ${SANS}`, "--soft"));
}
